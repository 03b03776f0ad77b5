from __future__ import annotations

import pytest

from hicache.core.layout import KVGeometry, LayerGroup
from hicache.errors import GeometryError
from hicache.memory.layout import LAYOUTS, PageLayout, layout_axes


def test_a_llama_page_has_the_bytes_of_its_geometry() -> None:
    geometry = KVGeometry.mha(32, kv_heads=8, head_dim=128, dtype="bfloat16", head_group=2)
    page = PageLayout.of(geometry, 64)
    assert page.page_bytes == geometry.page_bytes(64) == 64 * 131_072
    assert page.canonical_shape == (4, 32, 2, 64, 2, 256)
    assert (page.layer_bytes, page.plane_bytes, page.element_bytes) == (262_144, 131_072, 2)


def test_latent_pages_have_one_plane_and_no_heads() -> None:
    geometry = KVGeometry.mla(4, latent_dim=512, rope_dim=64, dtype="float8_e4m3fn")
    page = PageLayout.of(geometry, 16)
    assert page.canonical_shape == (1, 4, 1, 16, 1, 576)
    assert page.page_bytes == geometry.page_bytes(16)
    assert layout_axes("layer_first", page) == ("layer", "slot", "token", "dim")
    assert layout_axes("page_first", page) == ("slot", "layer", "token", "dim")


@pytest.mark.parametrize(
    "geometry",
    [
        KVGeometry.opaque(engine="e", backend="b", version="1", shape="x", page_bytes=4096, layers=4),
        KVGeometry(
            (
                LayerGroup((0, 2), 4, 4, 2 * 4 * 64, dims="32"),
                LayerGroup((2, 4), 2, 2, 2 * 2 * 64, dims="32"),
            )
        ),
    ],
    ids=["opaque", "layers differ"],
)
def test_pages_that_have_no_common_layers_are_one_run(geometry: KVGeometry) -> None:
    page = PageLayout.of(geometry, 16)
    assert page.kind == "opaque"
    assert page.page_bytes == geometry.page_bytes(16)
    with pytest.raises(GeometryError, match='use layout "opaque"'):
        layout_axes("layer_first", page)


def test_an_unknown_layout_is_refused_with_those_that_exist() -> None:
    page = PageLayout.of(KVGeometry.mha(2, kv_heads=2, head_dim=8, dtype="float16"), 4)
    with pytest.raises(GeometryError, match="unknown device layout 'token_first': use one of layer_first, page_first"):
        layout_axes("token_first", page)


@pytest.mark.case("PLUG-2")
@pytest.mark.parametrize(
    "other",
    [
        KVGeometry.mha(4, kv_heads=1, head_dim=256, dtype="bfloat16"),
        KVGeometry.mha(4, kv_heads=2, head_dim=128, dtype="float16"),
        KVGeometry.mha(4, kv_heads=2, head_dim=128, dtype="bfloat16", head_group=1),
        KVGeometry.mha(8, kv_heads=1, head_dim=128, dtype="bfloat16"),
    ],
    ids=["heads", "dtype", "head group", "layers"],
)
def test_equal_bytes_do_not_make_equal_layouts(other: KVGeometry) -> None:
    geometry = KVGeometry.mha(4, kv_heads=2, head_dim=128, dtype="bfloat16")
    assert other.page_bytes(16) == geometry.page_bytes(16)
    assert PageLayout.of(other, 16) != PageLayout.of(geometry, 16)


def test_the_table_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        LAYOUTS["mine"] = ("slot",)  # type: ignore[index]
