"""`hicache pin ADDRESS --model NAME --prompts FILE`: keep prefixes in host memory."""

from __future__ import annotations

import argparse
import contextlib

from hicache.cli.output import Table, print_json, print_table
from hicache.cli.service import (
    add_prompts_argument,
    add_service_arguments,
    add_target_arguments,
    connected,
    read_prompts,
    required_target,
    seconds_of,
)
from hicache.errors import ConfigError, HicacheError, InvalidInput
from hicache.units import format_size

HELP = "keep prefixes in host memory"


_EPILOG = """\
A soft pin is given up when requests need its slots, a hard one is not; limits.pinned_bytes of the service bounds what a
tenant may pin. Pages that no tier has are not pinned: `hicache warm` or an engine brings them first.
Exit code 1 if not all pages of the prompts are there.

  echo "[1, 2, 3, ...]" | hicache pin unix:///run/hicache/hicache.sock --model org/model --prompts - --name system
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_service_arguments(parser)
    add_target_arguments(parser)
    add_prompts_argument(parser)
    parser.add_argument(
        "--name",
        default="",
        help="for `hicache unpin`; of several prompts the pins are NAME-1, NAME-2 and so on, and NAME ends them all "
        "(default: chosen for you)",
    )
    parser.add_argument("--hard", action="store_true", help="requests may not take the pages even if they need room")
    parser.add_argument("--ttl", default="0", metavar="SECONDS", help="for how long (default: 0, for ever)")


def run(options: argparse.Namespace) -> int:
    """Pin, print, and return the exit code: 1 if not all pages of the prompts are there."""
    from hicache.cli.main import EXIT_FINE, EXIT_WRONG

    target, ttl = required_target(options), seconds_of(options.ttl, "--ttl", least=0.0)
    prompts = list(read_prompts(options.prompts))
    if not prompts:
        raise InvalidInput(f"{options.prompts!r:.200} has no prompts")
    if len(prompts) > 1000:
        raise ConfigError(f"{len(prompts)} prompts to pin: more than 1,000 is what `hicache warm` is for")
    pinned = []
    with connected(options) as client:
        try:
            for number, prompt in enumerate(prompts, 1):
                name = f"{options.name}-{number}" if options.name and len(prompts) > 1 else options.name
                pinned.append(client.pin(target, prompt, hard=options.hard, ttl_seconds=ttl, name=name))
        except HicacheError:
            with contextlib.suppress(HicacheError):  # all of them, or none
                for pin in pinned:
                    client.unpin(pin.name)
            raise
    if options.json:
        print_json(
            {"pins": [{"name": p.name, "pages": p.pages, "of_pages": p.of_pages, "bytes": p.bytes} for p in pinned]}
        )
    else:
        rows = [(p.name, f"{p.pages:,}", f"{p.of_pages:,}", format_size(p.bytes)) for p in pinned]
        print_table(Table("pinned", ("name", "pages", "of", "size"), rows))
    return EXIT_FINE if all(p.pages == p.of_pages for p in pinned) else EXIT_WRONG
