"""What is stored, in little memory, and in which order it goes.

Recency is counted in buckets, not in single uses: all that was used at about the same time is equally recent, and
among equals the deepest page goes first, so that what stays of a chain is its head, the part that can be used. A
bucket closes with the minute, or once it has taken in 1/64 of all objects, so that order stays fine where the store
turns over fast, and exact where it is small.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container
from typing import Final

__all__ = ["MINUTE", "UNIT", "Index"]

UNIT: Final = 4096
"""Sizes are kept in these units; files are multiples of it."""
MINUTE: Final = 60.0
"""Precision in seconds to which order survives a restart."""

_FIRST_LIVE: Final = 2**32  # bucket numbers below it are minutes of the wall clock, read from files
_DEPTH_SHIFT, _BUCKET_SHIFT = 32, 64
_MASK: Final = 2**32 - 1
_SHARE: Final = 64


class _Bucket:
    __slots__ = ("entries", "live", "minute", "number", "ordered")

    def __init__(self, number: int, minute: int) -> None:
        self.number = number
        self.minute = minute
        self.entries: list[bytes] = []
        self.live = 0  # entries that have not moved on
        self.ordered = False


class Index:
    """Ids of stored objects with size, depth and recency. Not thread-safe: its owner holds a lock.

    An object costs about 170 bytes: one packed integer (bucket, depth, size) in a dict, and a place in its bucket.
    """

    def __init__(self) -> None:
        self._table: dict[bytes, int] = {}
        self._found: dict[int, _Bucket] = {}  # from before this process, by minute
        self._live: OrderedDict[int, _Bucket] = OrderedDict()  # of this process, oldest first
        self._next = _FIRST_LIVE
        self._open: _Bucket | None = None
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._table)

    def __contains__(self, identity: object) -> bool:
        return identity in self._table

    def size(self, identity: bytes) -> int:
        """Bytes of an object, 0 if it is not known."""
        return (self._table.get(identity, 0) & _MASK) * UNIT

    def current(self, minute: int) -> int:
        """The bucket for what is used in this call; the same one for all keys of the call.

        Args:
            minute: wall clock in minutes; stepping back does not disturb the order.
        """
        bucket = self._open
        if bucket is None or bucket.minute != minute or bucket.live > len(self._table) // _SHARE:
            self._open = None
            if bucket is not None:
                self._drop_if_empty(bucket)
            bucket = self._open = _Bucket(self._next, minute)
            self._next += 1
            self._live[bucket.number] = bucket
        return bucket.number

    def add(self, identity: bytes, *, size: int, depth: int, bucket: int) -> None:
        """Enter an object, or replace what is known of it."""
        self.remove(identity)
        home = self._bucket(bucket)
        self._table[identity] = home.number << _BUCKET_SHIFT | min(depth, _MASK) << _DEPTH_SHIFT | -(-size // UNIT)
        self.bytes += -(-size // UNIT) * UNIT
        self._join(home, identity)

    def add_found(self, identity: bytes, *, size: int, depth: int, minute: int) -> None:
        """Enter an object of an earlier process, as recent as its file's time says."""
        number = max(0, min(minute, _FIRST_LIVE - 1))
        if number not in self._found:
            self._found[number] = _Bucket(number, number)
        self.add(identity, size=size, depth=depth, bucket=number)

    def use(self, identity: bytes, bucket: int) -> bool | None:
        """Move an object to a bucket.

        Returns:
            None if it is not known, else whether its file's time should be set: once a minute and object.
        """
        entry = self._table.get(identity)
        if entry is None:
            return None
        before = entry >> _BUCKET_SHIFT
        if before >= bucket:
            return False
        home = self._bucket(bucket)
        old = self._home(before)
        self._leave(before)
        self._table[identity] = home.number << _BUCKET_SHIFT | entry & (2**_BUCKET_SHIFT - 1)
        self._join(home, identity)
        return old is None or old.minute != home.minute

    def remove(self, identity: bytes) -> int:
        """Forget an object; returns its bytes, 0 if it was not known."""
        entry = self._table.pop(identity, None)
        if entry is None:
            return 0
        self._leave(entry >> _BUCKET_SHIFT)
        size = (entry & _MASK) * UNIT
        self.bytes -= size
        return size

    def victims(self, need: int, busy: Container[bytes], *, charge: int = 0) -> list[tuple[bytes, int, int, int]]:
        """Take out the objects that go first, until `need` bytes are reached or nothing is left.

        Args:
            need: bytes to free.
            busy: ids that may not go now.
            charge: bytes that each object counts beyond its size.

        Returns:
            (id, size, depth, minute of its last use) of each, no longer in the index.
        """
        taken: list[tuple[bytes, int, int, int]] = []
        kept: list[bytes] = []
        freed = 0
        while freed < need and (bucket := self._oldest()) is not None:
            self._order(bucket)
            while bucket.entries and freed < need:
                identity = bucket.entries.pop()
                if identity in busy:
                    kept.append(identity)
                    bucket.live -= 1
                    continue
                depth = self._table[identity] >> _DEPTH_SHIFT & _MASK
                bucket.live -= 1
                size = (self._table.pop(identity) & _MASK) * UNIT
                self.bytes -= size
                freed += size + charge
                taken.append((identity, size, depth, bucket.minute))
            self._drop_if_empty(bucket)
        self._return(kept)
        return taken

    def ids(self) -> list[bytes]:
        """All ids, in no order."""
        return list(self._table)

    def clear(self) -> None:
        """Forget everything."""
        self._table.clear()
        self._found.clear()
        self._live.clear()
        self._open = None
        self.bytes = 0

    def _return(self, kept: list[bytes]) -> None:
        """Busy objects are in use, so they come back as used now."""
        if kept:
            home = self._bucket(self.current(self._open.minute if self._open else 0))
            for identity in kept:
                entry = self._table[identity]
                self._table[identity] = home.number << _BUCKET_SHIFT | entry & (2**_BUCKET_SHIFT - 1)
                self._join(home, identity)

    def _home(self, number: int) -> _Bucket | None:
        return self._live.get(number) or self._found.get(number)

    def _bucket(self, number: int) -> _Bucket:
        """The bucket, made anew where it emptied while its call was still running."""
        bucket = self._home(number)
        if bucket is None:
            self._open = None
            minute = number if number < _FIRST_LIVE else -1
            bucket = _Bucket(number if number < _FIRST_LIVE else self._next, minute)
            if number >= _FIRST_LIVE:
                self._next += 1
                self._live[bucket.number] = bucket
            else:
                self._found[number] = bucket
        return bucket

    def _join(self, bucket: _Bucket, identity: bytes) -> None:
        bucket.entries.append(identity)
        bucket.live += 1
        bucket.ordered = False

    def _leave(self, number: int) -> None:
        bucket = self._home(number)
        if bucket is None:
            return
        bucket.live -= 1
        if bucket.live == 0:
            bucket.entries.clear()
            self._drop_if_empty(bucket)
        elif len(bucket.entries) > 2 * bucket.live + 8:
            self._filter(bucket)

    def _filter(self, bucket: _Bucket) -> None:
        """Drop entries that moved on, and repeats of an id that was replaced in place."""
        table, number = self._table, bucket.number
        bucket.entries = [i for i in dict.fromkeys(bucket.entries) if table.get(i, -1) >> _BUCKET_SHIFT == number]

    def _order(self, bucket: _Bucket) -> None:
        if bucket is self._open:
            self._open = None  # it is being eaten: what is used from now on is newer
        if not bucket.ordered:
            self._filter(bucket)
            bucket.entries.reverse()  # the sort is stable: of one depth, what came first is popped first
            bucket.entries.sort(key=lambda identity: self._table[identity] >> _DEPTH_SHIFT)
            bucket.ordered = True
        elif len(bucket.entries) != bucket.live:
            self._filter(bucket)

    def _oldest(self) -> _Bucket | None:
        if self._found:
            return self._found[min(self._found)]
        return next(iter(self._live.values()), None)

    def _drop_if_empty(self, bucket: _Bucket) -> None:
        if bucket.live == 0 and bucket is not self._open:
            self._live.pop(bucket.number, None)
            self._found.pop(bucket.number, None)
