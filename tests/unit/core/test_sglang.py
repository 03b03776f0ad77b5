from __future__ import annotations

from typing import Any

import pytest

from hicache.core.sglang import sglang_ukv_digest
from hicache.errors import GeometryError

LLAMA: dict[str, Any] = {
    "model_id": "meta-llama/Llama-3.1-70B",
    "dtype": "bfloat16",
    "page_size": 64,
    "total_kv_heads": 8,
    "head_group": 8,
}
LATENT: dict[str, Any] = LLAMA | {"rank_replicated": True, "total_kv_heads": 0, "head_group": 0}


def test_digests_are_those_of_sglang(golden: dict[str, Any]) -> None:
    assert len(golden["sglang"]) == 3
    for vector in golden["sglang"]:
        digest = vector.pop("digest")
        assert sglang_ukv_digest(**vector) == digest


@pytest.mark.parametrize(
    "fields",
    [
        LLAMA | {"model_id": ""},
        LLAMA | {"head_group": 0},
        LLAMA | {"head_group": 3},
        LLAMA | {"total_kv_heads": 0, "rank_replicated": True},
        LATENT | {"total_kv_heads": 8},
    ],
)
def test_what_sglang_refuses_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(GeometryError):
        sglang_ukv_digest(**fields)
