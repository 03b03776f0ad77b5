"""Options that `hicache simulate` and `hicache sweep` share: tiers, policies and costs, as flags or from a file."""

from __future__ import annotations

import argparse
import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hicache.cli.sizes import tier_size
from hicache.cli.trace_options import add_trace_arguments, add_trace_paths, opening
from hicache.cli.values import choice, number, whole
from hicache.errors import ConfigError
from hicache.units import format_size, parse_size

if TYPE_CHECKING:
    from hicache.analytics.analysis.columns import Columns
    from hicache.analytics.simulate.settings import Costs

EVICTION: Final = ("lru", "lfu", "slru", "priority")
WRITE_POLICIES: Final = ("write_through", "write_through_selective", "write_back")
PREFETCH: Final = ("best_effort", "timeout", "wait_complete")
ROUTING: Final = ("round_robin", "sticky", "prefix_aware")
_CHOICES: Final = {
    "eviction": EVICTION,
    "write_policy": WRITE_POLICIES,
    "prefetch": PREFETCH,
    "routing": ROUTING,
}
_MOST_CONFIG: Final = 2**20

# name, metavar, what it is, default
_SETTINGS: Final = (
    ("device", "SIZE", 'of each instance: pages, bytes with a unit, or "unlimited"', "10000"),
    ("host", "SIZE", "of each instance: pages, or bytes with a unit; 0 is no host tier", "0"),
    ("storage", "SIZE", 'that all instances share: pages, bytes with a unit, or "unlimited"; 0 is none', "0"),
    ("page_size", "P", 'tokens of a page, or "trace": each id is one page', "trace"),
    ("eviction", "|".join(EVICTION), "which pages go first", "lru"),
    ("protected_share", "SHARE", "of a tier, what slru protects at most", "0.2"),
    ("write_policy", "|".join(WRITE_POLICIES), "when pages go down", "write_through"),
    ("admission", "K", 'write pages down from their K-th use on, or "policy": as the write policy says', "policy"),
    ("prefetch", "|".join(PREFETCH), "how long storage is waited for", "wait_complete"),
    ("decide", "yes|no", "bring pages up only where that takes less time than computing them", "no"),
    ("read_bound", "SIZE", "bytes on their way from storage; beyond, pages are not read ahead", "1GiB"),
    ("write_bound", "SIZE", "bytes on their way to storage; beyond, pages are not written", "256MiB"),
    ("instances", "N", "caches that share the requests", "1"),
    ("routing", "|".join(ROUTING), "which instance a request goes to", "round_robin"),
    ("speed", "FACTOR", "to the trace's own times: 2 is twice the load", "1"),
    ("instant", "yes|no", "nothing takes time: hit rates of the policies alone, as `hicache replay` has them", "no"),
)
NAMES: Final = tuple(name for name, *_ in _SETTINGS)

_COSTS: Final = (
    ("token_bytes", "SIZE", "KV of a token (default: 128KiB, Llama-3.1-8B in bfloat16; see `hicache plan`)"),
    (
        "prefill_rate",
        "TOKENS_PER_SECOND",
        "that one instance computes (default: 24642, 40 %% of the 989 TFLOPS of an H100 for 8.03 billion parameters)",
    ),
    ("device_link", "SIZE", "bytes a second, each way (default: 50GB, 80 %% of PCIe 5.0 x16)"),
    ("storage_read", "SIZE", "bytes a second of each instance (default: 5GB, an NVMe drive on PCIe 4.0)"),
    ("storage_write", "SIZE", "bytes a second of each instance (default: 2.5GB)"),
    ("storage_latency", "SECONDS", "of each call (default: 0.0005)"),
    ("gpu_hour_price", "MONEY", "of one instance: tells what hits are worth"),
)

_COST_WORDS: Final = {
    "prefill_rate": "the tokens a second that an instance computes",
    "storage_latency": "seconds, or 0",
    "gpu_hour_price": "a price, or 0",
}


def add_simulation_arguments(parser: argparse.ArgumentParser, *, several: bool) -> None:
    """The options; with `several` each setting takes values with commas between them."""
    add_trace_paths(parser)
    add_setting_arguments(parser, several=several)
    add_trace_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def add_setting_arguments(
    parser: argparse._ActionsContainer, *, several: bool, but: frozenset[str] = frozenset()
) -> None:
    """Settings and costs, to a parser or a group of one, without those named in `but`, which it has already."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings in TOML by these options' names, with _")
    more = ",..." if several else ""
    for name, metavar, text, default in _SETTINGS:
        parser.add_argument(_option(name), metavar=metavar + more, help=f"{text} (default: {default})")
    for name, metavar, text in _COSTS:
        if name not in but:
            parser.add_argument(_option(name), metavar=metavar, help=text)


def read_trace(options: argparse.Namespace) -> Columns:
    """The trace, read to its end.

    Raises:
        TraceError: it cannot be read.
    """
    from hicache.analytics.analysis.columns import read_columns
    from hicache.cli.output import warn

    trace = opening(options).open(options.trace)
    columns = read_columns(trace)
    if trace.skipped:
        warn(f"{trace.skipped:,} broken entries of the trace were skipped")
    if not columns.requests:
        warn(f"{', '.join(map(str, trace.paths)):.200}: {trace.why_nothing}")
    return columns


def given_settings(options: argparse.Namespace) -> dict[str, str]:
    """Text of each setting and cost that was given, by its name: flags first, then the file.

    Raises:
        ConfigError: the file cannot be read, or has a name that is none of these.
    """
    known = (*NAMES, *(name for name, *_ in _COSTS))
    given = {} if options.config is None else _from_file(options.config, known)
    for name in known:
        if (text := getattr(options, name)) is not None:
            given[name] = text
    return given


def _from_file(path: Path, known: tuple[str, ...]) -> dict[str, str]:
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_CONFIG + 1)
        if len(data) > _MOST_CONFIG:
            raise ConfigError(f"--config {path}: more than 1 MiB, so it holds no settings")
        found = tomllib.loads(data.decode())
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}; name a file that can be read") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"--config {path}: is no valid TOML: {error}") from None
    for name in found:
        if name not in known:
            raise ConfigError(f"--config {path}: {name!r:.40} is no setting; known are {', '.join(known)}")
    return {name: _text(path, name, value) for name, value in found.items()}


def _text(path: Path, name: str, value: object) -> str:
    if isinstance(value, list):
        return ",".join(_text(path, name, item) for item in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str | int | float):
        return str(value)
    raise ConfigError(f"--config {path}: {name} must be text, a number or a list of these")


def costs_of(given: dict[str, str]) -> Costs:
    """What things cost.

    Raises:
        ConfigError: a value that cannot be.
    """
    from hicache.analytics.simulate.settings import Costs

    texts = {name: (_option(name), given[name]) for name, *_ in _COSTS if name in given}
    read: dict[str, Any] = {}
    for name, (option, text) in texts.items():
        if name in ("token_bytes", "device_link", "storage_read", "storage_write"):
            read[name] = _bytes(option, text)
        else:
            read[name] = 0.0 if text == "0" else number(option, text, _COST_WORDS[name])
    return Costs(**read)


def choices_of(given: dict[str, str], columns: Columns, costs: Costs, *, several: bool) -> dict[str, list[Any]]:
    """Values of each setting, in the order given.

    Raises:
        ConfigError: a value that cannot be, or more than one where one is wanted.
    """
    texts = {name: given.get(name, default) for name, _, _, default in _SETTINGS}
    lists = {name: [part.strip() for part in text.split(",")] for name, text in texts.items()}
    for name, parts in lists.items():
        if len(parts) > 1 and not several:
            raise ConfigError(f"{_option(name)} {texts[name]:.60}: give one value; `hicache sweep` takes several")
    found: dict[str, list[Any]] = {name: [_value(name, part) for part in lists[name]] for name in NAMES[3:]}
    unit = int(columns.unit[0]) if columns.requests else 1
    sizes = [size or unit for size in found["page_size"]]
    for name in NAMES[:3]:
        if len(set(sizes)) > 1 and any(not _is_plain(part) for part in lists[name]):
            raise ConfigError(
                f"{_option(name)} {texts[name]:.60}: bytes are another number of pages at each --page-size: "
                f"give pages, or one page size"
            )
        found[name] = [_pages(name, part, sizes[0] * costs.token_bytes) for part in lists[name]]
    return found


def _is_plain(text: str) -> bool:
    return text == "unlimited" or re.fullmatch(r"[+-]?[0-9]+", text) is not None


def _pages(name: str, text: str, page_bytes: int) -> int | None:
    option = _option(name)
    if text == "unlimited":
        if name == "host":
            raise ConfigError(f"{option} {text}: only --device and --storage can be without limit; give a size")
        return None
    if _is_plain(text):
        return whole(option, text)
    size = tier_size(text, option=option)
    if 0 < size < page_bytes:
        raise ConfigError(f"{option} {text}: is less than one page of {format_size(page_bytes)}; make it larger")
    return size // page_bytes


def _value(name: str, text: str) -> Any:
    option = _option(name)
    if name in _CHOICES:
        choice(option, text, _CHOICES[name])
        return text
    if name in ("decide", "instant"):
        choice(option, text, ("yes", "no"))
        return text == "yes"
    if name == "protected_share":
        return 0.0 if text == "0" else number(option, text, "a share such as 0.2")
    if name == "speed":
        return number(option, text, "a factor such as 2")
    if (name, text) in (("page_size", "trace"), ("admission", "policy")):
        return None
    if name in ("read_bound", "write_bound"):
        return _bytes(option, text)
    return whole(option, text)


def _bytes(option: str, text: str) -> int:
    try:
        return parse_size(text)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from None


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
