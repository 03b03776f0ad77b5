"""`hicache ping ADDRESS`: whether a service answers, what it is, and how it feels."""

from __future__ import annotations

import argparse
import time

from hicache.cli.output import Table, print_json, print_table
from hicache.cli.service import add_service_arguments, connected

HELP = "see whether a service answers"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parser.description = f"{HELP}; exit code 1 if it is not ready or degraded, 2 if nobody answers"
    add_service_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Ask, print, and return the exit code: 1 if the service is not ready, or degraded."""
    from hicache.cli.main import EXIT_FINE, EXIT_WRONG

    with connected(options) as client:
        client.ping()  # connects; the second one is measured
        start = time.perf_counter()
        answer = client.ping()
        seconds = time.perf_counter() - start
    if options.json:
        document = {
            "address": str(client.address),
            "server": answer.server,
            "boot": answer.boot.hex(),
            "uptime_seconds": round(answer.uptime_seconds, 3),
            "ready": answer.ready,
            "degraded": list(answer.degraded),
            "tenant": answer.tenant,
            "seconds": seconds,
        }
        print_json(document)
    else:
        state = "ready" if answer.ready else "not ready: it is starting or draining"
        rows = [
            ("state", state if not answer.degraded else f"{state}, degraded"),
            *(("degraded", text) for text in answer.degraded),
            ("version", answer.server),
            ("up", f"{answer.uptime_seconds:,.0f} s"),
            ("answer after", f"{1000 * seconds:.2f} ms"),
            ("tenant", answer.tenant or "none"),
        ]
        print_table(Table(f"hicache at {client.address}", ("what", ""), rows, texts=2))
    return EXIT_FINE if answer.ready and not answer.degraded else EXIT_WRONG
