"""`hicache events ADDRESS`: which pages come and go, as it happens."""

from __future__ import annotations

import argparse
import json
import struct
import sys
from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Any

from hicache.cli.service import add_service_arguments, connected
from hicache.errors import ConfigError
from hicache.events import Event, Removed, Stored

if TYPE_CHECKING:
    from hicache.rpc.service import EventBatch

HELP = "show which pages come and go, as it happens"

_NAMED = 8  # hex digits by which people tell pages and namespaces apart


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    add_service_arguments(parser)
    parser.add_argument(
        "--from",
        dest="first",
        type=int,
        default=0,
        metavar="NUMBER",
        help="begin with this event; if it is not kept any more, with a snapshot (default: with a snapshot)",
    )
    parser.add_argument("--count", type=int, metavar="N", help="end after N lines (default: never)")
    parser.add_argument("--snapshot", action="store_true", help="end after the snapshot")
    parser.add_argument("--tokens", action="store_true", help="with --json: the tokens of pages too, where known")


def run(options: argparse.Namespace) -> int:
    """Print until Ctrl-C, or as far as was asked; returns the exit code."""
    from hicache.cli.main import EXIT_FINE

    if options.count is not None and options.count < 1:
        raise ConfigError(f"--count {options.count}: give 1 or more")
    if not 0 <= options.first < 2**64:
        raise ConfigError(f"--from {options.first}: give the number of an event, as it is shown, or 0")
    shown = 0
    with connected(options) as client:
        try:
            for batch in client.watch_events(options.first):
                for line in _lines(batch, options):
                    sys.stdout.write(line + "\n")
                    shown += 1
                    if shown == options.count:
                        return EXIT_FINE
                sys.stdout.flush()
                if options.snapshot and batch.snapshot_end:
                    return EXIT_FINE
        except KeyboardInterrupt:
            pass  # it is how one ends it
    return EXIT_FINE


def _lines(batch: EventBatch, options: argparse.Namespace) -> Iterator[str]:
    if options.json:
        yield from map(json.dumps, documents(batch, tokens=options.tokens))
    else:
        yield from texts(batch)


def documents(batch: EventBatch, *, tokens: bool = False) -> Iterator[dict[str, Any]]:
    """A JSON document for each event, for events that were lost, and for the end of a snapshot.

    Args:
        batch: as it came.
        tokens: whether to tell tokens.
    """
    common = {"number": batch.sequence, "timestamp_ms": batch.timestamp_ms}
    if batch.lost:
        yield {"event": "lost", "lost": batch.lost} | common
    for at, event in enumerate(batch.events):
        # All of a snapshot has one number: that of the event which follows it.
        number = batch.sequence if batch.snapshot else batch.sequence + at
        document = _document(event) | common | {"number": number, "snapshot": batch.snapshot}
        if tokens and isinstance(event, Stored):
            document["tokens"] = [token for (token,) in struct.iter_unpack("<I", event.tokens)]
        yield document
    if batch.snapshot_end:
        yield {"event": "snapshot_end"} | common


def _document(event: Event) -> dict[str, Any]:
    scope = {"namespace": event.namespace.hex(), "generation": event.generation}
    if isinstance(event, Stored):
        return {
            "event": "stored",
            "tier": event.tier.name.lower(),
            "first_page": event.first_page,
            "parent_hash": None if event.parent_hash is None else event.parent_hash.hex(),
            "page_hashes": [page_hash.hex() for page_hash in event.page_hashes],
        } | scope
    if isinstance(event, Removed):
        return {
            "event": "removed",
            "tier": event.tier.name.lower(),
            "reason": event.reason,
            "page_hashes": [page_hash.hex() for page_hash in event.page_hashes],
        } | scope
    return {"event": "cleared"} | scope


def texts(batch: EventBatch) -> Iterator[str]:
    """The same for people."""
    when = datetime.fromtimestamp(batch.timestamp_ms / 1000).strftime("%H:%M:%S.%f")[:-3]
    if batch.lost:
        yield f"{when}  lost      {batch.lost:,} events or more; all that is resident follows"
    for event in batch.events:
        scope = f"namespace {event.namespace.hex()[:_NAMED]} generation {event.generation}"
        if isinstance(event, Stored):
            what = "resident" if batch.snapshot else "stored"
            names, place = event.page_hashes, f"from page {event.first_page}"
        elif isinstance(event, Removed):
            what, names, place = "removed", event.page_hashes, event.reason
        else:
            yield f"{when}  cleared   {scope}"
            continue
        tier = event.tier.name.lower()
        pages = f"{len(names):,} {'page' if len(names) == 1 else 'pages'}"
        yield f"{when}  {what:<8}  {tier:<7}  {pages} {place}, {names[0].hex()[:_NAMED]}, {scope}"
    if batch.snapshot_end:
        yield f"{when}  that was all; the next event is number {batch.sequence}"
