"""Readers: what they yield, what they refuse, and how they say so."""

from __future__ import annotations

import itertools
import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hicache.analytics.formats import lines
from hicache.analytics.trace import TraceRequest
from hicache.analytics.traces import open_trace
from hicache.errors import TraceError


def line(**changes: Any) -> str:
    entry = {"timestamp": 1500, "input_length": 1025, "output_length": 7, "hash_ids": [4, 5, 6], **changes}
    return json.dumps(entry)


def session(requests: list[dict[str, Any]], **changes: Any) -> str:
    return json.dumps({"id": "s", "block_size": 64, "hash_id_scope": "local", "requests": requests, **changes})


def turn(t: float, ids: list[int], **changes: Any) -> dict[str, Any]:
    return {"t": t, "type": "n", "model": "m", "in": 64 * len(ids) + 5, "out": 3, "hash_ids": ids, **changes}


def write(folder: Path, text: str | bytes, name: str = "trace.jsonl") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def read(*paths: Path, **options: Any) -> list[TraceRequest]:
    return list(open_trace(paths, **options))


def test_mooncake_line(tmp_path: Path) -> None:
    (request,) = read(write(tmp_path, line() + "\n"))
    assert (request.time, request.unit, request.input_tokens, request.output_tokens) == (1.5, 512, 1025, 7)
    assert request.ids.dtype == np.uint32
    assert request.ids.tolist() == [4, 5, 6]
    assert not request.ids.flags.writeable
    assert request.known_tokens == 1025
    assert request.place == "line 1"


def test_published_numbers_of_the_small_trace(small_trace: Path) -> None:
    requests = read(small_trace)
    assert len(requests) == 1000
    assert sum(len(request.ids) for request in requests) == 27_305
    assert sum(request.input_tokens for request in requests) == 13_732_944
    assert all(a.time <= b.time for a, b in itertools.pairwise(requests))


BROKEN = {
    "not JSON": ('{"timestamp": 1, "input_le', "no valid JSON at byte 26"),
    "not an object": ("[1]", "is of type array and must be object"),
    "a field is missing": (json.dumps({"timestamp": 0, "input_length": 5, "hash_ids": [1]}), "output_length"),
    "ids do not fit the length": (line(hash_ids=[1, 2]), "2 hash_ids, but input_length 1025 starts 3 blocks"),
    "negative id": (line(hash_ids=[1, -2, 3]), r"hash_ids\[1\]"),
    "id is a boolean": (line(hash_ids=[1, True, 3]), r"hash_ids\[1\]"),
    "id above 64 bits": (line(hash_ids=[1, 2**70, 3]), r"hash_ids\[1\]"),
    "negative length": (line(input_length=-1, hash_ids=[]), "input_length must be >= 0"),
    "time is NaN": (line(timestamp=float("nan")), "no valid JSON"),
    "time is infinite": (line().replace("1500", "1e999"), "out of range|<"),
    "nested without end": ("[" * 100_000, "recursion|depth|must be object"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_line_is_named_and_can_be_skipped(tmp_path: Path, name: str) -> None:
    text, problem = BROKEN[name]
    path = write(tmp_path, "\n".join([line(), text, line()]) + "\n")
    with pytest.raises(TraceError, match=problem) as caught:
        read(path)
    assert f"{path}, line 2: " in str(caught.value)
    assert "--skip-bad" in str(caught.value)
    trace = open_trace([path], skip_bad=True)
    assert [request.place for request in trace] == ["line 1", "line 3"]
    assert trace.skipped == 1
    assert trace.bytes_read == trace.size


def test_binary_line_is_broken_like_any_other(tmp_path: Path) -> None:
    path = write(tmp_path, line().encode() + b"\n\xff\xfe\x00\x01\n")
    with pytest.raises(TraceError, match="line 2"):
        read(path)


def test_too_long_line_ends_where_the_next_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_LINE", 200)
    path = write(tmp_path, "\n".join([line(), line(note="x" * 1000), line()]) + "\n")
    with pytest.raises(TraceError, match="line 2: longer than"):
        read(path)
    trace = open_trace([path], skip_bad=True)
    assert [request.place for request in trace] == ["line 1", "line 3"]
    assert trace.bytes_read == trace.size


def test_first_line_broken_does_not_hide_the_format(tmp_path: Path) -> None:
    path = write(tmp_path, "{broken\n" + line() + "\n")
    assert len(read(path, skip_bad=True)) == 1
    with pytest.raises(TraceError, match="line 1"):
        read(path)


def test_unknown_fields_and_blank_lines_are_fine(tmp_path: Path) -> None:
    assert len(read(write(tmp_path, line(more={"a": [1]}) + "\n\n   \n" + line()))) == 2


@pytest.mark.case("STAT-2")
@pytest.mark.parametrize("text", ["", "\n", "  \n\n"])
def test_empty_trace_has_no_requests(tmp_path: Path, text: str) -> None:
    trace = open_trace([write(tmp_path, text)])
    assert list(trace) == []
    assert trace.formats == ("empty",)


def test_prompt_without_tokens(tmp_path: Path) -> None:
    (request,) = read(write(tmp_path, line(input_length=0, hash_ids=[])))
    assert len(request.ids) == 0


@pytest.mark.parametrize("text", ["hello\n", '{"a": 1}\n', "<html>"])
def test_unknown_format_names_the_known(tmp_path: Path, text: str) -> None:
    with pytest.raises(TraceError, match=r"known formats are .*; mooncake \(one JSON .*; kv-cache-tester \("):
        open_trace([write(tmp_path, text)])


@pytest.mark.case("SEC-1")
def test_pickle_as_a_trace_runs_nothing(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    bomb = b"cos\nsystem\n(S'touch " + str(marker).encode() + b"'\ntR."
    for extra in (b"", line().encode() + b"\n"):
        with pytest.raises(TraceError):
            read(write(tmp_path, extra + bomb))
    assert not marker.exists()


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"nothing\.jsonl: No such file"):
        open_trace([tmp_path / "nothing.jsonl"])
    with pytest.raises(TraceError, match="folder without"):
        open_trace([tmp_path])


def test_pipe_is_refused_instead_of_read_twice(tmp_path: Path) -> None:
    pipe = tmp_path / "trace.jsonl"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path):
        with pytest.raises(TraceError, match="no regular file"):
            open_trace([path])


def test_endless_device_is_refused() -> None:
    with pytest.raises(TraceError, match="no regular file"):
        open_trace([Path("/dev/zero")], form="mooncake", skip_bad=True)


@pytest.mark.parametrize(
    "text",
    [
        '{"timestamp": 0, "input_length": 17179869184, "output_length": 1, "hash_ids": []}',
        '{"block_size": 8589934592, "requests": [{"t": 0, "in": 8589934592, "out": 1, "hash_ids": [1]}]}',
    ],
    ids=["mooncake", "session"],
)
def test_few_bytes_cannot_ask_for_tokens_beyond_memory(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(TraceError, match="<= 16777216"):
        list(open_trace([path]))


def test_unknown_format_name() -> None:
    with pytest.raises(TraceError, match=r"known are auto, .*mooncake"):
        open_trace([], form="parquet")


def test_session_file_is_flattened_by_time(tmp_path: Path) -> None:
    inner = {"t": 1.0, "type": "subagent", "requests": [turn(4.0, [9]), turn(1.5, [8])]}
    path = write(tmp_path, session([turn(0.0, [1, 2]), inner, turn(2.0, [1, 2, 3])]), "s.json")
    requests = read(path)
    assert [request.time for request in requests] == [0.0, 1.5, 2.0, 4.0]
    assert [request.place for request in requests] == ["request 1", "request 2.2", "request 3", "request 2.1"]
    assert requests[0].unit == 64
    assert requests[0].input_tokens == 133
    assert requests[0].known_tokens == 128
    assert requests[2].ids.tolist()[:2] == requests[0].ids.tolist()


@pytest.mark.parametrize(
    ("tokens", "fits"), [(128, True), (130, True), (127, True), (100, True), (192, False), (64, False)]
)
def test_session_tokens_must_fit_the_ids(tmp_path: Path, tokens: int, fits: bool) -> None:
    path = write(tmp_path, session([turn(0.0, [1, 2], **{"in": tokens})]), "s.json")
    if fits:
        assert len(read(path)) == 1
    else:
        with pytest.raises(TraceError, match="request 1: 2 hash_ids"):
            read(path)


def test_ids_are_shared_inside_a_scope_only(tmp_path: Path) -> None:
    requests = [turn(0.0, [1, 2]), turn(1.0, [1, 2]), turn(2.0, [1, 2], model="other")]
    first = write(tmp_path, session(requests), "a.json")
    second = write(tmp_path, session([turn(0.5, [1, 2])]), "b.json")
    a, b, same, other = read(first, second)
    ids = [set(request.ids.tolist()) for request in (a, b, same, other)]
    assert ids[0] == ids[2]
    assert not ids[0] & ids[1]
    assert not ids[0] & ids[3]
    assert not ids[1] & ids[3]


def test_global_scope_is_shared_between_files(tmp_path: Path) -> None:
    for name in ("a.json", "b.json"):
        write(tmp_path, session([turn(0.0, [7])], hash_id_scope="global"), name)
    first, second = read(tmp_path)
    assert first.ids.tolist() == second.ids.tolist()


def test_mooncake_files_do_not_share_ids(tmp_path: Path) -> None:
    write(tmp_path, line(), "a.jsonl")
    write(tmp_path, line(), "b.jsonl")
    first, second = read(tmp_path)
    assert not set(first.ids.tolist()) & set(second.ids.tolist())


def test_folder_is_merged_by_time(tmp_path: Path) -> None:
    write(tmp_path, session([turn(0.0, [1]), turn(9.0, [2])]), "a.json")
    write(tmp_path, session([turn(3.0, [1]), turn(4.0, [2])]), "b.json")
    assert [request.time for request in read(tmp_path)] == [0.0, 3.0, 4.0, 9.0]


def test_broken_request_of_a_session_is_named_and_can_be_skipped(tmp_path: Path) -> None:
    inner = {"t": 1.0, "type": "subagent", "requests": [turn(2.0, [3]), turn(-1.0, [4])]}
    path = write(tmp_path, session([turn(0.0, [1]), inner, {"t": 0, "type": "n"}]), "s.json")
    with pytest.raises(TraceError, match=r"request 2\.2: t must be"):
        read(path)
    trace = open_trace([path], skip_bad=True)
    assert [request.place for request in trace] == ["request 1", "request 2.1"]
    assert trace.skipped == 2
    assert trace.bytes_read == trace.size


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (session([])[:-1], "kv-cache-tester document"),
        (session([], block_size=0), "block_size is 0"),
        (session([], block_size=-64), "block_size"),
        (session([], hash_id_scope="cluster"), "hash_id_scope 'cluster' is unknown"),
        ('{"requests": 5}', "kv-cache-tester document"),
    ],
)
def test_broken_document_counts_as_one(tmp_path: Path, text: str, problem: str) -> None:
    path = write(tmp_path, text, "s.json")
    with pytest.raises(TraceError, match=problem):
        read(path)
    trace = open_trace([path], skip_bad=True)
    assert list(trace) == []
    assert trace.skipped == 1


def test_subagents_may_not_nest_without_end(tmp_path: Path) -> None:
    nest: dict[str, Any] = turn(0.0, [1])
    for _ in range(40):
        nest = {"t": 0.0, "type": "subagent", "requests": [nest]}
    with pytest.raises(TraceError, match="nest deeper"):
        read(write(tmp_path, session([nest]), "s.json"))


def test_file_that_vanishes_is_bad_input(tmp_path: Path) -> None:
    path = write(tmp_path, line())
    trace = open_trace([path])
    path.unlink()
    with pytest.raises(TraceError, match="can be read"):
        list(trace)


@pytest.mark.parametrize("seed", range(20))
def test_no_damage_gets_past_as_another_error(tmp_path: Path, small_trace: Path, seed: int) -> None:
    chance = random.Random(seed)
    data = bytearray(b"".join(small_trace.read_bytes().splitlines(keepends=True)[:20]))
    for _ in range(5):
        data[chance.randrange(len(data))] = chance.randrange(256)
    path = write(tmp_path, bytes(data))
    trace = open_trace([path], form="mooncake", skip_bad=True)
    assert 14 <= len(list(trace)) + trace.skipped <= 30  # a new line break may cut one in two, a lost one join two


def test_a_folder_may_have_more_files_than_may_be_open(tmp_path: Path) -> None:
    import resource

    least, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    for number in range(200):
        write(tmp_path, session([turn(float(number), [1])]), f"{number}.json")
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 100, most))
    try:
        assert len(read(tmp_path)) == 200
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (least, most))


def test_ids_of_64_bits_are_folded(tmp_path: Path) -> None:
    """Small ones stay what they are, so that they mean the same in another reading; large ones are told apart."""
    rows = [[4, 2**40, 2**63 - 1], [2**63 - 1, 5, 2**32], [4, 2**32, 6]]
    found = read(write(tmp_path, "\n".join(line(hash_ids=ids) for ids in rows)))
    assert [request.ids.tolist() for request in found] == [
        [4, 2**32 - 1, 2**32 - 2],
        [2**32 - 2, 5, 2**32 - 3],
        [4, 2**32 - 3, 6],
    ]
    path = write(tmp_path, "\n".join(line(hash_ids=[2**32 - 1, large, 3]) for large in (7, 2**40)))
    with pytest.raises(
        TraceError, match="line 2: ids up to 4294967295 and others above 4294967296 cannot be told apart"
    ):
        read(path)
    path = write(tmp_path, "\n".join(line(hash_ids=[large, 7, 3]) for large in (2**40, 2**32 - 1)))
    with pytest.raises(TraceError, match="line 2: ids up to 4294967295"):
        read(path)
