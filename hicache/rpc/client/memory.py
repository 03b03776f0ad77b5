"""The service's host memory, as this process has mapped it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hicache.core.residency import Slots
from hicache.errors import CacheClosed, ConfigError
from hicache.memory.arena import MappedArena, MappedWords
from hicache.memory.base import Bytes
from hicache.memory.rankpages import RankMemory, RankPages
from hicache.rpc.client.lifeline import Lifeline
from hicache.rpc.client.written import Written
from hicache.rpc.service import Attached

__all__ = ["SharedPages"]

_POPULATE_STEP: Final = 16 * 2**20
"""Bytes, some milliseconds: closing waits for no more."""


class SharedPages:
    """A pool's arenas, as far as this rank has part in them, and its generation words. Any thread may use it.

    It stays mapped after its session has ended, since copies may be under way, until `close`. So long the lifeline
    stays too: the service waits for it before it gives the slots to others.

    Args:
        lifeline: gives the descriptors; belongs to this from now on.
        attached: what the service says of the memory.
        populate: whether a thread gives this process the memory's pages in the background, so that first touches do
            not cost half of the speed. It takes some 50 ms a GiB, and 2 MiB of page tables.

    Attributes:
        slots: number of slots.
        page_bytes: bytes of this rank's part of a page.
        written: slots that were written here, or handed out as memory.

    Raises:
        ConfigError: what was handed out is not the memory that was announced.
    """

    def __init__(self, lifeline: Lifeline, attached: Attached, *, populate: bool = False) -> None:
        self.slots = attached.slots
        self.page_bytes = attached.rank_page_bytes
        self.written = Written(attached.slots)
        self._lifeline = lifeline
        self._stop = threading.Event()
        self._closing = threading.Lock()
        self._closed = False
        self._populating: threading.Thread | None = None
        with ExitStack() as stack:
            memories, arenas = [], []
            for view in attached.arenas:
                fd, size = lifeline.fetch(view.id)
                if size != view.size:
                    raise ConfigError(f"arena {view.id} was announced with {view.size} bytes and has {size}")
                arena = MappedArena(fd, self.slots, view.stride, size=size, writable=view.writes)
                stack.callback(arena.close)
                arenas.append(arena)
                memories.append(RankMemory(arena.rows, view.runs, view.writes))
            fd, _ = lifeline.fetch(attached.words_id)
            self._words = MappedWords(fd, self.slots)
            stack.callback(self._words.close)
            self._pages = RankPages(self.page_bytes, memories)
            stack.callback(self._pages.close)
            self._held = stack.pop_all()
        if populate:
            self._populating = threading.Thread(target=self._populate, args=(arenas,), name="hicache-client-populate")
            self._populating.start()

    def _populate(self, arenas: list[MappedArena]) -> None:
        for arena in arenas:
            while arena.populate(_POPULATE_STEP):
                if self._stop.is_set():
                    return

    def wait_populated(self) -> None:
        """Block until the background thread has done its work, or is stopped."""
        if self._populating is not None:
            self._populating.join()

    @property
    def writes(self) -> bool:
        """Whether this rank writes any part of its pages."""
        return self._pages.writes

    @property
    def pages(self) -> RankPages:
        """Where this rank's pages lie, for those who copy without this; what they write they tell by `wrote`."""
        return self._pages

    def before_unmapping(self, callback: Callable[[], None]) -> None:
        """Call once when the memory is let go of, while it is still mapped.

        Raises:
            CacheClosed: it is closed.
        """
        with self._closing:
            if self._closed:
                raise CacheClosed("this shared memory is closed")
            self._held.callback(callback)

    def wrote(self, slots: Slots) -> None:
        """Somebody who copies without this has written these slots."""
        self._note(slots)

    def page(self, slot: int) -> Bytes:
        """One page, not a copy; see `RankPages.page`. Who has it may write it, so it counts as written."""
        page = self._pages.page(slot)
        self._note(slot)
        return page

    def read_page(self, slot: int) -> Bytes:
        """A copy of one page; see `RankPages.read_page`."""
        return self._pages.read_page(slot)

    def write_page(self, slot: int, data: Any) -> None:
        """Write one page; see `RankPages.write_page`."""
        self._pages.write_page(slot, data)
        self._note(slot)

    def gather(self, slots: Slots, out: Sequence[Bytes] | Bytes) -> None:
        """Copy pages out, into rows of an array, or into one buffer a page. Releases the GIL while bytes move."""
        if isinstance(out, np.ndarray):
            self._pages.gather(slots, out)
        else:
            for at, row in enumerate(out):
                self._pages.gather(slots[at : at + 1], row.reshape(1, -1))

    def scatter(self, slots: Slots, pages: Sequence[Bytes] | Bytes) -> None:
        """Copy pages in; parts that another rank writes are left out. As `gather` otherwise."""
        if isinstance(pages, np.ndarray):
            self._pages.scatter(slots, pages)
        else:
            for at, row in enumerate(pages):
                self._pages.scatter(slots[at : at + 1], row.reshape(1, -1))
        self._note(slots)

    def _note(self, slots: Slots | int) -> None:
        self.written.note(slots, self._words.values[slots])

    def unchanged(self, slots: Slots, words: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Which slots have still the words that were noted. To be asked behind the copy."""
        return self._words.unchanged(slots, words)

    def close(self, *, finished: bool = True) -> None:
        """Let go of the memory; while somebody still holds a view, it stays mapped. Idempotent.

        Args:
            finished: whether nothing here touches it any more, so that the service may give the slots to others at
                once, and need not wait for the end of this process.
        """
        self._stop.set()
        self.wait_populated()  # it looks after each step
        with self._closing:
            self._closed = True
        self._held.close()
        if finished:
            self._lifeline.finish()
        else:
            self._lifeline.close()
