"""Whatever is in a file: an answer in one line, in bounded memory, and nothing is run."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle  # noqa: TID251  to see that it is not read
import random
import tracemalloc
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hicache.analytics.analysis.report import AnalyzeOptions, analyze
from hicache.analytics.formats import lines
from hicache.analytics.formats.known import FORMATS
from hicache.analytics.formats.objects import RECORD
from hicache.analytics.trace import Interner, Reading
from hicache.analytics.traces import Opening, open_trace
from hicache.errors import TraceError

FORMS = [name for name in FORMATS if name != "access-log"]  # it has tests of its own
LINES = [name for name in FORMS if name not in ("kv-cache-tester", "oracle-general")]


def _samples() -> dict[str, bytes]:
    rows = [(at, [at % 3, at]) for at in range(12)]

    def each(entry: Any) -> bytes:
        return b"".join(json.dumps(entry(at, ids)).encode() + b"\n" for at, ids in rows)

    def request(at: int, ids: list[int]) -> dict[str, Any]:
        replay = {"trace_block_size": 64, "input_length": 100, "input_sequence_hashes": ids}
        inside = {"request_received_ms": at, "output_tokens": 1, "replay": replay}
        return {"schema": "dynamo.request.trace.v1", "event_type": "request_end", "request": inside}

    def stored(at: int, ids: list[int]) -> list[Any]:
        event = {"type": "BlockStored", "block_hashes": ids, "parent_block_hash": None, "block_size": 16}
        return [at * 5.0, [event], None]

    sessions = [{"t": at, "in": 100, "out": 1, "hash_ids": ids, "model": "m"} for at, ids in rows]
    mooncake = {"input_length": 600, "output_length": 1}
    return {
        "mooncake": each(lambda at, ids: mooncake | {"timestamp": at, "hash_ids": ids}),
        "bailian": each(
            lambda at, ids: mooncake | {"chat_id": at, "timestamp": at, "input_length": 20, "hash_ids": ids}
        ),
        "dynamo": each(request),
        "kv-events": each(stored),
        "tokens": each(lambda at, ids: {"tokens": ids * 40, "timestamp": at}),
        "csv": b"time,obj_id\n" + b"".join(f"{at},{ids[0]}\n".encode() for at, ids in rows),
        "kv-cache-tester": json.dumps({"block_size": 64, "requests": sessions}).encode(),
        "oracle-general": np.array([(at, ids[0], 1, -1) for at, ids in rows], RECORD).tobytes(),
    }


SAMPLES = _samples()


def tell(path: Path, form: str, **options: Any) -> str:
    """What `analyze` says of a file, as JSON without anything that is no number; or the error."""
    try:
        found = analyze(Opening(form=form, **options).open([path]), AnalyzeOptions(spans=3))
    except TraceError as error:
        said = str(error)
    else:
        return json.dumps(found.document(), allow_nan=False)
    assert "\n" not in said
    assert str(path) in said or "--" in said
    return said


def test_there_is_a_sample_of_each_format() -> None:
    assert set(SAMPLES) == set(FORMS)


@pytest.mark.parametrize("form", FORMS)
def test_samples_are_read_and_found_out(tmp_path: Path, form: str) -> None:
    path = tmp_path / "trace"
    path.write_bytes(SAMPLES[form])
    trace = open_trace([path])
    assert len(list(trace)) == 12
    assert trace.formats == (form,)


@pytest.mark.case("STAT-2")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("content", [b"", b"\n", b"  \n\n"])
def test_empty_files(tmp_path: Path, form: str, content: bytes) -> None:
    path = tmp_path / "trace"
    path.write_bytes(content)
    assert json.loads(tell(path, form))["requests"] == 0


@pytest.mark.parametrize("form", FORMS)
def test_truncated_files_are_answered_wherever_they_break_off(tmp_path: Path, form: str) -> None:
    path = tmp_path / "trace"
    for size in range(1, len(SAMPLES[form]), 131):
        path.write_bytes(SAMPLES[form][:size])
        tell(path, form)
        assert tell(path, form, skip_bad=True).startswith("{")


WORDS = {
    "deep": b"[" * 200_000,
    "deep objects": b'{"a":' * 100_000,
    "NaN": b'{"timestamp": NaN, "t": NaN, "input_length": 1, "chat_id": 1, "tokens": [NaN]}',
    "infinite": b'{"timestamp": 1e999, "chat_id": 1, "input_length": 1, "output_length": 1, "hash_ids": [1]}',
    "negative": b'{"timestamp": -5, "chat_id": 1, "input_length": 1, "hash_ids": [1], "tokens": [1]}',
    "huge": b'{"timestamp": 1, "chat_id": 1, "input_length": 1, "output_length": 1, "hash_ids": ['
    + b"9" * 4000
    + b"]}",
    "huge number": b"9" * 5000 + b"," + b"9" * 5000,
    "utf-8": b'{"timestamp": 1, "model": "\xff\xfe", "chat_id": 1, "tokens": [1]}',
    "null": b"null",
    "number": b"NaN",
    "nul bytes": bytes(200),
    "pickle": pickle.dumps({"timestamp": 1, "requests": [1, 2, 3]}),
}


@pytest.mark.case("SEC-1")
@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("form", LINES)
def test_broken_lines_are_named_and_counted(tmp_path: Path, form: str, word: str) -> None:
    head, _, rest = SAMPLES[form].partition(b"\n")
    path = tmp_path / "trace"
    path.write_bytes(head + b"\n" + WORDS[word].replace(b"\n", b" ") + b"\n" + rest)
    said = tell(path, form)
    if said.startswith("{"):  # such a line may be one of that format, as a number is of a table
        assert (form, word) in {("csv", "number"), ("csv", "huge number")} or form == "csv"
        return
    assert f"{path}, line 2: " in said
    assert "--skip-bad" in said
    assert len(said) < 1000
    document = json.loads(tell(path, form, skip_bad=True))
    assert document["entries_skipped"] == 1
    assert document["requests"] >= 11


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("form", FORMS)
def test_files_of_nothing_else_get_an_answer(tmp_path: Path, form: str, word: str) -> None:
    path = tmp_path / "trace"
    path.write_bytes(WORDS[word])
    said = tell(path, form)
    assert len(said) < 1000 or said.startswith("{")
    assert tell(path, form, skip_bad=True).startswith("{")


@pytest.mark.case("SEC-1")
def test_a_pickle_runs_nothing(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    bomb = b"cos\nsystem\n(S'touch " + str(marker).encode() + b"'\ntR."
    path = tmp_path / "trace"
    path.write_bytes(bomb)
    for form in ("auto", *FORMATS):
        tell(path, form)
        tell(path, form, skip_bad=True)
    assert not marker.exists()


@pytest.mark.parametrize("form", ["mooncake", "bailian", "dynamo", "kv-events", "kv-cache-tester"])
def test_ids_that_are_there_more_than_once_in_a_prompt(tmp_path: Path, form: str) -> None:
    path = tmp_path / "trace"
    path.write_bytes(SAMPLES[form].replace(b"[0, 0]", b"[5, 5]").replace(b"[1, 1]", b"[5, 5]"))
    assert json.loads(tell(path, form))["requests"] >= 10


class Endless(io.RawIOBase):
    """A file that repeats some bytes and never ends."""

    def __init__(self, part: bytes, head: bytes) -> None:
        self._part = part * (2**20 // len(part))
        self._head = head

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        data = (self._head or self._part)[: len(view)]
        self._head = self._head[len(data) :]
        view[: len(data)] = data
        return len(data)


class EndlessSource:
    def __init__(self, part: bytes, head: bytes = b"") -> None:
        self._part, self._head = part, head

    def __str__(self) -> str:
        return "endless"

    def open(self, _mode: str = "rb", buffering: int = -1) -> BinaryIO:
        return io.BufferedReader(Endless(self._part, self._head), max(buffering, 8192))

    def stat(self) -> os.stat_result:
        return os.stat(os.devnull)


@pytest.mark.parametrize("skip_bad", [False, True])
@pytest.mark.parametrize(("form", "part"), [*((form, b"a") for form in LINES), ("tokens", b"[1,2"), ("csv", b"1,")])
def test_a_line_without_end(monkeypatch: pytest.MonkeyPatch, form: str, part: bytes, skip_bad: bool) -> None:
    """Of gigabytes, as it were; the bound is lowered so that this takes no time."""
    monkeypatch.setattr(lines, "MAX_LINE", 2**18)
    reader = FORMATS[form].reader(EndlessSource(part), Reading(skip_bad=skip_bad), interner=Interner())  # type: ignore[arg-type]
    tracemalloc.start()
    try:
        if skip_bad:
            assert list(reader) == []
            assert reader.skipped == 2  # the line, and that nothing follows
        else:
            with pytest.raises(TraceError, match="endless, line 1: longer than"):
                list(reader)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 12 * 2**20


def test_a_line_of_ten_gigabytes_is_passed_over_in_its_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen times the bound are looked through for the end of a line that is too long."""
    monkeypatch.setattr(lines, "MAX_LINE", 2**16)
    fine = SAMPLES["mooncake"].splitlines(keepends=True)[0]
    long = b"x" * (15 * 2**16) + b"\n"

    class Some(EndlessSource):
        def open(self, _mode: str = "rb", buffering: int = -1) -> BinaryIO:
            return io.BufferedReader(io.BytesIO(fine + long + fine))

    reader = FORMATS["mooncake"].reader(Some(b"x"), Reading(skip_bad=True), interner=None)  # type: ignore[arg-type]
    assert [request.place for request in reader] == ["line 1", "line 3"]
    assert reader.skipped == 1


def test_a_message_without_end() -> None:
    """An array of four billion values, each of which is there."""
    reader = FORMATS["kv-events"].reader(EndlessSource(b"\x01", b"\xdd\xff\xff\xff\xff"), Reading(), interner=None)  # type: ignore[arg-type]
    tracemalloc.start()
    try:
        with pytest.raises(TraceError, match="a message is longer than 16 MiB"):
            list(reader)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 200 * 2**20


def test_what_unpacks_to_much_needs_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """256 MiB of one byte, which are 260 KiB packed."""
    monkeypatch.setattr(lines, "MAX_LINE", 2**20)
    path = tmp_path / "bomb.jsonl.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(32):
            file.write(b"0" * 2**20)
    tracemalloc.start()
    try:
        with pytest.raises(TraceError, match="line 1: longer than 1 MiB"):
            list(open_trace([path], form="mooncake"))
        assert list(open_trace([path], form="mooncake", skip_bad=True)) == []
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 16 * 2**20


def test_a_document_that_is_too_long_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    from hicache.analytics import sessions

    monkeypatch.setattr(sessions, "MAX_DOCUMENT", 2**20)
    reader = FORMATS["kv-cache-tester"].reader(EndlessSource(b"{"), Reading(), interner=None)  # type: ignore[arg-type]
    with pytest.raises(TraceError, match="more than 1048576 bytes in one document"):
        list(reader)


@pytest.mark.parametrize("form", FORMS)
def test_damage_gets_no_other_answer(tmp_path: Path, form: str) -> None:
    chance = random.Random(form)
    path = tmp_path / "trace"
    for _ in range(12):
        data = bytearray(SAMPLES[form])
        for _ in range(chance.randrange(1, 6)):
            at = chance.randrange(len(data))
            data[at : at + chance.choice((0, 1, 1, 3))] = chance.randbytes(chance.choice((0, 1, 1, 2)))
        path.write_bytes(bytes(data))
        for skip_bad in (False, True):
            tell(path, form, skip_bad=skip_bad)


@settings(max_examples=30)
@given(content=st.binary(max_size=300), form=st.sampled_from(["auto", *FORMS]), skip_bad=st.booleans())
@example(content=b"\x91" * 300, form="kv-events", skip_bad=True)
@example(content=b"[1]", form="auto", skip_bad=False)
@example(content=msgspec.msgpack.encode([float("nan"), []]), form="kv-events", skip_bad=False)
def test_any_bytes_get_an_answer(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, form: str, skip_bad: bool
) -> None:
    path = tmp_path_factory.mktemp("any") / "trace"
    path.write_bytes(content)
    tell(path, form, skip_bad=skip_bad)
