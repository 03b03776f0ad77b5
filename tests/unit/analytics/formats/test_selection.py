"""Which part of a trace is read, whatever it is packed in, and from where."""

from __future__ import annotations

import bz2
import gzip
import importlib.util
import io
import json
import lzma
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hicache.analytics import packing, sources
from hicache.analytics.traces import Moment, Opening, open_trace
from hicache.cli.trace_options import add_trace_arguments, opening
from hicache.errors import ConfigError, TraceError

WALL = 1_777_312_800.0  # 2026-04-27T18:00:00 UTC


def line(at: float, number: int = 0) -> str:
    return json.dumps({"timestamp": at * 1000, "input_length": 512, "output_length": 1, "hash_ids": [number]}) + "\n"


TEXT = "".join(line(10.0 + at, at) for at in range(10)).encode()

zstandard = pytest.mark.skipif(
    importlib.util.find_spec("zstandard") is None and sys.version_info < (3, 14), reason="zstandard is not here"
)


def compress_zstd(data: bytes) -> bytes:
    if sys.version_info >= (3, 14):
        return importlib.import_module("compression.zstd").compress(data)  # type: ignore[no-any-return]
    return importlib.import_module("zstandard").ZstdCompressor().compress(data)  # type: ignore[no-any-return]


PACKERS = [
    pytest.param(gzip.compress, id="gzip"),
    pytest.param(bz2.compress, id="bzip2"),
    pytest.param(lzma.compress, id="xz"),
    pytest.param(compress_zstd, id="zstd", marks=zstandard),
]


def times(path: Path, **options: Any) -> list[float]:
    return [request.time for request in Opening(**options).open([path])]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(TEXT)
    return path


@pytest.fixture
def wall(tmp_path: Path) -> Path:
    path = tmp_path / "wall.jsonl"
    path.write_text("".join(line(WALL + at, at) for at in range(10)))
    return path


def test_limit_since_and_until(trace: Path) -> None:
    assert times(trace, limit=3) == [10.0, 11.0, 12.0]
    assert times(trace, limit=0) == []
    assert times(trace, since=Moment(7)) == [17.0, 18.0, 19.0]
    assert times(trace, until=Moment(2)) == [10.0, 11.0]
    assert times(trace, since=Moment(2), until=Moment(9), limit=2) == [12.0, 13.0]
    assert times(trace, since=Moment(100)) == []


def test_times_of_a_wall_clock(wall: Path, trace: Path) -> None:
    assert times(wall, limit=3) == [0.0, 1.0, 2.0]
    assert times(wall, since=Moment(WALL + 8, absolute=True)) == [8.0, 9.0]
    assert times(wall, since=Moment(2), until=Moment(WALL + 4, absolute=True)) == [2.0, 3.0]
    with pytest.raises(TraceError, match=r"--since: .*trace\.jsonl has no times of a wall clock"):
        times(trace, since=Moment(WALL, absolute=True))
    # beside one that counts from its own begin, each counts from its own
    assert [request.time for request in open_trace([wall, trace])][:3] == [0.0, 1.0, 2.0]


def test_an_empty_trace_has_no_part(tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text("\n")
    assert times(path, since=Moment(WALL, absolute=True)) == []


def options(*words: str) -> Opening:
    import argparse

    parser = argparse.ArgumentParser()
    add_trace_arguments(parser)
    return opening(parser.parse_args(words))


def test_options_as_people_give_them() -> None:
    found = options("--since", "90m", "--until", "2h", "--limit", "5", "--unit", "64", "--format", "csv")
    assert (found.since, found.until) == (Moment(5400.0), Moment(7200.0))
    assert (found.limit, found.unit, found.form) == (5, 64, "csv")
    assert options("--since", "1.5").since == Moment(1.5)
    assert options("--since", "2026-04-27T18:00").since == Moment(WALL, absolute=True)
    assert options("--since", "2026-04-27T20:00+02:00").since == Moment(WALL, absolute=True)
    assert options("--requests", "7").limit == 7


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--since", "yesterday"], "--since yesterday: give seconds since the trace's begin"),
        (["--since", "-5"], "--since"),
        (["--until", "nan"], "--until nan"),
        (["--until", "1e9"], "--until 1e9"),
        (["--since", "10", "--until", "10"], "--until 10: is not behind --since 10"),
        (["--unit", "0"], "--unit 0: must be 1 to"),
        (["--unit", "many"], "--unit many: is not a whole number"),
        (["--limit", "-1"], "--limit -1: cannot be negative"),
        (["--format", "parquet"], "--format parquet: use one of auto, access-log, mooncake"),
    ],
)
def test_options_that_cannot_be(words: list[str], problem: str) -> None:
    with pytest.raises((ConfigError, SystemExit)) as caught:
        options(*(f"{words[0]}={words[1]}" if words[1].startswith("-") else word for word in words[:2]), *words[2:])
    if isinstance(caught.value, ConfigError):
        assert problem in str(caught.value)


@pytest.mark.parametrize("pack", PACKERS)
def test_compressed_traces_are_the_same(tmp_path: Path, trace: Path, pack: Callable[[bytes], bytes]) -> None:
    packed = tmp_path / "packed.jsonl.x"
    packed.write_bytes(pack(TEXT))
    found = open_trace([packed])
    assert [(request.time, request.place) for request in found] == [
        (request.time, request.place) for request in open_trace([trace])
    ]
    assert found.formats == ("mooncake",)
    assert found.bytes_read == found.size == packed.stat().st_size
    # as several programs write it, one part behind the other
    packed.write_bytes(pack(TEXT) + pack(TEXT))
    assert len(times(packed)) == 20


@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("pack", PACKERS)
def test_compressed_files_that_break_off_or_are_damaged(
    tmp_path: Path, pack: Callable[[bytes], bytes], damaged: bool
) -> None:
    data = bytearray(pack(b"".join(line(at, at).encode() for at in range(4000))))
    if damaged:
        data[len(data) // 2 : len(data) // 2 + 40] = bytes(40)
    else:
        del data[-40:]
    packed = tmp_path / "packed"
    packed.write_bytes(bytes(data))
    with pytest.raises(TraceError, match=r"breaks off|cannot unpack it behind byte|line \d+: ") as caught:
        times(packed)
    assert "\n" not in str(caught.value)
    if pack in (bz2.compress, compress_zstd):  # nothing can be read of a block before all of it is there
        return
    trace = open_trace([packed], skip_bad=True)
    assert 800 < len(list(trace)) < 4000
    assert trace.skipped >= 1


def test_zstd_without_its_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("zstandard", "compression.zstd", "compression"):
        monkeypatch.setitem(sys.modules, name, None)
    path = tmp_path / "trace.zst"
    path.write_bytes(b"\x28\xb5\x2f\xfd" + bytes(20))
    with pytest.raises(TraceError, match=r"pip install 'hicache\[zstd\]', or unpack it: zstd -dc FILE \| hicache"):
        open_trace([path])


def test_an_xz_file_cannot_ask_for_any_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_MOST_MEMORY", 2**20)
    path = tmp_path / "trace.xz"
    path.write_bytes(lzma.compress(TEXT))  # its dictionary has 8 MiB
    with pytest.raises(TraceError, match=r"xz cannot unpack it .*[Mm]emory"):
        times(path)


def test_a_folder_has_traces_of_any_kind(tmp_path: Path, trace: Path) -> None:
    (tmp_path / "more.jsonl.gz").write_bytes(gzip.compress(TEXT))
    (tmp_path / "notes.txt").write_text("not a trace")
    (tmp_path / "trace.jsonl.known.json").write_text("{}")
    assert len(times(tmp_path)) == 20


class Piped(io.RawIOBase):
    """A pipe of some bytes, in parts."""

    def __init__(self, data: bytes, part: int = 100) -> None:
        self._file = io.BytesIO(data)
        self._part = part
        self.given = 0

    def readable(self) -> bool:
        return True

    def read1(self, size: int = -1) -> bytes:
        data = self._file.read(min(size, self._part))
        self.given += len(data)
        return data

    def fileno(self) -> int:
        return os.open(os.devnull, os.O_RDONLY)


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_what_is_piped_in(monkeypatch: pytest.MonkeyPatch, pack: Callable[[bytes], bytes]) -> None:
    reader, writer = os.pipe()
    os.write(writer, pack(TEXT))
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(stream))
        trace = open_trace([Path("-")])
        assert trace.size == 0
        assert str(trace.paths[0]) == "standard input"
        assert [request.time for request in trace] == [10.0 + at for at in range(10)]


def test_only_so_much_is_taken_from_a_pipe_as_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows is left to whoever reads on, and nothing is kept on a disk."""
    monkeypatch.setattr(sources, "KEPT", 1000)
    stream = Piped(TEXT * 2000)
    source = sources.StandardInput(stream)  # type: ignore[arg-type]
    with source.open() as file:
        assert file.read(500) == (TEXT * 2)[:500]
    with source.open() as file:  # its begin was kept
        assert file.read(3000) == (TEXT * 20)[:3000]
    assert stream.given < 40_000
    with pytest.raises(TraceError, match="standard input: it can be read once only"):
        source.open()
