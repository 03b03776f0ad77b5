"""`hicache unpin ADDRESS --name NAME`: let a pinned prefix go."""

from __future__ import annotations

import argparse

from hicache.cli.output import print_json, say
from hicache.cli.service import add_service_arguments, connected
from hicache.errors import ConfigError

HELP = "let pinned prefixes go"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    add_service_arguments(parser)
    parser.add_argument("--name", metavar="NAME", help="the pin, as `hicache pins` shows it")
    parser.add_argument("--all", action="store_true", help="all pins of this caller's tenant")


def run(options: argparse.Namespace) -> int:
    """End them, print how many, and return the exit code."""
    from hicache.cli.main import EXIT_FINE

    if (options.name is None) != options.all or options.name == "":
        raise ConfigError("unpin what? give --name for one pin, or --all")
    with connected(options) as client:
        ended = client.unpin(options.name or "")
    if options.json:
        print_json({"pins": ended})
    else:
        say(f"{ended} pin{'' if ended == 1 else 's'} ended")
    return EXIT_FINE
