"""Pages as stored objects: which objects make up a page, and whether what was read is what was asked for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

from hicache.core.partition import ShardPart, ShardPlan
from hicache.core.prompt import PageIdentity
from hicache.core.transfers import Transfer
from hicache.errors import HicacheError
from hicache.records import PageResult
from hicache.runtime.tokens import PageTokens
from hicache.storage.base import ObjectKey, ObjectResult, ObjectStatus, StorageBackend, StoredObject
from hicache.storage.codec import Header, encode_header

_log = logging.getLogger("hicache.runtime")

BATCH_BYTES = 2**23
"""About the payload of one call to a backend: between two calls a cancelled transfer can end."""

TOUCH_OBJECTS = 512
"""Objects of one call of `touch`."""

BufferOf = Callable[[int, int, int], memoryview]
"""(HOST slot, offset, length) to the slot's bytes."""


class PageObjects:
    """Reads and writes whole pages as objects of a backend. Holds no state; any thread may use it.

    A page is there only if all of its shards are. One of them, the anchor, is put last, so that asking for it alone
    tells whether the page is there.

    Args:
        backend: keeps the contract to the letter (`GuardedBackend`).
        buffer: where HOST slots are.
        plan: the shards of a page that this process holds: all of them, or those of one rank.
        tokens: knows the pages' tokens.
    """

    def __init__(
        self,
        backend: StorageBackend,
        *,
        buffer: BufferOf,
        plan: ShardPlan,
        tokens: PageTokens,
    ) -> None:
        self._backend = backend
        self._buffer = buffer
        self._plan = plan
        self._tokens = tokens
        self._batch = max(1, BATCH_BYTES // plan.page_bytes)

    def contains(self, namespace: bytes, generation: int, page_hashes: Sequence[bytes]) -> int:
        """How many of the pages, from the first on and without a hole, are there. One question to the backend."""
        shard = self._plan.anchor
        keys = [ObjectKey(namespace, generation, page_hash, shard) for page_hash in page_hashes]
        answers = self._backend.contains(keys, stop_at_first_miss=True)
        return next((i for i, there in enumerate(answers) if not there), len(answers))

    def read(self, transfer: Transfer) -> list[PageResult]:
        """Fetch a transfer's pages into its HOST slots, up to the first that fails; what is behind it is FAILED."""
        slots = _slots(transfer.target_slots)
        results = [PageResult.FAILED] * transfer.count
        parts = self._plan.parts
        for first, end in self._batches(transfer):
            keys = [_key(transfer, page, part) for page in transfer.pages[first:end] for part in parts]
            buffers = [self._buffer(slot, part.offset, part.length) for slot in slots[first:end] for part in parts]
            answers = self._backend.get_into(keys, buffers)
            for i in range(first, end):
                at = (i - first) * len(parts)
                results[i] = self._judge(transfer, i, slots[i], answers[at : at + len(parts)])
                if results[i] is not PageResult.OK:
                    return results
        return results

    def write(self, transfer: Transfer) -> list[PageResult]:
        """Put a transfer's pages from its HOST slots. Pages are independent: one that fails stops no other."""
        slots = _slots(transfer.source_slots)
        results = [PageResult.FAILED] * transfer.count
        for first, end in self._batches(transfer):
            pages = {}
            for i in range(first, end):
                try:
                    pages[i] = self._encode(transfer, transfer.pages[i], slots[i])
                except HicacheError:
                    continue  # no header can be made for it: this page alone fails
            rest = iter(self._put([stored for objects in pages.values() for stored in objects[:-1]]))
            siblings = {i: [next(rest) for _ in objects[:-1]] for i, objects in pages.items()}
            whole = [i for i, stored in siblings.items() if all(stored)]
            last = iter(self._put([stored for i in whole for stored in pages[i][-1:]]))
            for i in whole:
                results[i] = PageResult.OK if all(next(last) for _ in pages[i][-1:]) else PageResult.FAILED
        return results

    def touch(self, transfer: Transfer) -> list[PageResult]:
        """Mark a transfer's pages as used, in its order, the anchor of each last so that it is the newest.

        A page that is not there whole is SOURCE_GONE; where storage cannot tell, it is FAILED.
        """
        results = [PageResult.FAILED] * transfer.count
        shards = [part.shard for part in reversed(self._plan.parts)]
        size = max(1, TOUCH_OBJECTS // len(shards))
        for first in range(0, transfer.count, size):
            pages = transfer.pages[first : first + size]
            tree = transfer.tree
            keys = [ObjectKey(tree.namespace, tree.generation, page.hash, shard) for page in pages for shard in shards]
            try:
                there = self._backend.touch(keys)
            except Exception as error:  # says nothing about any page
                _log.debug("%d pages could not be touched: %r", transfer.count - first, error)
                break
            for i in range(len(pages)):
                whole = all(there[i * len(shards) : (i + 1) * len(shards)])
                results[first + i] = PageResult.OK if whole else PageResult.SOURCE_GONE
        return results

    def _put(self, objects: list[StoredObject]) -> list[bool]:
        return [result.status is ObjectStatus.OK for result in self._backend.put(objects)] if objects else []

    def _batches(self, transfer: Transfer) -> Iterator[tuple[int, int]]:
        for first in range(0, transfer.count, self._batch):
            if transfer.cancelled:
                return
            yield first, min(first + self._batch, transfer.count)

    def _encode(self, transfer: Transfer, page: PageIdentity, slot: int) -> list[StoredObject]:
        """The objects that this process puts for a page, in the order in which to put them."""
        objects = []
        tokens, extras = self._tokens.of(page, slot)
        for part in self._plan.writes(page.hash):
            key = _key(transfer, page, part)
            payload = self._buffer(slot, part.offset, part.length)
            header = encode_header(
                key,
                parent_hash=page.parent,
                depth=page.depth,
                tokens=tokens,
                extras=extras,
                payload=payload,
            )
            objects.append(StoredObject(key, header, payload))
        return objects

    def _judge(self, transfer: Transfer, at: int, slot: int, answers: Sequence[ObjectResult]) -> PageResult:
        """A page is as good as the worst of its shards."""
        page = transfer.pages[at]
        worst = PageResult.OK
        headers = []
        for answer in answers:
            if answer.status is ObjectStatus.FAILED:
                result = PageResult.FAILED
            elif answer.status is ObjectStatus.MISSING and answer.reason in _GONE:
                result = PageResult.SOURCE_GONE
            elif answer.status is not ObjectStatus.OK or not _is_at(page, answer.header):
                result = PageResult.SOURCE_BAD
            else:
                assert answer.header is not None
                headers.append(answer.header)
                continue
            if _BADNESS[result] > _BADNESS[worst]:
                worst = result
        if worst is PageResult.OK and not self._tokens.agree(transfer.tree, page, slot, headers):
            return PageResult.SOURCE_BAD
        return worst


def _is_at(page: PageIdentity, header: Header | None) -> bool:
    """Whether an object says that it lies where it was looked for in the chain."""
    return header is not None and header.parent_hash == page.parent and header.depth == page.depth


_GONE = ("", "absent")  # what a backend says of a name that holds nothing at all
_BADNESS = {PageResult.OK: 0, PageResult.FAILED: 1, PageResult.SOURCE_GONE: 2, PageResult.SOURCE_BAD: 3}


def _key(transfer: Transfer, page: PageIdentity, part: ShardPart) -> ObjectKey:
    tree = transfer.tree
    return ObjectKey(tree.namespace, tree.generation, page.hash, part.shard)


def _slots(array: object) -> list[int]:
    """Slot numbers as Python integers: these index buffers, one by one."""
    assert array is not None
    slots: list[int] = array.tolist()  # type: ignore[attr-defined]
    return slots
