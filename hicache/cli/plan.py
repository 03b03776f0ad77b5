"""`hicache plan MODEL`: how much memory a model's KV takes, and how many requests fit."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from hicache.cli.fitting import print_fitted
from hicache.cli.output import Table, print_json, say
from hicache.cli.values import number, whole
from hicache.errors import ConfigError
from hicache.units import format_size, parse_size

if TYPE_CHECKING:
    from hicache.analytics.plan.footprint import Layout
    from hicache.analytics.plan.report import Plan
    from hicache.analytics.plan.shapes import ModelShape

HELP = "compute how much memory a model's KV takes: a token, a page, a request, many of them, on each rank"

_EPILOG = """\
MODEL is a preset (--list), a model's config.json, or its folder; or give the numbers.

  hicache plan llama-3.1-8b --tokens 8192 --requests 32 --shared 4096
  hicache plan deepseek-v3 --tp 8 --gpu-memory 141GiB --tokens 32768 --host 1TiB
  hicache plan --layers 32 --kv-heads 8 --head-dim 128 --explain
"""

_MOST = 2**40
_SHAPE = ("layers", "kv_heads", "head_dim", "latent_dim", "rope_dim", "window")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a preset, or a config.json, or the folder of one")
    parser.add_argument("--list", action="store_true", help="show the presets")
    for option, text in (
        ("--tokens", "of a request, prompt and answer (default: 8192)"),
        ("--requests", "at the same time (default: 1)"),
        ("--shared", "tokens that all requests begin with (default: 0)"),
        ("--page-size", "tokens of a page (default: 16)"),
        ("--tp", "ranks of tensor parallelism (default: 1)"),
        ("--pp", "stages of pipeline parallelism (default: 1)"),
        ("--cp", "ranks of context parallelism, which share out pages (default: 1)"),
    ):
        parser.add_argument(option, metavar="N", help=text)
    parser.add_argument(
        "--dtype", metavar="NAME", help="of keys and values, such as bfloat16, fp8, int4 (default: the model's)"
    )
    parser.add_argument("--state-dtype", metavar="NAME", help="of recurrent state (default: the model's)")
    parser.add_argument(
        "--scale-bytes",
        metavar="N",
        help="of quantisation scales, a token, head and row (default: 0, as for scales a tensor)",
    )
    parser.add_argument(
        "--row-bytes", metavar="N", help="of a packed row of one token and head (default: from the dtype)"
    )
    parser.add_argument("--gpu-memory", metavar="SIZE", help="of each GPU, such as 80GiB: tells how many requests fit")
    parser.add_argument("--memory-share", metavar="SHARE", help="of it that may be used (default: 0.9)")
    parser.add_argument("--weights", metavar="SIZE", help="of all weights (default: the model's, where it is known)")
    parser.add_argument(
        "--overhead", metavar="SIZE", help="on each GPU for activations and graphs (default: 2GiB, an assumption)"
    )
    parser.add_argument("--host", metavar="SIZE", help="of a host tier: tells what it holds")
    parser.add_argument("--storage", metavar="SIZE", help="of a storage tier: tells what it holds")
    for name in _SHAPE:
        parser.add_argument(f"--{name.replace('_', '-')}", metavar="N", help="of the model, instead of MODEL")
    parser.add_argument("--explain", action="store_true", help="show the formulas with their numbers and sources")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(options: argparse.Namespace) -> int:
    """Compute, print, and return the exit code."""
    from hicache.analytics.plan.report import Wish, plan
    from hicache.cli.main import EXIT_FINE

    if options.list:
        _list(as_json=options.json)
        return EXIT_FINE
    given = {
        "tokens": _number(options, "tokens", 1),
        "requests": _number(options, "requests", 1),
        "shared": _number(options, "shared", 0),
        "gpu_memory": _size(options, "gpu_memory"),
        "weights": _size(options, "weights"),
        "overhead": _size(options, "overhead"),
        "memory_share": None
        if options.memory_share is None
        else number("--memory-share", options.memory_share, "a share such as 0.9"),
    }
    tiers = {name: size for name in ("host", "storage") if (size := _size(options, name)) is not None}
    wish = Wish(tiers=tiers, **{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]
    found = plan(_model(options), _layout(options), wish)
    if options.json:
        print_json(found.document() | ({"explain": _explained(found)} if options.explain else {}))
        return EXIT_FINE
    for table in tables(found):
        print_fitted(table)
    if options.explain:
        for step in _explained(found):
            say(f"{step['what']}\n    {step['formula']}\n    {step['numbers']}\n    [{step['source']}]")
    return EXIT_FINE


def _layout(options: argparse.Namespace) -> Layout:
    from hicache.analytics.plan.footprint import Layout
    from hicache.analytics.plan.shapes import bits_of

    for name in ("dtype", "state_dtype"):
        if (dtype := getattr(options, name)) is not None:
            bits_of(dtype, f"--{name.replace('_', '-')}")
    given = {
        "dtype": options.dtype,
        "state_dtype": options.state_dtype,
        "scale_bytes": _number(options, "scale_bytes", 0),
        "row_bytes": _number(options, "row_bytes", 1),
        **{name: _number(options, name, 1) for name in ("page_size", "tp", "pp", "cp")},
    }
    return Layout(**{name: value for name, value in given.items() if value is not None})


def _model(options: argparse.Namespace) -> ModelShape:
    from hicache.analytics.plan.configs import read_model
    from hicache.analytics.plan.presets import PRESETS, preset
    from hicache.analytics.plan.shapes import FULL, LATENT, WINDOW, Layer, ModelShape, check_layers

    given = [f"--{name.replace('_', '-')}" for name in _SHAPE if getattr(options, name) is not None]
    if options.model is not None:
        if given:
            raise ConfigError(f"{given[0]}: {options.model:.80} says it already; give either the model or its numbers")
        path = Path(options.model)
        known = options.model.lower() in PRESETS
        return read_model(path) if not known and path.exists() else preset(options.model)
    if not given:
        raise ConfigError("MODEL: is missing; name a preset (--list) or a config.json, or give --layers and the like")
    layers = _needed(options, "layers")
    check_layers(layers, "--layers")
    if options.latent_dim is not None:
        layer = Layer(LATENT, 0, _needed(options, "latent_dim") + (_number(options, "rope_dim", 0) or 0))
    else:
        heads, dim = _needed(options, "kv_heads"), _needed(options, "head_dim")
        window = _number(options, "window", 1) or 0
        layer = Layer(WINDOW if window else FULL, heads, dim, dim, window)
    return ModelShape("the numbers given", "the command line", (layer,) * layers)


def tables(plan: Plan) -> Iterator[Table]:
    """A plan for people."""
    found, wish, model, layout = plan.footprint, plan.wish, plan.footprint.model, plan.footprint.layout
    yield Table(
        f"{model.name} ({model.source})",
        ("layers", "what each keeps", "count", "a token", "a request"),
        [
            (
                part.layer.kind,
                part.layer.describe(),
                f"{part.layers}",
                format_size(part.token_bytes) if part.token_bytes else "",
                format_size(part.state_bytes) if part.state_bytes else "",
            )
            for part in found.parts
        ],
        texts=2,
    )
    ranks = layout.tp * layout.pp * layout.cp
    one = [
        ("a token", found.token_bytes, found.rank_token_bytes),
        (f"a page of {layout.page_size} tokens", found.page_bytes, found.rank_token_bytes * layout.page_size),
        (f"a request of {wish.tokens:,} tokens", plan.request_bytes, found.rank_bytes(1, wish.tokens)),
    ]
    if wish.requests > 1:
        one.append((f"{wish.requests:,} requests", plan.all_bytes, found.rank_bytes(wish.requests, wish.tokens)))
    if wish.requests > 1 and wish.shared:
        one.append((f"the same, {wish.shared:,} tokens shared", plan.all_bytes_shared, plan.rank_bytes_shared))
    yield Table(
        f"memory, {layout.dtype or model.dtype}"
        + (f", {ranks} ranks (tp {layout.tp}, pp {layout.pp}, cp {layout.cp})" if ranks > 1 else ""),
        ("of", "each key and value once", "on the fullest rank"),
        [(name, format_size(size), format_size(rank)) for name, size, rank in one],
    )
    if plan.tiers:
        yield Table(
            "tiers, each key and value once",
            ("tier", "size", "pages", "tokens", f"requests of {wish.tokens:,}"),
            [
                (tier.tier, format_size(tier.bytes), f"{tier.pages:,}", f"{tier.tokens:,}", f"{tier.requests:,}")
                for tier in plan.tiers
            ],
        )
    if plan.gpu is not None:
        yield _gpu_table(plan)


def _gpu_table(plan: Plan) -> Table:
    gpu, wish = plan.gpu, plan.wish
    assert gpu is not None
    rows = [
        ("weights on it", format_size(gpu.weights_on_a_rank)),
        ("overhead", format_size(gpu.overhead)),
        (
            "left for KV",
            format_size(gpu.kv_budget_bytes) if gpu.kv_budget_bytes >= 0 else "none: the weights do not fit",
        ),
        (f"requests of {wish.tokens:,} tokens at once", f"{gpu.most_requests:,}"),
    ]
    if wish.shared:
        rows.append((f"the same, {wish.shared:,} tokens shared", f"{gpu.most_requests_shared:,}"))
    title = f"a GPU of {format_size(gpu.gpu_memory)}, {100 * wish.memory_share:g} % of it used"
    return Table(title, ("what", "each of them"), rows)


def _explained(plan: Plan) -> list[dict[str, str]]:
    from hicache.analytics.plan.formulas import steps

    return [asdict(step) for step in steps(plan)]


def _list(*, as_json: bool) -> None:
    from hicache.analytics.plan.presets import PRESETS

    shapes = [(name, preset.model, preset.shape(name)) for name, preset in PRESETS.items()]
    if as_json:
        print_json(
            {"presets": [{"name": name, "model": model, "parameters": s.parameters} for name, model, s in shapes]}
        )
        return
    rows = [(name, model, f"{shape.parameters / 1e9:,.4g} billion") for name, model, shape in shapes]
    print_fitted(Table("presets", ("name", "model", "parameters"), rows, texts=2))


def _needed(options: argparse.Namespace, name: str) -> int:
    value = _number(options, name, 1)
    if value is None:
        raise ConfigError(
            f"--{name.replace('_', '-')}: is missing; without MODEL give --layers, --kv-heads and --head-dim"
        )
    return value


def _number(options: argparse.Namespace, name: str, least: int) -> int | None:
    text = getattr(options, name)
    if text is None:
        return None
    option = f"--{name.replace('_', '-')}"
    value = whole(option, text)
    if not least <= value <= _MOST:
        raise ConfigError(f"{option} {text:.40}: must be {least} to {_MOST}")
    return value


def _size(options: argparse.Namespace, name: str) -> int | None:
    text = getattr(options, name)
    if text is None:
        return None
    try:
        return parse_size(text)
    except ConfigError as error:
        raise ConfigError(f"--{name.replace('_', '-')}: {error}") from None
