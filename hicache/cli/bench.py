"""`hicache bench storage URL` and `hicache bench sidecar ADDRESS`: how fast a store or a service is.

A store is measured beside a loop without frills on the same medium, a service beside an empty message and a plain copy.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING

from hicache.cli.output import Table, print_json, print_table, progress, warn
from hicache.cli.service import add_secret_arguments, secrets_of
from hicache.errors import ConfigError
from hicache.units import format_size

if TYPE_CHECKING:
    from hicache.rpc.client.trial import TrialResult
    from hicache.storage.trial import SizeResult, Timing

HELP = "measure a store with real objects, or a service with real pages"

MOST_BYTES = 2**36


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parser.add_argument("what", choices=["storage", "sidecar"], help="what is measured")
    parser.add_argument(
        "url", metavar="URL|ADDRESS", help="the store, such as file:///path, or the service, such as unix:///path"
    )
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="rates are medians of N (default: 5)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    _add_storage_arguments(parser.add_argument_group("of a store"))
    service = parser.add_argument_group("of a service")
    service.add_argument("--calls", type=int, default=500, metavar="N", help="calls of each verb (default: 500)")
    service.add_argument(
        "--tokens", type=int, default=8192, metavar="N", help="of the prompt that is looked up (default: 8192)"
    )
    service.add_argument(
        "--bytes",
        default="32MiB",
        metavar="SIZE",
        help="stored and loaded at once (default: 32MiB)",
    )
    add_secret_arguments(parser)


def _add_storage_arguments(parser: argparse._ArgumentGroup) -> None:
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


def run(options: argparse.Namespace) -> int:
    """Measure, print, and return the exit code: 1 if something wrong was read."""
    return _run_sidecar(options) if options.what == "sidecar" else _run_storage(options)


def _run_storage(options: argparse.Namespace) -> int:
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


def _run_sidecar(options: argparse.Namespace) -> int:
    from hicache.cli.main import EXIT_FINE, EXIT_WRONG
    from hicache.cli.sizes import parse_bytes
    from hicache.rpc.client.trial import TrialOptions, run_trial

    wanted = TrialOptions(
        calls=options.calls,
        tokens=options.tokens,
        batch=parse_bytes(options.bytes, option="--bytes", most=MOST_BYTES),
        rounds=options.rounds,
    )
    result = run_trial(options.url, secrets_of(options), wanted)
    if options.json:
        print_json(result.document())
    else:
        for table in service_tables(result):
            print_table(table)
    if result.wrong:
        warn(f"{result.wrong} pages were not as they were stored: do not use this service")
    return EXIT_WRONG if result.wrong else EXIT_FINE


def service_tables(result: TrialResult) -> Iterator[Table]:
    """The figures of a service for people."""
    echo = result.latencies[0].p50
    yield Table(
        "one client; match, lease and load of a stored prompt",
        ("verb", "p50 µs", "p99 µs", "of echo"),
        [(seen.verb, f"{seen.p50:,.0f}", f"{seen.p99:,.0f}", f"{seen.p50 / echo:.2f}") for seen in result.latencies],
    )
    yield Table(
        f"{format_size(result.batch)} at once, in a process each",
        ("what", "GB/s", "copy", "ratio"),
        [(r.what, f"{r.gigabytes_per_second:.2f}", f"{r.reference:.2f}", f"{r.ratio:.2f}") for r in result.rates],
    )


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
