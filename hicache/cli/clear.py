"""`hicache clear ADDRESS`: forget pages in every tier."""

from __future__ import annotations

import argparse

from hicache.cli.output import print_json, say, warn
from hicache.cli.service import add_service_arguments, add_target_arguments, connected, target_of
from hicache.errors import ConfigError

HELP = "forget pages in every tier, as after a change of weights"


_EPILOG = """\
Without --adapter and --salt it is the namespace of requests that have neither; --all is every namespace in use. Pages
that requests hold now go when those end. Exit code 1 if storage has not confirmed it: do it again.

  hicache clear unix:///run/hicache/hicache.sock --model org/model
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_service_arguments(parser)
    add_target_arguments(parser)
    parser.add_argument("--all", action="store_true", help="everything that this caller may clear")


def run(options: argparse.Namespace) -> int:
    """Clear, print, and return the exit code: 1 if storage has not confirmed it."""
    from hicache.cli.main import EXIT_FINE, EXIT_WRONG

    target = target_of(options)
    if (target is None) != options.all:
        raise ConfigError("clear what? give --model or --namespace for one model, or --all")
    with connected(options) as client:
        cleared, unconfirmed = client.clear(target)
    if options.json:
        print_json({"namespaces": cleared, "unconfirmed": list(unconfirmed)})
    else:
        say(f"{cleared} namespace{'' if cleared == 1 else 's'} cleared")
    for text in unconfirmed:
        warn(f"storage has not confirmed it, so after a restart old pages may be found again: {text}")
    return EXIT_WRONG if unconfirmed else EXIT_FINE
