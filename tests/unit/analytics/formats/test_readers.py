"""Each format's reader: what it takes from a file, what it passes over, how a file is told from those of others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hicache.analytics.formats import dynamo
from hicache.analytics.formats.known import FORMATS, format_of
from hicache.analytics.formats.objects import RECORD
from hicache.analytics.trace import TraceRequest
from hicache.analytics.traces import Opening, Trace
from hicache.errors import TraceError

DYNAMO = "dynamo.request.trace.v1"


def write(folder: Path, content: bytes | str, name: str = "trace") -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def lines(*entries: Any) -> str:
    return "".join(json.dumps(entry) + "\n" for entry in entries)


def opened(path: Path, **options: Any) -> Trace:
    return Opening(**options).open([path])


def read(path: Path, **options: Any) -> list[TraceRequest]:
    return list(opened(path, **options))


def bailian(**changes: Any) -> dict[str, Any]:
    entry = {"chat_id": 159, "parent_chat_id": 55, "timestamp": 61.114, "input_length": 40, "output_length": 132}
    return entry | {"type": "text", "turn": 2, "hash_ids": [1089, 1090, 1091]} | changes


def request_end(at: float, hashes: list[int], **changes: Any) -> dict[str, Any]:
    replay = {"trace_block_size": 64, "input_length": 64 * len(hashes), "input_sequence_hashes": hashes}
    request = {"request_id": f"r{at}", "request_received_ms": at, "output_tokens": 16, "replay": replay} | changes
    return {"schema": DYNAMO, "event_type": "request_end", "event_time_unix_ms": at + 1000, "request": request}


def records(*rows: tuple[int, int, int, int]) -> bytes:
    return np.array(list(rows), RECORD).tobytes()


def test_bailian(tmp_path: Path) -> None:
    path = write(tmp_path, lines(bailian(), bailian(hash_ids=[1089, 1090], parent_chat_id=-1)))
    first, second = read(path)
    assert (first.time, first.unit, first.input_tokens, first.output_tokens) == (61.114, 16, 40, 132)
    assert first.ids.tolist() == [1089, 1090, 1091]
    assert (second.known_tokens, second.input_tokens) == (32, 40)  # a tail without an id
    assert first.details is not None
    assert second.details is not None
    assert (first.details.request, first.details.parent, first.details.kind, first.details.turn) == (
        *("159", "55", "text"),
        2,
    )
    assert second.details.parent == ""
    with pytest.raises(TraceError, match=r"3 hash_ids, but input_length 90 has 5 whole blocks of 16; .* --unit"):
        read(write(tmp_path, lines(bailian(input_length=90))))
    assert read(write(tmp_path, lines(bailian(input_length=90))), unit=32)[0].unit == 32


def test_dynamo(tmp_path: Path) -> None:
    wall = 1_777_312_800_000
    other = {"schema": DYNAMO, "event_type": "tool_end", "event_time_unix_ms": wall, "tool": {"tool_call_id": "x"}}
    payload = {"schema": DYNAMO, "event_type": "request_payload", "event_time_unix_ms": wall}
    late = request_end(wall + 500, [2**64 - 1, 7], model="m")
    wrapped = {"timestamp": 5, "event": request_end(wall + 250, [2**64 - 1]) | {"agent_context": {"session_id": "s"}}}
    trace = opened(write(tmp_path, lines(late, other, payload, wrapped, request_end(wall, [5, 7]))))
    found = list(trace)
    assert trace.formats == ("dynamo",)
    assert [request.time for request in found] == [0.0, 0.25, 0.5]  # in the order in which they came
    assert trace.wall_begin == wall / 1000
    assert [request.place for request in found] == ["line 5", "line 4", "line 1"]
    assert (found[0].unit, found[0].input_tokens, found[0].output_tokens) == (64, 128, 16)
    assert found[1].details is not None
    assert found[1].details.session == "s"
    ids = [set(request.ids.tolist()) for request in found]
    assert not ids[1] & ids[2]  # KV of another model


def test_dynamo_shards_share_ids(tmp_path: Path) -> None:
    wall = 1_777_312_800_000
    write(tmp_path, lines(request_end(wall + 1000, [8, 9])), "b.jsonl")
    write(tmp_path, lines(request_end(wall, [8])), "a.jsonl")
    first, second = read(tmp_path)
    assert (first.time, second.time) == (0.0, 1.0)
    assert second.ids.tolist()[:1] == first.ids.tolist()


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        (request_end(5, [1]) | {"schema": "dynamo.request.trace.v9"}, "schema 'dynamo.request.trace.v9' is unknown"),
        (request_end(5, [1]) | {"event_type": "party"}, "event_type 'party' is unknown"),
        (request_end(5, [1], replay=None), "request.replay is missing"),
        (request_end(5, [1], output_tokens=None), "output_tokens is missing"),
        (request_end(5, [2**64]), "input_sequence_hashes"),
        (request_end(5, [-1]), "input_sequence_hashes"),
        (
            request_end(5, [], replay={"trace_block_size": 0, "input_length": 0, "input_sequence_hashes": []}),
            "trace_block_size must be >= 1",
        ),
    ],
)
def test_dynamo_records_that_are_none(tmp_path: Path, entry: dict[str, Any], problem: str) -> None:
    path = write(tmp_path, lines(request_end(1, [1]), entry))
    with pytest.raises(TraceError, match=f"line 2: .*{problem}"):
        read(path)
    trace = opened(path, skip_bad=True)
    assert (len(list(trace)), trace.skipped) == (1, 1)


def test_dynamo_is_put_in_order_within_a_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamo, "WINDOW", 2)
    path = write(tmp_path, lines(*(request_end(at, [at]) for at in (3, 2, 1, 0))))
    assert [round(request.time * 1000) for request in read(path)] == [1, 0, 2, 3]  # 0 came too late for a window of two


def test_tokens_are_paged_by_the_caches_own_hash(tmp_path: Path) -> None:
    head = list(range(64))
    entries: list[Any] = [[*head, *range(70)], {"tokens": [*head, *range(64, 70)], "timestamp": 2.5}, [*range(1, 65)]]
    path = write(tmp_path, lines(*entries, {"prompt_token_ids": head, "output_length": 4, "model": "other"}))
    a, b, c, d = read(path)
    assert [len(request.ids) for request in (a, b, c, d)] == [2, 1, 1, 1]
    assert [request.input_tokens for request in (a, b, c, d)] == [134, 70, 64, 64]
    assert [request.time for request in (a, b, c, d)] == [0.0, 2.5, 2.0, 3.0]
    assert a.ids[0] == b.ids[0] != c.ids[0]
    assert d.ids[0] not in (a.ids[0], c.ids[0])
    assert d.output_tokens == 4
    assert [len(request.ids) for request in read(path, unit=16)] == [8, 4, 4, 4]


def test_token_lines_that_are_none(tmp_path: Path) -> None:
    for text, problem in (
        ("[1, -2]", "-2|>= 0"),
        ('[1, "a"]', "must be int"),
        ('{"tokens": 5}', "tokens"),
        ('{"text": "hello"}', "the field tokens is missing"),
        (f"[{2**32}]", "<="),
    ):
        with pytest.raises(TraceError, match=f"line 2: .*{problem}"):
            read(write(tmp_path, f"[1]\n{text}\n"), form="tokens")


def test_oracle_general(tmp_path: Path) -> None:
    trace = opened(write(tmp_path, records((5, 2**64 - 1, 4096, 3), (6, 7, 512, -1), (9, 2**64 - 1, 4096, 2**63 - 1))))
    found = list(trace)
    assert trace.formats == ("oracle-general",)
    assert [request.time for request in found] == [5.0, 6.0, 9.0]
    assert found[0].ids.tolist() == found[2].ids.tolist() != found[1].ids.tolist()
    assert [request.input_tokens for request in found] == [1, 1, 1]
    assert trace.bytes_read == trace.size
    assert found[2].place == "record 3"
    assert read(write(tmp_path, records((5, 1, 1, -1))), unit=64)[0].input_tokens == 64


def test_records_that_break_off(tmp_path: Path) -> None:
    path = write(tmp_path, records((5, 1, 1, -1), (6, 2, 1, -1))[:-7])
    with pytest.raises(TraceError, match="record 2: the file breaks off, it has 17 of 24 bytes"):
        read(path)
    trace = opened(path, skip_bad=True)
    assert (len(list(trace)), trace.skipped) == (1, 1)


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        ("time,obj_id,obj_size\n1.5,a,10\n2,b,20\n3,a,10\n", {}, [(1.5, "a"), (2.0, "b"), (3.0, "a")]),
        ("1,7,10\n2,8,10\n", {}, [(1.0, 7), (2.0, 8)]),
        ("1\t7\t10\n\n2\t8\t10\n", {}, [(1.0, 7), (2.0, 8)]),
        ("7\n8\n7\n", {}, [(0.0, 7), (1.0, 8), (2.0, 7)]),
        ("size|key|ts\n1|x|5\n", {}, [(5.0, "x")]),
        ('1,"a,b",10\n', {"form": "csv"}, [(1.0, "a,b")]),
        ("v1,v2,v3,v4,v5\n9,5,9,9,77\n", {"form": "csv", "columns": "time-col=2, obj-id-col=5"}, [(5.0, 77)]),
        ("3;4;99\n", {"columns": "id=3"}, [(0.0, 99)]),
    ],
)
def test_tables(tmp_path: Path, text: str, options: dict[str, Any], expected: list[tuple[float, int | str]]) -> None:
    found = read(write(tmp_path, text), **options)
    numbers: dict[int | str, int] = {}
    for _, name in expected:
        numbers.setdefault(name, len(numbers))
    assert [(request.time, request.ids.tolist()) for request in found] == [
        (time, [numbers[name]]) for time, name in expected
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("1,7\n2\n", "line 2: it has 1 columns and needs 2"),
        ("1,7\nnan,8\n", "line 2: its time 'nan' is no number of seconds"),
        ("1,7\n-1,8\n", "line 2: its time '-1'"),
        ("1,7\n1e999,8\n", "line 2: its time '1e999'"),
        ("1,7\n3,\n", "line 2: the object has no id"),
        ("first,second\n1,2\n", "line 1: none of its columns is called obj_id"),
    ],
)
def test_tables_that_are_none(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(TraceError, match=problem):
        read(write(tmp_path, text), form="csv")


@pytest.mark.parametrize("columns", ["a=1", "time=0,id=1", "time=1", "id", "id=99999"])
def test_columns_are_checked(tmp_path: Path, columns: str) -> None:
    with pytest.raises(TraceError, match="--columns"):
        read(write(tmp_path, "1,2\n"), form="csv", columns=columns)


SAMPLES: dict[str, bytes] = {
    "bailian": lines(bailian()).encode(),
    "dynamo": lines(request_end(5, [1])).encode(),
    "kv-events": lines([1.0, [{"type": "BlockStored", "block_hashes": [1], "block_size": 16}], None]).encode(),
    "mooncake": lines({"timestamp": 1, "input_length": 5, "output_length": 1, "hash_ids": [1]}).encode(),
    "kv-cache-tester": json.dumps({"block_size": 64, "requests": []}).encode(),
    "tokens": b"[1, 2, 3]\n",
    "oracle-general": records((5, 1, 1, -1)),
    "csv": b"1,2,3\n",
}


def test_every_format_is_told_from_the_others() -> None:
    assert set(SAMPLES) == set(FORMATS) - {"access-log"}  # which has tests of its own
    assert {name: format_of(head) for name, head in SAMPLES.items()} == {name: name for name in SAMPLES}


def test_every_format_is_in_the_documentation(repository: Path) -> None:
    text = (repository / "hicache" / "analytics" / "README.md").read_text()
    assert [name for name in FORMATS if f"| `{name}` |" not in text] == []


@pytest.mark.parametrize(
    "head",
    [b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00", bytes(range(256)), b"\x7fELF\x02\x01\x01" + bytes(57), b"a,b\n"],
    ids=["pickle", "bytes", "program", "words"],
)
def test_what_is_no_trace_is_none(tmp_path: Path, head: bytes) -> None:
    with pytest.raises(TraceError, match="no trace that is known here"):
        read(write(tmp_path, head))
