"""`hicache fsck URL`: read everything that a store holds, and say what is wrong with it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from hicache.cli.output import Table, print_json, print_table, progress, warn
from hicache.errors import ConfigError
from hicache.units import format_size

if TYPE_CHECKING:
    from hicache.storage.fsck import FsckResult

HELP = "verify every object of a store, and show whose it is"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parser.add_argument("url", metavar="URL", help="the store, such as file:///path or redis://host:6379/0")
    parser.add_argument(
        "--sample",
        default="100%",
        metavar="SHARE",
        help="the share of objects to read, such as 5%% (default: all)",
    )
    parser.add_argument(
        "--repair", action="store_true", help="remove damaged objects and the remains of cleared generations"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(options: argparse.Namespace) -> int:
    """Check, print, and return the exit code: 1 if damaged objects are left."""
    from hicache.cli.main import EXIT_FINE, EXIT_WRONG
    from hicache.storage.fsck import check_storage
    from hicache.storage.registry import open_storage
    from hicache.storage.url import StorageUrl

    sample = parse_share(options.sample)
    url = StorageUrl.parse(options.url)
    if url.scheme == "file" and not os.path.isdir(url.path):  # opening would make one
        raise ConfigError(f"there is no folder {url.path!r:.200}: nothing was checked; look at the path")
    backend = open_storage(options.url)
    try:
        with progress("fsck") as show:
            result = check_storage(backend, sample=sample, repair=options.repair, progress=show)
    finally:
        backend.close()
    if options.json:
        print_json(result.document())
    else:
        for table in tables(result):
            print_table(table)
    for line in result.examples:
        warn(line)
    return EXIT_WRONG if result.corrupt and not options.repair else EXIT_FINE


def parse_share(text: str) -> float:
    """A share such as `5%` or `0.05`, above 0 and at most 1.

    Raises:
        ConfigError: it is none.
    """
    try:
        share = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise ConfigError(f"--sample {text:.40}: use a share such as 5% or 0.05")
    return share


def tables(result: FsckResult) -> Iterator[Table]:
    """The result for people."""
    unreachable = "not known" if result.unreachable is None else f"{result.unreachable:,}"
    yield Table(
        title=f"{result.objects:,} objects, {format_size(result.bytes)}",
        columns=("found", "objects"),
        rows=[
            ("read and verified", f"{result.checked:,}"),
            ("as they should be", f"{result.ok:,}"),
            ("damaged", f"{result.corrupt:,}"),
            ("of cleared generations", f"{result.cleared:,}"),
            ("behind a missing page", unreachable),
            ("foreign, left alone", f"{result.foreign:,}"),
            ("of a newer version, left alone", f"{result.newer:,}"),
            ("removed", f"{result.removed:,}"),
        ],
    )
    if result.namespaces:
        yield Table(
            title="by namespace",
            columns=("namespace", "model", "generation", "objects", "size", "damaged", "cleared", "unreachable"),
            rows=[
                (
                    use.namespace,
                    use.model,
                    str(use.generation),
                    f"{use.objects:,}",
                    format_size(use.bytes),
                    f"{use.corrupt:,}",
                    f"{use.cleared:,}",
                    f"{use.unreachable:,}",
                )
                for use in result.namespaces
            ],
        )
