"""Random and broken messages of the session's protocol, from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import inf, nan
from typing import Any, Final, TypeAlias

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from hicache.rpc.service import Limits
from hicache.rpc.v1 import session_pb2 as pb
from hicache.testing.rpcstream import ATTACH, GOODBYE, HASHES, HELLO, RAW_TOKENS

__all__ = ["FUZZ_LIMITS", "Fuzzer"]

FUZZ_LIMITS: Final = Limits(message_bytes=20_000, pages=6, leases=8, requests=40, chunk_bytes=32)
"""Small enough for random messages to be above them."""

NUMBERS = (0, 1, 2, 3, 5, 7, 2**31, 2**32 - 1, 2**63, 2**64 - 1)
TEXTS = ("", "org/tiny", "sha256", "canonical-v1", "float16", "x" * 300, "\0", "../../etc", "é")
BLOBS = (b"", b"k", bytes(16), bytes(32), HASHES, HASHES[:32], HASHES + bytes(320), RAW_TOKENS, RAW_TOKENS[:16])
Field: TypeAlias = Any  # of whichever implementation of protobuf there is

_LIKELY: Final[dict[str, Sequence[object]]] = {
    "attachment": (1,),
    "page_hashes": (HASHES,),
    "stored": (HASHES,),
    "removed": (HASHES,),
    "tokens": (RAW_TOKENS,),
    **dict.fromkeys(("pages", "upto", "page", "first_page", "end_page", "offset", "limit"), range(4)),
}
"""Values that mean something, by the names of fields."""

_ANY: Final[dict[int, Sequence[object]]] = {
    FieldDescriptor.TYPE_UINT32: [number % 2**31 for number in NUMBERS],
    FieldDescriptor.TYPE_SINT32: [number % 2**31 for number in NUMBERS],
    FieldDescriptor.TYPE_UINT64: NUMBERS,
    FieldDescriptor.TYPE_DOUBLE: (0.0, -1.0, 1.5, 1e300, inf, nan),
    FieldDescriptor.TYPE_BOOL: (True, False),
    FieldDescriptor.TYPE_STRING: TEXTS,
    FieldDescriptor.TYPE_BYTES: BLOBS,
}
"""Values by the types of fields."""


class Fuzzer:
    """Random messages of the schema, mostly with values that mean something.

    Attributes:
        leases: ids that requests mostly name; the test keeps it up to date.
        random: where all choices come from.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)  # noqa: S311  a test's choices, to be repeated
        self.leases: list[int] = []

    def fill(self, message: Message, depth: int = 0) -> None:
        """Give most fields of a message a value."""
        descriptor = message.DESCRIPTOR
        skipped = set()
        for oneof in descriptor.oneofs:
            names = [field.name for field in oneof.fields]
            skipped |= {*names} - {self.random.choice(names)}
        for field in descriptor.fields:
            if field.name not in skipped and self.random.random() < (0.1 if field.name == "scope" else 0.8):
                self._fill_field(message, field, depth)

    def _fill_field(self, message: Message, field: Field, depth: int) -> None:
        repeated = isinstance(getattr(message, field.name), Message) is False and hasattr(
            getattr(message, field.name), "append"
        )
        if field.message_type is not None:
            targets = [getattr(message, field.name)]
            if repeated:
                targets = [targets[0].add() for _ in range(self.random.randrange(3))]
            for target in targets:
                target.SetInParent()
                if depth < 5:
                    self.fill(target, depth + 1)
        elif repeated:
            getattr(message, field.name).extend([self._value(field) for _ in range(self.random.randrange(4))])
        else:
            setattr(message, field.name, self._value(field))

    def _value(self, field: Field) -> object:
        if self.random.random() < 0.8:
            if field.name in ("lease", "leases") and self.leases:
                return self.random.choice(self.leases)
            if field.name in _LIKELY and not (field.name == "tokens" and field.type != FieldDescriptor.TYPE_BYTES):
                return self.random.choice(_LIKELY[field.name])
        return self.random.choice(_ANY.get(field.type, (0,)))

    def request(self) -> pb.Request:
        """One request."""
        request = pb.Request()
        if self.random.random() < 0.05:
            request.CopyFrom(GOODBYE if self.random.random() < 0.05 else self.random.choice((HELLO, ATTACH)))
            return request
        verbs = [field.name for field in pb.Request.DESCRIPTOR.oneofs_by_name["verb"].fields]
        verb = self.random.choice([verb for verb in verbs if verb not in ("hello", "goodbye")])
        if verb == "attach" and self.random.random() < 0.7:  # one that could almost be
            request.attach.CopyFrom(ATTACH.attach)
            field = self.random.choice(request.attach.DESCRIPTOR.fields)
            self._fill_field(request.attach, field, 0)
        else:
            self.fill(getattr(request, verb))
        request.id = self.random.randrange(60)
        if self.random.random() < 0.7:
            request.deadline_ms = self.random.choice((0, 1, 1_000, 2**32 - 1))
        return request

    def message(self) -> bytes:
        """A message that is well formed."""
        count = 1 if self.random.random() < 0.9 else self.random.randrange(FUZZ_LIMITS.requests)
        return pb.OpenRequest(requests=[self.request() for _ in range(count)]).SerializeToString()

    def raw(self) -> bytes:
        """Bytes that are none, or a good message, mostly with some of them changed, cut or put in between."""
        if self.random.random() < 0.3:
            return self.random.randbytes(self.random.randrange(200))
        data = bytearray(self.message())
        for _ in range(self.random.randrange(4)):
            at = self.random.randrange(len(data) + 1)
            how = self.random.randrange(3)
            if how == 0 and at < len(data):
                data[at] ^= 1 << self.random.randrange(8)
            elif how == 1:
                del data[at : at + self.random.randrange(9)]
            else:
                data[at:at] = self.random.randbytes(self.random.randrange(9))
        if self.random.random() < 0.002:
            data += bytes([0x0A, 0]) * (FUZZ_LIMITS.message_bytes // 2)
        return bytes(data)
