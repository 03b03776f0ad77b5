"""`hicache serve`: run a service that engines on this host, and clients elsewhere, attach to."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from hicache.cli.output import warn
from hicache.cli.settings import add_setting_arguments, settings_of

if TYPE_CHECKING:
    from hicache.sidecar.app import App

HELP = "run a service that engines share"

_EPILOG = """\
SIGTERM drains for as long as --drain says, and reports what it dropped; a second one ends at once.
SIGHUP reads the tokens and quotas again.
Settings come from flags, HICACHE_... variables and --config, in this order; see `hicache config describe`.

  hicache serve --listen unix:///run/hicache/hicache.sock --host 64GiB \\
      --storage "file:///var/cache/hicache?capacity=1TiB" --metrics 127.0.0.1:9400
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_setting_arguments(parser)
    parser.add_argument(
        "--takeover", action="store_true", help="take sockets and pages over from the service that runs there now"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON document when ready, and one at the end")


def run(options: argparse.Namespace) -> int:
    """Serve until a signal; the exit code is 0 whatever the drain had to drop."""
    import asyncio

    from hicache.cli.main import EXIT_FINE
    from hicache.sidecar.app import serve
    from hicache.sidecar.checks import check_files
    from hicache.sidecar.logs import set_up

    settings = settings_of(options)
    for text in check_files(settings):
        warn(text)
    set_up(settings.config.log)

    def started(app: App) -> None:
        _say(options, {"addresses": [str(address) for address in app.addresses]}, "serving on")

    ended = asyncio.run(serve(settings.config, started=started))
    _say(options, {"dropped": ended.dropped}, "ended; dropped")
    return EXIT_FINE


def _say(options: argparse.Namespace, document: dict[str, object], words: str) -> None:
    (value,) = document.values()
    shown = ", ".join(value) if isinstance(value, list) else value or "nothing"
    sys.stdout.write(json.dumps(document) + "\n" if options.json else f"{words} {shown}\n")
    sys.stdout.flush()
