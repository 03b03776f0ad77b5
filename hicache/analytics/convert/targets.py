"""All formats that traces can be converted to."""

from __future__ import annotations

from collections.abc import Callable
from typing import BinaryIO, Final

from hicache.analytics.convert.objects import OracleWriter, TableWriter
from hicache.analytics.convert.writers import (
    BailianWriter,
    DynamoWriter,
    MooncakeWriter,
    SessionWriter,
    TokenWriter,
    Writer,
)

TARGETS: Final[dict[str, Callable[[BinaryIO, int | None], Writer]]] = {
    "mooncake": MooncakeWriter,
    "bailian": BailianWriter,
    "kv-cache-tester": SessionWriter,
    "dynamo": DynamoWriter,
    "tokens": TokenWriter,
    "oracle-general": OracleWriter,
    "csv": TableWriter,
}
"""By name: makes the writer of a file that can be written and sought, with tokens a block or None for its own."""
