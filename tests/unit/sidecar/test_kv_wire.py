from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hicache
from hicache.errors import InvalidInput
from hicache.events import Stored
from hicache.records import Tier
from hicache.sidecar.kv_wire import (
    AllBlocksCleared,
    BlockBatch,
    BlockRemoved,
    BlockStored,
    OtherEvent,
    WireFormat,
    decode_batch,
    short_hash,
)
from hicache.sidecar.residency import Scope

MHA = hicache.KVGeometry.mha(2, kv_heads=2, head_dim=8, dtype="float16")
MLA = hicache.KVGeometry.mla(2, latent_dim=8, rope_dim=8, dtype="float16")
SQL = hicache.Adapter("sql", digest=bytes(32))
# The hash of tokens 0 to 63 as SGLang 0.5.23 has it, and what it publishes for it.
PAGE = bytes.fromhex("fea7b32778ecbdd7adee1941e98c89cf96bbc762f5f1beb0be24e36a456fbbc5")
SHORT = -96911884851298857


def pack(value: object) -> bytes:
    return msgspec.msgpack.encode(value)


def scope(*, geometry: hicache.KVGeometry = MHA, adapter: hicache.Adapter | None = None, **separation: str) -> Scope:
    namespace = hicache.Namespace("example/m", geometry=geometry, page_size=2, hash="sha256")
    derived = namespace.derive(adapter=adapter, **separation)
    return Scope(1, None, derived.digest, 0, derived)


def event(tier: Tier = Tier.HOST) -> Stored:
    tokens = b"".join(token.to_bytes(4, "little") for token in (1, 2, 3, 2**32 - 1))
    return Stored(bytes(16), 0, tier, (b"\1" * 32, b"\2" * 32), PAGE, 1, b"", tokens)


STORED = BlockStored((b"\1" * 32, b"\2" * 32), PAGE, (1, 2, 3, 2**32 - 1), 2, "CPU")


def written(form: WireFormat, *events: object) -> bytes:
    return form.batch(12.5, list(events), 3)  # type: ignore[arg-type]


def test_the_short_hash_is_that_of_sglang() -> None:
    assert short_hash(PAGE) == SHORT == int.from_bytes(PAGE[:8], "big") - 2**64


# ---- what engines publish, written by hand


def test_maps_of_current_vllm_are_read() -> None:
    """Unsigned hashes become signed ones; fields that we have no name for are kept."""
    payload = pack(
        [
            1760000000.25,
            [
                {"type": "BlockRemoved", "block_hashes": [2**64 - 5], "medium": "GPU", "group_idx": 0},
                {
                    "type": "BlockStored",
                    "block_hashes": [2**63 + 7, 9],
                    "parent_block_hash": 2**64 - 5,
                    "token_ids": [1, 2, 3, 4],
                    "block_size": 2,
                    "lora_id": None,
                    "medium": "GPU",
                    "lora_name": "sql",
                    "extra_keys": [["sql"], ["sql"]],
                    "group_idx": 0,
                    "kv_cache_spec_kind": "full_attention",
                    "kv_cache_spec_sliding_window": None,
                },
            ],
            0,
        ]
    )
    more = {"extra_keys": [["sql"], ["sql"]], "group_idx": 0, "kv_cache_spec_kind": "full_attention"}
    assert decode_batch(payload) == BlockBatch(
        1760000000.25,
        (
            BlockRemoved((-5,), "GPU"),
            BlockStored((7 - 2**63, 9), -5, (1, 2, 3, 4), 2, "GPU", lora_name="sql", more=more),
        ),
        0,
    )


def test_arrays_of_older_vllm_are_read() -> None:
    """With and without the fields that came later, and with a rank or none."""
    payload = pack(
        [
            5.0,
            [
                ["BlockStored", [11, 12], None, [1, 2, 3, 4], 2, None],
                [
                    "BlockStored",
                    [b"\1" * 32],
                    b"\2" * 32,
                    [5, 6],
                    2,
                    None,
                    "CPU",
                    "sql",
                    None,
                    0,
                    "mla_attention",
                    None,
                ],
                ["BlockRemoved", [11]],
                ["BlockRemoved", [12], "FS", 1],
                ["AllBlocksCleared"],
            ],
        ]
    )
    assert decode_batch(payload) == BlockBatch(
        5.0,
        (
            BlockStored((11, 12), None, (1, 2, 3, 4), 2),
            BlockStored(
                (b"\1" * 32,),
                b"\2" * 32,
                (5, 6),
                2,
                "CPU",
                "sql",
                more={"group_idx": 0, "kv_cache_spec_kind": "mla_attention"},
            ),
            BlockRemoved((11,)),
            BlockRemoved((12,), "FS"),
            AllBlocksCleared(),
        ),
    )


def test_maps_of_sglang_are_read() -> None:
    """One page an event, its own words for media, a salt, and pairs of tokens where it hashes pairs."""
    stored = {
        "type": "BlockStored",
        "block_hashes": [SHORT],
        "parent_block_hash": None,
        "token_ids": [[1, 2], [2, 3]],
        "block_size": 2,
        "lora_id": None,
        "medium": "CPU_PINNED",
        "cache_salt": "pepper",
        "session_id": "s1",
    }
    payload = pack([7, [stored, {"type": "AllBlocksCleared"}], 1])
    expected = BlockStored(
        (SHORT,), None, ((1, 2), (2, 3)), 2, "CPU_PINNED", cache_salt="pepper", more={"session_id": "s1"}
    )
    assert decode_batch(payload) == BlockBatch(7.0, (expected, AllBlocksCleared()), 1)


def test_a_mapped_batch_is_read() -> None:
    payload = pack({"ts": 1.0, "events": [["AllBlocksCleared"]], "data_parallel_rank": 2})
    assert decode_batch(payload) == BlockBatch(1.0, (AllBlocksCleared(),), 2)


def test_events_and_media_that_are_not_known_are_not_taken_for_others() -> None:
    """A block in a medium nobody has heard of is in no GPU; an event of a later version is no clear."""
    payload = pack(
        [1.0, [["BlockFrobbed", 1, 2], {"type": "BlockRemoved", "block_hashes": [1], "medium": "TAPE"}], None]
    )
    assert decode_batch(payload).events == (OtherEvent("BlockFrobbed"), BlockRemoved((1,), "TAPE"))


# ---- what we publish


def test_the_examples_of_the_formats_are_true(repository: Path) -> None:
    """The page that implementers read quotes both encodings of one message."""
    document = "".join((repository / "proto" / "formats.md").read_text(encoding="utf-8").split())
    geometry = hicache.KVGeometry.mha(1, kv_heads=1, head_dim=1, dtype="float16")
    namespace = hicache.Namespace("m", geometry=geometry, page_size=2, hash="sha256").derive()
    tokens = b"\1\0\0\0\2\0\0\0"
    page_hash = namespace.hasher().extend(None, tokens, 1)
    assert page_hash.hex() in document
    for encoding in ("map", "array"):
        form = WireFormat(encoding=encoding, hashes="int64")  # type: ignore[arg-type]
        fields = form.stored(
            Stored(namespace.digest, 0, Tier.HOST, (page_hash,), None, 0, b"", tokens),
            Scope(1, None, namespace.digest, 0, namespace),
        )
        assert fields is not None
        assert form.batch(12.5, [fields], 0).hex() in document


@pytest.mark.parametrize("encoding", ["map", "array"])
def test_both_encodings_say_the_same(encoding: str) -> None:
    form = WireFormat(encoding=encoding)  # type: ignore[arg-type]
    payload = written(
        form,
        form.removed(Tier.STORAGE, [PAGE]),
        form.stored(event(), scope()),
        form.stored(event(), scope(adapter=SQL)),
        form.cleared(),
    )
    found = decode_batch(payload)
    assert (found.timestamp, found.dp_rank) == (12.5, 3)
    plain = [
        BlockStored(e.block_hashes, e.parent_block_hash, e.token_ids, e.block_size, e.medium, e.lora_name)
        if isinstance(e, BlockStored)
        else e
        for e in found.events
    ]
    with_adapter = BlockStored(*(getattr(STORED, name) for name in STORED.__slots__[:5]), lora_name="sql")
    assert plain == [BlockRemoved((PAGE,), "DISK"), STORED, with_adapter, AllBlocksCleared()]


def test_the_exact_bytes_of_a_map() -> None:
    """What a consumer of maps sees, field by field."""
    form = WireFormat(hashes="int64")
    outer = msgspec.msgpack.decode(written(form, form.stored(event(Tier.DEVICE), scope(salt="pepper", tenant="acme"))))
    assert outer == [
        12.5,
        [
            {
                "type": "BlockStored",
                "block_hashes": [0x0101010101010101, 0x0202020202020202],
                "parent_block_hash": SHORT,
                "token_ids": [1, 2, 3, 2**32 - 1],
                "block_size": 2,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "kv_cache_spec_kind": "full_attention",
                "model_name": "example/m",
            }
        ],
        3,
    ]


def test_the_exact_bytes_of_an_array() -> None:
    """As it was before maps: up to the medium, and on to the adapter only where there is one."""
    form = WireFormat(encoding="array", hashes="int64", salts=True)
    outer = msgspec.msgpack.decode(
        written(
            form,
            form.stored(event(), scope(geometry=MLA, salt="pepper")),
            form.stored(event(), scope(adapter=SQL)),
            form.removed(Tier.HOST, [PAGE]),
            form.cleared(),
        )
    )
    blocks = [0x0101010101010101, 0x0202020202020202]
    assert outer[1] == [
        ["BlockStored", blocks, SHORT, [1, 2, 3, 2**32 - 1], 2, None, "CPU"],
        ["BlockStored", blocks, SHORT, [1, 2, 3, 2**32 - 1], 2, None, "CPU", "sql"],
        ["BlockRemoved", [SHORT], "CPU"],
        ["AllBlocksCleared"],
    ]


def test_salts_and_tenants_are_told_only_where_that_is_switched_on() -> None:
    secret = scope(salt="pepper", tenant="acme")
    quiet = written(WireFormat(), WireFormat().stored(event(), secret))
    assert b"pepper" not in quiet
    assert b"acme" not in quiet
    open_form = WireFormat(salts=True)
    (found,) = decode_batch(written(open_form, open_form.stored(event(), secret))).events
    assert isinstance(found, BlockStored)
    assert (found.cache_salt, found.more["tenant_id"]) == ("pepper", "acme")


def test_what_kind_of_attention_it_is() -> None:
    for geometry, kind in ((MHA, "full_attention"), (MLA, "mla_attention")):
        fields = WireFormat().stored(event(), scope(geometry=geometry))
        assert fields is not None
        assert fields["kv_cache_spec_kind"] == kind


def test_media_have_the_names_they_are_given_and_tiers_without_one_are_left_out() -> None:
    form = WireFormat(media={Tier.HOST: "CPU_PINNED"})
    stored = form.stored(event(), scope())
    assert stored is not None
    assert stored["medium"] == "CPU_PINNED"
    assert form.stored(event(Tier.DEVICE), scope()) is None
    assert form.removed(Tier.STORAGE, [PAGE]) is None


# ---- what is no batch


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        pack(7),
        pack([1.0]),
        pack([1.0, {}]),
        pack(["now", []]),
        pack([1.0, [], "zero"]),
        pack([1.0, [7]]),
        pack([1.0, [[]]]),
        pack([1.0, [{"block_hashes": []}]]),
        pack([1.0, [{"type": "BlockStored", "token_ids": [], "block_size": 2}]]),
        pack([1.0, [["BlockStored", [1], None, [1], 0]]]),
        pack([1.0, [["BlockStored", [1.5], None, [1], 1]]]),
        pack([1.0, [["BlockStored", [True], None, [1], 1]]]),
        pack([1.0, [["BlockRemoved", 1]]]),
        pack([1.0, [["BlockRemoved", [1], 7]]]),
        pack({"events": []}),
        b"\x91" * 5000,
    ],
)
def test_what_is_no_batch_is_refused_in_words(payload: bytes) -> None:
    with pytest.raises(InvalidInput):
        decode_batch(payload)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_batch_or_are_refused(payload: bytes) -> None:
    with contextlib.suppress(InvalidInput):
        decode_batch(payload)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)
KINDS = st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "Other"])
NAMES = st.sampled_from(["block_hashes", "parent_block_hash", "token_ids", "block_size", "medium", "lora_name"])


@given(
    st.lists(
        st.builds(lambda kind, rest: [kind, *rest], KINDS, st.lists(JSON, max_size=8))
        | st.builds(lambda kind, rest: {"type": kind, **rest}, KINDS, st.dictionaries(NAMES, JSON, max_size=6)),
        max_size=3,
    )
)
def test_any_events_are_read_or_refused(events: list[object]) -> None:
    with contextlib.suppress(InvalidInput):
        assert len(decode_batch(pack([1.0, events, None])).events) == len(events)
