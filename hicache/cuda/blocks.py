"""Blocks of an engine's tensors, copied to and from the memory that a service shares: for connectors.

Pages are moved where they lie: device memory on one side, the service's arenas on the other, which are pinned when they
are first seen and unpinned before they are unmapped. Where the arenas cannot be reached, as those of a service on
another host, pages go through a pinned buffer here.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np

from hicache.cuda.driver import CudaDriver, CudaError, Stream
from hicache.cuda.engine import CudaCopyEngine, CudaCopyStatistics
from hicache.cuda.events import CudaEvent
from hicache.cuda.hostside import chosen
from hicache.cuda.kept import keep as keep_for_good
from hicache.cuda.lanes import CudaCopy
from hicache.cuda.options import DEFAULTS, CudaOptions
from hicache.cuda.pinned import PinnedBuffer, rank_parts
from hicache.cuda.pool import CudaDevicePool, open_device
from hicache.cuda.regions import Region
from hicache.errors import ConfigError, GeometryError
from hicache.memory.base import Bytes, Slots
from hicache.memory.layout import PageLayout
from hicache.memory.rankpages import RankPages
from hicache.records import PageResult

__all__ = ["BlockPlane", "CudaBlocks", "SharedMemory", "good"]

_LOG = logging.getLogger(__name__)
_CLOSE_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class BlockPlane:
    """Keys, or values, of one layer in an engine's tensor. Rows of a token and head are one run.

    Attributes:
        address: of the first row of block 0.
        blocks, tokens, heads: how many.
        steps: bytes from one block, token and head to the next.
    """

    address: int
    blocks: int
    tokens: int
    heads: int
    steps: tuple[int, int, int]


class SharedMemory(Protocol):
    """A service's pages as a client has mapped them."""

    @property
    def pages(self) -> RankPages:
        """Where they are."""
        ...

    def before_unmapping(self, callback: Any) -> None:
        """Call while the memory is still mapped."""
        ...


class CudaBlocks:
    """One rank's KV tensors on a GPU. Any thread may use it.

    Args:
        planes: of each layer, in order: keys and values, or one plane.
        tokens: of a page; a multiple of a block's.
        head_group: heads that lie together in a page.
        row_bytes: bytes of one token and head in one plane.
        keep: the engine's tensors, which stay alive as long as this.
        stream: on which the engine computes; None is the calling thread's current one.
        options: how pages are copied.
        driver: of the device; None opens it through cupy.
        device: its number, where `driver` is None.

    Attributes:
        per_page: blocks of a page.

    Raises:
        GeometryError: planes that make no such pages, or lie on another device.
        ConfigError: no cupy, no driver, ...
    """

    def __init__(
        self,
        planes: Sequence[Sequence[BlockPlane]],
        *,
        tokens: int,
        head_group: int,
        row_bytes: int,
        keep: object = None,
        stream: Any = None,
        options: CudaOptions = DEFAULTS,
        driver: CudaDriver | None = None,
        device: int | None = None,
    ) -> None:
        first = planes[0][0]
        if tokens % first.tokens:
            raise GeometryError(f"blocks of {first.tokens} tokens do not divide pages of {tokens}: use a multiple")
        page = PageLayout(
            kind="mha",
            layers=len(planes),
            planes=len(planes[0]),
            tokens=tokens,
            heads=first.heads,
            head_group=head_group,
            row_bytes=row_bytes,
            dtype="",
        )
        self._driver = open_device(device) if driver is None else driver
        self._check(planes)
        self._pool = CudaDevicePool(
            [_region(plane, layer, at) for layer, both in enumerate(planes) for at, plane in enumerate(both)],
            page=page,
            layout="blocks",
            driver=self._driver,
            stream=stream,
            options=options,
            keep=keep,
        )
        self.per_page = tokens // first.tokens
        self.page_bytes = page.page_bytes
        self.layers = page.layers
        self._lock = threading.Lock()
        self._engines: weakref.WeakKeyDictionary[Any, CudaCopyEngine] = weakref.WeakKeyDictionary()
        self._buffers: dict[int, PinnedBuffer] = {}  # of each thread
        self._closed = False
        self._endless = False  # copies of a memory that is forgotten have not ended
        self._process = os.getpid()
        self._executors = chosen(self._driver, options, pinned=options.pinned != "off")

    def _check(self, planes: Sequence[Sequence[BlockPlane]]) -> None:
        for layer, both in enumerate(planes):
            place = self._driver.pointer(both[0].address)
            if place.kind not in ("device", "managed") or place.device != self._driver.device:
                where = "main memory" if place.kind in ("host", "unregistered") else f"CUDA device {place.device}"
                raise GeometryError(
                    f"the KV tensor of layer {layer} is in {where}, this worker's GPU is device {self._driver.device}: "
                    "give each device a worker of its own"
                )

    def mark(self) -> CudaEvent:
        """An event behind what the calling thread's current stream holds."""
        event = self._driver.event()
        self._driver.record(event, self._driver.current_stream())
        return CudaEvent(self._driver, event)

    def current_stream(self) -> Stream:
        """The stream on which the calling thread computes."""
        return self._driver.current_stream()

    def load(
        self,
        memory: SharedMemory | None,
        slots: Slots,
        blocks: Sequence[int],
        *,
        inside: int,
        behind: CudaEvent | Sequence[CudaEvent],
    ) -> CudaCopy:
        """Begin to copy pages into blocks.

        Args:
            memory: where the pages are; None is the buffer of `buffer`.
            slots: of the pages, in order.
            blocks: the engine's, in the order of the prompt.
            inside: place of the first of them in the first page.
            behind: nobody uses the blocks any more when it passes, or all of them.
        """
        ends = [behind] if isinstance(behind, CudaEvent) else behind
        engine = self._engine(memory)
        pages, parts = np.divmod(np.arange(len(blocks)) + inside, self.per_page)
        return engine.host_to_device(
            slots[pages], np.array(blocks, np.int64), done=_ignore, behind=ends, parts=self._parts(parts)
        )

    def store(
        self,
        memory: SharedMemory | None,
        slots: Slots,
        blocks: Sequence[int],
        *,
        behind: CudaEvent,
        layers: tuple[int, int] | None = None,
    ) -> CudaCopy:
        """Begin to copy blocks of whole pages out, as `load` otherwise; `behind` is when they are computed.

        With `layers`, a range [first, end), only those are; the others are for other calls. A copy that is `stranded`
        may write into its slots for as long as this process lives.
        """
        engine = self._engine(memory)
        pages, parts = np.divmod(np.arange(len(blocks)), self.per_page)
        return engine.device_to_host(
            np.array(blocks, np.int64),
            slots[pages],
            ready=behind,
            done=_ignore,
            parts=self._parts(parts),
            layers=layers,
        )

    def buffer(self, pages: int) -> Bytes:
        """Pinned memory of pages, (pages, page_bytes), that `load` and `store` use without a service's memory.

        It is the calling thread's, and the same for every call, or grown.
        """
        thread = threading.get_ident()
        with self._lock:
            found = self._buffers.get(thread)
            if found is not None and found.pages >= pages:
                return found.rows[:pages]
            self._buffers.pop(thread, None)
        if found is not None:
            self._forget(found)
        made = PinnedBuffer(self._driver, pages, self.page_bytes)
        with self._lock:
            self._buffers[thread] = made
        return made.rows

    def statistics(self) -> list[CudaCopyStatistics]:
        """Of each memory that is in use."""
        with self._lock:
            return [engine.statistics() for engine in self._engines.values()]

    @property
    def lost(self) -> str:
        """Why nothing is copied any more, in words: the device has failed. Empty where all is well."""
        with self._lock:
            return next((engine.lost for engine in self._engines.values() if engine.lost), "")

    def close(self) -> None:
        """Let copies end, unpin everything and let go of the tensors. Idempotent.

        What copies that have not ended may still touch is kept for as long as the process lives. In a forked child it
        does nothing: all of it is the parent's.
        """
        if os.getpid() != self._process:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            engines, buffers = dict(self._engines), list(self._buffers.values())
            self._engines.clear()
            self._buffers.clear()
        over = [_ended(key, engine) for key, engine in engines.items()]
        for buffer in buffers:
            if buffer not in engines or engines[buffer].over:
                buffer.close()
        if self._endless or not all(over):
            keep_for_good(self, "tensors of an engine, and what copies them")
            return
        try:
            self._executors.close()
        except CudaError as error:  # the device is gone, and the memory with it
            _LOG.warning("what copies have used could not be given back: %s", error)
        self._pool.close()

    def _parts(self, parts: Slots) -> Slots | None:
        return parts if self.per_page > 1 else None

    def _engine(self, memory: SharedMemory | None) -> CudaCopyEngine:
        fresh = False
        with self._lock:
            if self._closed:
                raise ConfigError("these blocks are closed: their tensors were given back")
            key: Any = self._buffers[threading.get_ident()] if memory is None else memory
            found = self._engines.get(key)
            if found is None:
                parts = key.parts if memory is None else rank_parts(memory.pages)
                found = CudaCopyEngine(self._pool, None, parts=parts, executors=self._executors, name="hicache-blocks")
                self._engines[key] = found
                fresh = True
        if fresh and memory is not None:
            try:
                memory.before_unmapping(lambda: self._forget(memory))
            except BaseException:  # it is closed already
                self._forget(memory)
                raise
        return found

    def attach(self, memory: SharedMemory) -> None:
        """Pin a memory now, so that its first copy need not."""
        self._engine(memory)

    def _forget(self, key: Any) -> None:
        """A memory is about to be unmapped."""
        with self._lock:
            engine = self._engines.pop(key, None)
        if engine is not None and not _ended(key, engine):
            self._endless = True
        elif isinstance(key, PinnedBuffer):
            key.close()


def _ended(key: Any, engine: CudaCopyEngine) -> bool:
    """Close an engine. Whether no byte moves any more; else the memory stays mapped and pinned for good."""
    engine.close(_CLOSE_SECONDS)
    if not engine.over:
        memory = key if isinstance(key, PinnedBuffer) else [one.rows for one in key.pages.memories]
        keep_for_good((engine, memory), "pages that copies have not left")
    return engine.over


def good(copy: CudaCopy) -> int:
    """Leading slots of a copy that has ended that came rightly."""
    results = copy.results or ()
    return next((at for at, result in enumerate(results) if result is not PageResult.OK), len(results))


def _region(plane: BlockPlane, layer: int, at: int) -> Region:
    block, token, head = plane.steps
    return Region(plane.address, layer, at, (plane.blocks, 1, 1, plane.tokens, plane.heads), (block, 0, 0, token, head))


def _ignore(results: Sequence[PageResult]) -> None:
    del results
