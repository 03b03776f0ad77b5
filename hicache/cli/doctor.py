"""`hicache doctor [ADDRESS]`: what an engine would stumble over, found before it starts."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from hicache.cli.output import Table, print_json, print_table
from hicache.cli.service import add_service_arguments, connected
from hicache.cli.settings import add_setting_arguments, settings_of

if TYPE_CHECKING:
    from hicache.rpc.service import Finding

HELP = "check memory, sockets, storage and every tier before an engine starts"

_EPILOG = """\
Without ADDRESS it looks at what a service with these settings would need, and sends a page through every tier and back;
with it, it asks the service that runs there, and looks at settings too where any are given.
Exit code 1 if anything is not as it should be.

  hicache doctor --config /etc/hicache.toml
  hicache doctor unix:///run/hicache/hicache.sock
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_service_arguments(parser, required=False, insecure=False)
    add_setting_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Look, print, and return the exit code: 1 if something is wrong."""
    from hicache.cli.main import EXIT_FINE, EXIT_WRONG

    findings: list[Finding] = []
    # With an address `--insecure` is about the connection to it, and no setting of a service.
    insecure = options.insecure and options.address is None
    settings = settings_of(argparse.Namespace(**{**vars(options), "insecure": insecure}))
    if options.address is None or settings.origins:
        import asyncio

        from hicache.sidecar.preflight import preflight

        findings += asyncio.run(preflight(settings, sockets=options.address is None))
    if options.address is None:
        findings.append(_cuda())
    if options.address is not None:
        findings += _ask(options)
    if options.json:
        print_json({"findings": [{"check": f.check, "good": f.good, "text": f.text} for f in findings]})
    else:
        rows = [(finding.check, "good" if finding.good else "BAD", finding.text) for finding in findings]
        print_table(Table("doctor", ("check", "", "found"), rows, texts=3))
    return EXIT_FINE if all(finding.good for finding in findings) else EXIT_WRONG


def _cuda() -> Finding:
    from hicache.cuda.look import found
    from hicache.rpc.service import Finding

    good, text = found()
    return Finding("cuda", good, text)


def _ask(options: argparse.Namespace) -> list[Finding]:
    from hicache.rpc.service import Finding

    with connected(options) as client:
        answer = client.ping()
        state = "ready" if answer.ready else "not ready: it is starting or draining"
        return [
            Finding(f"service at {client.address}", answer.ready, f"{state}, version {answer.server}"),
            *client.diagnose(),
        ]
