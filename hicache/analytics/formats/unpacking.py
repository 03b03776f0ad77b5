"""MessagePack values that lie one after the other in a file, told apart without trusting any of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import BinaryIO, Final

import msgspec

from hicache.errors import TraceError

MAX_MESSAGE: Final = 2**24
"""Bytes of a value; publishers' batches have some KiB."""

_CHUNK: Final = 2**18
_BEHIND: Final = re.compile(r".*trailing characters \(byte (\d+)\)")
_BREAKS_OFF: Final = "Input data was truncated"


def payloads(file: BinaryIO) -> Iterator[bytes]:
    """The values of a file, still encoded.

    Raises:
        TraceError: the file breaks off, or is none of such values.
    """
    decode = msgspec.msgpack.Decoder(msgspec.Raw).decode
    data, at, ended = b"", 0, False
    while True:
        while at < len(data):
            size = _first(decode, memoryview(data)[at:])
            if size is None:
                break
            yield data[at : at + size]
            at += size
        if ended:
            if at < len(data):
                raise TraceError("the last message breaks off; read what is in front of it with --skip-bad")
            return
        if len(data) - at > MAX_MESSAGE:
            raise TraceError(f"a message is longer than {MAX_MESSAGE >> 20} MiB, so this is no capture of KV events")
        # Twice as much each time, as what is there is looked through again.
        more = file.read(max(_CHUNK, len(data) - at))
        data, at, ended = data[at:] + more, 0, not more


def _first(decode: Callable[[memoryview], object], data: memoryview) -> int | None:
    """Bytes of the first value; None where it goes on behind the end."""
    try:
        decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        text = str(error)
        if text == _BREAKS_OFF:
            return None
        if (found := _BEHIND.fullmatch(text)) is not None and int(found[1]):
            return int(found[1])
        raise TraceError(f"this is no MessagePack: {text}") from None
    return len(data)
