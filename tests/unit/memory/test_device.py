from __future__ import annotations

import numpy as np
import pytest
import torch

from hicache.core.layout import DTYPE_BYTES, KVGeometry, LayerGroup
from hicache.errors import CacheClosed, ConfigError, GeometryError
from hicache.memory.base import POISON, Bytes
from hicache.memory.device import TensorDevicePool
from hicache.memory.host import MmapHostPool

LAYERS, HEADS, DIM, TOKENS, SLOTS = 3, 4, 16, 8, 6
SOME = np.array([4, 0, 1, 2])
OTHERS = np.array([3, 5, 1, 2])


def mha(dtype: str = "bfloat16", *, head_group: int | None = None) -> KVGeometry:
    return KVGeometry.mha(LAYERS, kv_heads=HEADS, head_dim=DIM, dtype=dtype, head_group=head_group)


def mla(dtype: str = "bfloat16") -> KVGeometry:
    return KVGeometry.mla(LAYERS, latent_dim=DIM, rope_dim=8, dtype=dtype)


def random_tensor(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """Random bit patterns, NaN payloads and negative zeros among them."""
    size = DTYPE_BYTES[dtype]
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8)
    raw[..., :2] = 0xFF
    return raw.view(getattr(torch, dtype))


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def page_through_host(pool: TensorDevicePool, slot: int) -> bytes:
    host = MmapHostPool(2, pool.page_bytes)
    pool.gather(np.array([slot]), host, np.array([1]))
    page = host.page(1).tobytes()
    host.close()
    return page


@pytest.mark.case("PLUG-1")
@pytest.mark.parametrize("dtype", [name for name in DTYPE_BYTES if name != "uint8"])
@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
@pytest.mark.parametrize("head_group", [4, 2, 1])
def test_pages_come_back_bit_for_bit(dtype: str, layout: str, head_group: int) -> None:
    """Down from one slot and up into another: the same bits, the same number of bytes, and no other slot touched."""
    sizes = {"layer": LAYERS, "plane": 2, "slot": SLOTS, "token": TOKENS, "head": HEADS, "dim": DIM}
    axes = {
        "layer_first": ("layer", "plane", "slot", "token", "head", "dim"),
        "page_first": ("slot", "layer", "plane", "token", "head", "dim"),
    }[layout]
    tensor = random_tensor(tuple(sizes[axis] for axis in axes), dtype)
    before = tensor.view(torch.uint8).clone()
    pool = TensorDevicePool.attach(tensor, mha(dtype, head_group=head_group), page_size=TOKENS, layout=layout)
    host = MmapHostPool(SLOTS, pool.page_bytes)
    assert pool.page_bytes == LAYERS * 2 * TOKENS * HEADS * DIM * DTYPE_BYTES[dtype]

    pool.gather(SOME, host, OTHERS)
    pool.scatter(host, OTHERS[::-1].copy(), SOME)

    after, at = tensor.view(torch.uint8), axes.index("slot")
    for target, source in zip(SOME.tolist(), SOME[::-1].tolist(), strict=True):
        assert torch.equal(after.select(at, target), before.select(at, source))
    for untouched in {*range(SLOTS)} - {*SOME.tolist()}:
        assert torch.equal(after.select(at, untouched), before.select(at, untouched))
    host.close()


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_canonical_form_is_head_group_layer_plane_token_head(layout: str) -> None:
    tensor = random_tensor((LAYERS, 2, SLOTS, TOKENS, HEADS, DIM), "float16")
    engine = tensor if layout == "layer_first" else tensor.permute(2, 0, 1, 3, 4, 5).contiguous()
    pool = TensorDevicePool.attach(engine, mha("float16", head_group=2), page_size=TOKENS, layout=layout)
    expected = b"".join(
        raw_bytes(tensor[layer, plane, 5, token, head])
        for group in range(2)
        for layer in range(LAYERS)
        for plane in range(2)
        for token in range(TOKENS)
        for head in (2 * group, 2 * group + 1)
    )
    assert pool.read_page(5).tobytes() == page_through_host(pool, 5) == expected


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_latent_pages_are_layer_token_row(layout: str) -> None:
    tensor = random_tensor((LAYERS, SLOTS, TOKENS, DIM + 8), "bfloat16")
    engine = tensor if layout == "layer_first" else tensor.permute(1, 0, 2, 3).contiguous()
    pool = TensorDevicePool.attach(engine, mla(), page_size=TOKENS, layout=layout)
    assert page_through_host(pool, 3) == b"".join(raw_bytes(tensor[layer, 3]) for layer in range(LAYERS))
    pool.write_page(0, pool.read_page(3))
    assert page_through_host(pool, 0) == page_through_host(pool, 3)


def test_opaque_pages_are_kept_as_they_are() -> None:
    geometry = KVGeometry.opaque(engine="e", backend="b", version="1", shape="x", page_bytes=1000)
    array = np.random.default_rng(1).integers(0, 256, (SLOTS, 1000), np.uint8)
    pool = TensorDevicePool.attach(array, geometry, page_size=16, layout="opaque")
    assert page_through_host(pool, 2) == array[2].tobytes()


def test_pages_whose_layers_differ_are_kept_as_they_are() -> None:
    geometry = KVGeometry((LayerGroup((0, 1), 4, 4, 64), LayerGroup((1, 2), 2, 2, 32)))
    pool = TensorDevicePool.allocate(geometry, page_size=4, slots=2)
    data = bytes(range(256)) + bytes(pool.page_bytes - 256)
    pool.write_page(1, data)
    assert page_through_host(pool, 1) == data
    assert pool.layout == "opaque"


@pytest.mark.parametrize("planes_are_large", [False, True], ids=["small planes", "large planes"])
@pytest.mark.parametrize("head_group", [4, 1])
@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_layers_can_be_scattered_one_by_one(layout: str, head_group: int, planes_are_large: bool) -> None:
    dim = 1024 if planes_are_large else DIM
    geometry = KVGeometry.mha(LAYERS, kv_heads=HEADS, head_dim=dim, dtype="int8", head_group=head_group)
    pool = TensorDevicePool.allocate(geometry, page_size=TOKENS, slots=SLOTS, layout=layout)
    host = MmapHostPool(SLOTS, pool.page_bytes)
    host.pages[:] = np.random.default_rng(2).integers(1, 256, host.pages.shape, np.uint8)
    by_group = host.page(3).reshape(HEADS // head_group, LAYERS, -1)
    for layer in range(LAYERS):
        pool.scatter(host, np.array([3]), np.array([2]), layers=(layer, layer + 1))
        loaded = pool.read_page(2).reshape(HEADS // head_group, LAYERS, -1)
        assert np.array_equal(loaded[:, : layer + 1], by_group[:, : layer + 1])
        assert not loaded[:, layer + 1 :].any()
    host.close()


def test_one_tensor_per_layer_is_the_same_as_one_tensor() -> None:
    tensor = random_tensor((LAYERS, 2, SLOTS, TOKENS, HEADS, DIM), "bfloat16")
    geometry = mha(head_group=2)
    whole = TensorDevicePool.attach(tensor, geometry, page_size=TOKENS, layout="layer_first")
    parts = TensorDevicePool.attach(list(tensor.unbind(0)), geometry, page_size=TOKENS, layout="layer_first")
    assert np.array_equal(whole.read_page(4), parts.read_page(4))
    parts.write_page(0, parts.read_page(4))
    assert np.array_equal(whole.read_page(0), whole.read_page(4))


def test_slots_and_tokens_may_be_one_axis() -> None:
    tensor = random_tensor((LAYERS, 2, SLOTS, TOKENS, HEADS, DIM), "bfloat16")
    apart = TensorDevicePool.attach(tensor, mha(), page_size=TOKENS, layout="layer_first")
    flat = tensor.view(LAYERS, 2, SLOTS * TOKENS, HEADS, DIM)
    joined = TensorDevicePool.attach(flat, mha(), page_size=TOKENS, layout="layer_first")
    assert joined.slots == SLOTS
    assert np.array_equal(joined.read_page(4), apart.read_page(4))


@pytest.mark.case("PLUG-1")
@pytest.mark.parametrize("view", ["heads", "slots", "tokens"])
def test_views_with_gaps_are_read_and_written_in_place(view: str) -> None:
    cut = {
        "heads": (slice(None),) * 4 + (slice(2, 2 + HEADS),),
        "slots": (slice(None),) * 2 + (slice(0, 2 * SLOTS, 2),),
        "tokens": (slice(None),) * 3 + (slice(0, 2 * TOKENS, 2),),
    }[view]
    whole = random_tensor((LAYERS, 2, 2 * SLOTS, 2 * TOKENS, 2 + HEADS, DIM), "bfloat16")
    tensor = whole[cut][:, :, :SLOTS, :TOKENS, :HEADS]
    pool = TensorDevicePool.attach(tensor, mha(head_group=2), page_size=TOKENS, layout="layer_first")
    compact = TensorDevicePool.attach(tensor.contiguous(), mha(head_group=2), page_size=TOKENS, layout="layer_first")
    assert np.array_equal(pool.read_page(3), compact.read_page(3))
    page = pool.read_page(3)
    before = whole.view(torch.uint8).sum().item() - int(pool.read_page(1).sum())
    pool.write_page(1, page)
    assert np.array_equal(pool.read_page(1), page)
    assert whole.view(torch.uint8).sum().item() - int(page.sum()) == before  # nothing between the rows was written


@pytest.mark.case("PLUG-2")
def test_a_page_of_one_layout_is_right_in_the_other() -> None:
    tensor = random_tensor((LAYERS, 2, SLOTS, TOKENS, HEADS, DIM), "bfloat16")
    writer = TensorDevicePool.attach(tensor, mha(head_group=1), page_size=TOKENS, layout="layer_first")
    reader = TensorDevicePool.allocate(mha(head_group=1), page_size=TOKENS, slots=2, layout="page_first")
    reader.write_page(1, writer.read_page(4))
    assert np.array_equal(reader.read_page(1), writer.read_page(4))


@pytest.mark.case("PLUG-2")
@pytest.mark.parametrize(
    ("geometry", "page_size"),
    [
        (KVGeometry.mha(LAYERS, kv_heads=HEADS // 2, head_dim=2 * DIM, dtype="bfloat16"), TOKENS),
        (mha(), 2 * TOKENS),
        (mha("float16"), TOKENS),
        (mha(head_group=2), TOKENS),
    ],
    ids=["heads", "page size", "dtype", "head group"],
)
def test_a_pool_of_another_geometry_is_refused(geometry: KVGeometry, page_size: int) -> None:
    pool = TensorDevicePool.allocate(mha(), page_size=TOKENS, slots=2)
    pool.check_geometry(mha(), TOKENS)
    with pytest.raises(GeometryError, match=r"the device pool holds mha pages of .* the namespace has"):
        pool.check_geometry(geometry, page_size)


def test_integers_and_bytes_carry_other_dtypes() -> None:
    shape = (LAYERS, 2, SLOTS, TOKENS, HEADS, DIM)
    words = np.zeros(shape, np.uint16)
    raw = np.zeros((*shape[:-1], 2 * DIM), np.uint8)
    for array in (words, raw):
        assert TensorDevicePool.attach(array, mha(), page_size=TOKENS, layout="layer_first").slots == SLOTS


def good() -> torch.Tensor:
    return torch.zeros((LAYERS, 2, SLOTS, TOKENS, HEADS, DIM), dtype=torch.bfloat16)


def read_only() -> np.ndarray:
    array = np.zeros((LAYERS, 2, SLOTS, TOKENS, HEADS, DIM), np.uint16)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        (
            good()[:, :, :, :, :2],
            r"shape \(3, 2, 6, 8, 2, 16\), expected \(layer=3, plane=2, slot=any, token=8, head=4",
        ),
        (good()[..., :8], r"shape \(3, 2, 6, 8, 4, 8\), expected .*dim=16\)"),
        (good()[:2], r"shape \(2, 2, .* expected \(layer=3"),
        (good().view(LAYERS, 2, -1, HEADS, DIM)[:, :, :-1], r"shape \(3, 2, 47, 4, 16\)"),
        (good()[:, :, :0], r"hold \[0\] slots"),
        (good().float(), r"dtype float32, the geometry bfloat16 \(2 bytes an element\)"),
        (good().half(), r"dtype float16, the geometry bfloat16"),
        (good().to(torch.int8), r"dtype int8, the geometry bfloat16"),
        (good().to("meta"), r"is on device meta: this pool copies with the CPU"),
        (good().to_sparse(), r"is sparse"),
        (good().transpose(4, 5).contiguous().transpose(4, 5), r"last axis of the device tensor is not contiguous"),
        (torch.zeros((1, 2, 1, 1, 1, DIM), dtype=torch.bfloat16).expand(LAYERS, 2, 4, TOKENS, HEADS, DIM), "expanded"),
        (torch.zeros(()), r"is a single number"),
        (read_only(), r"is read-only"),
        (np.zeros((2, 2), object), r"has dtype object"),
        ("a tensor", r"is a str: give a torch tensor"),
        (7, r"is a int: give a torch tensor or a numpy array"),
        ([good()[0]] * 2, r"2 tensors given for 3 layers"),
        ([good()[0], good()[1], good()[2][:, :3]], r"hold \[3, 6\] slots"),
        ([good()[0], good()[1], good()[2].float()], r"the tensor of layer 2 has dtype float32"),
    ],
)
def test_a_wrong_tensor_is_refused_in_one_line(tensors: object, text: str) -> None:
    with pytest.raises(GeometryError, match=text) as caught:
        TensorDevicePool.attach(tensors, mha(), page_size=TOKENS, layout="layer_first")
    assert "\n" not in str(caught.value)


@pytest.mark.gpu
def test_a_cuda_tensor_is_refused() -> None:
    with pytest.raises(GeometryError, match="is on device cuda"):
        TensorDevicePool.attach(good().to("cuda"), mha(), page_size=TOKENS, layout="layer_first")


def test_a_list_of_tensors_is_only_for_layer_first() -> None:
    with pytest.raises(GeometryError, match='"page_first" is one tensor'):
        TensorDevicePool.attach([good()[0]] * 3, mha(), page_size=TOKENS, layout="page_first")


@pytest.mark.parametrize("slots", [0, -1, 2.0, True])
def test_a_pool_needs_slots(slots: int) -> None:
    with pytest.raises(ConfigError, match="slots of a device pool"):
        TensorDevicePool.allocate(mha(), page_size=TOKENS, slots=slots)


def test_a_pool_larger_than_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not fit"):
        TensorDevicePool.allocate(mha(), page_size=TOKENS, slots=2**40)


@pytest.mark.parametrize("slot", [-1, SLOTS])
def test_slots_that_do_not_exist_move_nothing(slot: int) -> None:
    """A negative slot must not wrap to the end of the pool."""
    pool = TensorDevicePool.allocate(mha(), page_size=TOKENS, slots=SLOTS)
    host = MmapHostPool(SLOTS, pool.page_bytes)
    host.pages[:] = 9
    bad, fine = np.array([1, slot]), np.array([1, 2])
    with pytest.raises(GeometryError, match=f"device slot {slot} does not exist"):
        pool.scatter(host, fine, bad)
    with pytest.raises(GeometryError, match=f"host slot {slot} does not exist"):
        pool.scatter(host, bad, fine)
    with pytest.raises(GeometryError, match=f"device slot {slot} does not exist"):
        pool.gather(bad, host, fine)
    with pytest.raises(GeometryError, match=f"device slot {slot} does not exist"):
        pool.read_page(slot)
    with pytest.raises(GeometryError, match=f"device slot {slot} does not exist"):
        pool.write_page(slot, bytes(pool.page_bytes))
    assert not any(pool.read_page(at).any() for at in range(SLOTS))
    host.close()


def test_pools_of_different_pages_do_not_mix() -> None:
    pool = TensorDevicePool.allocate(mha(), page_size=TOKENS, slots=2)
    host = MmapHostPool(2, pool.page_bytes - 1)
    with pytest.raises(GeometryError, match="host pages have"):
        pool.gather(np.array([0]), host, np.array([0]))
    with pytest.raises(GeometryError, match="a page has"):
        pool.write_page(0, b"short")
    host.close()
    other = MmapHostPool(2, pool.page_bytes)
    with pytest.raises(GeometryError, match="do not pair"):
        pool.gather(np.array([0, 1]), other, np.array([0]))
    other.close()


def test_poison_and_close_leave_an_engines_tensors_to_it() -> None:
    tensor = good()
    pool = TensorDevicePool.attach(tensor, mha(), page_size=TOKENS, layout="layer_first")
    pool.poison(np.array([1]))
    as_bytes: Bytes = tensor.view(torch.uint8).numpy()
    assert set(as_bytes[:, :, 1].reshape(-1).tolist()) == {POISON}
    assert not as_bytes[:, :, 0].any()
    pool.close()
    pool.close()
    with pytest.raises(CacheClosed):
        pool.read_page(0)
    assert set(as_bytes[:, :, 1].reshape(-1).tolist()) == {POISON}
