"""Puts ended requests into blocks: each page's hash stands in a block once, however many requests share it."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from hicache.runtime.accesslog.format import HASH_BYTES, Entry, Head, NamespaceRecord, pack

if TYPE_CHECKING:
    from hicache.core.prompt import Prompt
    from hicache.core.reasons import RequestCounts
    from hicache.runtime.accesslog.settings import AccessLog

__all__ = ["Block", "Ended", "Sampler"]

MOST_ENTRIES: Final = 1024
MOST_NEW_PAGES: Final = 32_768
MOST_PAGES: Final = 2**20
"""Of a block: what a reader must hold at once."""

Words = npt.NDArray[np.uint64]

_WHOLE: Final = 2.0**64


class Ended(NamedTuple):
    """One request that has ended.

    Attributes:
        namespace: whose pages.
        prompt: its whole pages, with those that it grew by; its hashes are computed by whoever writes.
        began, ended: monotonic seconds; `loaded` too, or None.
        tokens, output: of the prompt, and those that were added to it.
        counts: what it was counted as.
        kept: leading pages that the cache has of it.
        session: of the service, or None.
    """

    namespace: NamespaceRecord
    prompt: Prompt
    began: float
    ended: float
    loaded: float | None
    tokens: int
    output: int
    counts: RequestCounts
    kept: int
    session: int | None


class Sampler:
    """Which requests are written. The same in every process."""

    def __init__(self, settings: AccessLog) -> None:
        self._all = settings.sample == 1
        self._threshold = int(settings.sample * _WHOLE)
        self._by_prefix = settings.sample_by == "prefix"
        self._tokens = settings.sample_tokens
        self._random = np.random.default_rng()

    def takes(self, ended: Ended, hashes: Words) -> bool:
        """Whether a request is written.

        Args:
            ended: the request.
            hashes: of its pages, uint64 `(pages, n)`: the second word decides, as others go by the first one.
        """
        if self._all:
            return True
        if not self._by_prefix or not len(hashes):
            return bool(self._random.random() * _WHOLE < self._threshold)
        page = max(1, self._tokens // ended.namespace.page_size)
        return bool(hashes[min(page, len(hashes)) - 1, 1] < self._threshold)


class Block:
    """Requests that are written together.

    Args:
        key: hides hashes; empty: they are written as they are.

    Attributes:
        entries: of the requests so far.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._namespaces: dict[NamespaceRecord, int] = {}
        self._known: list[dict[int, int]] = []  # of each namespace: first word of a page's hash -> a request with it
        self._new = self._all = 0
        self.entries: list[Entry] = []

    @property
    def full(self) -> bool:
        """Whether it is to be written now."""
        return len(self.entries) >= MOST_ENTRIES or self._new >= MOST_NEW_PAGES or self._all >= MOST_PAGES

    def add(self, ended: Ended, hashes: Words, *, wall: float) -> None:
        """Add a request.

        Args:
            ended: the request.
            hashes: of its pages, uint64 `(pages, n)`.
            wall: what to add to monotonic seconds for those since 1970.
        """
        namespace = self._namespaces.setdefault(ended.namespace, len(self._namespaces))
        if namespace == len(self._known):
            self._known.append({})
        like, same = self._shared(namespace, hashes)
        pages = self._hidden(hashes[same:])
        counts = ended.counts
        self.entries.append(
            Entry(
                time=round(max(0.0, ended.began + wall), 6),
                seconds=_seconds(ended.ended - ended.began),
                load=None if ended.loaded is None else _seconds(ended.loaded - ended.began),
                namespace=namespace,
                tokens=ended.tokens,
                output=ended.output,
                asked=counts.asked,
                device=counts.device,
                host=counts.host,
                storage=counts.storage,
                missed={reason.value: pages for reason, pages in counts.missed.items()},
                kept=ended.kept,
                aborted=counts.aborted,
                session=ended.session,
                like=like,
                same=same,
                pages=pages,
            )
        )
        self._new += len(hashes) - same
        self._all += len(hashes)

    def _shared(self, namespace: int, hashes: Words) -> tuple[int, int]:
        """A request of this block with the longest common beginning, and its pages."""
        known, names = self._known[namespace], hashes[:, 0]
        low, high = 0, len(names)
        while low < high:  # a hash names all that is in front of it: where a page is known, all before it are
            middle = (low + high + 1) // 2
            if int(names[middle - 1]) in known:
                low = middle
            else:
                high = middle - 1
        like = known[int(names[low - 1])] if low else 0
        known.update(dict.fromkeys(names[low:].tolist(), len(self.entries)))
        return like, low

    def _hidden(self, hashes: Words) -> bytes:
        if not self._key:
            return hashes[:, 0].tobytes()
        width, data, key = hashes.shape[1] * HASH_BYTES, hashes.tobytes(), self._key
        digest = hashlib.blake2b
        return b"".join(
            digest(data[at : at + width], digest_size=HASH_BYTES, key=key).digest() for at in range(0, len(data), width)
        )

    def pack(self, head: Head) -> bytes:
        """The block's bytes; the head gets its namespaces."""
        fields = {name: getattr(head, name) for name in Head.__struct_fields__ if name != "namespaces"}
        return pack(Head(namespaces=tuple(self._namespaces), **fields), self.entries)


def _seconds(value: float) -> float:
    return round(max(0.0, value), 6)
