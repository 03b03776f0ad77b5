"""`hicache warm ADDRESS --model NAME --prompts FILE`: bring prompts from storage into host memory."""

from __future__ import annotations

import argparse

from hicache.cli.output import print_json, progress, say
from hicache.cli.service import (
    add_prompts_argument,
    add_service_arguments,
    add_target_arguments,
    connected,
    read_prompts,
    required_target,
    seconds_of,
)

HELP = "bring prompts from storage into host memory"


_EPILOG = """\
Pages that come up stay until others need their slots; `hicache pin` keeps them. Exit code 1 if pages are missing.

  hicache warm unix:///run/hicache/hicache.sock --model org/model --prompts prompts.jsonl --deadline 60
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_service_arguments(parser)
    add_target_arguments(parser)
    add_prompts_argument(parser)
    parser.add_argument(
        "--deadline", default="0", metavar="SECONDS", help="for each 262,144 tokens (default: 0, as the service thinks)"
    )


def run(options: argparse.Namespace) -> int:
    """Bring them up, print, and return the exit code: 1 if pages are missing."""
    from hicache.cli.main import EXIT_FINE, EXIT_WRONG

    target, deadline = required_target(options), seconds_of(options.deadline, "--deadline", least=0.0)
    prompts = list(read_prompts(options.prompts))
    done = host = missed = 0
    with connected(options) as client, progress("warm") as show:
        for step in client.warm(target, prompts, deadline_seconds=deadline):
            done, host, missed = step
            show(done, len(prompts))
    if options.json:
        print_json({"prompts": done, "host_pages": host, "missed_pages": missed})
    else:
        say(f"{done:,} prompts: {host:,} pages in host memory, {missed:,} in no tier or too late")
    return EXIT_WRONG if missed else EXIT_FINE
