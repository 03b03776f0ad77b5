"""Storage that misbehaves at random, checks all that is put and read, and remembers what it said."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hicache.core.keys import ObjectKey
from hicache.memory.base import POISON
from hicache.storage.base import ObjectResult, ObjectStatus, StorageBackend, StoredObject
from hicache.storage.codec import encode_header, verify
from hicache.storage.wrappers import WrapperBackend
from hicache.testing.choices import Choices
from hicache.testing.faults import Call, Fault, answer, drop_ack, resize
from hicache.testing.truth import Truth, require

__all__ = ["WatchedStorage"]

_OK = ObjectStatus.OK


def _scattered(call: Call) -> Any:
    """Some keys go well, others fail; reads leave garbage for those."""
    results = list(call.apply())
    for i in range(0, len(results), 2):
        results[i] = ObjectResult(ObjectStatus.FAILED, "timeout")
        for buffer in call.buffers[i : i + 1]:
            np.asarray(buffer)[:] = POISON
    return results


def _says(value: bool) -> Fault:
    return lambda call: [value] * len(call.keys)


def _fails(call: Call) -> Any:
    del call
    raise _broken()


def _applies_and_fails(call: Call) -> Any:
    call.apply()
    raise _broken()


def _broken() -> OSError:
    # A new one each time, which nobody holds: an exception keeps frames, and these the requests that were dropped.
    return OSError(errno.EIO, "the disk is on fire")


_ANY: tuple[Fault, ...] = (_fails, _applies_and_fails, answer(None), resize(1), resize(-1), drop_ack())
_FAULTS: dict[str, tuple[Fault, ...]] = {
    "get_into": (*_ANY, _scattered, _scattered),
    "put": (*_ANY, _scattered, _scattered),
    "contains": (*_ANY, _says(True), _says(False)),
    "touch": _ANY,
    "delete": _ANY,
    "generation": (_fails,),
    "clear": (_fails, _applies_and_fails),
}


class WatchedStorage(WrapperBackend):
    """A backend under a random driver.

    Args:
        inner: the backend.
        truth: what must be in it.
        choices: where decisions come from.
        meanwhile: called inside calls, where other threads would do something.
        note: told the name of each kind of thing that happened.

    Attributes:
        faults: one call in so many goes wrong; 0: none.
        stored: keys that were acknowledged by a put or a read.
        seen: pages (namespace, generation, hash) that storage said it has.
        collided: keys under which another page's object was planted.
    """

    def __init__(
        self,
        inner: StorageBackend,
        *,
        truth: Truth,
        choices: Choices,
        meanwhile: Callable[[], None],
        note: Callable[[str], None],
    ) -> None:
        super().__init__(inner)
        self.faults = 6
        self.stored: dict[ObjectKey, None] = {}
        self.seen: set[tuple[bytes, int, bytes]] = set()
        self.collided: set[ObjectKey] = set()
        self._truth = truth
        self._choices = choices
        self._meanwhile = meanwhile
        self._note = note
        self._writing: set[ObjectKey] = set()

    # ---- verbs

    def get_into(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[ObjectResult]:
        """See `StorageBackend`."""
        for buffer in buffers:
            np.asarray(buffer)[:] = POISON
        self._note("read")
        results = self._do("get_into", keys, lambda: self.inner.get_into(keys, buffers), buffers)
        for key, buffer, result in zip(keys, buffers, _results(results, len(keys)), strict=True):
            self._check_read(key, buffer, result)
        return results  # type: ignore[no-any-return]

    def put(self, objects: Sequence[StoredObject]) -> list[ObjectResult]:
        """See `StorageBackend`."""
        keys = [stored.key for stored in objects]
        for stored in objects:
            self._check_object(stored)
            require(stored.key not in self._writing, "two writers of one object at once")
        self._writing.update(keys)
        try:
            results = self._do("put", keys, lambda: self.inner.put(objects))
        finally:
            self._writing.difference_update(keys)
        for stored, result in zip(objects, _results(results, len(keys)), strict=True):
            self._check_object(stored)  # the bytes that are being written may not change meanwhile
            if result.status is _OK:
                self.stored[stored.key] = None
        return results  # type: ignore[no-any-return]

    def contains(self, keys: Sequence[ObjectKey], *, stop_at_first_miss: bool = False) -> list[bool]:
        """See `StorageBackend`."""
        apply = lambda: self.inner.contains(keys, stop_at_first_miss=stop_at_first_miss)  # noqa: E731
        answers = self._do("contains", keys, apply)
        if isinstance(answers, list) and len(answers) == len(keys):
            there = (key for key, found in zip(keys, answers, strict=True) if found and key.shard == self._truth.anchor)
            self.seen.update((key.namespace, key.generation, key.page_hash) for key in there)
        return answers  # type: ignore[no-any-return]

    def touch(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """See `StorageBackend`."""
        return self._do("touch", keys, lambda: self.inner.touch(keys))  # type: ignore[no-any-return]

    def delete(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """See `StorageBackend`."""
        return self._do("delete", keys, lambda: self.inner.delete(keys))  # type: ignore[no-any-return]

    def generation(self, namespace: bytes) -> int:
        """See `StorageBackend`."""
        return self._do("generation", (), lambda: self.inner.generation(namespace))  # type: ignore[no-any-return]

    def clear(self, namespace: bytes, generation: int) -> None:
        """See `StorageBackend`."""
        self._do("clear", (), lambda: self.inner.clear(namespace, generation))

    # ---- for the driver

    def acknowledged(self, namespace: bytes, generation: int, page_hash: bytes) -> bool:
        """Whether storage ever said that it has the page, all of it."""
        if (namespace, generation, page_hash) in self.seen:
            return True
        return all(ObjectKey(namespace, generation, page_hash, shard) in self.stored for shard in self._truth.parts)

    def lose(self, key: ObjectKey) -> bool:
        """Delete an object behind the cache's back."""
        return self.inner.delete([key]) == [True]

    def collide(self, key: ObjectKey) -> bool:
        """Leave under a key an object of other tokens with the same hash, whole and well formed."""
        if not self.lose(key):
            return False
        tokens = bytes(255 - byte for byte in self._truth.tokens(key))
        payload = bytes(255 - byte for byte in self._truth.shard(key))
        past = self._truth.past(key.namespace, key.page_hash)[: -self._truth.width]
        parent = self._truth.hash(key.namespace, past)
        header = encode_header(
            key, parent_hash=parent, depth=len(past) // self._truth.width, tokens=tokens, payload=payload
        )
        self.collided.add(key)
        return self.inner.put([StoredObject(key, header, memoryview(payload))])[0].status is _OK

    def check_all(self) -> int:
        """Read all that was ever stored: each object is right, or missing, or says itself that it is not right.

        Returns how many are right.
        """
        found = 0
        for key in self.stored:
            buffer = memoryview(bytearray(self._truth.parts[key.shard].length))
            result = self.inner.get_into([key], [buffer])[0]
            self._check_read(key, buffer, result)
            found += result.status is _OK
        return found

    # ---- inside

    def _check_read(self, key: ObjectKey, buffer: memoryview, result: ObjectResult) -> None:
        if result.status is not _OK or result.header is None:
            return
        if not self._told(key, result.header.tokens):
            require(key in self.collided, f"storage holds other tokens under {key}")
            self._note("collision read")
            return
        require(bytes(buffer) == self._truth.shard(key), f"storage holds other bytes under {key}")
        self.stored[key] = None

    def _check_object(self, stored: StoredObject) -> None:
        key = stored.key
        require(bytes(stored.payload) == self._truth.shard(key), f"other bytes are put under {key}")
        verdict = verify(key, stored.header, stored.payload)
        require(verdict.ok and verdict.header is not None, f"an object that proves nothing is put under {key}")
        assert verdict.header is not None
        past = self._truth.past(key.namespace, key.page_hash)
        parent = self._truth.hash(key.namespace, past[: -self._truth.width])
        said = (verdict.header.depth, verdict.header.parent_hash)
        require(said == (len(past) // self._truth.width - 1, parent), f"wrong header of {key}")
        require(self._told(key, verdict.header.tokens), f"wrong tokens in the header of {key}")

    def _told(self, key: ObjectKey, tokens: bytes) -> bool:
        """Whether an object may say these tokens: the page's, or none where clients hide them."""
        return tokens == self._truth.tokens(key) or (self._truth.hides and not tokens)

    def _do(
        self, verb: str, keys: Sequence[ObjectKey], apply: Callable[[], Any], buffers: Sequence[memoryview] = ()
    ) -> Any:
        self._meanwhile()
        if not self.faults or self._choices.integer(1, self.faults) > 1:
            result = apply()
        else:
            faults = _FAULTS[verb]
            fault = faults[self._choices.integer(0, len(faults) - 1)]
            self._note(f"fault in {verb}")
            result = fault(Call(verb, tuple(keys), apply, self.inner, tuple(buffers)))
        self._meanwhile()
        return result


def _results(results: object, count: int) -> list[ObjectResult]:
    """Results as their caller must understand them: a list of another length says nothing."""
    if isinstance(results, list) and len(results) == count:
        return results
    return [ObjectResult(ObjectStatus.FAILED, "contract")] * count
