from __future__ import annotations

import json
from typing import Any

import pytest

from hicache.core.layout import DTYPE_BYTES, KVGeometry, LayerGroup
from hicache.errors import GeometryError, InvalidInput


def mha(**changes: Any) -> KVGeometry:
    fields: dict[str, Any] = {"layers": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"}
    return KVGeometry.mha(**(fields | changes))


def test_worked_example_of_a_gigabyte() -> None:
    geometry = mha()
    assert geometry.token_bytes == 131_072
    assert geometry.token_bytes * 8_192 == 2**30
    assert geometry.page_bytes(64) * (8_192 // 64) == 2**30


@pytest.mark.case("PLUG-1")
@pytest.mark.parametrize(
    ("dtype", "size"),
    [("float32", 4), ("float16", 2), ("bfloat16", 2), ("float8_e4m3fn", 1), ("float8_e5m2", 1), ("int8", 1)],
)
def test_elements_have_their_own_size_never_that_of_a_stand_in(dtype: str, size: int) -> None:
    assert DTYPE_BYTES[dtype] == size
    assert mha(dtype=dtype).token_bytes == 2 * 32 * 8 * 128 * size


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_page_bytes_of_each_kind(page_size: int) -> None:
    assert mha(kv_heads=1).page_bytes(page_size) == 2 * 32 * 128 * 2 * page_size
    assert mha(dtype="float4", row_bytes=64).page_bytes(page_size) == 2 * 32 * 8 * 64 * page_size
    latent = KVGeometry.mla(61, latent_dim=512, rope_dim=64, dtype="bfloat16")
    assert latent.page_bytes(page_size) == 61 * 576 * 2 * page_size
    packed = KVGeometry.mla(61, latent_dim=512, rope_dim=64, dtype="fp8_packed", row_bytes=656)
    assert packed.page_bytes(page_size) == 61 * 656 * page_size
    opaque = KVGeometry.opaque(engine="e", backend="b", version="1", shape="s", page_bytes=4096, layers=4)
    assert opaque.page_bytes(page_size) == 4096
    assert opaque.token_bytes == 0


@pytest.mark.case("KEY-5", "PLUG-2")
def test_digests_differ_with_every_field() -> None:
    geometries = [
        mha(),
        mha(layers=31),
        mha(layers=(1, 33)),
        mha(kv_heads=2),
        mha(kv_heads=1, head_dim=256),
        mha(kv_heads=2, head_dim=64),
        mha(dtype="float16"),
        mha(dtype="float8_e4m3fn"),
        mha(dtype="float8_e5m2"),
        mha(dtype="int8"),
        mha(head_group=4),
        mha(layer_partition=16),
        mha(row_bytes=64),
        KVGeometry.mla(32, latent_dim=512, rope_dim=64, dtype="bfloat16"),
        KVGeometry.mla(32, latent_dim=448, rope_dim=128, dtype="bfloat16"),
        KVGeometry.opaque(engine="e", backend="b", version="1", shape="s", cell_bytes=4096),
        KVGeometry.opaque(engine="e", backend="b", version="1", shape="t", cell_bytes=4096),
        KVGeometry.opaque(engine="e", backend="b", version="2", shape="s", cell_bytes=4096),
        KVGeometry.opaque(engine="e", backend="c", version="1", shape="s", cell_bytes=4096),
        KVGeometry.opaque(engine="f", backend="b", version="1", shape="s", cell_bytes=4096),
        KVGeometry.opaque(engine="e", backend="b", version="1", shape="s", cell_bytes=4096, head_groups=1),
    ]
    digests = {geometry.digest(page_size) for geometry in geometries for page_size in (16, 32)}
    assert len(digests) == 2 * len(geometries)


def test_a_partition_that_cuts_nothing_is_none() -> None:
    assert mha(layer_partition=32) == mha(layer_partition=64) == mha()
    assert mha(layer_partition=32).digest(64) == mha().digest(64)
    assert mha(layer_partition=31) != mha()
    assert mha(layers=(32, 40), layer_partition=36).layer_cuts() == ((32, 36), (36, 40))


@pytest.mark.parametrize(
    ("layers", "partition", "cuts"),
    [
        (32, None, [(0, 32)]),
        (32, 16, [(0, 16), (16, 32)]),
        (30, 16, [(0, 16), (16, 30)]),
        ((5, 20), 8, [(5, 8), (8, 16), (16, 20)]),
        ((8, 16), 8, [(8, 16)]),
        (2, 1, [(0, 1), (1, 2)]),
    ],
)
def test_cuts_lie_on_absolute_multiples(layers: Any, partition: int | None, cuts: list[tuple[int, int]]) -> None:
    assert list(mha(layers=layers, layer_partition=partition).layer_cuts()) == cuts


def test_layers_that_differ_are_groups() -> None:
    geometry = KVGeometry(
        (LayerGroup((0, 4), 8, 2, 1024, dtype="bfloat16", dims="128"), LayerGroup((4, 6), 2, 2, 512, dtype="int8")),
        layer_partition=3,
    )
    assert geometry.layers == (0, 6)
    assert geometry.layer_count == 6
    assert geometry.dtype == "bfloat16+int8"
    assert geometry.token_bytes == 4 * 4 * 1024 + 2 * 512
    assert geometry.layer_cuts() == ((0, 3), (3, 4), (4, 6))


def test_anchor_is_the_first_shard() -> None:
    assert mha(layer_partition=8, head_group=2).anchor(64).suffix.endswith("_L0-8_H0")
    assert KVGeometry.mla(61, latent_dim=512, rope_dim=64, dtype="bfloat16").anchor(64).suffix.endswith("_L0-61")


def test_descriptions_are_json() -> None:
    assert json.loads(json.dumps(mha().describe())) == mha().describe()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layers": 0}, "layers"),
        ({"layers": -1}, "layers"),
        ({"layers": (3, 3)}, "empty"),
        ({"layers": (3, 2)}, "empty"),
        ({"layers": (1, 2, 3)}, "layers"),
        ({"layers": 10**6}, "layers"),
        ({"layers": True}, "layers"),
        ({"kv_heads": 0}, "kv_heads"),
        ({"kv_heads": 2.0}, "kv_heads"),
        ({"head_dim": 0}, "head_dim"),
        ({"head_dim": 2**41}, "head_dim"),
        ({"head_group": 0}, "head_group"),
        ({"head_group": 3}, "use head_group=2"),
        ({"head_group": 16}, "use head_group=8"),
        ({"dtype": "float4"}, "row_bytes"),
        ({"dtype": "a b", "row_bytes": 3}, "dtype"),
        ({"row_bytes": 0}, "row_bytes"),
        ({"layer_partition": 0}, "layer_partition"),
    ],
)
def test_geometries_that_cannot_be_say_why(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(GeometryError, match=words):
        mha(**changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "exactly one"),
        ({"page_bytes": 1, "cell_bytes": 1}, "exactly one"),
        ({"page_bytes": 10, "layers": 4}, "use 12"),
        ({"page_bytes": 0}, "page_bytes"),
        ({"cell_bytes": 1, "engine": "a/b"}, "engine"),
        ({"cell_bytes": 1, "backend": ""}, "backend"),
        ({"cell_bytes": 1, "version": "x" * 65}, "version"),
        ({"cell_bytes": 1, "shape": "(2, 3)"}, "shape"),
        ({"cell_bytes": 1, "head_groups": 0}, "head_groups"),
    ],
)
def test_opaque_geometries_are_checked(changes: dict[str, Any], words: str) -> None:
    fields: dict[str, Any] = {"engine": "e", "backend": "b", "version": "1", "shape": "s"}
    with pytest.raises(GeometryError, match=words):
        KVGeometry.opaque(**(fields | changes))


GROUP = LayerGroup((0, 2), 2, 1, 64)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"groups": ()}, "at least one"),
        ({"groups": [GROUP]}, "tuple"),
        ({"groups": (GROUP, GROUP)}, "gap or overlap"),
        ({"groups": (GROUP, LayerGroup((3, 4), 2, 1, 64))}, "gap or overlap"),
        ({"groups": (GROUP,), "format": "canonical-v2"}, "format"),
        ({"groups": (GROUP,), "format": "opaque:a/b/c"}, "format"),
        ({"groups": (GROUP,), "format": "opaque:a/b/c/d e"}, "opaque format"),
        ({"groups": (GROUP,), "format": None}, "format"),
    ],
)
def test_group_lists_and_formats_are_checked(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(GeometryError, match=words):
        KVGeometry(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"token_bytes": 0},
        {"token_bytes": 1, "page_bytes": 1},
        {"token_bytes": -1},
        {"kv_heads": 0, "head_group": 1},
        {"kind": ""},
        {"dims": "a b"},
    ],
)
def test_cells_are_checked(fields: dict[str, Any]) -> None:
    with pytest.raises(GeometryError):
        LayerGroup(**({"layers": (0, 1), "kv_heads": 2, "head_group": 1, "token_bytes": 1} | fields))


def test_page_sizes_are_checked_where_bytes_are_asked() -> None:
    for ask in (mha().page_bytes, mha().digest, mha().record):
        with pytest.raises(InvalidInput, match="page_size"):
            ask(0)
