"""Blocks of an engine over a service's memory: what becomes of it when copies do not end, or a process forks."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from hicache.core.arenas import Run
from hicache.cuda import CudaError, CudaOptions
from hicache.cuda.blocks import BlockPlane, CudaBlocks, good
from hicache.cuda.kept import KEPT
from hicache.memory.base import Bytes
from hicache.memory.host import MmapHostPool
from hicache.memory.rankpages import RankMemory, RankPages
from hicache.testing.cuda import FakeCuda
from hicache.testing.cudacopy import KERNELS

LAYERS, BLOCKS, TOKENS, HEADS, ROW = 2, 6, 4, 2, 16
PLANE = BLOCKS * TOKENS * HEADS * ROW
PAGE = LAYERS * 2 * TOKENS * HEADS * ROW
SLOTS = 8
LIMIT = 20.0


class Service:
    """A service's pages, as a client has mapped them."""

    def __init__(self) -> None:
        self.pool = MmapHostPool(SLOTS, PAGE)
        self.pool.pages[:] = np.random.default_rng(2).integers(0, 256, self.pool.pages.shape, np.uint8)
        self.pages = RankPages(PAGE, [RankMemory(self.pool.pages, (Run(0, 0, PAGE),), True)])
        self.callbacks: list[Callable[[], None]] = []

    def before_unmapping(self, callback: Callable[[], None]) -> None:
        self.callbacks.append(callback)

    def unmap(self) -> None:
        while self.callbacks:
            self.callbacks.pop()()
        self.pages.close()


class Tensors:
    """Of the engine."""


class Made:
    """Blocks on a fake GPU."""

    def __init__(self) -> None:
        self.cuda = FakeCuda(memory=1 << 22, kernels=KERNELS)
        self.address = self.cuda.malloc(LAYERS * 2 * PLANE)
        tensors = Tensors()
        self.tensors = weakref.ref(tensors)
        steps = (TOKENS * HEADS * ROW, HEADS * ROW, ROW)
        self.blocks = CudaBlocks(
            [
                [BlockPlane(self.address + (2 * layer + at) * PLANE, BLOCKS, TOKENS, HEADS, steps) for at in range(2)]
                for layer in range(LAYERS)
            ],
            tokens=TOKENS,
            head_group=HEADS,
            row_bytes=ROW,
            keep=tensors,
            options=CudaOptions(method="plain"),
            driver=self.cuda,
        )
        self.service = Service()
        self.blocks.attach(self.service)
        self.down = list(self.cuda.timeline.streams.values())[-1]

    @property
    def memory(self) -> Bytes:
        """All of the engine's."""
        size = LAYERS * 2 * PLANE
        return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(self.address))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    monkeypatch.setattr("hicache.cuda.blocks._CLOSE_SECONDS", 0.05)
    before = len(KEPT)
    one = Made()
    yield one
    one.cuda.finish()
    one.service.unmap()
    one.blocks.close()
    del KEPT[before:]
    one.service.pool.close()


def test_a_device_that_fails_under_a_store_keeps_what_it_may_still_write(
    made: Made, caplog: pytest.LogCaptureFixture
) -> None:
    gate = made.cuda.gate(made.down)
    blocks, service = made.blocks, made.service
    made.memory[:] = np.random.default_rng(3).integers(0, 256, made.memory.shape, np.uint8)
    before = len(KEPT)
    copy = blocks.store(service, np.array([3, 4]), [1, 2], behind=blocks.mark())
    assert not copy.wait(0.05)
    made.cuda.lose()
    assert copy.wait(LIMIT)
    assert (good(copy), copy.stranded) == (0, True)
    assert "has failed (the device: cudaErrorIllegalAddress" in blocks.lost
    assert blocks.lost == blocks.statistics()[0].lost
    with pytest.raises(CudaError, match="cudaErrorIllegalAddress"):
        blocks.mark()
    service.unmap()
    for _ in range(2):
        blocks.close()
    assert made.cuda.registered
    assert made.tensors() is not None
    assert len(KEPT) > before
    assert "pages that copies have not left: kept until this process ends" in caplog.text
    service.pool.close()  # stays mapped while somebody has a view
    gate.open()
    made.cuda.finish()


def test_closing_lets_go_of_the_engines_tensors(made: Made) -> None:
    for _ in range(2):
        made.blocks.close()
    assert made.tensors() is None
    assert not made.cuda.registered


def test_copies_of_a_lost_device_fail_at_once(made: Made) -> None:
    blocks, service = made.blocks, made.service
    behind = blocks.mark()
    made.cuda.lose()
    for copy in (
        blocks.load(service, np.array([1]), [1], inside=0, behind=behind),
        blocks.store(service, np.array([1]), [1], behind=behind),
    ):
        assert copy.wait(LIMIT)
        assert good(copy) == 0
        assert not copy.stranded  # nothing of it had come into a stream
    assert blocks.lost


def test_a_buffer_that_a_copy_has_not_left_is_not_given_back(made: Made, caplog: pytest.LogCaptureFixture) -> None:
    """The engine's stream is slow, and all is closed meanwhile: the copy writes where nobody else is."""
    blocks = made.blocks
    blocks.buffer(1)[:] = 7
    gate = made.cuda.gate(made.cuda.default)
    copy = blocks.load(None, np.array([0]), [5], inside=0, behind=blocks.mark())
    address = blocks.buffer(1).ctypes.data
    blocks.close()
    assert address in made.cuda.registered
    assert "kept until this process ends" in caplog.text
    gate.open()
    assert copy.wait(LIMIT)
    assert good(copy) == 1
    assert set(made.memory.reshape(LAYERS * 2, BLOCKS, -1)[:, 5].reshape(-1).tolist()) == {7}
    blocks.close()


def test_a_buffer_that_grows_stays_where_copies_are(made: Made) -> None:
    blocks = made.blocks
    blocks.buffer(1)[:] = 9
    gate = made.cuda.gate(made.cuda.default)
    copy = blocks.load(None, np.array([0]), [4], inside=0, behind=blocks.mark())
    first = blocks.buffer(1).ctypes.data
    assert blocks.buffer(2).ctypes.data != first
    assert first in made.cuda.registered
    gate.open()
    assert copy.wait(LIMIT)
    assert set(made.memory.reshape(LAYERS * 2, BLOCKS, -1)[:, 4].reshape(-1).tolist()) == {9}


def test_a_forked_child_leaves_everything_to_its_parent(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicache.cuda.blocks.os.getpid", lambda: -1)
    made.blocks.close()
    monkeypatch.setattr("hicache.cuda.blocks.os.getpid", made.blocks._process.__int__)
    copy = made.blocks.load(made.service, np.array([1]), [1], inside=0, behind=made.blocks.mark())
    assert copy.wait(LIMIT)
    assert good(copy) == 1
