"""Recordings made by strangers: whole, but asking for what no recorder would write."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import xxhash

from hicache.analytics.recording import repeat
from hicache.core.config import CoreConfig
from hicache.core.recorder import RecordedCore
from hicache.core.recordings import HEAD, MemorySegments
from hicache.errors import ConfigError, InvalidInput


def entries() -> list[Any]:
    """A short recording, decoded: its header, and two inputs."""
    segments = MemorySegments()
    core = RecordedCore(CoreConfig(8), segments)
    core.flush()
    core.check()
    data, values, at = segments.dump(), [], 0
    while size := HEAD.unpack_from(data, at)[0]:
        values.append(msgspec.msgpack.decode(data[at + HEAD.size : at + HEAD.size + size]))
        at += HEAD.size + size
    return values


def recording(values: list[Any]) -> bytes:
    """Back to bytes that prove themselves whole."""
    encoded = [msgspec.msgpack.encode(value) for value in values]
    return b"".join(HEAD.pack(len(v), xxhash.xxh32_intdigest(v)) + v for v in encoded) + bytes(HEAD.size)


def test_what_the_helpers_make_can_be_repeated() -> None:
    assert repeat(recording(entries())).outcome == "ok"


@pytest.mark.case("SEC-1")
@pytest.mark.parametrize("operation", ["_class__", "_setattr__", "prompt", "trees", ""])
def test_only_inputs_can_be_called(operation: str) -> None:
    values = entries()
    values[1][1] = operation
    with pytest.raises(InvalidInput, match="unknown operation"):
        repeat(recording(values))


def test_few_bytes_cannot_ask_for_tables_beyond_memory() -> None:
    values = entries()
    values[0]["config"]["device_pages"] = 2**50
    with pytest.raises(ConfigError, match="does not fit"):
        repeat(recording(values))
