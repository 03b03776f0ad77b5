"""`hicache stats ADDRESS [--watch]`: what a service counts."""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from hicache.cli.output import Table, print_json, print_table
from hicache.cli.service import add_service_arguments, connected, seconds_of
from hicache.errors import ConfigError
from hicache.units import format_size

HELP = "show what a service counts"

_CLEAR_SCREEN = "\x1b[H\x1b[2J"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    add_service_arguments(parser)
    parser.add_argument("--watch", action="store_true", help="again and again, until Ctrl-C; with --json a line each")
    parser.add_argument("--every", default="2", metavar="SECONDS", help="between two looks with --watch (default: 2)")
    parser.add_argument("--count", type=int, metavar="N", help="end --watch after N looks (default: never)")


def run(options: argparse.Namespace) -> int:
    """Print once or again and again; returns the exit code."""
    from hicache.cli.main import EXIT_FINE

    every = seconds_of(options.every, "--every", least=0.05)
    if options.count is not None and options.count < 1:
        raise ConfigError(f"--count {options.count}: give 1 or more")
    with connected(options) as client:
        if not options.watch:
            _show(client.statistics(), options, again=False)
            return EXIT_FINE
        pause, shown = threading.Event(), 0
        try:
            while True:
                _show(client.statistics(), options, again=True)
                shown += 1
                if shown == options.count or pause.wait(every):
                    break
        except KeyboardInterrupt:
            sys.stdout.write("\n")  # it is how one ends it
    return EXIT_FINE


def _show(document: dict[str, Any], options: argparse.Namespace, *, again: bool) -> None:
    if options.json:
        if again:
            sys.stdout.write(json.dumps(document, allow_nan=False) + "\n")
            sys.stdout.flush()
        else:
            print_json(document)
        return
    if again and sys.stdout.isatty():
        sys.stdout.write(_CLEAR_SCREEN)
    for table in tables(document):
        print_table(table)
    sys.stdout.flush()


def tables(document: Mapping[str, Any]) -> Iterator[Table]:
    """The document for people."""
    service, pools = document["service"], document["pools"]
    yield Table(f"service, up {service['uptime_seconds']:,.0f} s", ("what", ""), list(_whole(service)), texts=2)
    yield from _more(service)
    if not pools:
        return
    yield Table(
        "pools",
        (
            "model",
            "namespace",
            "tenant",
            "ranks",
            "sessions",
            "size",
            "pages",
            "resident",
            "pinned",
            "private",
            "quarantined",
        ),
        [_pool(pool) for pool in pools],
        texts=3,
    )
    yield Table(
        "tokens",
        ("model", "tenant", "requests", "asked", "hit", "device", "host", "storage", "most missed as"),
        [_tokens(pool) for pool in pools],
        texts=2,
    )
    storage = pools[0]["statistics"]["storage"]
    if storage is not None:
        yield Table(
            "storage",
            ("what", ""),
            [
                ("objects", f"{storage['objects']:,}"),
                ("bytes", format_size(storage["bytes_used"]) + _of(storage["capacity"])),
                ("found", f"{storage['hits']:,} of {storage['gets']:,}{_share(storage['hits'], storage['gets'])}"),
                ("written, read", f"{format_size(storage['bytes_written'])}, {format_size(storage['bytes_read'])}"),
                *((f"not OK: {reason}", f"{count:,}") for reason, count in storage["by_reason"].items() if count),
            ],
            texts=2,
        )


def _whole(service: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What concerns all tenants together; one of them is not told."""
    if "sessions" in service:
        leases, pins = service["leases"], service["pins"]
        yield "sessions", f"{service['sessions']:,} open, {service['sessions_opened']:,} since the start"
        ended = f"{leases['ended']:,} ended ones keep {leases['quarantined_slots']:,} slots"
        yield "leases", f"{leases['open']:,} open, {ended}"
        yield "pins", f"{pins['pins']:,} with {pins['slots']:,} slots"
    if log := service.get("access_log"):
        shares = (("written", "written"), ("waiting", "waiting"), ("left_out", "left out"), ("dropped", "lost"))
        counts = ", ".join(f"{log[key]:,} {word}" for key, word in shares if log[key] or key == "written")
        yield "access log", f"{counts}, {format_size(log['bytes'])} in {log['folder']}"
    for text in service["degraded"]:
        yield "degraded", text


def _more(service: Mapping[str, Any]) -> Iterator[Table]:
    verbs = [verb for verb in service.get("verbs", ()) if verb["answered"]]
    if verbs:
        yield Table("requests", ("verb", "answered", "failed", "mean µs"), [_verb(verb) for verb in verbs])
    if service["quotas"]:
        rows = [
            (
                row["tenant"] or "-",
                row["tier"],
                format_size(row["bytes"]),
                _of(row["quota"]).removeprefix(" of ") or "-",
            )
            for row in service["quotas"]
        ]
        yield Table("tenants", ("tenant", "tier", "holds", "may hold"), rows, texts=2)


def _verb(verb: Mapping[str, Any]) -> tuple[str, ...]:
    mean = 1e6 * verb["seconds"] / verb["answered"]
    return (verb["verb"], f"{verb['answered']:,}", f"{verb['failed']:,}", f"{mean:,.0f}")


def _pool(pool: Mapping[str, Any]) -> tuple[str, ...]:
    host = pool["statistics"]["core"]["host"]
    counts = (host[name] for name in ("capacity", "resident", "pinned", "private", "quarantined"))
    names = (pool["model"], pool["namespace"], pool["tenant"] or "-", str(pool["ranks"]))
    return (*names, f"{pool['sessions']:,}", format_size(pool["bytes"]), *(f"{count:,}" for count in counts))


def _tokens(pool: Mapping[str, Any]) -> tuple[str, ...]:
    statistics = pool["statistics"]
    tokens = statistics["tokens"]
    hits = tokens["device"] + tokens["host"] + tokens["storage"]
    missed = max(tokens["missed"].items(), key=lambda item: item[1], default=None)
    return (
        pool["model"],
        pool["tenant"] or "-",
        f"{statistics['requests']:,}",
        f"{tokens['asked']:,}",
        f"{hits:,}{_share(hits, tokens['asked'])}",
        *(f"{tokens[tier]:,}" for tier in ("device", "host", "storage")),
        "-" if missed is None else f"{missed[0]} {missed[1]:,}",
    )


def _share(part: int, whole: int) -> str:
    return f" ({100 * part / whole:.1f} %)" if whole else ""


def _of(capacity: int | None) -> str:
    return "" if capacity is None else f" of {format_size(capacity)}"
