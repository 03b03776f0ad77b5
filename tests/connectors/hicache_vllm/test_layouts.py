"""Where elements of blocks lie: each description against plain tensors that are written element by element."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hicache.errors import ConfigError
from hicache_vllm.devices import CudaStreams, DeviceTensors, Streams, like
from hicache_vllm.layouts import LAYOUTS, OPAQUE, BlockShape, PageForm, Run, runs_of
from hicache_vllm.proof import proven
from hicache_vllm.tensors import HostTensors, KVTensors, made_of, ordered

BLOCKS = 9


def vec(b: int, d: int, t: Any, e: Any, plane: int) -> Any:
    """fp32, fp16 and bf16 on AVX-512 and AVX2: keys [element][token], values [token][element]."""
    return e * b + t if plane == 0 else b * d + t * d + e


def amx(b: int, d: int, t: Any, e: Any, plane: int) -> Any:
    """bf16 on a CPU with AMX, as measured there."""
    if plane == 0:
        return t // 16 * 16 * d + e // 2 * 32 + t % 16 * 2 + e % 2
    return b * d + e // 16 * 16 * b + t // 2 * 32 + e % 16 * 2 + t % 2


PLACES: dict[str, Callable[[int, int, Any, Any, int], Any]] = {"cpu_attn/vec": vec, "cpu_attn/amx": amx}

SHAPES: dict[str, Callable[[int, int, int], tuple[int, ...]]] = {
    "split/nhd": lambda h, n, d: (2, BLOCKS, n, h, d),
    "split/hnd": lambda h, n, d: (2, BLOCKS, h, n, d),
    "blocks/nhd": lambda h, n, d: (BLOCKS, 2, n, h, d),
    "blocks/hnd": lambda h, n, d: (BLOCKS, 2, h, n, d),
    "rows": lambda h, n, d: (BLOCKS, h, n, 2 * d),
}


def element(tensor: torch.Tensor, name: str, block: int, head: int, token: int, e: int, plane: int, d: int) -> Any:
    if name == "rows":
        return tensor[block, head, token, plane * d + e]
    axes = {"2": plane, "b": block, "h": head, "n": token, "c": e}
    return tensor[tuple(axes[axis] for axis in LAYOUTS[name].axes)]


def engine_tensor(name: str, shape: BlockShape, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor with numbers in it, and what they are as (plane, block, head, token, element)."""
    h, n, d = shape.heads, shape.tokens, shape.width
    wanted = torch.from_numpy(np.random.default_rng(seed).integers(1, 250, (2, BLOCKS, h, n, d)).astype(np.float32))
    wanted = wanted.to(dtype)
    if name not in PLACES:
        tensor = torch.zeros(SHAPES[name](h, n, d), dtype=dtype)
        order = {"2": 0, "b": 1, "h": 2, "n": 3, "c": 4}
        if name == "rows":
            tensor.copy_(wanted.permute(1, 2, 3, 0, 4).reshape(BLOCKS, h, n, 2 * d))
        else:
            tensor.copy_(wanted.permute([order[axis] for axis in LAYOUTS[name].axes]))
        return tensor, wanted
    tensor = torch.zeros((BLOCKS, h, 2 * n * d), dtype=dtype)
    t, e = (torch.from_numpy(axis.reshape(-1)) for axis in np.indices((n, d)))
    for plane in range(2):
        tensor[:, :, PLACES[name](n, d, t, e, plane)] = wanted[plane].flatten(2)
    return tensor.view(BLOCKS, h, n, 2 * d), wanted


FORMS = [
    ("cpu_attn/vec", torch.float32, 32, 32),
    ("cpu_attn/vec", torch.bfloat16, 32, 16),
    ("cpu_attn/vec", torch.float16, 32, 80),
    ("cpu_attn/amx", torch.bfloat16, 32, 32),
    ("cpu_attn/amx", torch.bfloat16, 32, 48),
    *((name, torch.bfloat16, 16, 8) for name in SHAPES),
]


@pytest.mark.case("PLUG-1")
@pytest.mark.parametrize(("name", "dtype", "block", "width"), FORMS)
@pytest.mark.parametrize(("group", "device"), [(1, False), (4, False), (2, True)])
def test_pages_are_canonical_and_come_back(
    name: str, dtype: torch.dtype, block: int, width: int, group: int, device: bool
) -> None:
    """Blocks in any order become pages of (head group, layer, 2, token, head in group, element), and blocks again."""
    shape = BlockShape(4, block, width, dtype.itemsize)
    form = PageForm(shape, 2, group, 2, LAYOUTS[name].halves)
    made = [engine_tensor(name, shape, dtype, layer) for layer in range(2)]
    given = [tensor for tensor, _ in made]
    tensors: KVTensors = HostTensors(given, LAYOUTS[name], form)
    if device:
        tensors = DeviceTensors(given, LAYOUTS[name], form, Streams())
    tensors.mark()()
    blocks = [3, 4, 5, 6, 8, 1]
    pages = tensors.store(3, list(runs_of(blocks, first=0, per_page=2)))
    wanted = torch.stack([numbers for _, numbers in made])[:, :, blocks]  # layer, plane, block, head, token, element
    wanted = wanted.view(2, 2, 3, 2, 4 // group, group, block, width).permute(2, 4, 0, 1, 3, 6, 5, 7)
    assert bytes(pages) == bytes(wanted.contiguous().view(torch.uint8).numpy())
    before = [tensor.clone() for tensor, _ in made]
    for tensor, _ in made:
        tensor.index_fill_(LAYOUTS[name].axes.index("b"), torch.tensor(blocks), 0)
    came: list[int] = []
    tensors.load(pages, list(runs_of(blocks, first=0, per_page=2)), came.append)
    assert came == [0, 1]
    assert all(torch.equal(tensor, old) for (tensor, _), old in zip(made, before, strict=True))


def test_heads_first_and_tokens_first_are_one_layout() -> None:
    """FLASH_ATTN's tensor has the same axes as NHD and as HND; only its strides differ."""
    shape = BlockShape(4, 16, 8, 2)
    tensor, wanted = engine_tensor("rows", shape, torch.bfloat16, 1)
    turned = tensor.permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3)
    assert turned.stride() != tensor.stride()
    for one in (tensor, turned):
        keys, values = LAYOUTS["rows"].planes(one, shape)
        assert torch.equal(keys[:, :, :, 0, :, 0], wanted[0])
        assert torch.equal(values[:, :, :, 0, :, 0], wanted[1])


def test_part_of_a_page_is_left_alone() -> None:
    """A load that begins inside a page writes only the blocks that the engine lacks."""
    shape = BlockShape(2, 4, 8, 2)
    form = PageForm(shape, 1, 2, 4, LAYOUTS["rows"].halves)
    tensor, _ = engine_tensor("rows", shape, torch.bfloat16, 2)
    kinds: list[KVTensors] = [
        HostTensors([tensor], LAYOUTS["rows"], form),
        DeviceTensors([tensor], LAYOUTS["rows"], form, Streams()),
    ]
    for tensors in kinds:
        pages = tensors.store(2, list(runs_of(list(range(8)), first=0, per_page=4)))
        before = tensor.clone()
        tensor[3:8] = 0
        tensors.load(pages, list(runs_of([3, 4, 5, 6, 7], first=3, per_page=4)))
        assert torch.equal(tensor, before)
        assert tensors.block_bytes == 2 * 2 * 4 * 8 * 2


def test_opaque_rows_keep_their_bytes() -> None:
    shape = BlockShape(2, 4, 24, 1, planes=1)
    form = PageForm(shape, 1, 1, 2, OPAQUE.halves)
    tensor = torch.arange(BLOCKS * 2 * 4 * 24, dtype=torch.int64).to(torch.uint8).view(BLOCKS, 2, 4, 24)
    tensors = HostTensors([tensor], OPAQUE, form)
    pages = tensors.store(1, [Run(2, 0, 2)])
    assert bytes(pages) == bytes(tensor[2:4].permute(1, 0, 2, 3).contiguous().numpy())


@pytest.mark.parametrize(
    ("blocks", "first", "runs"),
    [
        ([5, 6, 7, 8], 0, [(5, 0, 4)]),
        ([5, 6, 7, 8, 9], 0, [(5, 0, 4), (9, 4, 1)]),
        ([6, 7, 8, 9, 10], 1, [(6, 1, 1), (7, 2, 4)]),
        ([5, 7, 8, 3], 0, [(5, 0, 1), (7, 1, 1), (8, 2, 1), (3, 3, 1)]),
        ([4], 3, [(4, 3, 1)]),
        ([], 0, []),
    ],
)
def test_runs_stay_in_a_page_or_are_whole_pages(
    blocks: list[int], first: int, runs: list[tuple[int, int, int]]
) -> None:
    found = list(runs_of(blocks, first=first, per_page=2))
    assert found == [Run(*run) for run in runs]


@pytest.mark.case("PLUG-2")
@pytest.mark.parametrize(
    ("name", "tensor", "text"),
    [
        ("rows", torch.zeros(3, 4, 16, 8), "none of"),
        ("split/nhd", torch.zeros(3, 5, 16, 4, 8), "none of"),
        ("cpu_attn/vec", torch.zeros(3, 4, 16, 32)[..., ::2], "not one run"),
        ("cpu_attn/amx", torch.zeros(3, 4, 16, 16)[:, :, :15], "none of"),
    ],
)
def test_tensors_of_other_shapes_are_refused(name: str, tensor: torch.Tensor, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        LAYOUTS[name].planes(tensor, BlockShape(4, 16, 8, 4))


def test_layers_are_ordered_by_their_numbers() -> None:
    found = ordered({f"model.layers.{n}.self_attn.attn": n for n in (10, 2, 0)})
    assert list(found.values()) == [0, 2, 10]
    for names in (["model.attn"], ["a.1.x", "b.1.y"]):
        with pytest.raises(ConfigError, match="no number of its own"):
            ordered(dict.fromkeys(names))


def test_layers_that_are_not_the_models_are_refused() -> None:
    shape = BlockShape(2, 4, 8, 2)
    form = PageForm(shape, 2, 2, 2, LAYOUTS["rows"].halves)
    with pytest.raises(ConfigError, match="1 layers"):
        HostTensors([torch.zeros(3, 2, 4, 16, dtype=torch.bfloat16)], LAYOUTS["rows"], form)
    with pytest.raises(ConfigError, match="1 layers"):
        DeviceTensors([torch.zeros(3, 2, 4, 16, dtype=torch.bfloat16)], LAYOUTS["rows"], form, Streams())
    meta = 2 * [torch.zeros(3, 2, 4, 16, dtype=torch.bfloat16, device="meta")]
    with pytest.raises(ConfigError, match="not in host memory"):
        HostTensors(meta, LAYOUTS["rows"], form)
    with pytest.raises(ConfigError, match="known are cpu and cuda"):
        made_of(meta, LAYOUTS["rows"], form)


def test_work_on_a_device_waits_for_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's stream is marked by its own thread, and ours waits for the mark before it touches a block."""
    calls: list[str] = []

    class Stream:
        def wait_event(self, event: Any) -> None:
            calls.append("wait for the mark")

        def synchronize(self) -> None:
            calls.append("synchronize")

    class Event:
        def record(self, stream: Any) -> None:
            calls.append(f"mark {stream}")

    fake = SimpleNamespace(Stream=Stream, Event=Event, current_stream=lambda: "the engine's", stream=nullcontext)
    monkeypatch.setattr(torch, "cuda", fake)

    def plain(*shape: Any, pin_memory: bool, **options: Any) -> Any:
        assert pin_memory
        return torch.zeros(*shape, **options)

    monkeypatch.setattr("torch.empty", plain)
    streams = CudaStreams()
    ready = streams.mark()
    ready()
    with streams.own():
        assert torch.equal(streams.host(torch.ones(2)), torch.ones(2))
    streams.wait()
    assert calls == ["mark the engine's", "wait for the mark", "synchronize"]


def test_tensors_for_proofs_lie_as_the_engines() -> None:
    """Heads first or tokens first, with three blocks instead of all."""
    engine = torch.zeros(9, 16, 4, 8).permute(0, 2, 1, 3)
    made = like(engine, 0, 3)
    assert made.shape == (3, 4, 16, 8)
    assert made.stride() == engine.stride()


class TestProof:
    """What a kernel writes decides whether a description is believed."""

    SHAPE = BlockShape(2, 32, 32, 2)

    def cache(self, blocks: int) -> torch.Tensor:
        return torch.zeros((blocks, 2, 32, 64), dtype=torch.bfloat16)

    def writer(self, place: Callable[[int, int, Any, Any, int], Any]) -> Callable[..., None]:
        def write(keys: Any, values: Any, cache: Any, slots: Any) -> None:
            flat = cache.view(cache.shape[0], 2, -1)
            t = slots % 32
            for plane, rows in enumerate((keys, values)):
                for e in range(32):
                    flat[slots // 32, :, place(32, 32, t, torch.full_like(t, e), plane)] = rows[:, :, e]

        return write

    def proves(self, name: str, write: Callable[..., None]) -> bool:
        return proven(LAYOUTS[name], self.SHAPE, dtype=torch.bfloat16, cache=self.cache, write=write)

    @pytest.mark.parametrize("name", ["cpu_attn/vec", "cpu_attn/amx"])
    def test_each_kernel_proves_its_own_layout(self, name: str) -> None:
        write = self.writer(PLACES[name])
        assert {other: self.proves(other, write) for other in PLACES} == {other: other == name for other in PLACES}

    def test_one_element_elsewhere_is_enough(self) -> None:
        def swapped(b: int, d: int, t: Any, e: Any, plane: int) -> Any:
            return vec(b, d, t, torch.where((t == 31) & (e >= 30), 61 - e, e), plane)

        assert not self.proves("cpu_attn/vec", self.writer(swapped))

    def test_a_kernel_that_writes_too_much_proves_nothing(self) -> None:
        write = self.writer(vec)

        def spills(keys: Any, values: Any, cache: Any, slots: Any) -> None:
            write(keys, values, cache, slots)
            cache[0, 0, 0, 0] = 1

        assert not self.proves("cpu_attn/vec", spills)

    def test_a_kernel_that_raises_proves_nothing(self) -> None:
        def fails(*_: Any) -> None:
            raise RuntimeError("no such instruction")

        assert not self.proves("cpu_attn/vec", fails)
