"""What engines hand over is checked: shared bytes, wrong types, and numbers of other libraries."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from hicache.core.layout import KVGeometry
from hicache.errors import ConfigError, GeometryError, InvalidInput, OutOfSlots
from hicache.memory.device import TensorDevicePool
from hicache.memory.host import MmapHostPool
from hicache.memory.null import NullDevicePool, NullHostPool

LAYERS, TOKENS, SLOTS, ROW = 4, 8, 6, 24
SIZE = SLOTS * TOKENS * ROW  # elements of one layer


def mla(layers: int = LAYERS) -> KVGeometry:
    return KVGeometry.mla(layers, latent_dim=16, rope_dim=8, dtype="float16")


def attach(tensors: object, geometry: KVGeometry | None = None) -> TensorDevicePool:
    return TensorDevicePool.attach(tensors, geometry or mla(), page_size=TOKENS, layout="layer_first")


def same_layer_twice() -> list[torch.Tensor]:
    layers = [torch.zeros((SLOTS, TOKENS, ROW), dtype=torch.float16) for _ in range(LAYERS)]
    return [layers[0], layers[1], layers[0], layers[3]]


def overlapping_cuts() -> list[np.ndarray]:
    whole = np.zeros(LAYERS * SIZE, np.float16)
    starts = (0, SIZE, 2 * SIZE - ROW, 3 * SIZE)
    return [whole[start : start + SIZE].reshape(SLOTS, TOKENS, ROW) for start in starts]


def overlapping_stripes() -> list[torch.Tensor]:
    """Side by side in each slot, but the last two by one row too near."""
    whole = torch.zeros(SLOTS * LAYERS * TOKENS * ROW, dtype=torch.float16)
    starts = [0, TOKENS * ROW, 2 * TOKENS * ROW, 3 * TOKENS * ROW - ROW]
    strides = (LAYERS * TOKENS * ROW, ROW, 1)
    return [torch.as_strided(whole, (SLOTS, TOKENS, ROW), strides, start) for start in starts]


@pytest.mark.parametrize("make", [same_layer_twice, overlapping_cuts, overlapping_stripes])
def test_layers_that_share_memory_are_refused(make: Callable[[], list[object]]) -> None:
    with pytest.raises(GeometryError, match=r"the tensors of layers \d and \d share memory") as caught:
        attach(make())
    assert "\n" not in str(caught.value)


def test_rows_that_run_into_each_other_are_refused() -> None:
    whole = torch.zeros(LAYERS * SIZE, dtype=torch.float16)
    slots = torch.as_strided(whole, (LAYERS, SLOTS, TOKENS, ROW), (SIZE, TOKENS * ROW - ROW, ROW, 1))
    with pytest.raises(GeometryError, match="elements share memory"):
        attach(slots)


def test_layers_side_by_side_in_one_memory_are_fine() -> None:
    layers = 61
    whole = torch.zeros((SLOTS, layers, TOKENS, ROW), dtype=torch.float16)
    pool = attach([whole[:, layer] for layer in range(layers)], mla(layers))
    page = np.random.default_rng(1).integers(0, 256, pool.page_bytes).astype(np.uint8)
    pool.write_page(3, page)
    assert np.array_equal(pool.read_page(3), page)
    assert np.array_equal(whole[3].reshape(-1).view(torch.uint8).numpy(), page)
    assert not whole[[0, 1, 2, 4, 5]].any()


@pytest.mark.parametrize("geometry", [None, "mla", 5])
def test_a_geometry_is_a_geometry(geometry: object) -> None:
    with pytest.raises(GeometryError, match="geometry must be a KVGeometry, not"):
        TensorDevicePool.attach(
            np.zeros(1),
            geometry,  # type: ignore[arg-type]
            page_size=TOKENS,
            layout="layer_first",
        )


@pytest.mark.parametrize("page_size", [0, -1, 1.5, True, "8", None])
def test_a_page_size_is_named_as_such(page_size: object) -> None:
    with pytest.raises(InvalidInput, match=r"page_size .* must be an integer of 1"):
        TensorDevicePool.attach(
            np.zeros(1),
            mla(),
            page_size=page_size,  # type: ignore[arg-type]
            layout="layer_first",
        )


@pytest.mark.parametrize("layout", [[], None, 3, "NHD"])
def test_a_layout_is_one_of_those_there_are(layout: object) -> None:
    with pytest.raises(GeometryError, match=r"unknown device layout .*: use one of layer_first"):
        TensorDevicePool.attach(np.zeros(1), mla(), page_size=TOKENS, layout=layout)  # type: ignore[arg-type]


def test_numbers_of_numpy_are_numbers() -> None:
    pool = TensorDevicePool.allocate(mla(), page_size=np.int64(TOKENS), slots=np.int32(SLOTS))  # type: ignore[arg-type]
    assert (pool.slots, type(pool.slots)) == (SLOTS, int)
    page = bytes([7]) * pool.page_bytes
    pool.write_page(np.int64(2), page)  # type: ignore[arg-type]
    assert pool.read_page(np.uint8(2)).tobytes() == page  # type: ignore[arg-type]
    pool.check_geometry(mla(), TOKENS)


@pytest.mark.parametrize("slot", [1.0, "1", None, True, np.array([1])])
def test_a_slot_is_an_integer(slot: object) -> None:
    pool = TensorDevicePool.allocate(mla(), page_size=TOKENS, slots=2)
    with pytest.raises(GeometryError, match="is no slot number"):
        pool.read_page(slot)  # type: ignore[arg-type]
    with pytest.raises(GeometryError, match="is no slot number"):
        pool.write_page(slot, bytes(pool.page_bytes))  # type: ignore[arg-type]


@pytest.mark.parametrize("page", ["x", None, 5, [1, 2], np.array(["x"], object)])
def test_a_page_is_bytes(page: object) -> None:
    pool = TensorDevicePool.allocate(mla(), page_size=TOKENS, slots=2)
    with pytest.raises(GeometryError, match="a page is given as bytes or a numpy array, not"):
        pool.write_page(0, page)  # type: ignore[arg-type]


def test_a_page_may_be_a_view_with_gaps() -> None:
    pool = TensorDevicePool.allocate(mla(), page_size=TOKENS, slots=2)
    page = np.arange(2 * pool.page_bytes, dtype=np.uint64).astype(np.uint8)
    pool.write_page(0, page[::2])
    assert np.array_equal(pool.read_page(0), page[::2])


def test_a_pool_says_what_it_is() -> None:
    pool = TensorDevicePool.allocate(mla(), page_size=TOKENS, slots=2)
    assert repr(pool).startswith("<hicache.TensorDevicePool 2 slots of mla pages of 4 layers")
    pool.close()
    assert repr(pool).endswith("closed>")


def test_too_few_slots_name_what_helps() -> None:
    busy = str(OutOfSlots(asked=3, free=1, evictable=0, capacity=8))
    assert "allocate(deadline=SECONDS)" in busy
    absurd = str(OutOfSlots(asked=9, free=1, evictable=0, capacity=8))
    assert "more than the whole tier" in absurd
    assert "deadline" not in absurd


def test_memory_is_checked_with_numbers_of_numpy_too() -> None:
    with pytest.raises(ConfigError, match="does not fit"):
        TensorDevicePool.allocate(mla(), page_size=TOKENS, slots=np.int64(2**45))  # type: ignore[arg-type]


@pytest.mark.parametrize("slot", [1.0, "1", None, True, 2])
def test_slots_of_other_pools_are_integers_too(slot: object) -> None:
    host = MmapHostPool(2, 64)
    for pool_page in (host.page, NullHostPool(2).page, NullDevicePool(2).read_page):
        with pytest.raises(GeometryError, match="does not exist: the pool has 2"):
            pool_page(slot)  # type: ignore[operator]
    assert host.page(np.int64(1)).nbytes == 64  # type: ignore[arg-type]
    host.close()
    with pytest.raises(GeometryError, match="have no bytes"):
        NullDevicePool(2).write_page(0, "x")  # type: ignore[arg-type]
