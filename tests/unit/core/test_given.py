"""Numbers and dtypes of numpy and torch mean what they say; what is no number is refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hicache.core.cells import LayerGroup
from hicache.core.identity import Namespace
from hicache.core.layout import KVGeometry
from hicache.core.symbols import symbols
from hicache.errors import GeometryError, InvalidInput, NamespaceError
from hicache.units import whole_number


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (7, 7),
        (np.int8(-3), -3),
        (np.uint64(2**63), 2**63),
        (np.array(5), 5),
        (torch.tensor(6), 6),
        (True, None),
        (np.True_, None),
        (1.0, None),
        (np.float32(1), None),
        (np.array([1]), None),
        ("1", None),
        (None, None),
        (int, None),
    ],
)
def test_whole_numbers(value: object, number: int | None) -> None:
    assert whole_number(value) == number
    assert type(whole_number(value)) is type(number)


@pytest.mark.parametrize(
    "dtype", ["float16", torch.float16, np.float16, np.dtype("float16"), "torch.float16"], ids=range(5)
)
@pytest.mark.case("KEY-5")
def test_a_geometry_of_other_libraries_numbers_is_the_same_geometry(dtype: Any) -> None:
    plain = KVGeometry.mha(2, kv_heads=4, head_dim=16, dtype="float16", head_group=2, layer_partition=1)
    number: Any = np.int64
    given = KVGeometry.mha(
        number(2),
        kv_heads=number(4),
        head_dim=number(16),
        dtype=dtype,
        head_group=number(2),
        layer_partition=number(1),
    )
    assert given == plain
    assert given.digest(number(8)) == plain.digest(8)
    assert type(given.page_bytes(number(8))) is int
    latent = KVGeometry.mla(number(2), latent_dim=number(8), rope_dim=number(4), dtype=dtype)
    assert latent == KVGeometry.mla(2, latent_dim=8, rope_dim=4, dtype="float16")
    first = Namespace("m", geometry=given, page_size=number(8))
    assert first == Namespace("m", geometry=plain, page_size=8)
    assert type(first.page_size) is int


def test_bfloat16_is_torchs() -> None:
    dtype: Any = torch.bfloat16
    assert KVGeometry.mha(1, kv_heads=1, head_dim=8, dtype=dtype).dtype == "bfloat16"


@pytest.mark.parametrize("dtype", [float, None, 5, [], np.complex64])
def test_a_dtype_without_a_size_is_refused(dtype: Any) -> None:
    with pytest.raises(GeometryError, match=r"dtype .* has no known size"):
        KVGeometry.mha(1, kv_heads=1, head_dim=8, dtype=dtype)


def test_groups_keep_plain_numbers() -> None:
    number: Any = np.int64
    group = LayerGroup((number(0), number(2)), number(4), number(2), number(8))
    assert group == LayerGroup((0, 2), 4, 2, 8)
    assert all(type(value) is int for value in (*group.layers, group.kv_heads, group.head_group, group.token_bytes))
    assert group.record() == LayerGroup((0, 2), 4, 2, 8).record()


@pytest.mark.parametrize("value", [True, 2.0, "2", None])
def test_what_is_no_number_is_refused_by_name(value: Any) -> None:
    with pytest.raises(GeometryError, match="kv_heads"):
        KVGeometry.mha(1, kv_heads=value, head_dim=8, dtype="float16")
    with pytest.raises(NamespaceError, match="page_size"):
        Namespace("m", geometry=KVGeometry.mha(1, kv_heads=1, head_dim=8, dtype="float16"), page_size=value)


@pytest.mark.parametrize("tokens", [None, 5, {1, 2}, (token for token in (1, 2)), {1: 2}, object()])
def test_tokens_that_are_no_sequence_are_named(tokens: Any) -> None:
    with pytest.raises(InvalidInput, match=r"tokens are \w+: give a list or an array of token ids"):
        symbols(tokens, 4)
