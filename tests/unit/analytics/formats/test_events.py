"""Requests that are worked out of KV events."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import hicache
from hicache.analytics.formats import chains, events
from hicache.analytics.traces import Opening
from hicache.cli.events import documents
from hicache.errors import TraceError
from hicache.events import Cleared, Event, Removed, Stored
from hicache.memory.writer import READY
from hicache.rpc.service import EventBatch
from hicache.sidecar.kv_wire import WireFormat

ROOT = 1_777_312_800.0


def stored(hashes: list[Any], parent: Any = None, medium: str | None = "GPU", **more: Any) -> dict[str, Any]:
    fields = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "token_ids": []}
    return fields | {"block_size": 16, "medium": medium} | more


def removed(hashes: list[Any], medium: str | None = "GPU") -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium}


def batch(at: float, *events: Any) -> list[Any]:
    return [ROOT + at, list(events), None]


def as_array(event: dict[str, Any]) -> list[Any]:
    if event["type"] == "BlockRemoved":
        return ["BlockRemoved", event["block_hashes"], event["medium"]]
    names = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium")
    return ["BlockStored", *(event.get(name) for name in names)]


def requests(path: Path, **options: Any) -> list[tuple[float, list[int], int]]:
    found = list(Opening(form="kv-events", **options).open([path]))
    return [(round(request.time, 6), request.ids.tolist(), request.input_tokens) for request in found]


def from_lines(folder: Path, *entries: Any, **options: Any) -> list[tuple[float, list[int], int]]:
    path = folder / "events.jsonl"
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return requests(path, **options)


def from_messages(folder: Path, *entries: Any, **options: Any) -> list[tuple[float, list[int], int]]:
    path = folder / "events.msgpack"
    path.write_bytes(b"".join(msgspec.msgpack.encode(entry) for entry in entries))
    return requests(path, **options)


HISTORY = (
    batch(0, stored([11, 12]), stored([13], 12)),  # one prompt of three pages, told in two
    batch(10, stored([14], 12)),  # another one, that found two
    batch(20, stored([11, 12], None, "CPU")),  # copies
    batch(30, removed([13, 12, 11, 14])),
    batch(40, stored([11, 12], None, "GPU")),  # brought back up: no prefill
    batch(50, removed([12, 11]), removed([12, 11], "CPU")),
    batch(60, stored([11, 12])),  # computed again
)
EXPECTED = [(0.0, [0, 1, 2], 48), (10.0, [0, 1, 3], 48), (60.0, [0, 1], 32)]


@pytest.mark.parametrize("write", [from_lines, from_messages])
@pytest.mark.parametrize("form", ["maps", "arrays", "outer map"])
def test_prompts_are_chains_of_what_was_computed(tmp_path: Path, write: Any, form: str) -> None:
    entries: list[Any] = list(HISTORY)
    if form == "arrays":
        entries = [[ts, [as_array(event) for event in events], rank] for ts, events, rank in HISTORY]
    elif form == "outer map":
        entries = [{"ts": ts, "events": events, "data_parallel_rank": rank} for ts, events, rank in HISTORY]
    assert write(tmp_path, *entries) == EXPECTED


def test_hashes_as_bytes_and_of_either_sign(tmp_path: Path) -> None:
    wide = [batch(0, stored([b"\x01" * 32, b"\x02" * 32]), stored([b"\x03" * 32], b"\x02" * 32))]
    assert from_messages(tmp_path, *wide) == [(0.0, [0, 1, 2], 48)]
    signs = [batch(0, stored([2**64 - 5, 7])), batch(10, stored([8], -5))]
    assert from_lines(tmp_path, *signs) == [(0.0, [0, 1], 32), (10.0, [0, 2], 32)]


def test_a_request_grows_while_it_is_computed_and_decodes(tmp_path: Path) -> None:
    chunks = [batch(0.0, stored([1, 2])), batch(0.5, stored([3], 2)), batch(2.0, stored([4], 3))]
    turn = batch(9.0, stored([5], 4))  # the next turn comes when people have read
    assert from_lines(tmp_path, *chunks, turn) == [(0.0, [0, 1, 2, 3], 64), (9.0, [0, 1, 2, 3, 4], 80)]


def test_requests_come_in_the_order_of_their_begins(tmp_path: Path) -> None:
    """A long one begins first and ends last."""
    long = [batch(at * 1.5, stored([100 + at], 99 + at if at else None)) for at in range(6)]
    short = batch(2.0, stored([7]))
    entries = sorted([*long, short], key=lambda entry: entry[0])
    assert [time for time, *_ in from_lines(tmp_path, *entries)] == [0.0, 2.0]


def test_the_begin_of_a_chain_may_be_unknown(tmp_path: Path) -> None:
    assert from_lines(tmp_path, batch(0, stored([5, 6], 4)), batch(9, stored([4], 6))) == [
        (0.0, [0, 1], 32),
        (9.0, [0, 1, 2], 48),
    ]
    # A page that is its own past, as only a broken capture has it, leads nowhere.
    assert from_lines(tmp_path, batch(0, stored([5], 5)), batch(9, stored([6, 6], 6))) == [
        (0.0, [0], 16),
        (9.0, [1], 16),
    ]


def test_other_groups_and_kinds_are_passed_over(tmp_path: Path) -> None:
    window = stored([1, 2], group_idx=1)
    assert from_lines(tmp_path, batch(0, stored([1, 2], group_idx=0), window, {"type": "News"})) == [(0.0, [0, 1], 32)]


def test_all_blocks_cleared(tmp_path: Path) -> None:
    cleared, copy = {"type": "AllBlocksCleared"}, stored([1], None, "CPU")
    assert len(from_lines(tmp_path, batch(0, stored([1])), batch(5, cleared), batch(9, copy))) == 2
    assert len(from_lines(tmp_path, batch(0, stored([1])), batch(9, copy))) == 1


def test_an_engine_computes_a_last_page_again(tmp_path: Path) -> None:
    """It needs what follows the last token, also where all pages are there: the request is seen by that."""
    again = batch(9, stored([3], 2))
    assert from_lines(tmp_path, batch(0, stored([1, 2, 3])), again) == [(0.0, [0, 1, 2], 48), (9.0, [0, 1, 2], 48)]


def test_what_vllm_published(repository: Path) -> None:
    """Of vLLM 0.32 itself, blocks of 32 tokens: 128 tokens and 64 of two kinds, the first once more, and 100 others."""
    found = list(Opening().open([repository / "tests" / "data" / "vllm-0.32-kv-events.msgpack"]))
    assert [request.ids.tolist() for request in found] == [
        [0, 1, 2, 3, 4, 5],
        [0, 1, 2, 3, 6, 7],
        [0, 1, 2, 3, 4, 5],
        [0, 1, 2, 3, 8, 9, 10],
    ]
    assert {request.unit for request in found} == {32}
    assert [round(request.time) for request in found] == [0, 3, 5, 8]


def test_each_rank_computes_for_itself(tmp_path: Path) -> None:
    """The same prompt at two ranks: the second did not find what the first has, and it is the same prompt."""
    first, second = batch(0, stored([1, 2])), batch(5, stored([1, 2]))
    second[2] = 1
    cleared = batch(9, {"type": "AllBlocksCleared"})
    assert from_lines(tmp_path, first, second, cleared, batch(20, stored([1]))) == [
        (0.0, [0, 1], 32),
        (5.0, [0, 1], 32),
        (20.0, [0], 16),
    ]


def ours(kind: str, at: float, pages: list[str], **more: Any) -> dict[str, Any]:
    event = {"event": kind, "tier": "device", "first_page": 0, "page_hashes": pages, "namespace": "ab", "generation": 1}
    return event | {"parent_hash": None, "number": 1, "timestamp_ms": (ROOT + at) * 1000, "snapshot": False} | more


def test_what_hicache_events_prints(tmp_path: Path) -> None:
    entries = [
        ours("stored", 0, ["aa", "bb"], snapshot=True),
        {"event": "snapshot_end", "number": 3, "timestamp_ms": ROOT * 1000},
        ours("stored", 1, ["cc"], parent_hash="bb", tokens=[1] * 32),
        ours("stored", 2, ["cc"], parent_hash="bb", tier="host"),
        ours("removed", 3, ["cc"], reason="evicted"),
        ours("stored", 9, ["aa"], generation=2),
        {"event": "cleared", "namespace": "ab", "generation": 1, "number": 9, "timestamp_ms": (ROOT + 10) * 1000},
        ours("stored", 20, ["aa"]),
    ]
    # 96: pages of 32 tokens, as the event's own tokens tell; the others' size is told by --unit
    assert from_lines(tmp_path, *entries, unit=16) == [(0.0, [0, 1, 2], 96), (8.0, [3], 16), (19.0, [0], 16)]
    with pytest.raises(TraceError, match="line 1: events were lost here"):
        from_lines(tmp_path, {"event": "lost", "lost": 5, "number": 1, "timestamp_ms": 5})


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ({"a": 1}, "no batch of KV events"),
        ([ROOT, [{"type": "BlockStored", "block_size": 16}], None], "hashes of pages are missing"),
        (batch(0, stored([1], block_size=0)), "block_size 0 is no number"),
        (batch(0, stored([1], block_size=True)), "block_size True"),
        (batch(0, stored([1.5])), "1.5 is no hash"),
        (batch(0, stored([1], parent=[])), r"\[\] is no hash"),
        (batch(0, 5), "a KV event is a map"),
        ([-1.0, [], None], "-1.0 is no time"),
        (["now", [], None], "'now' is no time"),
        (ours("stored", 0, ["aa"]) | {"event": "moved"}, "event 'moved' is unknown"),
    ],
)
def test_broken_events(tmp_path: Path, entry: Any, problem: str) -> None:
    with pytest.raises(TraceError, match=f"line 2: .*{problem}"):
        from_lines(tmp_path, batch(0, stored([1])), entry)
    assert len(from_lines(tmp_path, batch(0, stored([1])), entry, skip_bad=True)) == 1


def test_messages_that_break_off(tmp_path: Path) -> None:
    path = tmp_path / "events.msgpack"
    whole = msgspec.msgpack.encode(batch(0, stored([1, 2])))
    for rest, problem in ((whole[:-3], "the last message breaks off"), (b"\xc1", "no MessagePack")):
        path.write_bytes(whole + rest)
        with pytest.raises(TraceError, match=f"behind byte {len(whole)}: .*{problem}"):
            requests(path)
        assert requests(path, skip_bad=True) == [(0.0, [0, 1], 32)]
    path.write_bytes(whole + b"\xdd\xff\xff\xff\xff")  # an array of four billion values
    with pytest.raises(TraceError, match="breaks off"):
        requests(path)


def test_a_chain_that_no_prompt_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MAX_TOKENS", 32)
    entries = [batch(0, stored([1, 2])), batch(9, stored([3], 2)), batch(20, stored([4], 1))]
    with pytest.raises(TraceError, match="line 2: its chain of 3 pages is longer than any prompt"):
        from_lines(tmp_path, *entries)
    assert [ids for _, ids, _ in from_lines(tmp_path, *entries, skip_bad=True)] == [[0, 1], [0, 2]]


def test_no_more_requests_are_open_than_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chains, "MOST_OPEN", 3)
    entries = [batch(0.001 * at, stored([at])) for at in range(10)]
    assert [ids for _, ids, _ in from_lines(tmp_path, *entries)] == [[at] for at in range(10)]


def real_events(prompts: list[list[int]], device: int | None) -> list[tuple[float, list[Event]]]:
    """What a cache tells while it answers prompts, ten seconds apart; and how many pages it computed."""
    geometry = hicache.KVGeometry.opaque(engine="e", backend="b", version="1", shape="s", page_bytes=1)
    namespace = hicache.Namespace(model="m", geometry=geometry, page_size=2)
    told = []
    with hicache.open(namespace, device=device, host=0, storage=None, bytes=False, events=True) as cache:
        listener = cache.events()
        for number, tokens in enumerate(prompts):
            with cache.request(np.array(tokens, np.uint32), logits=False) as request:
                request.load()
                request.allocate()
                request.commit(upto=len(tokens), ready=READY)
            found = [event for event in listener.drain() if isinstance(event, Stored | Removed | Cleared)]
            told.append((10.0 * number, found))
    return told


@pytest.mark.parametrize("form", ["hicache events --json", "the wire"])
@pytest.mark.parametrize("device", [None, 4])
def test_a_real_caches_events(tmp_path: Path, form: str, device: int | None) -> None:
    """What a cache computed for its prompts comes back as these prompts, but for those that it had all of."""
    head = [1, 2, 3, 4]
    prompts = [[*head, 5, 6], [*head, 7, 8], head, [9, 9, *head], [*head, 5, 6]]
    told = real_events(prompts, device)
    entries: list[Any] = []
    wire = WireFormat()
    for at, found in told:
        if form == "the wire":
            fields = [_on_the_wire(wire, event) for event in found]
            entries.append(msgspec.msgpack.decode(wire.batch(ROOT + at, fields, None)))
        else:
            entries += documents(EventBatch(1, int((ROOT + at) * 1000), tuple(found)))
    write = from_messages if form == "the wire" else from_lines
    found = write(tmp_path, *entries, unit=2)
    # With room for four pages the last prompt's own page was evicted by then; without limits it was all there.
    seen = prompts[:2] + prompts[3:4] + (prompts[4:] if device else [])
    assert [tokens for _, _, tokens in found] == [len(tokens) for tokens in seen]
    assert [at for at, *_ in found] == [
        10.0 * prompts.index(tokens) if at < 40 else 40.0 for tokens, (at, *_) in zip(seen, found, strict=True)
    ]
    assert found[1][1][:2] == found[0][1][:2]
    assert not set(found[2][1]) & set(found[0][1])
    if device:
        assert found[3][1] == found[0][1]


def _on_the_wire(wire: WireFormat, event: Event) -> Any:
    if isinstance(event, Stored):
        hashes = list(event.page_hashes)
        return {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": event.parent_hash, "block_size": 2}
    assert isinstance(event, Removed)
    return wire.removed(event.tier, event.page_hashes) | {"medium": "GPU"}  # type: ignore[operator]
