"""Batches on one connection: requests go out while replies come in, with a bound on the bytes under way.

Results are put into the batch as they arrive, so that what came before a break is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from hicache.storage import codec
from hicache.storage.base import ObjectKey, ObjectResult, ObjectStatus, StoredObject
from hicache.storage.codec import HeaderError, VerdictKind

from .channel import Channel
from .trouble import reason_of_reply

__all__ = ["ABSENT", "OK", "Reads", "Writes", "ask", "command", "fetch", "judge_value", "store"]

OK: Final = ObjectResult(ObjectStatus.OK)
ABSENT: Final = ObjectResult(ObjectStatus.MISSING, "absent")
_HEAD: Final = 512  # what a header is counted with before one was seen
_GIVES_UP: Final = frozenset({"oom", "readonly", "misconf", "noreplicas", "acl", "loading"})
"""Refusals that the rest of a batch would get too."""


@dataclass(slots=True)
class Reads:
    """One call of `get_into`, shared by the threads that ask a node each; no two of them touch one index.

    Attributes:
        names, keys, buffers: what was asked.
        results: what is known.
        errors: error replies by index, as words.
        doubtful: indexes whose object looked damaged or shifted, and may be well in the store.
    """

    names: Sequence[bytes]
    keys: Sequence[ObjectKey]
    buffers: Sequence[memoryview]
    results: list[ObjectResult | None]
    errors: dict[int, str] = field(default_factory=dict)
    doubtful: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Writes:
    """One call of `put`.

    Attributes:
        names, objects: what was asked.
        results: what is known.
        errors: error replies by index, as words.
        skipped: indexes of objects that were there.
        disbelieved: names whose object may not be taken for there.
    """

    names: Sequence[bytes]
    objects: Sequence[StoredObject]
    results: list[ObjectResult | None]
    errors: dict[int, str] = field(default_factory=dict)
    skipped: list[int] = field(default_factory=list)
    disbelieved: frozenset[bytes] = frozenset()


def command(*words: bytes) -> bytes:
    """A request."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


def ask(channel: Channel, requests: Sequence[bytes]) -> list[int | str]:
    """Send requests that answer a number together, and read the replies: numbers, or the words of errors."""
    channel.hint = 4096
    channel.send([b"".join(requests)])
    return [_short_reply(channel) for _ in requests]


def _short_reply(channel: Channel) -> int | str:
    reply = channel.reply(b":")
    return reason_of_reply(reply[1:]) if isinstance(reply, bytes) else reply or 0


# --- reading ----------------------------------------------------------------------------------------------------------


def fetch(channel: Channel, batch: Reads, at: Sequence[int], window: int) -> None:
    """Read the objects at these indexes."""
    sent, under_way = 0, 0
    for position, index in enumerate(at):
        requests = []
        while sent < len(at):
            size = batch.buffers[at[sent]].nbytes + _HEAD
            if under_way and under_way + size > window:
                break
            requests.append(command(b"GET", batch.names[at[sent]]))
            under_way += size
            sent += 1
        if requests:
            channel.send([b"".join(requests)])
        _read_one(channel, batch, index, last=position + 1 == len(at))
        under_way -= batch.buffers[index].nbytes + _HEAD


def _read_one(channel: Channel, batch: Reads, index: int, *, last: bool) -> None:
    reply = channel.reply(b"$")
    if reply is None:
        batch.results[index] = ABSENT
    elif isinstance(reply, bytes):
        batch.errors[index] = reason_of_reply(reply[1:])
    else:
        result = _read_value(channel, reply, batch.keys[index], batch.buffers[index])
        if last:
            channel.hint = 2
        channel.end_value()
        if result.status is ObjectStatus.CORRUPT or result.reason == VerdictKind.FOREIGN:
            batch.doubtful.add(index)
            channel.suspect = True
        batch.results[index] = result


def _read_value(channel: Channel, length: int, key: ObjectKey, buffer: memoryview) -> ObjectResult:
    """Read a value of `length` bytes: its payload into the buffer if it fits, else nowhere."""
    try:
        head = codec.header_length(channel.need(min(length, codec.PREFIX_SIZE)))
        if head > length:
            raise HeaderError(VerdictKind.CORRUPT, "truncated")
    except HeaderError as error:
        # A version that one flipped bit has raised is told by the checksum, which needs the whole header.
        some = bytes(channel.need(min(length, codec.MAX_HEADER)))
        channel.skip(length)
        return ObjectResult.of(codec.verify(key, some, b"")) if error.kind is VerdictKind.NEWER else _of(error)
    channel.hint = head + len(b"\r\n$%d\r\n" % length)
    header = channel.take(head)
    if length - head != buffer.nbytes:
        channel.skip(length - head)
        return _misfit(key, header, length - head)
    channel.fill(buffer)
    return ObjectResult.of(codec.verify(key, header, buffer))


def judge_value(key: ObjectKey, value: memoryview, buffer: memoryview | None) -> tuple[ObjectResult, memoryview]:
    """Verify a whole value that is in memory already.

    Returns:
        The result, and the payload within the value. A buffer of another length makes it FAILED ("size").
    """
    try:
        head = min(codec.header_length(value[: codec.PREFIX_SIZE]), value.nbytes)
    except HeaderError as error:
        if error.kind is not VerdictKind.NEWER:
            return _of(error), value[:0]
        return ObjectResult.of(codec.verify(key, value, b"")), value[:0]
    header, payload = value[:head], value[head:]
    if buffer is not None and payload.nbytes != buffer.nbytes:
        return _misfit(key, bytes(header), payload.nbytes), payload
    return ObjectResult.of(codec.verify(key, header, payload)), payload


def _misfit(key: ObjectKey, header: bytes, there: int) -> ObjectResult:
    """A payload of another length than the buffer: the caller's mistake, unless the object itself is wrong."""
    try:
        found = codec.decode_header(header, likely=key)
    except HeaderError as error:
        return _of(error)
    if found.key == key and found.payload_length == there:
        return ObjectResult(ObjectStatus.FAILED, "size")
    return ObjectResult.of(codec.verify(key, header, b""))


def _of(error: HeaderError) -> ObjectResult:
    return ObjectResult.of(codec.Verdict(error.kind, error.reason))


# --- writing ----------------------------------------------------------------------------------------------------------


def store(channel: Channel, batch: Writes, at: Sequence[int], *, window: int, ttl: int | None) -> None:
    """Write the objects at these indexes, but not those that are there with the same header."""
    missing = _not_there(channel, batch, at)
    expiry = [b"EX", b"%d" % ttl] if ttl else []
    waiting: list[int] = []
    under_way = 0
    refused = ""
    tail = b""
    channel.hint = 4096
    for index in missing:
        stored, size = batch.objects[index], _size(batch, index)
        while waiting and under_way + size > window:
            channel.send([tail])
            tail = b""
            under_way -= _size(batch, waiting[0])
            word = _acknowledge(channel, batch, waiting.pop(0))
            refused = refused or (word if word in _GIVES_UP else "")
        if refused:
            batch.errors[index] = refused
            continue
        name = batch.names[index]
        head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (3 + len(expiry), len(name), name, size)
        channel.send([tail + head + stored.header, stored.payload])
        tail = b"\r\n" + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in expiry)
        waiting.append(index)
        under_way += size
    if tail:
        channel.send([tail])
    for index in waiting:
        _acknowledge(channel, batch, index)
    if ttl and batch.skipped:
        skipped = set(batch.skipped)
        mine = [index for index in at if index in skipped]
        ask(channel, [command(b"EXPIRE", batch.names[index], b"%d" % ttl) for index in mine])


def _size(batch: Writes, index: int) -> int:
    stored = batch.objects[index]
    return len(stored.header) + stored.payload.nbytes


def _acknowledge(channel: Channel, batch: Writes, index: int) -> str:
    """Take the answer to a write; empty, or the word for why it was refused."""
    reply = channel.reply(b"+")
    if reply == b"+OK":
        batch.results[index] = OK
        return ""
    word = reason_of_reply(reply[1:]) if isinstance(reply, bytes) else "protocol"
    batch.errors[index] = word
    return word


def _not_there(channel: Channel, batch: Writes, at: Sequence[int]) -> list[int]:
    """Which of these have to be written. A header names the payload by its checksum, so an equal one is enough."""
    asked = [index for index in at if batch.names[index] not in batch.disbelieved]
    there: set[int] = set()
    if asked:
        ends = [b"%d" % (len(batch.objects[index].header) - 1) for index in asked]
        channel.hint = 4096
        channel.send(
            [
                b"".join(
                    command(b"GETRANGE", batch.names[index], b"0", end) for index, end in zip(asked, ends, strict=True)
                )
            ]
        )
        for index in asked:
            reply = channel.reply(b"$")
            if isinstance(reply, int):
                head = channel.take(reply)
                channel.end_value()
                if _settled(batch, index, head):
                    there.add(index)
            elif isinstance(reply, bytes) and (word := reason_of_reply(reply[1:])) != "wrongtype":
                batch.errors[index] = word
                there.add(index)
    return [index for index in at if index not in there]


def _settled(batch: Writes, index: int, head: bytes) -> bool:
    """Whether what begins like this is left as it is: it is the object, or one of a newer version."""
    if head == batch.objects[index].header:
        batch.results[index] = OK
        batch.skipped.append(index)
        return True
    if not head:
        return False
    try:
        codec.decode_header(head)
    except HeaderError as error:
        if error.kind is VerdictKind.NEWER:
            batch.results[index] = ObjectResult(ObjectStatus.FAILED, "newer")
            return True
    return False
