"""What is noted reaches the files, in bounded memory, and nobody waits for a disk."""

from __future__ import annotations

import gzip
import json
import threading
from pathlib import Path

import pytest

import hicache
from hicache.analytics.formats.accesslog import AccessLogReader, RecordedDetails
from hicache.analytics.trace import TraceRequest
from hicache.errors import ConfigError
from hicache.runtime.accesslog import blocks, writer
from hicache.runtime.accesslog.format import NamespaceRecord
from hicache.runtime.accesslog.settings import AccessLog, access_log
from hicache.runtime.accesslog.writer import AccessLogWriter
from hicache.testing.accesslog import ended


def read(folder: Path) -> list[TraceRequest]:
    return [request for path in sorted(folder.iterdir()) for request in AccessLogReader(path)]


def ids(requests: list[TraceRequest]) -> list[list[int]]:
    return [request.ids.tolist() for request in requests]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "log"


def test_what_is_noted_is_read_again(folder: Path) -> None:
    """Prompts that share pages have the same ids for them, whatever order they come in; nothing else meets."""
    log = AccessLogWriter(AccessLog(folder), now=lambda: 100.0, wall=lambda: 1_000_100.0, background=False)
    prompts = [(1, 2, 3), (1, 2, 3, 4), (1, 9), (1, 2), (5,), ()]
    for number, names in enumerate(prompts):
        log.note(ended(*names, at=float(number), hits=min(2, len(names))))
    log.note(ended(1, 2, at=6.0, namespace=NamespaceRecord(namespace="00ee", page_size=16)))
    assert log.close()
    found = read(folder)
    assert [request.time for request in found] == [1_000_000.0 + number for number in range(7)]
    numbers: dict[tuple[int, ...], int] = {}
    wanted = [[numbers.setdefault(names[: end + 1], len(numbers)) for end in range(len(names))] for names in prompts]
    assert ids(found[:6]) == wanted
    assert not set(found[6].ids.tolist()) & set(numbers.values())
    first = found[0]
    assert (first.input_tokens, first.unit) == (51, 16)
    details = first.details
    assert isinstance(details, RecordedDetails)
    assert details.model == "example/tiny"
    outcome = details.outcome
    assert (outcome.asked, outcome.host, outcome.missed, outcome.kept) == (3, 2, {"cold": 1}, 3)
    assert (outcome.load, outcome.seconds) == (0.25, 0.5)
    assert details.session.endswith("/7")
    statistics = log.statistics()
    assert (statistics.requests, statistics.written, statistics.dropped, statistics.waiting) == (7, 7, 0, 0)
    assert statistics.bytes == sum(path.stat().st_size for path in folder.iterdir())


def test_a_page_stands_in_a_block_once(folder: Path) -> None:
    """A thousand turns of one conversation take little more than its pages."""
    log = AccessLogWriter(AccessLog(folder), background=False)
    names = tuple(range(200))
    for turn in range(1, 201):
        log.note(ended(*names[:turn], hits=turn - 1))
    log.close()
    assert log.statistics().bytes < 200 * 8 * 2 + 200 * 40
    assert [len(found) for found in ids(read(folder))] == list(range(1, 201))


def test_blocks_end_where_they_are_full(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their requests, by their new pages, and by all pages that a reader must hold; all of it is read as one log."""
    for bound, most in (("MOST_ENTRIES", 3), ("MOST_NEW_PAGES", 6), ("MOST_PAGES", 6)):
        with monkeypatch.context() as patch:
            patch.setattr(blocks, bound, most)
            log = AccessLogWriter(AccessLog(folder / bound), background=False)
            for number in range(9):
                log.note(ended(1, 100 + number, at=float(number)))
            log.close()
        data = b"".join(path.read_bytes() for path in (folder / bound).iterdir())
        assert data.count(b"\x1f\x8b\x08\x04") == 3 if bound != "MOST_NEW_PAGES" else 2
        (path,) = (folder / bound).iterdir()
        assert ids(list(AccessLogReader(path))) == [[0, 1 + number] for number in range(9)]


def test_a_young_block_waits_for_more(folder: Path) -> None:
    """Until it is five seconds old, so that an idle service writes little and a killed one loses little."""
    now = [0.0]
    log = AccessLogWriter(AccessLog(folder), now=lambda: now[0], background=False)
    log.note(ended(1))
    log.work()
    assert log.statistics().waiting == 1
    now[0] = 4.9
    log.work()
    assert not list(folder.iterdir())
    now[0] = 5.0
    log.work()
    assert (log.statistics().written, log.statistics().waiting) == (1, 0)
    log.close()
    assert len(read(folder)) == 1


def test_a_full_queue_drops_and_counts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "MOST_WAITING", 5)
    log = AccessLogWriter(AccessLog(folder), background=False)
    for number in range(8):
        log.note(ended(number))
    assert (log.statistics().requests, log.statistics().dropped) == (8, 3)
    log.work(last=True)
    monkeypatch.setattr(writer, "MOST_PAGES_WAITING", 4)
    for _ in range(3):
        log.note(ended(1, 2))
    log.close()
    log.note(ended(1))
    statistics = log.statistics()
    assert (statistics.requests, statistics.written, statistics.dropped, statistics.waiting) == (12, 7, 5, 0)
    heads = [request.details.outcome.head for request in read(folder) if isinstance(request.details, RecordedDetails)]
    assert max((head.requests, head.dropped) for head in heads) == (11, 4)


def test_nobody_waits_for_a_disk_that_hangs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that writes is stuck; requests are noted, then dropped, and closing gives it up in its time."""
    monkeypatch.setattr(writer, "MOST_WAITING", 16)
    stuck, go = threading.Event(), threading.Event()

    def wall() -> float:
        stuck.set()
        go.wait(60)
        return 1.0

    log = AccessLogWriter(AccessLog(folder), wall=wall)
    try:
        for number in range(5):
            log.note(ended(number))  # the fifth one rings
        assert stuck.wait(60)
        for number in range(20):
            log.note(ended(number))
        assert log.statistics().dropped >= 4
        assert not log.close(0.0)
    finally:
        go.set()
    assert log.close(60)
    statistics = log.statistics()
    assert statistics.requests == 25 == statistics.written + statistics.dropped
    assert len(read(folder)) == statistics.written


def test_a_block_that_fails_is_counted_and_the_thread_goes_on(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A worker survives its work: what breaks it is told once, and the next requests are written."""
    log = AccessLogWriter(AccessLog(folder), background=False)
    log.note(ended(1)._replace(counts=None))  # it breaks what makes entries
    log._safely()
    assert log.statistics().dropped == 1
    log.note(ended(2))
    log.close()
    assert (log.statistics().written, log.statistics().dropped) == (1, 1)
    assert "internal error of the access log" in caplog.text
    assert len(read(folder)) == 1


def test_a_sample_by_prefix_has_all_or_nothing(folder: Path) -> None:
    """Of requests that begin alike; which ones is the same in every process, and at other rates a part of them."""
    found: dict[float, set[int]] = {}
    for share in (0.5, 0.25):
        log = AccessLogWriter(AccessLog(folder / str(share), sample=share), background=False)
        for family in range(200):
            for member in range(3):
                log.note(ended(family, member, at=float(family)))
        log.close()
        requests = read(folder / str(share))
        times = [int(request.time - requests[0].time) for request in requests]
        assert all(times.count(time) == 3 for time in times)
        begin = log.statistics()
        assert begin.written + begin.left_out == 600
        found[share] = set(_pages(folder / str(share)))
    assert found[0.25] < found[0.5]
    assert 60 <= len(found[0.5]) / 3 <= 140


def _pages(folder: Path) -> list[str]:
    (path,) = folder.iterdir()
    return [json.loads(line)["pages"] for line in gzip.decompress(path.read_bytes()).splitlines()[1:]]


def test_the_deciding_prefix_may_be_longer(folder: Path) -> None:
    """Behind a system prompt that all share, families differ only later."""
    for tokens, all_or_nothing in ((0, True), (32, False)):
        log = AccessLogWriter(AccessLog(folder / str(tokens), sample=0.5, sample_tokens=tokens), background=False)
        for family in range(100):
            log.note(ended(0, family, at=float(family)))
        log.close()
        written = log.statistics().written
        assert (written in (0, 100)) == all_or_nothing


def test_a_sample_by_request_is_a_share(folder: Path) -> None:
    log = AccessLogWriter(AccessLog(folder, sample=0.5, sample_by="request"), background=False)
    for _ in range(1000):
        log.note(ended(1, 2))
    log.note(ended())
    log.close()
    assert 400 <= log.statistics().written <= 600


def test_a_key_hides_hashes_and_keeps_what_is_equal(folder: Path, tmp_path: Path) -> None:
    """Neither hashes nor namespaces nor tenants can be confirmed without it; two logs of one key have the same."""
    secret, other = tmp_path / "a.key", tmp_path / "b.key"
    secret.write_text("0123456789abcdef" * 2 + "\n")
    other.write_text("fedcba9876543210" * 2 + "\n")
    texts = {}
    for name, key in (("plain", None), ("one", secret), ("again", secret), ("other", other)):
        log = AccessLogWriter(AccessLog(folder / name, key_file=key), background=False)
        base = hicache.Namespace(
            model="m", geometry=hicache.KVGeometry.mha(1, kv_heads=1, head_dim=8, dtype="float16"), page_size=16
        )
        record = log.describe(base.derive(tenant="acme"), 3)
        assert record.generation == 3
        assert record.tenant != "acme"
        for names in ((1, 2), (1, 2, 3)):
            log.note(ended(*names, namespace=record))
        log.close()
        assert [len(found) for found in ids(read(folder / name))] == [2, 3]
        texts[name] = (record.namespace, record.tenant, tuple(_pages(folder / name)))
    assert texts["one"] == texts["again"]
    assert len({texts["plain"], texts["one"], texts["other"]}) == 3
    assert all(one != other for one, other in zip(texts["plain"], texts["one"], strict=True))


@pytest.mark.parametrize(("tenants", "shown"), [("name", "acme"), ("omit", None)])
def test_tenants_by_name_or_not_at_all(folder: Path, tenants: str, shown: str | None) -> None:
    base = hicache.Namespace(
        model="m", geometry=hicache.KVGeometry.mha(1, kv_heads=1, head_dim=8, dtype="float16"), page_size=16
    )
    log = AccessLogWriter(AccessLog(folder, tenants=tenants), background=False)
    assert log.describe(base.derive(tenant="acme"), 0).tenant == shown
    log.close()


@pytest.mark.parametrize(
    "fields",
    [
        {"folder": ""},
        {"folder": 5},
        {"file_bytes": 100},
        {"file_bytes": True},
        {"total_bytes": 2**20},
        {"sample": 0},
        {"sample": 1.5},
        {"sample": float("nan")},
        {"sample": True},
        {"sample_by": "hash"},
        {"sample_tokens": -1},
        {"tenants": "all"},
    ],
)
def test_bad_settings_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=f"access_log.{next(iter(fields))}"):
        AccessLog(**({"folder": "x"} | fields))  # type: ignore[arg-type]


def test_settings_by_value(tmp_path: Path) -> None:
    given = AccessLog(tmp_path, sample=0.5)
    assert access_log(None) is None
    assert access_log(given) is given
    assert access_log(str(tmp_path)) == AccessLog(str(tmp_path))
    for wrong in (True, 5, "", b""):
        with pytest.raises(ConfigError, match="access_log="):
            access_log(wrong)


def test_keys_and_folders_that_cannot_be_used(tmp_path: Path) -> None:
    """One clear line each, before anything is written."""
    short = tmp_path / "short.key"
    short.write_text("secret")
    file = tmp_path / "file"
    file.touch()
    for settings, words in (
        (AccessLog(tmp_path / "log", key_file=tmp_path / "none"), "cannot be read: No such file"),
        (AccessLog(tmp_path / "log", key_file=short), "has 6 bytes, and a secret has 16"),
        (AccessLog(file), "cannot be made: File exists"),
        (AccessLog(file / "below"), "cannot be made: Not a directory"),
    ):
        with pytest.raises(ConfigError, match=words):
            AccessLogWriter(settings, background=False)
