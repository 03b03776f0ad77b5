"""KV tensors on a GPU, copied straight from and to the service's memory by `hicache.cuda`.

Loads are waited for by the engine's stream, layer by layer, never by its thread; stores wait for an event behind what
the engine has begun. What is here was tried with a fake of CUDA: no GPU was at hand.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hicache.cuda.blocks import BlockPlane, CudaBlocks
from hicache.cuda.blocks import good as right_slots
from hicache.cuda.driver import CudaDriver
from hicache.cuda.engine import CudaCopyStatistics
from hicache.cuda.events import CudaEvent
from hicache.cuda.lanes import CudaCopy
from hicache.cuda.options import DEFAULTS, CudaOptions
from hicache.errors import ConfigError
from hicache.rpc.client.group import JoinedRequest
from hicache.rpc.client.loans import Loan
from hicache.rpc.client.memory import SharedPages
from hicache.units import format_size
from hicache_vllm.layouts import ROWS, Layout, PageForm, Run
from hicache_vllm.tensors import Bytes, PagesAtRiskError, Wait, integers

__all__ = ["GpuTensors"]

STAGED_BYTES = 32 << 20
"""Of pages on their way through a buffer, where the service's memory cannot be reached."""


class GpuTensors:
    """One rank's tensors on a GPU; see `KVTensors` and `DirectTensors`.

    Args:
        layers: one tensor a layer, in order; they stay the engine's.
        layout: of each.
        form: of a page.
        driver: of the device; None opens it.
        options: how pages are copied.

    Raises:
        ConfigError: rows that are cut in a way that only the engine's own kernels know; no cupy, no driver, ...
        GeometryError: tensors of two devices.
    """

    def __init__(
        self,
        layers: Sequence[Any],
        layout: Layout,
        form: PageForm,
        *,
        driver: CudaDriver | None = None,
        options: CudaOptions = DEFAULTS,
    ) -> None:
        if len(layers) != form.layers:
            raise ConfigError(f"vLLM has {len(layers)} layers with a KV cache, the model {form.layers}: not understood")
        shape = form.shape
        self._form = form
        self._blocks = CudaBlocks(
            [_planes(tensor, layout, form) for tensor in layers],
            tokens=form.per_page * shape.tokens,
            head_group=form.group,
            row_bytes=shape.width * shape.itemsize,
            keep=list(layers),
            driver=driver,
            options=options,
            device=layers[0].device.index,
        )
        self._behind: dict[int, CudaEvent] = {}

    @property
    def block_bytes(self) -> int:
        """See `KVTensors`."""
        return self._form.page_bytes // self._form.per_page

    def mark(self) -> Callable[[], None]:
        """See `KVTensors`: the copies that the calling thread begins next wait for it, not the thread."""
        event = self._blocks.mark()

        def ready() -> None:
            self._behind[threading.get_ident()] = event

        return ready

    def fetch(
        self, joined: JoinedRequest, first: int, blocks: Sequence[int], *, inside: int, begun: Callable[[Wait], None]
    ) -> int:
        """See `DirectTensors`."""
        per_page, behind = self._form.per_page, self._event()
        pages = -(-(inside + len(blocks)) // per_page)
        loan = joined.lend(first, pages)
        if loan is None:
            return self._fetch_staged(joined, first, blocks, inside=inside, begun=begun)
        with loan:
            usable = min(max(loan.good() * per_page - inside, 0), len(blocks))
            copy = self._blocks.load(loan.memory, loan.slots, blocks[:usable], inside=inside, behind=behind)
            begun(self._waits(copy))
            copy.wait(None)
            right = min(right_slots(copy), max(loan.good() * per_page - inside, 0))
            loan.read(-(-(right + inside) // per_page) if right else 0)
        return right

    def put(self, joined: JoinedRequest, first: int, blocks: Sequence[int]) -> int:
        """See `DirectTensors`."""
        per_page, behind = self._form.per_page, self._event()
        loan = joined.lend(first, len(blocks) // per_page, write=True)
        if loan is None:
            return self._put_staged(joined, first, blocks)
        with loan:
            if not all(memory.writes for memory in loan.memory.pages.memories):
                usable = 0  # another rank writes a part: what goes where is the client's business
            else:
                usable = loan.good()
                copy = self._blocks.store(loan.memory, loan.slots[:usable], blocks[: usable * per_page], behind=behind)
                _wait_for([copy])
                written = min(right_slots(copy) // per_page, loan.good())
                loan.wrote(written)
                return written
        return self._put_staged(joined, first, blocks)

    def by_layer(self, joined: JoinedRequest, first: int, blocks: Sequence[int]) -> GpuLayers:
        """See `early.LayerTensors`."""
        loan = joined.lend(first, len(blocks) // self._form.per_page, write=True)
        return GpuLayers(self._blocks, loan, blocks, per_page=self._form.per_page, behind=self._event)

    def load(self, pages: Bytes, runs: Sequence[Run], came: Callable[[int], None] | None = None) -> None:
        """See `KVTensors`."""
        self._blocks.buffer(len(pages))[:] = pages
        for run in runs:
            page, inside = divmod(run.at, self._form.per_page)
            numbers = range(run.block, run.block + run.count)
            copy = self._blocks.load(None, np.arange(page, len(pages)), numbers, inside=inside, behind=self._event())
            copy.wait(None)
        if came is not None:
            for layer in range(self._form.layers):
                came(layer)

    def store(self, pages: int, runs: Sequence[Run]) -> Bytes:
        """See `KVTensors`: always whole pages."""
        buffer = self._blocks.buffer(pages)
        blocks = [run.block + at for run in runs for at in range(run.count)]
        copy = self._blocks.store(None, np.arange(pages), blocks, behind=self._event())
        copy.wait(None)
        if right_slots(copy) < len(blocks):
            raise ConfigError("blocks could not be read from the GPU: the log says why")
        return buffer

    def attach(self, memory: SharedPages | None) -> str:
        """See `DirectTensors`. Kernels are compiled and measured already; this pins the memory, or a buffer."""
        if memory is None:
            pages = max(1, STAGED_BYTES // self._form.page_bytes)
            self._blocks.buffer(pages)
            nothing = np.empty(0, np.int64)
            self._blocks.load(None, nothing, [], inside=0, behind=self._blocks.mark()).wait(None)
            return f"pages go through a pinned buffer of {format_size(pages * self._form.page_bytes)} a thread"
        self._blocks.attach(memory)
        return "; ".join(_told(one) for one in self._blocks.statistics())

    def close(self) -> None:
        """Let copies end, and let go of everything. Idempotent."""
        self._blocks.close()

    def _fetch_staged(
        self, joined: JoinedRequest, first: int, blocks: Sequence[int], *, inside: int, begun: Callable[[Wait], None]
    ) -> int:
        per_page, at, right = self._form.per_page, 0, 0
        step = max(1, STAGED_BYTES // self._form.page_bytes)
        while at < len(blocks):
            skip = inside if not at else 0
            count = min(step, -(-(skip + len(blocks) - at) // per_page))
            buffer = self._blocks.buffer(step)[:count]
            came = joined.read_into(buffer, first=first + (inside + at) // per_page)
            part = blocks[at : at + count * per_page - skip][: max(came * per_page - skip, 0)]
            copy = self._blocks.load(None, np.arange(count), part, inside=skip, behind=self._event())
            copy.wait(None)
            right = at + right_slots(copy)
            at += count * per_page - skip
            if right < min(at, len(blocks)):
                break
        begun(lambda layer: layer)  # all of it is there
        return right

    def _put_staged(self, joined: JoinedRequest, first: int, blocks: Sequence[int]) -> int:
        per_page, done = self._form.per_page, 0
        pages = len(blocks) // per_page
        step = max(1, STAGED_BYTES // self._form.page_bytes)
        while done < pages:
            count = min(step, pages - done)
            buffer = self._blocks.buffer(step)[:count]
            part = blocks[done * per_page : (done + count) * per_page]
            copy = self._blocks.store(None, np.arange(count), part, behind=self._event())
            copy.wait(None)
            right = right_slots(copy) // per_page
            written = joined.write_from(buffer[:right], first=first + done) if right else 0
            done += written
            if written < count:
                break
        return done

    def _waits(self, copy: CudaCopy) -> Wait:
        return lambda layer: copy.let_wait(layer, self._blocks.current_stream())

    def _event(self) -> CudaEvent:
        found = self._behind.get(threading.get_ident())
        return self._blocks.mark() if found is None else found


class GpuLayers:
    """Layers on their way into pages, each behind its own event; see `early.LayerCopy`.

    Args:
        blocks: the engine's tensors.
        loan: of the pages; None where they cannot be reached. Belongs to this from now on.
        numbers: of the blocks.
        per_page: blocks a page.
        behind: gives the event behind which the layers are computed that are copied next.
    """

    def __init__(
        self,
        blocks: CudaBlocks,
        loan: Loan | None,
        numbers: Sequence[int],
        *,
        per_page: int,
        behind: Callable[[], CudaEvent],
    ) -> None:
        self._blocks = blocks
        self._loan = loan
        self._per_page = per_page
        self._behind = behind
        self._copies: list[CudaCopy] = []
        reached = loan is not None and all(memory.writes for memory in loan.memory.pages.memories)
        self._usable = loan.good() if loan is not None and reached else 0
        self._reached = reached
        self._numbers = numbers[: self._usable * per_page]

    def copy(self, first: int, end: int) -> None:
        """See `early.LayerCopy`."""
        loan = self._loan
        if loan is not None and self._usable:
            slots = loan.slots[: self._usable]
            self._copies.append(
                self._blocks.store(loan.memory, slots, self._numbers, behind=self._behind(), layers=(first, end))
            )

    def finish(self, *, good: bool) -> int | None:
        """See `early.LayerCopy`."""
        loan, self._loan = self._loan, None
        if loan is None:
            return None
        with loan:
            _wait_for(self._copies)
            if not self._reached:
                return None
            right = min((right_slots(copy) for copy in self._copies), default=0) // self._per_page
            written = min(right, loan.good()) if good else 0
            loan.wrote(written)
        return written


def _wait_for(copies: Sequence[CudaCopy]) -> None:
    """Wait for copies into the service's pages.

    Raises:
        PagesAtRiskError: one of them has no end.
    """
    for copy in copies:
        copy.wait(None)
    if any(copy.stranded for copy in copies):
        raise PagesAtRiskError(
            "the GPU has failed under a copy: the pages that it wrote stay taken until this engine ends"
        )


def _told(statistics: CudaCopyStatistics) -> str:
    pinned, choice = statistics.pinned, statistics.choice
    ways = "" if choice is None else ", ".join(dict.fromkeys(name for _, name in (*choice.up, *choice.down)))
    return (
        f"pages go straight between GPU {statistics.device} and {format_size(pinned.bytes)} of the service's memory, "
        f"{format_size(pinned.pinned_bytes)} of it pinned, by {ways}"
    )


def _planes(tensor: Any, layout: Layout, form: PageForm) -> list[BlockPlane]:
    """Where keys and values of a layer are."""
    if layout.packed or any(half != ROWS for half in layout.halves):
        raise ConfigError(f"layout {layout.name} divides rows: it is copied by the engine's own kernels only")
    size = form.shape.itemsize
    found = []
    for plane in layout.planes(tensor.detach().view(integers(size)), form.shape):
        blocks, heads, tokens, _, width, _ = plane.shape
        if width > 1 and plane.stride(4) != 1:
            raise ConfigError(f"layout {layout.name}: a row of a token and head is not one run of memory")
        steps = (plane.stride(0) * size, plane.stride(2) * size, plane.stride(1) * size)
        found.append(BlockPlane(plane.data_ptr(), blocks, tokens, heads, steps))
    return found
