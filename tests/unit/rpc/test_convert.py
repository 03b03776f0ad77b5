"""Records and messages say the same; what a message has wrong is one clear error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.core.arenas import Run
from hicache.core.identity import Adapter, Namespace
from hicache.core.layout import KVGeometry, LayerGroup
from hicache.errors import GeometryError, InvalidInput, LimitExceeded, NamespaceError, ProtocolMismatch
from hicache.events import Cleared, Removed, Stored
from hicache.records import MissReason, Tier
from hicache.rpc.convert import admin, identity, lifeline, session
from hicache.rpc.service import (
    ArenaView,
    Attached,
    Attachment,
    Counts,
    Draining,
    EventBatch,
    Finding,
    Leased,
    Limits,
    Loaded,
    Matched,
    Piece,
    Ping,
    Pinned,
    RequestScope,
    Reserved,
    Revoked,
    Target,
    Welcome,
)
from hicache.rpc.v1 import admin_pb2, identity_pb2, session_pb2

LABEL = st.text("abcXYZ019._+-", min_size=1, max_size=12)
TEXT = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), min_size=1, max_size=20).filter(str.strip)
U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
DIGEST = st.binary(min_size=16, max_size=64)
HASHES = st.lists(st.binary(min_size=32, max_size=32), max_size=5).map(tuple)


@st.composite
def geometries(draw: st.DrawFn) -> KVGeometry:
    groups, layer = [], draw(st.integers(0, 3))
    for _ in range(draw(st.integers(1, 3))):
        end = layer + draw(st.integers(1, 4))
        head_group = draw(st.integers(0, 4))
        heads = head_group * draw(st.integers(1, 3))
        size = draw(st.integers(1, 2**20))
        sizes = draw(st.sampled_from([(size, 0), (0, size)]))
        groups.append(LayerGroup((layer, end), heads, head_group, *sizes, draw(LABEL), draw(LABEL), draw(LABEL)))
        layer = end
    form = draw(st.sampled_from(["canonical-v1", "opaque:vllm/flash/1/2x16"]))
    return KVGeometry(tuple(groups), format=form, layer_partition=draw(st.none() | st.integers(1, 20)))


@st.composite
def namespaces(draw: st.DrawFn) -> Namespace:
    return Namespace(
        "org/" + draw(LABEL),
        revision=draw(st.none() | TEXT),
        geometry=draw(geometries()),
        page_size=draw(st.integers(1, 32_768)),
        hash="sha256",
        rope=draw(st.none() | st.dictionaries(TEXT, st.integers() | TEXT | st.booleans(), max_size=3)),
        scales=draw(st.none() | DIGEST),
        numerics=draw(st.none() | TEXT),
    )


SCOPES = st.builds(RequestScope, st.none() | st.builds(Adapter, TEXT, st.none() | DIGEST), st.none() | TEXT)
LIMITS = st.builds(Limits, U64, U64, U64, U64, U64, st.floats(0, 1e9), U64)
RUNS = st.lists(st.builds(Run, U64, U64, U64), max_size=3).map(tuple)
ARENAS = st.lists(st.builds(ArenaView, U64, U64, U64, RUNS, st.booleans()), max_size=3).map(tuple)
TIERS = st.sampled_from(Tier)


@st.composite
def stored(draw: st.DrawFn) -> Stored:
    hashes = draw(HASHES)
    parent = draw(st.none() | st.binary(min_size=32, max_size=32))
    return Stored(draw(DIGEST), draw(U64), draw(TIERS), hashes, parent, draw(U32), b"", draw(st.binary(max_size=64)))


EVENTS = stored() | st.builds(Removed, DIGEST, U64, TIERS, HASHES, TEXT) | st.builds(Cleared, DIGEST, U64)
BATCHES = st.builds(EventBatch, U64, U64, st.lists(EVENTS, max_size=3).map(tuple), U64, st.booleans(), st.booleans())


@st.composite
def attachments(draw: st.DrawFn) -> Attachment:
    stages = tuple(sorted(draw(st.sets(st.integers(0, 99), max_size=4))))
    size = draw(st.integers(1, 8))
    return Attachment(
        number=draw(st.integers(1, 2**32 - 1)),
        namespace=draw(namespaces()),
        group=draw(st.text(max_size=9)),
        tp_rank=draw(st.integers(0, size - 1)),
        tp_size=size,
        pp_first_layers=stages,
        pp_rank=draw(st.integers(0, max(len(stages), 1) - 1)),
        pool_bytes=draw(U64),
        streamed=draw(st.booleans()),
        worker=draw(st.booleans()),
    )


def again(message: Any) -> Any:
    """The message as it arrives."""
    return type(message).FromString(message.SerializeToString())


def same(encode: Callable[[Any], Any], decode: Callable[[Any], Any]) -> Callable[[Any], None]:
    def check(record: Any) -> None:
        assert decode(again(encode(record))) == record

    return check


ROUND_TRIPS: dict[str, tuple[st.SearchStrategy[Any], Callable[[Any], None]]] = {
    "geometry": (geometries(), same(identity.encode_geometry, identity.decode_geometry)),
    "namespace": (namespaces(), same(identity.encode_namespace, identity.decode_namespace)),
    "scope": (SCOPES, same(identity.encode_scope, identity.decode_scope)),
    "limits": (LIMITS, same(session.encode_limits, session.decode_limits)),
    "welcome": (
        st.builds(Welcome, TEXT, DIGEST, U64, LIMITS, st.none() | TEXT, st.lists(TEXT, max_size=2).map(tuple)),
        same(lambda welcome: session.encode_welcome(welcome, 1), session.decode_welcome),
    ),
    "attachment": (attachments(), same(session.encode_attachment, session.decode_attachment)),
    "attached": (
        st.builds(Attached, U32, U64, U64, DIGEST, ARENAS, U64, st.lists(TEXT, max_size=2).map(tuple)),
        same(session.encode_attached, session.decode_attached),
    ),
    "matched": (st.builds(Matched, U32, U32, U32, U64), same(session.encode_matched, session.decode_matched)),
    "leased": (
        st.builds(Leased, U64, U32, U32, DIGEST, DIGEST, st.booleans(), U64),
        same(session.encode_leased, session.decode_leased),
    ),
    "loaded": (st.builds(Loaded, DIGEST, DIGEST, U32), same(session.encode_loaded, session.decode_loaded)),
    "reserved": (st.builds(Reserved, DIGEST, DIGEST, U32), same(session.encode_reserved, session.decode_reserved)),
    "counts": (
        st.builds(Counts, U32, U32, U32, st.dictionaries(st.sampled_from(MissReason), U32, max_size=4)),
        same(session.encode_counts, session.decode_counts),
    ),
    "notice": (
        st.builds(Revoked, st.lists(U64).map(tuple), TEXT) | st.builds(Draining, st.integers(0, 9999).map(float)),
        same(session.encode_notice, session.decode_notice),
    ),
    "target": (
        st.builds(Target, st.binary(min_size=16, max_size=16), st.just(""), SCOPES, st.none() | TEXT)
        | st.builds(Target, st.just(b""), TEXT, SCOPES, st.none() | TEXT),
        same(admin.encode_target, admin.decode_target),
    ),
    "ping": (
        st.builds(Ping, TEXT, DIGEST, st.floats(0, 1e9), st.booleans(), st.lists(TEXT).map(tuple), st.none() | TEXT),
        same(admin.encode_ping, admin.decode_ping),
    ),
    "pinned": (st.builds(Pinned, TEXT, U32, U64, U32), same(admin.encode_pinned, admin.decode_pinned)),
    "held": (
        st.builds(
            lambda pages, **rest: Pinned(pages=pages, of_pages=pages, **rest),
            U32,
            name=TEXT,
            bytes=U64,
            hard=st.booleans(),
            tenant=st.none() | TEXT,
            namespace_digest=DIGEST,
            seconds_left=st.floats(0, 1e9),
        ),
        same(admin.encode_held, admin.decode_held),
    ),
    "finding": (st.builds(Finding, TEXT, st.booleans(), TEXT), same(admin.encode_finding, admin.decode_finding)),
    "event": (EVENTS, same(admin.encode_event, admin.decode_event)),
    "batch": (BATCHES, same(admin.encode_batch, admin.decode_batch)),
}


@pytest.mark.parametrize("what", ROUND_TRIPS)
@given(data=st.data())
def test_a_record_comes_back_as_it_was(what: str, data: st.DataObject) -> None:
    records, check = ROUND_TRIPS[what]
    check(data.draw(records))


@given(one=namespaces(), other=namespaces())
def test_namespaces_that_arrive_name_the_same_pages(one: Namespace, other: Namespace) -> None:
    """The digest, which is computed on each side, is equal exactly for equal namespaces."""
    arrived = identity.decode_namespace(again(identity.encode_namespace(one)))
    assert arrived.digest == one.digest
    assert (arrived.digest == other.digest) == (one == other)


def attach(**changes: Any) -> session_pb2.Attach:
    geometry = KVGeometry.mha(layers=2, kv_heads=4, head_dim=8, dtype="float16")
    namespace = Namespace("org/tiny", geometry=geometry, page_size=16, hash="sha256")
    message = session.encode_attachment(Attachment(1, namespace))
    for path, value in changes.items():
        *parts, last = path.split("__")
        target = message
        for part in parts:
            target = getattr(target, part)
        setattr(target, last, value)
    return message


@pytest.mark.parametrize(
    ("changes", "kind", "text"),
    [
        ({"attachment": 0}, InvalidInput, "above 0"),
        ({"namespace__hash": "xxh3_128"}, NamespaceError, "hash='sha256'"),
        ({"namespace__hash": ""}, NamespaceError, "hash='sha256'"),
        ({"namespace__model": ""}, NamespaceError, "model is empty"),
        ({"namespace__model": "a\x00b"}, NamespaceError, "control character"),
        ({"namespace__model": "x" * 5000}, NamespaceError, "at most 4096"),
        ({"namespace__revision": ""}, NamespaceError, "revision is empty"),
        ({"namespace__page_size": 0}, NamespaceError, "page_size"),
        ({"namespace__page_size": 40_000}, NamespaceError, "page_size"),
        ({"namespace__rope": "[1]"}, NamespaceError, "rope"),
        ({"namespace__rope": "{" * 1000}, NamespaceError, "rope"),
        ({"namespace__rope": '{"a":' + "1" * 70_000 + "}"}, NamespaceError, "at most 65536"),
        ({"namespace__scales": b"short"}, NamespaceError, "scales"),
        ({"namespace__geometry__format": "mine"}, GeometryError, "format"),
        ({"namespace__geometry__layer_partition": 0}, GeometryError, "layer_partition"),
        ({"tp_rank": 1}, GeometryError, "tp_rank 1 of 1"),
        ({"tp_size": 4, "tp_rank": 4}, GeometryError, "ranks are 0 to 3"),
        ({"tp_size": 5000}, GeometryError, "at most 1024"),
        ({"pp_rank": 1}, GeometryError, "first layer of each stage"),
        ({"group": "g" * 257}, InvalidInput, "256"),
        ({"group": "é" * 200}, InvalidInput, "256"),
    ],
)
def test_an_attachment_with_a_wrong_field_is_refused_in_words(
    changes: dict[str, Any], kind: type[InvalidInput], text: str
) -> None:
    with pytest.raises(kind, match=text) as caught:
        session.decode_attachment(again(attach(**changes)))
    assert type(caught.value) is kind


def test_an_attachment_without_a_namespace_or_geometry_is_refused() -> None:
    with pytest.raises(NamespaceError, match="hash"):
        session.decode_attachment(session_pb2.Attach(attachment=1))
    message = attach()
    message.namespace.ClearField("geometry")
    with pytest.raises(NamespaceError, match="no geometry"):
        session.decode_attachment(message)
    message.namespace.geometry.format = "canonical-v1"
    with pytest.raises(GeometryError, match="at least one layer group"):
        session.decode_attachment(message)


def test_many_layer_groups_are_refused_before_they_cost_anything() -> None:
    groups = [identity_pb2.LayerGroup()] * 5000
    with pytest.raises(GeometryError, match="5000 layer groups: at most 4096"):
        identity.decode_geometry(identity_pb2.Geometry(groups=groups))


def test_tp_size_zero_is_one_rank() -> None:
    assert session.decode_attachment(attach(tp_size=0)).tp_size == 1


def test_fields_of_a_newer_client_are_ignored() -> None:
    """A field that is not known here does not make a message bad."""
    data = attach().SerializeToString() + bytes([0xC2, 0x3E, 3]) + b"new"  # field 1000, of bytes
    assert session.decode_attachment(session_pb2.Attach.FromString(data)).namespace.model == "org/tiny"


def test_glued_items_have_whole_items_and_a_limit() -> None:
    assert session.check_glued(bytes(64), 32, "page hashes", most=2) == bytes(64)
    with pytest.raises(InvalidInput, match="65 bytes: a multiple of 32"):
        session.check_glued(bytes(65), 32, "page hashes")
    with pytest.raises(LimitExceeded, match="3 page hashes: the limit is 2"):
        session.check_glued(bytes(96), 32, "page hashes", most=2)


def test_a_miss_reason_of_a_newer_service_keeps_the_sum() -> None:
    released = session_pb2.Released(asked=7, host=1, missed={"cold": 2, "gone fishing": 4})
    assert session.decode_counts(released).missed == {MissReason.COLD: 6}


def test_a_notice_of_a_newer_service_is_none() -> None:
    assert session.decode_notice(session_pb2.Reply(echoed=session_pb2.Echoed())) is None


@pytest.mark.parametrize(
    ("target", "text"),
    [
        (admin_pb2.Target(), "names no model"),
        (admin_pb2.Target(namespace_digest=b"short"), "5 bytes: it has 16"),
        (
            admin_pb2.Target(model="m", scope=identity_pb2.Scope(adapter=identity_pb2.Adapter())),
            "adapter name is empty",
        ),
    ],
)
def test_a_target_that_names_nothing_is_refused(target: admin_pb2.Target, text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        admin.decode_target(target)


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), 1e12])
def test_seconds_that_are_no_duration_are_refused(value: float) -> None:
    with pytest.raises(InvalidInput, match="no duration"):
        admin.check_seconds(value, "ttl_seconds")


@pytest.mark.parametrize(
    "event",
    [
        admin_pb2.ResidencyEvent(),
        admin_pb2.ResidencyEvent(stored=admin_pb2.PagesStored(tier=admin_pb2.TIER_UNSPECIFIED)),
        admin_pb2.ResidencyEvent(removed=admin_pb2.PagesRemoved(tier=admin_pb2.TIER_HOST, page_hashes=b"cut")),
    ],
    ids=["no change", "no tier", "cut hashes"],
)
def test_an_event_that_says_nothing_is_refused(event: admin_pb2.ResidencyEvent) -> None:
    with pytest.raises(InvalidInput):
        admin.decode_event(event)


def test_symbols_of_a_tree_of_hashes_do_not_travel() -> None:
    """They would only be the hashes once more."""
    event = Stored(bytes(16), 1, Tier.HOST, (bytes(32),), None, 0, bytes(32), b"tokens")
    assert admin.decode_event(admin.encode_event(event)) == replace(event, symbols=b"")


@given(number=U64, more=st.booleans(), page=U32, offset=U64, data=st.binary(max_size=300))
def test_a_piece_of_a_page_is_the_message_that_protobuf_would_make(
    number: int, more: bool, page: int, offset: int, data: bytes
) -> None:
    """It is put together by hand, to copy less."""
    made = session_pb2.OpenResponse.FromString(
        session.encode_piece(number, Piece(page, offset, memoryview(data)), more=more)
    )
    content = session_pb2.Bytes(page=page, offset=offset, data=data)
    assert made == session_pb2.OpenResponse(replies=[session_pb2.Reply(id=number, more=more, bytes=content)])
    assert session.decode_piece(made.replies[0].bytes) == Piece(page, offset, data)


# ---- the lifeline


@given(memory=st.integers(1, 2**64 - 1), size=U64, error=TEXT, finished=st.booleans())
def test_packets_of_the_lifeline_come_back_as_they_were(memory: int, size: int, error: str, finished: bool) -> None:
    assert lifeline.decode_request(lifeline.encode_request(memory, finished=finished)) == (memory, finished)
    assert lifeline.decode_reply(lifeline.encode_reply(memory, size=size, error=error)) == (memory, size, error)
    key, boot = bytes(16), b"b" * 16
    assert lifeline.decode_greeting(lifeline.encode_greeting(key, boot)) == (key, boot)


@given(packet=st.binary(max_size=64))
def test_garbage_on_the_lifeline_is_one_kind_of_error(packet: bytes) -> None:
    for decode in (lifeline.decode_greeting, lifeline.decode_request, lifeline.decode_reply):
        try:
            decode(packet)
        except (InvalidInput, ProtocolMismatch):
            continue


def test_a_greeting_of_another_version_or_form_is_refused() -> None:
    from hicache.rpc.v1 import lifeline_pb2

    with pytest.raises(ProtocolMismatch, match="version 2"):
        lifeline.decode_greeting(lifeline_pb2.LifelineGreeting(version=2).SerializeToString())
    with pytest.raises(InvalidInput, match="16 bytes"):
        lifeline.decode_greeting(lifeline_pb2.LifelineGreeting(version=1, key=b"k").SerializeToString())
    with pytest.raises(InvalidInput, match="without an id"):
        lifeline.decode_request(b"")


def test_a_long_error_fits_into_a_packet() -> None:
    assert (
        len(lifeline.encode_reply(2**64 - 1, size=2**64 - 1, error="\U0001f600" * 100_000)) <= lifeline.LIFELINE_PACKET
    )
