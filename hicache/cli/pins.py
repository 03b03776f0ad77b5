"""`hicache pins ADDRESS`: prefixes that administrators keep in host memory."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from hicache.cli.output import Table, print_json, print_table
from hicache.cli.service import add_service_arguments, connected
from hicache.units import format_size

if TYPE_CHECKING:
    from hicache.rpc.service import Pinned

HELP = "list pinned prefixes"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    add_service_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Print them; returns the exit code."""
    from hicache.cli.main import EXIT_FINE

    with connected(options) as client:
        pins = client.pins()
    if options.json:
        print_json({"pins": [document(pin) for pin in pins]})
    else:
        print_table(table("pins", pins))
    return EXIT_FINE


def document(pin: Pinned) -> dict[str, Any]:
    """A pin as JSON."""
    return {
        "name": pin.name,
        "tenant": pin.tenant,
        "namespace": pin.namespace_digest.hex(),
        "hard": pin.hard,
        "pages": pin.pages,
        "bytes": pin.bytes,
        "seconds_left": pin.seconds_left or None,
    }


def table(title: str, pins: tuple[Pinned, ...]) -> Table:
    """Pins for people."""
    rows = [
        (
            pin.name,
            pin.tenant or "-",
            pin.namespace_digest.hex() or "-",
            "hard" if pin.hard else "soft",
            f"{pin.pages:,}",
            format_size(pin.bytes),
            f"{pin.seconds_left:,.0f} s" if pin.seconds_left else "for ever",
        )
        for pin in pins
    ]
    return Table(title, ("name", "tenant", "namespace", "kind", "pages", "size", "left"), rows, texts=4)
