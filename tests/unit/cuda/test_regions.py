"""Engines' tensors as regions: the same bytes as the CPU pool and the vLLM connector find, and what is refused."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from hicache.core.arenas import Run
from hicache.core.layout import KVGeometry
from hicache.cuda.regions import DEVICE_LAYOUTS, Region, TensorMemory, regions_of
from hicache.cuda.runs import HostPart, PageRuns, RunTable
from hicache.errors import GeometryError
from hicache.memory.device import TensorDevicePool
from hicache.memory.host import MmapHostPool
from hicache.memory.layout import LAYOUTS, PageLayout
from hicache_vllm.layouts import LAYOUTS as OF_VLLM
from hicache_vllm.layouts import BlockShape, PageForm
from hicache_vllm.layouts import Run as BlockRun

LAYERS, HEADS, DIM, TOKENS, SLOTS = 3, 4, 8, 4, 5


def page_of(*, head_group: int | None = None, mla: bool = False) -> PageLayout:
    if mla:
        return PageLayout.of(KVGeometry.mla(LAYERS, latent_dim=DIM, rope_dim=2, dtype="float16"), TOKENS)
    geometry = KVGeometry.mha(LAYERS, kv_heads=HEADS, head_dim=DIM, dtype="float16", head_group=head_group)
    return PageLayout.of(geometry, TOKENS)


def filled(shape: tuple[int, ...], seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(0, 1 << 16, shape).astype(np.uint16)


def move(table: RunTable) -> None:
    columns = (table.source.tolist(), table.destination.tolist(), table.length.tolist())
    for source, target, length in zip(*columns, strict=True):
        ctypes.memmove(target, source, length)


def pages_by_table(page: PageLayout, regions: list[Region], slots: list[int]) -> Any:
    pages = np.zeros((len(slots), page.page_bytes), np.uint8)
    runs = PageRuns(page, regions, [HostPart.whole(pages.ctypes.data, len(slots), page.page_bytes)])
    move(runs.table(np.array(slots, np.int64), np.arange(len(slots)), to_device=False))
    return pages


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("kind", ["one group", "two groups", "mla"])
def test_pages_are_those_of_the_pool_in_main_memory(layout: str, kind: str) -> None:
    if layout == "opaque":
        geometry = KVGeometry.opaque(engine="e", backend="b", version="1", shape="s", page_bytes=96)
        tensor = filled((SLOTS, 48)).view(np.uint8)
    elif kind == "mla":
        geometry = KVGeometry.mla(LAYERS, latent_dim=DIM, rope_dim=2, dtype="float16")
        outer = {"layer_first": (LAYERS, SLOTS), "page_first": (SLOTS, LAYERS)}[layout]
        tensor = filled((*outer, TOKENS, DIM + 2))
    else:
        group = {"one group": None, "two groups": 2}[kind]
        geometry = KVGeometry.mha(LAYERS, kv_heads=HEADS, head_dim=DIM, dtype="float16", head_group=group)
        outer = {"layer_first": (LAYERS, 2, SLOTS), "page_first": (SLOTS, LAYERS, 2)}[layout]
        tensor = filled((*outer, TOKENS, HEADS, DIM))
    pool = TensorDevicePool.attach(tensor, geometry, page_size=TOKENS, layout=layout)
    slots = [3, 0, 4]
    expected = MmapHostPool(len(slots), pool.page_bytes)
    pool.gather(np.array(slots, np.int64), expected, np.arange(len(slots)))
    found = pages_by_table(pool.page, regions_of(TensorMemory.of_array(tensor), layout, pool.page), slots)
    assert np.array_equal(found, expected.pages)
    expected.close()


@pytest.mark.parametrize("group", [4, 2, 1])
@pytest.mark.parametrize("layout", ["split/nhd", "split/hnd", "blocks/nhd", "blocks/hnd", "rows"])
@pytest.mark.parametrize("per_page", [1, 2])
def test_flash_attention_is_laid_out_as_the_vllm_connector_says(layout: str, group: int, per_page: int) -> None:
    block = TOKENS // per_page
    lengths = {"slot": SLOTS * per_page, "plane": 2, "token": block, "head": HEADS, "dim": DIM, "content": 2 * DIM}
    shape = tuple(lengths[axis] for axis in DEVICE_LAYOUTS[layout])
    tensors = [filled(shape, seed) for seed in range(LAYERS)]
    page = page_of(head_group=group)
    form = PageForm(BlockShape(HEADS, block, DIM, 2), LAYERS, group, per_page, OF_VLLM[layout].halves)
    expected = np.zeros((2, page.page_bytes // 2), np.uint16)
    planes = [OF_VLLM[layout].planes(tensor, form.shape) for tensor in tensors]
    blocks = [7, 1, 4, 3] if per_page == 2 else [4, 1]
    runs = [BlockRun(block, at, 1) for at, block in enumerate(blocks)]
    for layer in range(LAYERS):
        form.copy(expected, planes, runs, layer, load=False)

    pages = np.zeros((2, page.page_bytes), np.uint8)
    regions = regions_of([TensorMemory.of_array(tensor) for tensor in tensors], layout, page, tokens=block)
    table = PageRuns(page, regions, [HostPart.whole(pages.ctypes.data, 2, page.page_bytes)]).table(
        np.array(blocks, np.int64),
        np.arange(2).repeat(per_page),
        to_device=False,
        parts=None if per_page == 1 else np.tile(np.arange(per_page), 2),
    )
    move(table)
    assert np.array_equal(pages.view(np.uint16), expected)


@pytest.mark.parametrize("group", [None, 2])
def test_sglang_has_keys_and_values_of_a_layer_apart_and_slots_in_tokens(group: int | None) -> None:
    page = page_of(head_group=group)
    keys, values = (filled((LAYERS, SLOTS * TOKENS, HEADS, DIM), seed) for seed in range(2))
    tensors = [TensorMemory.of_array(one) for layer in range(LAYERS) for one in (keys[layer], values[layer])]
    together = np.stack([keys, values], axis=1).reshape(LAYERS, 2, SLOTS, TOKENS, HEADS, DIM)
    expected = pages_by_table(page, regions_of(TensorMemory.of_array(together), "layer_first", page), [2, 4])
    assert np.array_equal(pages_by_table(page, regions_of(tensors, "planes", page), [2, 4]), expected)


def test_sglang_has_latents_in_one_tensor_a_layer() -> None:
    page = page_of(mla=True)
    latents = filled((LAYERS, SLOTS * TOKENS, DIM + 2))
    tensors = [TensorMemory.of_array(layer) for layer in latents]
    expected = pages_by_table(page, regions_of(TensorMemory.of_array(latents), "layer_first", page), [2, 4])
    assert np.array_equal(pages_by_table(page, regions_of(tensors, "planes", page), [2, 4]), expected)


def test_runs_are_as_long_as_both_sides_allow() -> None:
    """One run for neighbouring pages that lie alike, one a layer and plane where they do not, rows where heads part."""
    page = page_of()
    slots = np.array([1, 2, 3], np.int64)
    host = [HostPart.whole(0, SLOTS, page.page_bytes)]
    first = filled((SLOTS, LAYERS, 2, TOKENS, HEADS, DIM))
    runs = PageRuns(page, regions_of(TensorMemory.of_array(first), "page_first", page), host)
    assert runs.table(slots, slots, to_device=True).length.tolist() == [3 * page.page_bytes]
    assert runs.table(slots[[2, 0, 1]], slots[[2, 0, 1]], to_device=True).length.tolist() == [3 * page.page_bytes]
    assert runs.table(slots, slots, to_device=True, layers=(1, 3)).length.tolist() == [2 * page.layer_bytes] * 3
    by_layer = filled((LAYERS, 2, SLOTS, TOKENS, HEADS, DIM))
    runs = PageRuns(page, regions_of(TensorMemory.of_array(by_layer), "layer_first", page), host)
    assert runs.table(slots, slots, to_device=True).length.tolist() == [page.plane_bytes] * 18
    grouped = page_of(head_group=2)
    runs = PageRuns(grouped, regions_of(TensorMemory.of_array(by_layer), "layer_first", grouped), host)
    assert set(runs.table(slots, slots, to_device=True).length.tolist()) == {2 * DIM * 2}
    assert runs.runs_per_page() == LAYERS * 2 * TOKENS * 2
    assert runs.table(slots, slots, to_device=True, groups=(1, 2)).total == 3 * page.page_bytes // 2


def region(**changes: Any) -> list[Region]:
    """Regions of a page-first tensor with one thing changed."""
    given: dict[str, Any] = {"address": 0, "shape": (5, 3, 2, 4, 4, 8), "strides": None, "itemsize": 2} | changes
    shape = given["shape"]
    strides = given["strides"] or np.empty(shape, np.uint16).strides
    memory = TensorMemory(given["address"], shape, strides, given["itemsize"])
    return regions_of(
        memory, given.get("layout", "page_first"), given.get("page", page_of()), tokens=given.get("tokens", 0)
    )


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"layout": "sideways"}, "unknown device layout 'sideways': use one of layer_first, "),
        ({"shape": (5, 3, 2, 4, 8)}, r"has shape \(5, 3, 2, 4, 8\), its layout the axes \(slot, layer, plane"),
        ({"shape": (5, 2, 2, 4, 4, 8)}, "tensor 0 has 2 along its axis layer, expected 3"),
        ({"shape": (5, 3, 2, 4, 4, 9)}, "tensor 0 has rows of 18 bytes, expected 16"),
        ({"strides": (1, 1, 1, 1, 1, 4)}, "the last axis of tensor 0 is not contiguous"),
        ({"tokens": 3}, "slots of 3 tokens do not divide pages of 4: use a divisor"),
        ({"layout": "planes"}, '1 tensors given for 3 layers: layout "planes" of mha pages wants 6, in the order'),
        ({"layout": "rows", "page": page_of(mla=True)}, 'have no keys and values side by side: use layout "planes"'),
    ],
)
def test_tensors_that_do_not_fit_are_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(GeometryError, match=text):
        region(**changes)


def test_pages_without_layers_want_the_opaque_layout() -> None:
    geometry = KVGeometry.opaque(engine="e", backend="b", version="1", shape="s", page_bytes=96)
    with pytest.raises(GeometryError, match='have no layers and heads for layout "page_first": use "opaque"'):
        region(page=PageLayout.of(geometry, TOKENS))


def test_layers_with_different_numbers_of_slots_are_refused() -> None:
    tensors = [TensorMemory.of_array(filled((2, slots, TOKENS, HEADS, DIM))) for slots in (5, 5, 6)]
    with pytest.raises(GeometryError, match=r"the tensors hold \[5, 6\] slots: give each layer as many"):
        regions_of(tensors, "layer_first", page_of())


PAGE = page_of().page_bytes


@pytest.mark.parametrize(
    ("runs", "text"),
    [
        ((Run(0, 0, PAGE - 1),), f"the host memories hold {PAGE - 1} bytes a page, the geometry has {PAGE}"),
        ((Run(0, 0, 8), Run(9, 8, PAGE - 9)), "byte 8 of a page lies twice or nowhere in the host's memories"),
        ((Run(0, 0, 8), Run(7, 8, PAGE - 7)), "byte 7 of a page lies twice or nowhere in the host's memories"),
    ],
)
def test_host_memories_must_hold_each_byte_once(runs: tuple[Run, ...], text: str) -> None:
    with pytest.raises(GeometryError, match=text):
        PageRuns(page_of(), region(), [HostPart(0, 5, PAGE, runs)])


def test_regions_must_hold_each_byte_once() -> None:
    page, host = page_of(), [HostPart.whole(0, 5, PAGE)]
    layers = regions_of([TensorMemory(0, (2, 5, 4, 4, 8), (1280, 256, 64, 16, 2), 2)] * 3, "layer_first", page)
    with pytest.raises(GeometryError, match=r"the regions hold 1024 bytes a page, the geometry has 1536"):
        PageRuns(page, layers[:2], host)
    with pytest.raises(GeometryError, match=r"byte 0 of a page lies twice on the device, or one before it nowhere"):
        PageRuns(page, [layers[0], layers[0], layers[2]], host)
    with pytest.raises(GeometryError, match=r"regions with \[\] slots: give each as many"):
        PageRuns(page, [], host)


def test_slots_and_ranges_that_do_not_exist_are_refused() -> None:
    page = page_of()
    runs = PageRuns(page, region(), [HostPart.whole(0, 4, PAGE)])
    one = np.zeros(1, np.int64)
    for device, host, more, text in (
        (one + 5, one, {}, "device slot 5 does not exist: there are 5"),
        (one - 1, one, {}, "device slot -1 does not exist"),
        (one, one + 4, {}, "host slot 4 does not exist: there are 4"),
        (one, np.zeros(2, np.int64), {}, "1 device slots do not pair with 2 host slots"),
        (one, one, {"layers": (2, 4)}, "layers 2 to 4 of pages that have 3: use a range inside"),
        (one, one, {"groups": (1, 1)}, "head groups 1 to 1 of pages that have 1"),
        (one, one, {"parts": one}, "pages have 1 parts on the device"),
    ):
        with pytest.raises(GeometryError, match=text):
            runs.table(device, host, to_device=True, **more)
    empty = np.empty(0, np.int64)
    assert len(runs.table(empty, empty, to_device=True)) == 0
