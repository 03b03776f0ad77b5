"""Packets of the lifeline, one message each: plain values in, bytes out, and back.

Those who decode get `InvalidInput` for whatever is no such packet, and nothing else.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from google.protobuf.message import DecodeError

from hicache.errors import InvalidInput, ProtocolMismatch
from hicache.rpc.v1 import lifeline_pb2 as pb

LIFELINE_VERSION: Final = 1
LIFELINE_PACKET: Final = 4096
"""Bytes of the longest packet; one that does not fit is no packet of this protocol."""

_KEY: Final = 16
_MAX_ERROR: Final = 900  # characters of up to 4 bytes


class LifelineGreeting(NamedTuple):
    """The service's first packet: the key of this connection and the service's boot, 16 bytes each."""

    key: bytes
    boot: bytes


class LifelineRequest(NamedTuple):
    """A client's packet: the memory whose descriptor it wants, or that it is finished with all of them."""

    id: int
    finished: bool


class LifelineReply(NamedTuple):
    """The answer: the memory's id and size in bytes with a descriptor, or in words why there is none."""

    id: int
    size: int
    error: str


def encode_greeting(key: bytes, boot: bytes) -> bytes:
    """The greeting's packet."""
    return pb.LifelineGreeting(key=key, boot=boot, version=LIFELINE_VERSION).SerializeToString()


def decode_greeting(packet: bytes) -> LifelineGreeting:
    """The greeting of a packet.

    Raises:
        InvalidInput: no greeting.
        ProtocolMismatch: of another version.
    """
    try:
        message = pb.LifelineGreeting.FromString(packet)
    except DecodeError:
        raise InvalidInput("the lifeline's greeting cannot be read: is this the socket of a hicache service?") from None
    if message.version != LIFELINE_VERSION:
        raise ProtocolMismatch(
            f"the lifeline speaks version {message.version}, this is {LIFELINE_VERSION}: upgrade the older side"
        )
    if len(message.key) != _KEY or len(message.boot) != _KEY:
        raise InvalidInput("the lifeline's greeting has no key and boot of 16 bytes: is this a hicache service?")
    return LifelineGreeting(message.key, message.boot)


def encode_request(memory: int = 0, *, finished: bool = False) -> bytes:
    """The packet that asks for a descriptor, or says goodbye."""
    return pb.LifelineRequest(id=memory, finished=finished).SerializeToString()


def decode_request(packet: bytes) -> LifelineRequest:
    """The request of a packet.

    Raises:
        InvalidInput: no request: unreadable, or neither an id nor a goodbye.
    """
    try:
        message = pb.LifelineRequest.FromString(packet)
    except DecodeError:
        raise InvalidInput("a packet of the lifeline that cannot be read: send one LifelineRequest a packet") from None
    if not message.id and not message.finished:
        raise InvalidInput("a packet of the lifeline without an id: ids of memory are above 0")
    return LifelineRequest(message.id, message.finished)


def encode_reply(memory: int, *, size: int = 0, error: str = "") -> bytes:
    """The packet that goes with a descriptor, or says why there is none."""
    return pb.LifelineReply(id=memory, size=size, error=error[:_MAX_ERROR]).SerializeToString()


def decode_reply(packet: bytes) -> LifelineReply:
    """The reply of a packet.

    Raises:
        InvalidInput: no reply.
    """
    try:
        message = pb.LifelineReply.FromString(packet)
    except DecodeError:
        raise InvalidInput("the lifeline's answer cannot be read: is this the socket of a hicache service?") from None
    return LifelineReply(message.id, message.size, message.error)
