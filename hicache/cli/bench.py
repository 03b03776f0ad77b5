"""`hicache bench storage URL`: how fast a store is, beside a loop without frills on the same medium."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from hicache.cli.output import Table, print_json, print_table, progress, warn
from hicache.errors import ConfigError
from hicache.units import format_size

if TYPE_CHECKING:
    from hicache.storage.trial import SizeResult, Timing

HELP = "measure a store with real objects"

MOST_BYTES = 2**36


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parser.add_argument("what", choices=["storage"], help="what is measured")
    parser.add_argument("url", metavar="URL", help="the store, such as file:///path or redis://host:6379/0")
    parser.add_argument(
        "--sizes",
        default="64KiB,256KiB,1MiB,2MiB,8MiB",
        metavar="LIST",
        help="bytes of objects (default: 64KiB,256KiB,1MiB,2MiB,8MiB)",
    )
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="callers at the same time (default: 1)")
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="objects of one call (default: 8)")
    parser.add_argument(
        "--total", default="64MiB", metavar="SIZE", help="bytes stored at the same time (default: 64MiB)"
    )
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="figures are medians of N (default: 5)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(options: argparse.Namespace) -> int:
    """Measure, print, and return the exit code: 1 if something wrong was read."""
    from hicache.cli.main import EXIT_FINE, EXIT_WRONG
    from hicache.cli.sizes import parse_bytes
    from hicache.storage.registry import load_backend
    from hicache.storage.trial import TrialOptions, run_trial
    from hicache.storage.url import StorageUrl

    wanted = TrialOptions(
        sizes=tuple(parse_bytes(text, option="--sizes", most=MOST_BYTES) for text in options.sizes.split(",")),
        threads=options.threads,
        batch=options.batch,
        total=parse_bytes(options.total, option="--total", most=MOST_BYTES),
        rounds=options.rounds,
    )
    largest = max(wanted.sizes) * wanted.batch
    if largest > MOST_BYTES:
        raise ConfigError(f"--batch {wanted.batch}: a call would move {format_size(largest)}; use fewer or smaller")
    url = StorageUrl.parse(options.url)
    backend = load_backend(url.scheme).from_url(url)
    try:
        with progress("bench") as show:
            results = list(run_trial(backend, wanted, progress=show))
    finally:
        backend.close()
    if options.json:
        print_json({"sizes": [result.document() for result in results]})
    else:
        print_table(table(results, threads=wanted.threads, batch=wanted.batch))
    for result in results:
        for verb in ("put", "get", "contains"):
            for reason, count in getattr(result, verb).failed.items():
                warn(f"{format_size(result.size)}: {count} objects of {verb} failed: {reason}")
    return EXIT_WRONG if any(result.wrong for result in results) else EXIT_FINE


def table(results: list[SizeResult], *, threads: int, batch: int) -> Table:
    """The results for people."""
    rows = []
    for result in results:
        for verb in ("put", "get", "contains"):
            timing: Timing = getattr(result, verb)
            rows.append(
                (
                    f"{verb} {format_size(result.size)}",
                    f"{timing.gigabytes_per_second:.2f}" if timing.gigabytes_per_second else "",
                    f"{timing.reference:.2f}" if timing.reference else "",
                    f"{timing.ratio:.2f}" if timing.ratio else "",
                    f"{timing.p50:.2f}",
                    f"{timing.p99:.2f}",
                )
            )
    return Table(
        title=f"{threads} thread{'s' if threads > 1 else ''}, {batch} objects a call; contains asks for 512 keys",
        columns=("what", "GB/s", "raw loop", "ratio", "p50 ms", "p99 ms"),
        rows=rows,
    )
