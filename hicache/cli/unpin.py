"""`hicache unpin ADDRESS --name NAME`: let a pinned prefix go."""

from __future__ import annotations

import argparse
import re

from hicache.cli.output import print_json, say
from hicache.cli.service import add_service_arguments, connected
from hicache.errors import ConfigError, NotFound

HELP = "let pinned prefixes go"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    add_service_arguments(parser)
    parser.add_argument(
        "--name", metavar="NAME", help="the pin, as `hicache pins` shows it, or what several prompts were pinned as"
    )
    parser.add_argument("--all", action="store_true", help="all pins of this caller's tenant")


def run(options: argparse.Namespace) -> int:
    """End them, print how many, and return the exit code."""
    from hicache.cli.main import EXIT_FINE

    if (options.name is None) != options.all or options.name == "":
        raise ConfigError("unpin what? give --name for one pin, or --all")
    with connected(options) as client:
        try:
            ended = client.unpin(options.name or "")
        except NotFound:
            # Of several prompts that were pinned together: one pin each, with a number behind the name.
            several = re.compile(re.escape(options.name) + r"-[0-9]+")
            own = client.ping().tenant
            names = [pin.name for pin in client.pins() if pin.tenant == own and several.fullmatch(pin.name)]
            if not names:
                raise
            ended = sum(client.unpin(name) for name in names)
    if options.json:
        print_json({"pins": ended})
    else:
        say(f"{ended} pin{'' if ended == 1 else 's'} ended")
    return EXIT_FINE
