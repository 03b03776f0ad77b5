"""Traces in other formats: what analyze tells of them is the same, as far as the format can carry it."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.analytics.analysis.report import AnalyzeOptions, analyze
from hicache.analytics.convert import files, objects
from hicache.analytics.convert.run import Conversion, convert
from hicache.analytics.convert.targets import TARGETS
from hicache.analytics.formats.known import FORMATS
from hicache.analytics.formats.objects import NEVER, RECORD
from hicache.analytics.traces import Opening, open_trace
from hicache.cli.convert import TARGETS as NAMES
from hicache.errors import InvalidInput, TraceError

# A trace: gap in ms, model, ids of whole blocks, tokens of a partial one or 0, whether that has an id, output.
ROWS = st.lists(
    st.tuples(
        st.integers(0, 3000),
        st.sampled_from(["", "m"]),
        st.lists(st.integers(0, 3), max_size=6),
        st.integers(0, 15),
        st.booleans(),
        st.integers(0, 50),
    ),
    max_size=12,
)
SIZES = (1, 4, 16, 64)


def session(path: Path, rows: list[tuple[int, str, list[int], int, bool, int]], unit: int = 16) -> Path:
    """A trace in the format that can carry most: blocks of any size, tails with and without ids, models."""
    requests, at = [], 0
    for gap, model, ids, tail, named, out in rows:
        at += gap
        # A partial block has an id of its own, by what is in it.
        more = [100 + tail] if tail and named else []
        tokens = unit * len(ids) + tail
        requests.append({"t": at / 1000, "type": "n", "model": model, "in": tokens, "out": out, "hash_ids": ids + more})
    path.write_text(json.dumps({"block_size": unit, "requests": requests}))
    return path


def told(path: Path, **options: Any) -> dict[str, Any]:
    document = analyze(Opening(**options).open([path]), AnalyzeOptions(page_sizes=SIZES, sizes=(2, 8))).document()
    return {name: value for name, value in document.items() if name not in ("name", "formats")}


def converted(path: Path, form: str, **options: Any) -> tuple[Path, Conversion]:
    out = path.with_name(f"out.{form}")
    done = convert(open_trace([path]), form, out, **options)
    assert done is not None
    assert open_trace([out]).formats[0] in (form, "empty")
    return out, done


TOKENS = ("requests", "input_tokens", "output_tokens", "begin", "end", "gaps", "prompt_tokens", "generated_tokens")
TOKENS += ("ideal_tokens_hit", "ideal_hit_rate_tokens", "ideal_hit_rate_requests_tokens", "page_sizes")


def same(a: dict[str, Any], b: dict[str, Any], *names: str) -> None:
    for name in names or a:
        assert a[name] == b[name], name


@settings(max_examples=25)
@given(rows=ROWS)
def test_what_the_target_can_carry_is_the_same(tmp_path_factory: pytest.TempPathFactory, rows: list[Any]) -> None:
    path = session(tmp_path_factory.mktemp("c") / "in.json", rows)
    was = told(path)
    for form in ("kv-cache-tester", "bailian"):
        out, done = converted(path, form)
        same(was, told(out))
        assert not any("block" in loss for loss in done.losses)
    for form, how in (("dynamo", {}), ("mooncake", {"unit": 16})):
        out, done = converted(path, form, **how)
        found = told(out, unit=None if form == "dynamo" else 16)
        same(was, found, *TOKENS)
        lacks = sum(tail > 0 and not named for _, _, _, tail, named, _ in rows)
        assert found["pages_asked"] == was["pages_asked"] + lacks
        assert found["ideal_pages_hit"] == was["ideal_pages_hit"]
        assert any(f"the end of {lacks} prompts had no id" in loss for loss in done.losses) == (lacks > 0)
        if not lacks:
            same(was, found)


@settings(max_examples=12)
@given(rows=ROWS)
def test_blocks_of_another_size(tmp_path_factory: pytest.TempPathFactory, rows: list[Any]) -> None:
    path = session(tmp_path_factory.mktemp("c") / "in.json", rows)
    was = told(path)
    out, done = converted(path, "kv-cache-tester", unit=4)
    found = told(out)
    names = [name for name in TOKENS if name != "gaps"]
    same(was, found, *names)
    out, done = converted(path, "kv-cache-tester", unit=64)
    joined = told(out)
    assert joined["ideal_tokens_hit"] <= was["ideal_tokens_hit"]
    assert joined["page_sizes"][3] | {"lost_share": 0} == was["page_sizes"][3] | {"lost_share": 0}
    assert any("common begins" in loss for loss in done.losses) == bool(rows)


@settings(max_examples=12)
@given(rows=ROWS)
def test_single_blocks(tmp_path_factory: pytest.TempPathFactory, rows: list[Any]) -> None:
    path = session(tmp_path_factory.mktemp("c") / "in.json", rows)
    was = told(path)
    for form in ("csv", "oracle-general"):
        out, _ = converted(path, form)
        if was["pages_asked"]:
            same(was, told(out, unit=16), "pages_asked", "pages_different", "ideal_pages_hit", "ideal_hit_rate_pages")
    data = np.frombuffer(out.read_bytes(), RECORD)
    ids = data["id"].tolist()
    for place, name in enumerate(ids):
        later = [at + 1 for at in range(place + 1, len(ids)) if ids[at] == name]
        assert data["next"][place] == (later[0] if later else NEVER[0])
    assert set(data["size"].tolist()) <= {16}


def test_next_uses_are_put_in_wherever_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "_PATCHES", 2)
    rows = [(1000, "", [at % 5], 0, False, 0) for at in range(30)]
    out, _ = converted(session(tmp_path / "in.json", rows), "oracle-general")
    data = np.frombuffer(out.read_bytes(), RECORD)
    assert data["next"].tolist() == [*(range(6, 31)), *([-1] * 5)]


@settings(max_examples=12)
@given(rows=ROWS)
def test_tokens_that_are_made_up(tmp_path_factory: pytest.TempPathFactory, rows: list[Any]) -> None:
    path = session(tmp_path_factory.mktemp("c") / "in.json", rows)
    was = told(path)
    out, _ = converted(path, "tokens")
    found = told(out, unit=16)
    same(was, found, "requests", "input_tokens", "output_tokens", "begin", "end", "gaps")
    assert found["page_sizes"][2]["tokens_reused"] == was["page_sizes"][2]["tokens_reused"]


def test_the_public_trace_and_back(tmp_path: Path, small_trace: Path) -> None:
    some = tmp_path / "some"
    some.write_bytes(b"".join(small_trace.read_bytes().splitlines(keepends=True)[:300]))
    was = told(some)
    for form in ("dynamo", "kv-cache-tester"):
        out, done = _from(some, tmp_path, form)
        assert done == Conversion(300, 0, ())
        same(was, told(out))
        back, _ = _from(out, tmp_path, "mooncake")
        same(was, told(back))
    assert [json.loads(line)["timestamp"] for line in back.read_text().splitlines()] == [
        json.loads(line)["timestamp"] for line in some.read_text().splitlines()
    ]
    out, _ = _from(some, tmp_path, "bailian")
    same(was, told(out), *TOKENS)


def _from(path: Path, folder: Path, form: str) -> tuple[Path, Conversion]:
    out = folder / f"to-{form}"
    done = convert(open_trace([path]), form, out)
    assert done is not None
    return out, done


def test_chats_sessions_models_and_the_wall_clock(tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    entry = {"chat_id": 5, "parent_chat_id": 3, "timestamp": 1.25, "input_length": 16, "output_length": 1}
    chats.write_text(json.dumps(entry | {"type": "image", "turn": 4, "hash_ids": [9]}) + "\n")
    out, done = _from(chats, tmp_path, "bailian")
    assert json.loads(out.read_text()) == entry | {"type": "image", "turn": 4, "hash_ids": [0]}
    assert done.losses == ()
    out, done = _from(chats, tmp_path, "dynamo")
    assert done.losses == (
        "lost: turns of 1 requests",
        "lost: types of 1 requests",
        "lost: what they go on from, of 1 requests",
    )
    wall = tmp_path / "wall.jsonl"
    replay = {"trace_block_size": 64, "input_length": 64, "input_sequence_hashes": [2**64 - 1]}
    request = {"request_id": "r", "model": "m", "output_tokens": 1, "request_received_ms": 1_777_312_800_250}
    record = {
        "schema": "dynamo.request.trace.v1",
        "event_type": "request_end",
        "event_time_unix_ms": 1_777_312_800_250,
        "request": request | {"replay": replay},
        "agent_context": {"session_id": "s", "parent_session_id": "p"},
    }
    wall.write_text(json.dumps(record) + "\n")
    out, done = _from(wall, tmp_path, "dynamo")
    again = json.loads(out.read_text())
    assert again["request"].pop("replay") == replay | {"input_sequence_hashes": [0]}
    assert record["request"].pop("replay")  # type: ignore[attr-defined]
    assert again == record
    out, done = _from(wall, tmp_path, "bailian")
    assert "lost: the wall clock; times count from the begin at 2026-04-27T18:00:00+00:00" in done.losses
    out, done = _from(wall, tmp_path, "csv")
    assert out.read_text().splitlines()[1].startswith("1777312800,")


def test_the_same_block_behind_another_past_is_another_one(tmp_path: Path) -> None:
    path = session(tmp_path / "in.json", [(0, "", [1, 2], 0, False, 1), (1, "", [3, 2], 0, False, 1)])
    for form, expected in (("mooncake", [[0, 1], [2, 3]]), ("bailian", [[0, 1], [2, 1]])):
        out, _ = converted(path, form, unit=16)
        assert [json.loads(line)["hash_ids"] for line in out.read_text().splitlines()] == expected


@pytest.mark.parametrize(
    ("form", "problem"),
    [
        ("kv-events", "a trace does not tell what a cache stored"),
        ("access-log", "a trace does not tell what a cache did"),
        ("auto", "say which format"),
        ("parquet", "use one of mooncake, bailian"),
    ],
)
def test_targets_that_make_no_sense(tmp_path: Path, small_trace: Path, form: str, problem: str) -> None:
    with pytest.raises(InvalidInput, match=f"--to {form}: {problem}"):
        convert(open_trace([small_trace]), form, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_blocks_that_do_not_go_into_each_other(tmp_path: Path) -> None:
    path = session(tmp_path / "in.json", [(0, "", [1], 0, False, 1)])
    with pytest.raises(TraceError, match=r"request 1: blocks of 16 tokens cannot be made .* 24: .* --to-unit"):
        convert(open_trace([path]), "mooncake", tmp_path / "out", unit=24)
    assert os.listdir(tmp_path) == ["in.json"]


def test_a_broken_trace_leaves_the_old_file(tmp_path: Path, small_trace: Path) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_bytes(small_trace.read_bytes()[:5000])
    out = tmp_path / "out"
    out.write_text("old")
    with pytest.raises(TraceError, match="line"):
        convert(open_trace([broken]), "csv", out)
    assert (out.read_text(), sorted(os.listdir(tmp_path))) == ("old", ["broken.jsonl", "out"])
    assert convert(open_trace([broken], skip_bad=True), "csv", out, stopped=lambda: True) is None
    assert out.read_text() == "old"
    done = convert(open_trace([broken], skip_bad=True), "csv", out)
    assert done is not None
    assert done.skipped == 1
    assert out.read_text().startswith("time,obj_id,obj_size\n")
    assert out.stat().st_mode & 0o777 == 0o666 & ~files._umask()


def test_places_that_cannot_be_written(tmp_path: Path, small_trace: Path) -> None:
    with pytest.raises(InvalidInput, match="that is what is read; name another file"):
        convert(open_trace([small_trace]), "csv", small_trace)
    with pytest.raises(InvalidInput, match=r"--out .*: No such file or directory; name a file in a folder"):
        convert(open_trace([small_trace]), "csv", tmp_path / "nowhere" / "out")


@pytest.mark.parametrize(("suffix", "unpack"), [("gz", gzip.open), ("bz2", bz2.open), ("xz", lzma.open)])
def test_files_are_compressed_as_their_names_say(tmp_path: Path, suffix: str, unpack: Any) -> None:
    path = session(tmp_path / "in.json", [(0, "", [1, 2], 0, False, 1)])
    for _ in range(2):
        out = tmp_path / f"out.csv.{suffix}"
        assert convert(open_trace([path]), "csv", out) is not None
        with unpack(out) as file:
            assert file.read() == b"time,obj_id,obj_size\n0,0,16\n0,1,16\n"
    assert sorted(os.listdir(tmp_path)) == ["in.json", out.name]
    with pytest.raises(InvalidInput, match=r"zstd is only read here; write to - and pipe it"):
        convert(open_trace([path]), "csv", tmp_path / "out.zst")


def test_folders_links_and_pipes(tmp_path: Path) -> None:
    """A folder is refused, a link stays one, and what is no regular file is written to instead of replaced."""
    path = session(tmp_path / "in.json", [(0, "", [1, 2], 0, False, 1)])
    with pytest.raises(InvalidInput, match="is a folder; name a file in it"):
        convert(open_trace([path]), "csv", tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    convert(open_trace([path]), "csv", tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text().startswith("time,")
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        convert(open_trace([path]), "csv", tmp_path / "pipe")
        assert os.read(reader, 1000).startswith(b"time,")
    finally:
        os.close(reader)
    assert convert(open_trace([path]), "csv", Path(os.devnull)) is not None
    assert Path(os.devnull).is_char_device()


def test_a_time_that_does_not_fit(tmp_path: Path) -> None:
    path = session(tmp_path / "in.json", [(0, "", [1], 0, False, 1)])
    path.write_text(
        path.read_text()
        .replace('"t": 0.0', '"t": 5e10')
        .replace('"requests": [', '"requests": [{"t": 0, "in": 0, "out": 0, "hash_ids": []}, ')
    )
    with pytest.raises(TraceError, match="request 2: its time does not fit into 32 bits of seconds"):
        convert(open_trace([path]), "oracle-general", tmp_path / "out")


def test_memory_is_that_of_the_different_blocks(tmp_path: Path) -> None:
    """Eight times the requests over the same blocks take no more of it."""
    most = []
    for count in (100, 800):
        path = tmp_path / f"{count}.jsonl"
        line = {"input_length": 512 * 40, "output_length": 1, "hash_ids": list(range(40))}
        path.write_text("".join(json.dumps({"timestamp": at} | line) + "\n" for at in range(count)))
        tracemalloc.start()
        converted(path, "kv-cache-tester")
        most.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert most[1] < most[0] + 2**17


def test_names_are_those_of_the_library() -> None:
    assert set(NAMES) == set(TARGETS)
    assert set(TARGETS) | {"kv-events", "access-log"} == set(FORMATS)
