"""Access logs are read back, and whatever else a file holds is told in one line, in bounded memory."""

from __future__ import annotations

import gzip
import io
import json
import struct
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hicache.analytics.analysis.recorded import Recorded, Tally, between_ideals
from hicache.analytics.analysis.report import AnalyzeOptions, analyze
from hicache.analytics.formats import accesslog
from hicache.analytics.formats.accesslog import AccessLogReader
from hicache.analytics.trace import Interner, Reading, TraceRequest
from hicache.analytics.traces import Opening, open_trace
from hicache.core.prompt import Prompt, SymbolsAreHashes
from hicache.core.reasons import RequestCounts
from hicache.errors import TraceError
from hicache.records import MissReason
from hicache.runtime.accesslog.format import MAX_TEXT, PREFIX_BYTES, SIGNATURE, NamespaceRecord, member_length, unpack
from hicache.runtime.accesslog.settings import AccessLog
from hicache.runtime.accesslog.writer import AccessLogWriter
from hicache.testing.accesslog import ended, page_hashes

HEAD: dict[str, Any] = {
    "hicache_access_log": 1,
    "boot": "b0",
    "namespaces": [{"namespace": "00ff", "page_size": 16}],
    "requests": 1,
    "written": 1,
}
ENTRY: dict[str, Any] = {
    "time": 1.5e9,
    "tokens": 40,
    "asked": 2,
    "host": 1,
    "missed": {"cold": 1},
    "kept": 2,
    "pages": "AAAAAAAAAAEAAAAAAAAAAg==",
}


def written(folder: Path, *, blocks: int = 3, each: int = 4) -> Path:
    """A log of several blocks."""
    log = AccessLogWriter(AccessLog(folder), now=lambda: 0.0, wall=lambda: 1.5e9, background=False)
    for block in range(blocks):
        for number in range(each):
            log.note(ended(1, block, number, at=float(10 * block + number), hits=1))
        log.work(last=True)
    log.close()
    (path,) = folder.iterdir()
    return path


def member(*lines: dict[str, Any] | str) -> bytes:
    """A block of these lines, with everything right around them."""
    text = "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines).encode()
    return packed(text)


def packed(text: bytes, *, check: int | None = None, length: int | None = None) -> bytes:
    deflate = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS)
    body = deflate.compress(text) + deflate.flush()
    tail = struct.pack("<II", zlib.crc32(text) if check is None else check, len(text) % 2**32)
    size = PREFIX_BYTES + len(body) + len(tail) if length is None else length
    return SIGNATURE + struct.pack("<I", size) + body + tail


def place(folder: Path, data: bytes) -> Path:
    path = folder / "access.jsonl.gz"
    path.write_bytes(data)
    return path


def read(path: Path, *, skip: bool = False) -> tuple[list[TraceRequest], AccessLogReader]:
    reader = AccessLogReader(path, Reading(skip_bad=skip))
    return list(reader), reader


def test_any_gzip_reads_it(tmp_path: Path) -> None:
    """It is gzip, and JSON lines."""
    path = written(tmp_path)
    lines = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    assert [("hicache_access_log" in line) for line in lines] == [True, *[False] * 4] * 3


def test_a_file_that_breaks_off_is_read_up_to_there(tmp_path: Path) -> None:
    """Cut at any byte, as a killed process leaves it: all whole blocks, no error, nothing invented."""
    data = written(tmp_path / "log", blocks=2, each=2).read_bytes()
    ends, at = [], 0
    while at < len(data):
        at += member_length(data[at:])
        ends.append(at)
    whole, _ = read(place(tmp_path, data))
    for cut in range(len(data)):
        found, reader = read(place(tmp_path, data[:cut]))
        blocks = sum(end <= cut for end in ends)
        assert [request.ids.tolist() for request in found] == [request.ids.tolist() for request in whole[: 2 * blocks]]
        assert reader.breaks_off == (cut not in (0, *ends))
        assert reader.skipped == 0


def test_requests_come_by_the_time_of_their_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are written when they end; as far as the window goes, the reader turns that around."""
    log = AccessLogWriter(AccessLog(tmp_path), now=lambda: 0.0, wall=lambda: 1.5e9, background=False)
    for at in (5, 2, 9, 1, 7, 3):
        log.note(ended(1, at=float(at)))
    log.close()
    (path,) = tmp_path.iterdir()
    assert [request.time - 1.5e9 for request in read(path)[0]] == [1, 2, 3, 5, 7, 9]
    monkeypatch.setattr(accesslog, "WINDOW", 2)
    assert [request.time - 1.5e9 for request in read(path)[0]] == [2, 1, 5, 3, 7, 9]


def test_files_of_a_folder_are_one_log(tmp_path: Path) -> None:
    """The same page has the same id in all files, so what one file left is hit in the next."""
    for at in (0.0, 100.0):
        log = AccessLogWriter(AccessLog(tmp_path), now=lambda: 0.0, wall=lambda: 1.5e9, background=False)
        log.note(ended(1, 2, 3, at=at))
        log.close()
    found = analyze(open_trace([tmp_path]), AnalyzeOptions())
    assert found.formats == ("access-log",) * 2
    assert (found.requests, found.ideal_pages_hit, found.end - found.begin) == (2, 3, 100.0)
    assert found.recorded is not None
    assert (found.recorded.processes, found.recorded.requests_ended) == (2, 2)


def test_what_is_gone_is_counted(tmp_path: Path) -> None:
    """Files that somebody removed, blocks that are damaged, and none where only a part is read."""
    path = written(tmp_path / "log", blocks=5, each=4)
    data, blocks = path.read_bytes(), []
    while data:
        blocks.append(data[: member_length(data)])
        data = data[len(blocks[-1]) :]

    def gone(*files: bytes, limit: int | None = None, skip: bool = False) -> tuple[int, int]:
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        for number, file in enumerate(files):
            (folder / f"access-{number}.jsonl.gz").write_bytes(file)
        found = analyze(Opening(limit=limit, skip_bad=skip).open([folder]), AnalyzeOptions()).recorded
        assert found is not None
        assert found.requests_dropped == found.requests_left_out == 0
        return found.requests_gone, found.requests_ended - found.requests

    assert gone(b"".join(blocks)) == (0, 0)
    assert gone(blocks[0], blocks[1] + blocks[2], b"".join(blocks[3:])) == (0, 0)
    assert gone(blocks[3] + blocks[4]) == (12, 12)  # the oldest were removed
    assert gone(blocks[0], blocks[4]) == (12, 12)
    damaged = blocks[2][:-9] + bytes([blocks[2][-9] ^ 1]) + blocks[2][-8:]
    assert gone(blocks[0], blocks[1] + damaged + blocks[3], blocks[4], skip=True) == (4, 4)
    assert gone(b"".join(blocks[:3]), b"".join(blocks[3:]), limit=2)[0] == 0
    assert gone(gzip.decompress(b"".join(blocks[1:]))) == (4, 4)


@pytest.mark.parametrize("way", ["unpacked", "packed again", "piped", "unpacked and piped"])
def test_however_it_comes(tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = written(tmp_path / "log").read_bytes()
    text = gzip.decompress(data)
    path = tmp_path / "trace"
    path.write_bytes({"unpacked": text, "packed again": gzip.compress(text)}.get(way, b""))
    if "piped" in way:
        piped = io.BytesIO(data if way == "piped" else text)
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=Piped(piped)))
        path = Path("-")
    trace = open_trace([path])
    assert len(list(trace)) == 12
    assert trace.formats == ("access-log",)


class Piped(io.BufferedReader):
    """Bytes as they come out of a pipe."""

    def fileno(self) -> int:
        return 0

    def seekable(self) -> bool:
        return False


def test_what_is_damaged_is_passed_over_to_the_next_block(tmp_path: Path) -> None:
    """With --skip-bad the other blocks are read; without it the place is named."""
    data = bytearray(written(tmp_path / "log").read_bytes())
    second = member_length(bytes(data))
    for at, words in ((second + 2, "no block"), (second + 30, "damaged"), (second + 17, "block")):
        broken = bytearray(data)
        broken[at] ^= 0xFF
        path = place(tmp_path, bytes(broken))
        with pytest.raises(TraceError, match=rf"block at byte {second}.*{words}.*--skip-bad"):
            read(path)
        found, reader = read(path, skip=True)
        assert len(found) == 8, at
        assert reader.skipped >= 1
    found, reader = read(place(tmp_path, bytes(data) + b"garbage that is no block" * 100), skip=True)
    assert (len(found), reader.skipped) == (12, 1)


def test_what_is_piped_in_cannot_be_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = bytearray(written(tmp_path / "log").read_bytes())
    data[member_length(bytes(data)) + 30] ^= 0xFF
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=Piped(io.BytesIO(bytes(data)))))
    trace = open_trace([Path("-")], skip_bad=True)
    assert len(list(trace)) == 4
    assert trace.skipped == 2


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([HEAD | {"hicache_access_log": 2}], "version 2 of an access log, and this hicache reads version 1"),
        ([HEAD | {"hicache_access_log": "1"}], "hicache_access_log is of type str and must be int"),
        (["{'no': json"], "no first line of a block"),
        ([ENTRY], "no first line of a block"),
        ([HEAD, "[" * 5000], "no valid JSON|must be"),
        ([HEAD, ENTRY | {"time": -1}], "time must be >= 0"),
        ([HEAD, json.dumps(ENTRY).replace("1500000000.0", "NaN")], "no valid JSON"),
        ([HEAD, ENTRY | {"tokens": 2**40}], "tokens must be <= 16777216"),
        ([HEAD, ENTRY | {"namespace": 1}], "namespace 1 is none of the block's 1"),
        ([HEAD, ENTRY | {"pages": "AAAA"}], "pages has 3 bytes"),
        ([HEAD, ENTRY | {"pages": "no base64!"}], "pages|base64"),
        ([HEAD, ENTRY | {"same": 1}], "first 1 pages are said to be of request 0"),
        ([HEAD, ENTRY, ENTRY | {"same": 3}], "first 3 pages are said to be of request 0"),
        ([HEAD, ENTRY | {"asked": 3}], "asked is 3 pages, and hits and misses are 2"),
        ([HEAD, ENTRY | {"missed": {"bored": 1}}], "a reason that is unknown: bored"),
        ([HEAD, ENTRY | {"kept": 9}], "kept 9, of 2 pages"),
        ([HEAD, ENTRY | {"tokens": 16_000_000}], "it has 2 pages, and its 16000000 tokens are 1000000"),
        (
            [
                HEAD | {"namespaces": [{"namespace": "0", "page_size": 1}]},
                {"time": 1, "tokens": 2**24, "asked": 1, "missed": {"bypassed": 1}},
            ],
            "more than 4194304 pages",
        ),
    ],
)
def test_what_a_block_must_not_say(tmp_path: Path, lines: list[Any], words: str) -> None:
    """One clear line with the place; with --skip-bad it is counted, and the block behind it is read."""
    path = place(tmp_path, member(*lines) + member(HEAD, ENTRY))
    with pytest.raises(TraceError, match=words) as error:
        read(path)
    assert "block at byte 0" in str(error.value)
    assert "\n" not in str(error.value)
    found, reader = read(path, skip=True)
    assert found[-1].ids.tolist()[-2:] == sorted(found[-1].ids.tolist())[-2:]
    assert reader.skipped == 1
    assert len(found) == len([line for line in lines if line == ENTRY and HEAD in lines]) + 1


def test_later_requests_count_those_that_are_broken(tmp_path: Path) -> None:
    """A request names others by their number in the block, so one that cannot be read keeps its number."""
    path = place(tmp_path, member(HEAD, "{", ENTRY, {**ENTRY, "pages": "", "like": 1, "same": 2}))
    found, reader = read(path, skip=True)
    assert [request.ids.tolist() for request in found] == [[0, 1], [0, 1]]
    assert reader.skipped == 1


def test_lengths_that_lie_take_no_memory(tmp_path: Path) -> None:
    """A block that says to be huge, one that unpacks to more than any has, one of endless pages."""
    bomb = packed(bytes(MAX_TEXT + 1))
    repeated = member(HEAD, ENTRY, *[{**ENTRY, "pages": "", "like": 0, "same": 2}] * 50)
    with pytest.raises(ValueError, match="damaged"):
        unpack(bomb)
    for data, words in (
        (packed(b"{}", length=2**32 - 1), "says to have 4294967295 bytes"),
        (packed(b"{}", length=3), "says to have 3 bytes"),
        (bomb, "checksum"),
        (packed(b"{}\n", check=1), "checksum"),
    ):
        with pytest.raises(TraceError, match=words):
            read(place(tmp_path, data))
    assert len(read(place(tmp_path, repeated))[0]) == 51


def test_a_block_of_too_many_pages_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accesslog, "MOST_PAGES", 99)
    lines = [HEAD, ENTRY, *[{**ENTRY, "pages": "", "like": 0, "same": 2}] * 49]
    with pytest.raises(TraceError, match="more than 99 pages"):
        read(place(tmp_path, member(*lines)))


def test_what_went_past_the_cache_is_nobody_elses(tmp_path: Path) -> None:
    """Its pages have no names: they are asked, cold for the ideal, and counted as bypassed."""
    log = AccessLogWriter(AccessLog(tmp_path), background=False)
    past = ended()._replace(tokens=100, counts=RequestCounts(6, missed={MissReason.BYPASSED: 6}))
    for each in (past, ended(1, 2, 3), past):
        log.note(each)
    log.close()
    found = analyze(open_trace([tmp_path]), AnalyzeOptions())
    assert (found.pages_asked, found.pages_different, found.ideal_pages_hit) == (15, 15, 0)
    assert found.recorded is not None
    assert found.recorded.misses_by_reason["bypassed"] == 12


def tallied(*requests: Any) -> Recorded:
    log = AccessLogWriter(AccessLog(requests[0]), background=False)
    for each in requests[1:]:
        log.note(each)
    log.close()
    tally = Tally()
    interner = Interner()
    for path in sorted(Path(requests[0]).iterdir()):
        for _ in tally.watch(AccessLogReader(path, interner=interner)):
            pass
    result = tally.result()
    assert result is not None
    return result


@pytest.mark.case("STAT-5")
def test_rates_as_they_were_beside_the_ideal(tmp_path: Path) -> None:
    """Asked is hits by tier and misses by reason; the ideal knows answers, and what was got for reasons of its own."""
    grown = Prompt(page_hashes(1, 2, 3, 4), 32, SymbolsAreHashes(32))
    first = ended(1, 2, at=0.0)._replace(prompt=grown, output=35, kept=4)
    evicted = RequestCounts(5, device=1, host=1, storage=1, missed={MissReason.EVICTED: 1, MissReason.COLD: 1})
    second = ended(1, 2, 3, 4, 5, at=1.0)._replace(counts=evicted)
    warm = ended(8, 9, at=2.0, hits=2)._replace(counts=RequestCounts(2, storage=2, aborted=True))
    found = tallied(tmp_path, first, second, warm)
    assert (found.pages_asked, found.pages_device, found.pages_host, found.pages_storage) == (9, 1, 1, 3)
    assert found.pages_missed == 4 == sum(found.misses_by_reason.values())
    assert (found.misses_by_reason["cold"], found.misses_by_reason["evicted"]) == (3, 1)
    assert found.pages_that_could_hit == 4 + 2
    assert found.pages_hit_unknown == 2
    assert found.recorded_hit_rate_pages == 5 / 9
    assert found.recorded_ideal_hit_rate_pages == 6 / 9
    assert found.recorded_hit_rate_tokens == 80 / (35 + 83 + 35)
    assert found.recorded_hit_rate_requests == pytest.approx((0 + 3 / 5 + 1) / 3)
    assert (found.requests, found.aborted) == (3, 1)
    assert found.load_seconds.count == found.request_seconds.count == 3


@pytest.mark.case("STAT-5")
def test_what_is_between_the_two_ideals(tmp_path: Path) -> None:
    """From that of prompts alone to that of the log: answers, what was not kept, not asked, or of others."""
    grown = Prompt(page_hashes(1, 2, 3, 4), 32, SymbolsAreHashes(32))
    whole = ended(1, 2, at=5.0)._replace(tokens=32, counts=RequestCounts(1, device=1))  # its last token is computed
    requests = (
        ended(1, 2, at=0.0)._replace(prompt=grown, output=35, kept=4),
        ended(1, 2, 3, 4, 5, at=1.0, hits=3),
        ended(8, 9, at=2.0, hits=2),
        ended(20, 21, at=3.0)._replace(kept=0),
        ended(20, 21, at=4.0),
        whole,
    )
    recorded = tallied(tmp_path, *requests)
    found = analyze(open_trace([tmp_path]), AnalyzeOptions())
    assert found.recorded == recorded
    rows = between_ideals(recorded, asked=found.pages_asked, hit=found.ideal_pages_hit)
    assert [row[1:] for row in rows] == [(15, 6), (-1, -1), (0, 2), (0, -2), (0, 2), (14, 7)]
    assert "answers" in rows[2][0]
    assert between_ideals(recorded, asked=found.pages_asked + 1, hit=found.ideal_pages_hit) == ()
    whole_of_it = found.document()
    assert whole_of_it["recorded"]["pages_of_answers"] == whole_of_it["recorded"]["pages_not_kept"] == 2
    assert "pages_of_answers" in whole_of_it["definitions"]["recorded_ideal_hit_rate_pages"]


def test_other_namespaces_and_generations_share_nothing(tmp_path: Path) -> None:
    """Cleared, or of another model, the same hash is another page."""
    others = [
        NamespaceRecord(namespace="00ff", page_size=16, generation=1),
        NamespaceRecord(namespace="1", page_size=16),
    ]
    found = tallied(tmp_path, ended(1, 2), *(ended(1, 2, namespace=other) for other in others))
    assert found.pages_that_could_hit == 0


@pytest.mark.case("STAT-2")
def test_nothing_is_recorded_of_nothing(tmp_path: Path) -> None:
    """Of requests without pages every rate is 0; of no request there is nothing to tell."""
    found = tallied(tmp_path / "log", ended())
    document = json.dumps(found.document(), allow_nan=False)
    assert '"recorded_hit_rate_pages": 0' in document
    assert Tally().result() is None
    (tmp_path / "empty.jsonl.gz").touch()
    assert analyze(open_trace([tmp_path / "empty.jsonl.gz"]), AnalyzeOptions()).recorded is None
