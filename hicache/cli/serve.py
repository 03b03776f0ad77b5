"""`hicache serve`: run a service that engines on this host, and clients elsewhere, attach to."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from hicache.cli.output import warn
from hicache.cli.settings import add_setting_arguments, settings_of

if TYPE_CHECKING:
    from hicache.sidecar.app import App

HELP = "run a service that engines share"

_EPILOG = """\
SIGTERM drains for as long as --drain says, and reports what it dropped; a second one ends at once.
SIGHUP reads certificates, tokens and quotas again.
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

    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # else gRPC writes lines of its own between ours
    from hicache.sidecar.app import serve
    from hicache.sidecar.checks import check_files
    from hicache.sidecar.logs import set_up

    settings = settings_of(options)
    for text in check_files(settings):
        warn(text)
    set_up(settings.config.log)

    def started(app: App) -> None:
        listening = [str(address) for address in app.addresses]
        document = {"addresses": listening, "metrics": None if app.http is None else str(app.http)}
        _say(document if options.json else f"serving on {', '.join(listening)}")

    ended = asyncio.run(serve(settings.config, takeover=options.takeover, started=started))
    dropped = ", ".join(f"{count:,} {what.replace('_', ' ')}" for what, count in ended.dropped.items())
    _say({"dropped": ended.dropped} if options.json else f"ended; dropped {dropped or 'nothing'}")
    return EXIT_FINE


def _say(what: Mapping[str, object] | str) -> None:
    sys.stdout.write(f"{what if isinstance(what, str) else json.dumps(what)}\n")
    sys.stdout.flush()
