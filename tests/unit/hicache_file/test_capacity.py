"""The hard limit, the order of leaving, full disks, and what is true while the index is being built."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hicache.core.keys import ObjectKey
from hicache.storage.base import ObjectStatus, StoredObject
from hicache.testing.faults import interpose
from hicache.testing.gates import Gate
from hicache.testing.storage import in_threads, make_chain, make_key, make_object, pattern, read, status_of
from hicache_file import FileBackend, FileSystem

Open = Callable[..., FileBackend]
PathOf = Callable[[FileBackend, ObjectKey], Path]
OK = ObjectStatus.OK
SIZE = 8192
STORED = 4096 + SIZE
COST = STORED + 256


def singles(count: int, first: int = 0) -> list[StoredObject]:
    return [make_object(make_key(first + i), pattern(first + i, SIZE)) for i in range(count)]


def on_disk(root: Path) -> int:
    """Bytes of objects and temporary files, also while others come and go."""
    total = 0
    for directory, _, names in os.walk(root):
        for name in names:
            if "hg1-" in name or name.endswith("tmp"):
                with contextlib.suppress(FileNotFoundError):
                    total += os.lstat(os.path.join(directory, name)).st_size
    return total


def books_of(root: Path) -> Any:
    content = (root / "HICACHE-LEDGER").read_bytes()
    return json.loads(content[18 : 18 + int(content[:8], 16)])


class Wall:
    """A wall clock of the test's."""

    def __init__(self) -> None:
        self.time = 1_700_000_000.0

    def __call__(self) -> float:
        return self.time


@pytest.mark.case("FILE-5", "THR-4")
def test_what_is_read_stays_whatever_the_wall_clock_does(open_root: Open) -> None:
    wall = Wall()
    backend = open_root(capacity=10 * COST, wall=wall)
    things = singles(10)
    for stored in things:
        backend.put([stored])
    for jump in (0, -3600, 7200, -3600):
        wall.time += jump
        assert read(backend, things[0].key, SIZE)[0].status is OK
    for stored in singles(5, first=100):
        wall.time -= 100
        backend.put([stored])
    assert backend.contains([stored.key for stored in things]) == [True] + [False] * 5 + [True] * 4


@pytest.mark.case("FILE-5")
def test_order_survives_a_restart_to_the_minute(open_root: Open, path_of: PathOf) -> None:
    wall = Wall()
    backend = open_root(capacity=10 * COST, wall=wall)
    things = singles(10)
    for stored in things:
        backend.put([stored])
        os.utime(path_of(backend, stored.key), (wall.time, wall.time))
        wall.time += 60
    assert read(backend, things[0].key, SIZE)[0].status is OK
    stamp = path_of(backend, things[0].key).stat().st_mtime
    assert stamp == wall.time
    wall.time += 1
    assert read(backend, things[0].key, SIZE)[0].status is OK
    assert path_of(backend, things[0].key).stat().st_mtime == stamp, "set at most once a minute"
    assert backend.touch([things[1].key]) == [True]
    backend.close()
    again = open_root(capacity=10 * COST, wall=wall)
    for stored in singles(5, first=100):
        again.put([stored])
    assert again.contains([stored.key for stored in things]) == [True] * 2 + [False] * 5 + [True] * 3


@pytest.mark.case("EVICT-3")
def test_of_one_minute_the_deepest_goes_first_also_after_a_restart(open_root: Open) -> None:
    backend = open_root(capacity=10 * COST)
    chain = make_chain(10, SIZE)
    backend.put(chain)
    backend.close()
    again = open_root(capacity=10 * COST, wall=lambda: 4e9)
    again.put(singles(4, first=100))
    assert again.contains([stored.key for stored in chain]) == [True] * 6 + [False] * 4


def test_the_folder_never_exceeds_its_capacity_by_more_than_is_in_flight(open_root: Open, root: Path) -> None:
    capacity, most = 40 * COST, [0]
    lock = threading.Lock()

    def watch(name: str, number: int, args: tuple[Any, ...]) -> None:
        if name == "rename_new":
            with lock:
                most[0] = max(most[0], on_disk(root))

    backend = open_root(capacity=capacity, fs=interpose(FileSystem(), watch))

    def work(index: int) -> None:
        for stored in singles(60, first=1000 * index):
            assert backend.put([stored])[0].status is OK

    in_threads(4, work)
    assert most[0] <= capacity + 4 * STORED
    assert on_disk(root) <= capacity
    assert on_disk(root) == backend.statistics().bytes_used
    assert backend.statistics().objects == 40
    assert backend.statistics().evicted == 4 * 60 - 40


@pytest.mark.case("EVICT-2", "EVICT-5")
def test_eviction_takes_as_much_as_is_needed_and_nothing_for_what_cannot_fit(open_root: Open) -> None:
    backend = open_root(capacity=10 * COST)
    backend.put(singles(10))
    (result,) = backend.put([make_object(make_key(50), pattern(50, 11 * COST))])
    assert (result.status, result.reason) == (ObjectStatus.FAILED, "too_large")
    assert backend.statistics().objects == 10
    (result,) = backend.put([make_object(make_key(51), pattern(51, 9 * 4096))])
    assert result.status is OK
    assert backend.statistics().objects == 10 - 4 + 1
    assert backend.statistics().evicted == 4


@pytest.mark.case("EVICT-5")
def test_what_is_busy_is_not_evicted_and_a_put_that_needs_it_is_refused(open_root: Open) -> None:
    gate = Gate()
    armed: list[Gate] = []

    def hold(name: str, number: int, args: tuple[Any, ...]) -> None:
        if name == "pwritev" and armed:
            armed.pop().enter()

    backend = open_root(capacity=10 * COST, fs=interpose(FileSystem(), hold))
    backend.put(singles(3))
    armed.append(gate)
    big = make_object(make_key(70), pattern(70, 4 * COST))
    writing = threading.Thread(target=lambda: backend.put([big]))
    writing.start()
    gate.until_arrived()
    (result,) = backend.put([make_object(make_key(71), pattern(71, 6 * COST))])
    assert (result.status, result.reason) == (ObjectStatus.FAILED, "no_room")
    assert backend.statistics().objects == 3
    gate.open()
    writing.join(30)
    assert backend.contains([big.key]) == [True]


@pytest.mark.case("FILE-7")
def test_what_others_put_in_the_place_of_a_victim_stays(open_root: Open, path_of: PathOf) -> None:
    backend = open_root(capacity=4 * COST)
    things = singles(5)
    backend.put(things[:4])
    path = path_of(backend, things[0].key)
    path.unlink()
    path.write_bytes(b"theirs")
    assert status_of(backend.put(things[4:])) == [OK]
    assert path.read_bytes() == b"theirs"
    assert backend.statistics().objects == 4


def test_a_victim_that_cannot_be_removed_fails_the_put_and_still_counts(open_root: Open, root: Path) -> None:
    broken = [True]

    def refuse(name: str, number: int, args: tuple[Any, ...]) -> None:
        if name == "unlink" and "hg1-" in args[0] and broken[0]:
            raise PermissionError(errno.EACCES, "no")

    backend = open_root(capacity=4 * COST, fs=interpose(FileSystem(), refuse))
    things = singles(5)
    backend.put(things[:4])
    (result,) = backend.put(things[4:])
    assert (result.status, result.reason) == (ObjectStatus.FAILED, "evict")
    assert backend.statistics().bytes_used == on_disk(root) == 4 * STORED
    broken[0] = False
    assert status_of(backend.put(things[4:])) == [OK]
    assert backend.statistics().bytes_used == on_disk(root) == 4 * STORED


# --- while the index is being built -----------------------------------------------------------------------------


class SlowScan:
    """Stops the scan at its first object until the test opens the gate."""

    def __init__(self) -> None:
        self.gate = Gate()

    def __call__(self, name: str, number: int, args: tuple[Any, ...]) -> None:
        if name == "scandir" and threading.current_thread().name == "hicache-file-janitor" and len(args[0]) > 100:
            self.gate.enter()


@pytest.fixture
def scan() -> Any:
    scan = SlowScan()
    yield scan
    scan.gate.open()


def test_opening_does_not_wait_for_the_index(open_root: Open, scan: SlowScan) -> None:
    things = singles(10)
    first = open_root(capacity=20 * COST)
    first.put(things)
    first.close()
    backend = open_root(ready=False, capacity=20 * COST, fs=interpose(FileSystem(), scan))
    assert not backend.statistics().ready
    assert backend.contains([stored.key for stored in things]) == [True] * 10
    assert read(backend, things[3].key, SIZE)[1] == bytes(things[3].payload)
    assert backend.statistics().objects == 1, "what was read is known"
    assert status_of(backend.put(singles(2, first=50))) == [OK] * 2
    assert backend.delete([things[0].key]) == [True]
    assert status_of(backend.put([things[1]])) == [OK]
    scan.gate.open()
    assert backend.wait_ready(30)
    statistics = backend.statistics()
    assert (statistics.objects, statistics.bytes_used, statistics.ready) == (11, 11 * STORED, True)


def test_the_limit_holds_while_the_index_is_being_built(open_root: Open, root: Path, scan: SlowScan) -> None:
    things = singles(10)
    first = open_root(capacity=10 * COST)
    first.put(things)
    first.close()
    backend = open_root(ready=False, capacity=10 * COST, fs=interpose(FileSystem(), scan))
    (result,) = backend.put(singles(1, first=50))
    assert (result.status, result.reason) == (ObjectStatus.FAILED, "rebuilding")
    assert read(backend, things[0].key, SIZE)[0].status is OK  # now it is known, and may go
    assert status_of(backend.put(singles(1, first=50))) == [OK]
    assert on_disk(root) == 10 * STORED
    assert backend.contains([things[0].key]) == [False]
    scan.gate.open()
    assert backend.wait_ready(30)
    assert status_of(backend.put(singles(3, first=60))) == [OK] * 3
    assert on_disk(root) == backend.statistics().bytes_used == 10 * STORED


def test_after_a_crash_the_folder_is_taken_for_full_until_it_is_counted(
    open_root: Open, root: Path, scan: SlowScan
) -> None:
    first = open_root(capacity=10 * COST)
    first.put(singles(4))
    first.close()
    (root / "HICACHE-LEDGER").unlink()  # a crash leaves none
    backend = open_root(ready=False, capacity=10 * COST, fs=interpose(FileSystem(), scan))
    (result,) = backend.put(singles(1, first=50))
    assert result.reason == "rebuilding"
    scan.gate.open()
    assert backend.wait_ready(30)
    assert status_of(backend.put(singles(6, first=50))) == [OK] * 6
    assert backend.statistics().evicted == 0


def test_a_smaller_capacity_trims_after_the_count(open_root: Open, root: Path) -> None:
    first = open_root(capacity=20 * COST)
    first.put(singles(20))
    first.close()
    backend = open_root(capacity=5 * COST)
    assert status_of(backend.put(singles(1, first=50))) == [OK]
    assert backend.wait_swept(30)
    assert on_disk(root) <= 5 * COST
    assert backend.statistics().objects == 5


def too_full(open_root: Open, path_of: PathOf, count: int) -> list[StoredObject]:
    """A folder with objects that were used in different minutes, in this order."""
    first = open_root(capacity=count * COST)
    things = singles(count)
    assert status_of(first.put(things)) == [OK] * count
    for minute, stored in enumerate(things):
        os.utime(path_of(first, stored.key), (1_700_000_000 + 60 * minute,) * 2)
    first.close()
    return things


def test_a_folder_that_is_too_full_is_trimmed_while_it_is_indexed(open_root: Open, root: Path, path_of: PathOf) -> None:
    things = too_full(open_root, path_of, 40)
    gate = Gate()

    def hold(name: str, number: int, args: tuple[Any, ...]) -> None:
        indexing = threading.current_thread().name == "hicache-file-janitor"
        if name == "open" and "hg1-" in args[0] and indexing and on_disk(root) <= 25 * STORED:
            gate.enter()

    backend = open_root(ready=False, capacity=10 * COST, fs=interpose(FileSystem(), hold))
    gate.until_arrived()
    assert not backend.statistics().ready
    gate.open()
    assert backend.wait_swept(30)
    kept = backend.contains([stored.key for stored in things])
    assert kept == [False] * 30 + [True] * 10, "what goes is the same as if all had been known before"


def test_closing_trims_what_is_still_to_be_trimmed(
    open_root: Open, root: Path, path_of: PathOf, scan: SlowScan
) -> None:
    things = too_full(open_root, path_of, 20)
    backend = open_root(ready=False, capacity=5 * COST, fs=interpose(FileSystem(), scan))
    scan.gate.until_arrived()
    closing = threading.Thread(target=backend.close)
    closing.start()
    scan.gate.open()
    closing.join(30)
    assert on_disk(root) <= 5 * COST
    assert open_root(capacity=5 * COST).contains([stored.key for stored in things]) == [False] * 15 + [True] * 5


def test_closing_during_the_scan_is_quick_and_claims_nothing(open_root: Open, root: Path) -> None:
    first = open_root(capacity=20 * COST)
    first.put(singles(10))
    first.close()
    (root / "HICACHE-LEDGER").unlink()
    scan = SlowScan()
    backend = open_root(ready=False, capacity=20 * COST, fs=interpose(FileSystem(), scan))
    scan.gate.until_arrived()
    closing = threading.Thread(target=backend.close)
    closing.start()
    scan.gate.open()
    closing.join(30)
    assert books_of(root)["used"] is None
    assert open_root(capacity=20 * COST).statistics().objects == 10


# --- full disks -------------------------------------------------------------------------------------------------


@pytest.mark.case("FILE-6")
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("call", ["open", "pwritev", "rename_new"])
def test_a_full_disk_makes_room_once_and_tries_once_more(open_root: Open, root: Path, call: str, code: int) -> None:
    full: list[OSError] = []

    def refuse(name: str, number: int, args: tuple[Any, ...]) -> None:
        if name == call and full and (name != "open" or args[0].endswith(".hicache-tmp")):
            raise full.pop()

    backend = open_root(capacity=2**40, fs=interpose(FileSystem(), refuse))
    things = singles(6)
    backend.put(things[:4])
    full.append(OSError(code, "full"))
    assert status_of(backend.put(things[4:5])) == [OK]
    assert backend.statistics().evicted == 1
    assert backend.contains([stored.key for stored in things]) == [False, True, True, True, True, False]
    full.extend([OSError(code, "full")] * 2)
    (result,) = backend.put(things[5:])
    assert (result.status, result.reason) == (ObjectStatus.FAILED, "no_space")
    assert not list(root.rglob("*.hicache-tmp"))
    assert backend.statistics().bytes_used == on_disk(root)


@pytest.mark.case("FILE-6", "FAIL-6")
def test_a_disk_that_stays_full_is_not_tried_with_every_page(open_root: Open) -> None:
    now, tries = [0.0], [0]
    full = [True]

    def refuse(name: str, number: int, args: tuple[Any, ...]) -> None:
        if name == "pwritev" and full[0] and len(args[1]) > 1:
            tries[0] += 1
            raise OSError(errno.ENOSPC, "full")

    backend = open_root(fs=interpose(FileSystem(), refuse), now=lambda: now[0])
    things = singles(100)
    for stored in things:
        assert backend.put([stored])[0].reason == "no_space"
    assert tries[0] == 1, "nothing of ours can go, so there is no second try either"
    delays = []
    for _ in range(7):
        before = tries[0]
        waited = 0.0
        while tries[0] == before:
            waited += 0.5
            now[0] += 0.5
            backend.put(things[:1])
        delays.append(waited)
    assert delays == [1, 2, 4, 8, 16, 30, 30]
    full[0] = False
    now[0] += 30
    assert status_of(backend.put(things)) == [OK] * 100
    assert backend.statistics().by_reason["no_space"] > 100


SMALL_DISK = """
    import os, subprocess, sys
    root = sys.argv[1]
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", root], check=True)
    from hicache.testing.storage import make_key, make_object, pattern, read
    from hicache_file import FileBackend
    SIZE = 256 * 1024
    backend = FileBackend(root, capacity=10**9)
    things = [make_object(make_key(i), pattern(i, SIZE)) for i in range(100)]
    results = [backend.put([thing])[0] for thing in things]
    assert all(result.status in ("ok", "failed") for result in results)
    failed = sum(result.status == "failed" for result in results)
    assert backend.statistics().by_reason.get("no_space", 0) == failed
    readable = [read(backend, thing.key, SIZE) for thing in things]
    hits = [i for i, (result, payload) in enumerate(readable) if result.status == "ok"]
    assert all(readable[i][1] == bytes(things[i].payload) for i in hits)
    assert len(hits) >= 10 and max(hits) == 99, hits
    left = [f for _, _, files in os.walk(root) for f in files if f.endswith("hicache-tmp")]
    assert not left, left
    backend.close()
    print("done", len(hits), failed)
"""


@pytest.mark.case("FILE-6")
def test_a_real_small_disk(root: Path) -> None:
    if subprocess.run(["unshare", "-Urm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("mount namespaces are refused here")
    root.mkdir()
    done = subprocess.run(
        ["unshare", "-Urm", sys.executable, "-c", textwrap.dedent(SMALL_DISK), str(root)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.startswith("done"), done.stderr[-2000:]
