"""`hicache replay TRACE`: drive the real cache from a request trace and check what it gives back.

`hicache replay RECORDING` repeats what a cache's flight recorder kept (see `recordings`).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from hicache.cli.output import Table, print_json, print_table, progress, warn
from hicache.cli.trace_options import add_trace_arguments, add_trace_paths, opening
from hicache.cli.values import choice, requests, stop_on_interrupt, whole
from hicache.errors import ConfigError

if TYPE_CHECKING:
    from hicache.analytics.result import ReplayResult
    from hicache.analytics.run import ReplayOptions

HELP = "drive the cache from a request trace, with every returned byte checked, or repeat a flight recording"

EVICTION = ("lru", "lfu", "slru", "priority")
WRITE_POLICIES = ("write_through", "write_through_selective", "write_back")
PREFETCH = ("best_effort", "timeout", "wait_complete")

MOST_PAGE_BYTES = 2**30
MOST_PAGE_TOKENS = 32_768  # their bytes have to fit into the header of a stored page


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options; sizes: a plain number is pages, a number with a unit (64MiB, 2GiB) is bytes."""
    add_trace_paths(parser, more="; or a recording")
    add_trace_arguments(parser)
    parser.add_argument(
        "--device", default="10000", metavar="SIZE", help='pages, bytes with a unit, or "unlimited" (default: 10000)'
    )
    parser.add_argument(
        "--device-memory",
        default="main",
        metavar="main|cuda|cuda:N",
        help="where the device tier is: in main memory, or in that of a GPU (default: main)",
    )
    parser.add_argument(
        "--host", default="0", metavar="SIZE", help="pages, or bytes with a unit (default: 0, no host tier)"
    )
    parser.add_argument(
        "--storage",
        default="none",
        metavar="URL",
        help='such as file:///path?capacity=20GiB, or "none" (default: none)',
    )
    parser.add_argument(
        "--page-size", default="trace", metavar="P", help='tokens of a page, or "trace": each id is one page (default)'
    )
    parser.add_argument(
        "--page-bytes",
        default="0",
        metavar="N",
        help="bytes of a page, a unit is allowed; 0 holds no bytes (default: 0)",
    )
    parser.add_argument(
        "--eviction", default="lru", metavar="|".join(EVICTION), help="which pages go first (default: lru)"
    )
    parser.add_argument(
        "--write-policy",
        default="write_through",
        metavar="|".join(WRITE_POLICIES),
        help="when pages go down: at once, when used again, when evicted (default: write_through)",
    )
    parser.add_argument(
        "--prefetch",
        default="wait_complete",
        metavar="|".join(PREFETCH),
        help="how long storage is waited for: not at all, for a while, until it has answered (default: wait_complete)",
    )
    parser.add_argument(
        "--prefill-rate",
        metavar="TOKENS_PER_SECOND",
        help="what the engine computes: bring up only what pays, and report modelled times (default: bring up all)",
    )
    parser.add_argument(
        "--speed", default="max", metavar="max|real|FACTOR", help="as the tiers keep up, as recorded, or times FACTOR"
    )
    parser.add_argument("--seed", default="0", metavar="N", help="another seed is other content (default: 0)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(options: argparse.Namespace) -> int:
    """Replay, print, and return the exit code."""
    from hicache.analytics.run import replay
    from hicache.cli import recordings
    from hicache.cli.main import EXIT_FINE, EXIT_INTERRUPTED, EXIT_USAGE, EXIT_WRONG

    if recorded := recordings.find(options, _defaults()):
        return recordings.run(recorded, as_json=options.json)
    wanted = read_options(options)
    trace = opening(options).open(options.trace)
    with stop_on_interrupt() as stop, progress("replay") as show:
        result = replay(trace, wanted, stop=stop, progress=show)
    if options.json:
        print_json(result.document())
    else:
        for table in tables(result):
            print_table(table)
    for line in (*result.problems, *result.warnings, result.bad_input):
        if line:
            warn(line)
    if result.problems:
        return EXIT_WRONG
    if result.bad_input:
        return EXIT_USAGE
    if result.interrupted:
        return EXIT_INTERRUPTED
    return EXIT_FINE if result.requests or result.requests_refused else EXIT_WRONG


def _defaults() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(["-"])


def read_options(options: argparse.Namespace) -> ReplayOptions:
    """Check everything that can be checked before anything is opened.

    Raises:
        ConfigError: an option that cannot work; says which and what to do.
    """
    from hicache.analytics.prefill import parse_rate
    from hicache.analytics.run import ReplayOptions
    from hicache.cli.sizes import parse_bytes, parse_pages

    choice("--eviction", options.eviction, EVICTION)
    choice("--write-policy", options.write_policy, WRITE_POLICIES)
    choice("--prefetch", options.prefetch, PREFETCH)
    page_bytes = parse_bytes(options.page_bytes, option="--page-bytes", most=MOST_PAGE_BYTES)
    unlimited = options.device == "unlimited"
    return ReplayOptions(
        device_pages=None
        if unlimited
        else parse_pages(options.device, option="--device", page_bytes=page_bytes, least=1),
        device_memory=options.device_memory,
        host_pages=parse_pages(options.host, option="--host", page_bytes=page_bytes, least=0),
        storage=None if options.storage == "none" else options.storage,
        page_tokens=_page_tokens(options.page_size),
        page_bytes=page_bytes,
        eviction=options.eviction,
        write_policy=options.write_policy,
        prefetch=options.prefetch,
        prefill_rate=parse_rate(options.prefill_rate),
        requests=None if options.limit is None else requests(options.limit),
        speed=_speed(options.speed),
        seed=whole("--seed", options.seed),
    )


def tables(result: ReplayResult) -> Iterator[Table]:
    """The result for people."""

    def share(pages: int) -> str:
        return f"{100 * pages / result.pages_asked:.2f} %" if result.pages_asked else "n/a"

    tiers = [(name, getattr(result, f"pages_{name}")) for name in ("device", "host", "storage", "missed", "asked")]
    yield Table(
        title=f"{result.requests:,} requests in {result.seconds:.2f} s"
        + (", interrupted" if result.interrupted else ""),
        columns=("answered by", "pages", "share"),
        rows=[(name, f"{pages:,}", share(pages)) for name, pages in tiers],
    )
    yield Table(
        title="hit rates",
        columns=("of", "rate"),
        rows=[
            ("pages", f"{result.hit_rate_pages:.4f}"),
            ("tokens", f"{result.hit_rate_tokens:.4f}"),
            ("requests (mean of their page rates)", f"{result.hit_rate_requests:.4f}"),
        ],
    )
    reasons = [(name, pages) for name, pages in result.misses_by_reason.items() if pages]
    if reasons:
        yield Table(
            title="why pages were missed",
            columns=("reason", "pages", "share"),
            rows=[(name, f"{pages:,}", share(pages)) for name, pages in reasons],
        )
    if (times := result.prefill) is not None:
        yield Table(
            title=f"modelled times of an engine that computes {times.tokens_per_second:,g} tokens/s",
            columns=("of all requests", "seconds"),
            rows=[
                ("with lower tiers", f"{times.seconds:,.3f}"),
                ("with device alone", f"{times.seconds_without:,.3f}"),
            ],
        )
    moved = [
        ("device to host", result.bytes_device_to_host),
        ("host to device", result.bytes_host_to_device),
        ("host to storage", result.bytes_to_storage),
        ("storage to host", result.bytes_from_storage),
    ]
    if any(size for _, size in moved):
        yield Table(title="moved", columns=("edge", "bytes"), rows=[(name, f"{size:,}") for name, size in moved])
    checks = [("pages verified", result.pages_verified), ("pages wrong", result.pages_wrong)]
    checks += [(f"shed: {reason}", pages) for reason, pages in result.shed_by_reason.items()]
    checks += [("requests refused", result.requests_refused), ("trace entries skipped", result.entries_skipped)]
    yield Table(title="checks", columns=("what", "count"), rows=[(name, f"{count:,}") for name, count in checks])


def _page_tokens(text: str) -> int | None:
    if text == "trace":
        return None
    if not text.isascii() or not text.isdecimal() or len(text) > 9 or not 1 <= int(text) <= MOST_PAGE_TOKENS:
        raise ConfigError(f'--page-size {text}: use "trace" or a number of tokens from 1 to {MOST_PAGE_TOKENS}')
    return int(text)


def _speed(text: str) -> float | None:
    if text == "max":
        return None
    try:
        factor = 1.0 if text == "real" else float(text)
    except ValueError:
        factor = math.nan
    if not (factor > 0 and math.isfinite(factor)):
        raise ConfigError(f"--speed {text}: use max, real, or a factor above 0 such as 10")
    return factor
