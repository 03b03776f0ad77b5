"""Several processes on one root. Two backends in one process stand for two: their locks exclude each other as well."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hicache.core.keys import ObjectKey
from hicache.errors import ConfigError
from hicache.storage.base import ObjectStatus, StoredObject
from hicache.testing.faults import interpose
from hicache.testing.gates import Gate
from hicache.testing.storage import NAMESPACE, in_threads, make_chain, make_key, make_object, pattern, read, status_of
from hicache_file import FileBackend, FileSystem

Open = Callable[..., FileBackend]
PathOf = Callable[[FileBackend, ObjectKey], Path]
OK, FAILED, MISSING = ObjectStatus.OK, ObjectStatus.FAILED, ObjectStatus.MISSING
SIZE = 8192
STORED = 4096 + SIZE
COST = STORED + 256
NEVER = 3600.0  # no look by itself: the test says when


def singles(count: int, first: int = 0) -> list[StoredObject]:
    return [make_object(make_key(first + i), pattern(first + i, SIZE)) for i in range(count)]


def books_of(root: Path) -> Any:
    content = (root / "HICACHE-LEDGER").read_bytes()
    return json.loads(content[18 : 18 + int(content[:8], 16)])


def on_disk(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*") if "hg1-" in path.name or path.name.endswith("-tmp"))


def charged(root: Path) -> int:
    files = [path for path in root.rglob("*hg1-*") if path.is_file()]
    return sum(path.stat().st_size + 256 for path in files)


def look(backend: FileBackend) -> None:
    """What the thread does each time it looks."""
    backend._keeper._recount_at = backend._keeper._trim_at = 0.0
    backend._keeper._look([])


def die(backend: FileBackend) -> None:
    """As after kill -9: the locks are gone, and nothing was put in order."""
    backend._root._lock.close()  # type: ignore[union-attr]
    backend._opened.election.close()
    backend._accounts._ledger.close()


# --- what one stores the other finds --------------------------------------------------------------------------------


def test_what_one_stores_the_others_find_and_what_it_deletes_they_miss(open_root: Open) -> None:
    one, two = open_root(), open_root()
    objects = singles(3)
    one.put(objects)
    keys = [stored.key for stored in objects]
    assert two.contains(keys) == [True] * 3
    assert read(two, keys[1], SIZE)[1] == bytes(objects[1].payload)
    assert two.touch(keys) == [True] * 3
    one.delete(keys[:1])
    assert two.contains(keys) == [False, True, True]
    result, _ = read(two, keys[0], SIZE)
    assert (result.status, result.reason) == (MISSING, "absent")


def test_what_another_has_stored_is_not_written_again_and_counts_once(open_root: Open, root: Path) -> None:
    one, two = open_root(capacity=20 * COST), open_root(capacity=20 * COST)
    objects = singles(5)
    assert status_of(one.put(objects)) == [OK] * 5
    assert status_of(two.put(objects)) == [OK] * 5
    assert two.statistics().bytes_written == 0
    assert two.statistics().objects == 5
    one.close()
    two.close()
    assert books_of(root)["used"] == 5 * COST == charged(root)


@pytest.mark.case("RACE-6")
def test_two_that_store_the_same_object_at_the_same_moment_store_it_once(open_root: Open, root: Path) -> None:
    backends = [open_root(capacity=100 * COST) for _ in range(4)]
    for round_ in range(25):
        (stored,) = singles(1, first=round_)
        results = in_threads(4, lambda i, s=stored: backends[i].put([s])[0].status)  # type: ignore[misc]
        assert results == [OK] * 4
    assert sum(backend.statistics().bytes_written for backend in backends) == 25 * SIZE
    for backend in backends:
        backend.close()
    assert books_of(root)["used"] == 25 * COST == charged(root)


# --- the limit ------------------------------------------------------------------------------------------------------


class Weighed(FileSystem):
    """Weighs what is on the disk: each file from before it is written until after it is unlinked."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.now = self.most = 0

    def pwritev(self, fd: int, buffers: Any, offset: int) -> int:
        with self.lock:
            self.now += sum(memoryview(buffer).nbytes for buffer in buffers)
            self.most = max(self.most, self.now)
        return super().pwritev(fd, buffers, offset)

    def unlink(self, path: str) -> None:
        size = os.lstat(path).st_size // 4096 * 4096  # small files are no objects
        super().unlink(path)
        with self.lock:
            self.now -= size


@pytest.mark.parametrize("count", [2, 4])
def test_the_limit_is_that_of_all_together(open_root: Open, root: Path, count: int) -> None:
    capacity, scales = 30 * COST, Weighed()
    backends = [open_root(capacity=capacity, fs=scales) for _ in range(count)]

    def work(index: int) -> int:
        results = [backends[index].put([stored])[0] for stored in singles(50, first=1000 * index)]
        assert {result.reason for result in results} <= {"", "no_room"}
        return sum(result.status is OK for result in results)

    stored = sum(in_threads(count, work))
    assert stored >= count * 10
    assert 20 * STORED < scales.most <= capacity
    for backend in backends:
        backend.close()
    assert scales.now == on_disk(root)
    assert books_of(root)["used"] == charged(root) <= capacity


def test_a_full_root_lets_a_newcomer_in_at_the_cost_of_what_is_oldest(open_root: Open, root: Path) -> None:
    one = open_root(capacity=10 * COST)
    objects = singles(10)
    for stored in objects:
        one.put([stored])
    two = open_root(capacity=10 * COST)
    assert status_of(two.put(singles(3, first=50))) == [OK] * 3
    assert sum(one.contains([stored.key for stored in objects])) == 7
    assert on_disk(root) == 10 * STORED
    assert status_of(one.put(singles(10, first=80))) == [OK] * 10, "stale entries of its index cost it nothing"
    assert on_disk(root) <= 10 * STORED


@pytest.mark.case("FILE-5")
def test_what_another_process_uses_is_spared(open_root: Open, path_of: PathOf) -> None:
    wall = [1_700_000_000.0]
    one = open_root(capacity=4 * COST, wall=lambda: wall[0], refresh=NEVER)
    objects = singles(4)
    for stored in objects:
        one.put([stored])
        os.utime(path_of(one, stored.key), (wall[0], wall[0]))
    two = open_root(capacity=4 * COST, wall=lambda: wall[0], refresh=NEVER)
    look(one)
    wall[0] += 600
    assert read(two, objects[0].key, SIZE)[0].status is OK
    assert status_of(one.put(singles(1, first=50))) == [OK]
    assert one.contains([stored.key for stored in objects]) == [True, False, True, True]


def test_bytes_that_a_dead_writer_held_come_back_with_the_next_count(open_root: Open, root: Path) -> None:
    gate = Gate(patience=10)

    def hold(name: str, number: int, args: tuple[Any, ...]) -> None:
        if name == "rename_new":
            gate.enter()

    one = open_root(capacity=20 * COST, refresh=NEVER)
    two = open_root(capacity=20 * COST, refresh=NEVER, fs=interpose(FileSystem(), hold))
    (half,) = singles(1, first=99)
    results: list[Any] = []
    writing = threading.Thread(target=lambda: results.extend(two.put([half])))
    writing.start()
    gate.until_arrived()
    two._accounts.publish()
    die(two)
    assert one.put(singles(1))[0].status is OK
    assert books_of(root)["used"] >= 2 * COST
    look(one)
    books = books_of(root)
    assert (books["doubt"], list(books["writers"])) == (False, [one._root.token])
    assert books["used"] == COST + books["writers"][one._root.token]["held"]
    assert not [path for path in root.rglob("*.hicache-tmp") if path.exists()]
    gate.open()
    writing.join(30)
    assert results[0].status is FAILED, "its temporary file was taken for a dead writer's"


def test_a_count_with_others_at_work_is_never_too_low(open_root: Open, root: Path) -> None:
    one, two, three = (open_root(capacity=100 * COST, refresh=NEVER) for _ in range(3))
    for index, backend in enumerate((one, two, three)):
        backend.put(singles(5, first=100 * index))
        look(backend)
    three._accounts.draw(20 * COST)
    assert books_of(root)["used"] >= 35 * COST
    die(three)
    two.put(singles(5, first=900))
    look(one)
    books = books_of(root)
    held = sum(account["held"] for account in books["writers"].values())
    assert books["doubt"] is False
    assert charged(root) <= books["used"] <= charged(root) + held + 2 * two._accounts.portion + COST


def test_a_count_during_which_somebody_came_is_done_again(open_root: Open, root: Path) -> None:
    one = open_root(capacity=100 * COST, refresh=NEVER)
    before = one._accounts.begin_count()
    assert before is not None
    open_root(capacity=100 * COST, refresh=NEVER)
    assert one._accounts.end_count(before, 0) is False


@pytest.mark.parametrize("damage", [b"", b"xx", b"0000000a 00000000\n{}" + b" " * 100, None])
def test_a_ledger_that_is_lost_or_damaged_is_counted_anew(open_root: Open, root: Path, damage: bytes | None) -> None:
    one = open_root(capacity=20 * COST, refresh=NEVER)
    one.put(singles(5))
    path = root / "HICACHE-LEDGER"
    path.unlink() if damage is None else path.write_bytes(damage)
    look(one)
    look(one)
    books = books_of(root)
    assert books["used"] == 5 * COST + books["writers"][one._root.token]["held"]
    assert status_of(one.put(singles(15, first=50))) == [OK] * 15
    assert one.statistics().evicted == 0


def test_a_ledger_that_somebody_keeps_fails_the_put_in_time(
    open_root: Open, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    backend = open_root(capacity=20 * COST, refresh=NEVER)
    monkeypatch.setattr("hicache_file.ledger._PATIENCE", 0.05)
    with (root / "HICACHE-LEDGER").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        (result,) = backend.put(singles(1))
        assert (result.status, result.reason) == (FAILED, "busy")
    assert status_of(backend.put(singles(1))) == [OK]


# --- trimming -------------------------------------------------------------------------------------------------------


def test_one_put_into_a_folder_that_is_far_too_full_evicts_only_what_it_needs(open_root: Open, root: Path) -> None:
    first = open_root(capacity=200 * COST)
    first.put(singles(200))
    first.close()
    gate, by_thread = Gate(), dict[str, int]()

    def hold(name: str, number: int, args: tuple[Any, ...]) -> None:
        if name == "unlink" and "hg1-" in args[0]:
            thread = threading.current_thread().name
            by_thread[thread] = by_thread.get(thread, 0) + 1
            if thread == "hicache-file-janitor":
                gate.enter()

    backend = open_root(ready=False, capacity=5 * COST, fs=interpose(FileSystem(), hold))
    try:
        gate.until_arrived()
        assert status_of(backend.put(singles(1, first=500))) == [OK]
        assert by_thread[threading.current_thread().name] == 1
    finally:
        gate.open()
    assert backend.wait_swept(30)
    assert on_disk(root) <= 5 * COST


def test_closing_waits_for_the_trimming_of_a_folder_only_for_some_time(open_root: Open, root: Path) -> None:
    first = open_root(capacity=200 * COST)
    first.put(singles(200))
    first.close()
    gate = Gate()

    def hold(name: str, number: int, args: tuple[Any, ...]) -> None:
        if name == "unlink" and "hg1-" in args[0]:
            gate.enter()

    backend = open_root(ready=False, capacity=5 * COST, fs=interpose(FileSystem(), hold))
    gate.until_arrived()
    assert not backend._keeper.stop(0.1)
    gate.open()
    backend.close()
    assert len(list(root.rglob("*hg1-*"))) >= 198
    assert books_of(root)["used"] == charged(root)


def test_files_that_cannot_be_removed_are_counted_and_not_tried_for_ever(open_root: Open, root: Path) -> None:
    first = open_root(capacity=20 * COST)
    first.put(singles(20))
    first.close()
    tries = [0]

    def refuse(name: str, number: int, args: tuple[Any, ...]) -> None:
        if name == "unlink" and "hg1-" in args[0]:
            tries[0] += 1
            raise PermissionError(errno.EPERM, "no")

    backend = open_root(capacity=10 * COST, fs=interpose(FileSystem(), refuse))
    assert backend.wait_swept(30)
    assert 0 < tries[0] <= 20
    trimmed = tries[0]
    (result,) = backend.put(singles(1, first=500))
    assert (result.status, result.reason) == (FAILED, "evict")
    assert tries[0] - trimmed <= 16
    assert backend.statistics().by_reason["undeletable"] == tries[0]
    assert backend.statistics().objects == 20


# --- clearing -------------------------------------------------------------------------------------------------------


def test_a_clear_elsewhere_is_seen_within_the_refresh_time(open_root: Open, root: Path) -> None:
    now = [0.0]
    one = open_root(refresh=NEVER)
    two = open_root(refresh=5.0, now=lambda: now[0])
    objects = singles(3)
    two.put(objects)
    key = objects[0].key
    assert two.contains([key]) == [True]
    one._labels.raise_to(NAMESPACE, 1)  # no sweep: the files stay
    now[0] += 4.9
    assert two.contains([key]) == [True], "that late it may still hit"
    assert status_of(two.put(singles(1, first=50))) == [OK], "a late put is harmless"
    now[0] += 0.2
    assert two.contains([key]) == [False]
    assert two.touch([key]) == [False]
    result, _ = read(two, key, SIZE)
    assert (result.status, result.reason) == (MISSING, "cleared")
    assert two.put(singles(1, first=51))[0].reason == "cleared"
    look(one)
    assert not list(root.rglob("*hg1-*")), "the janitor has removed all of it, the late put too"


def test_the_janitor_sweeps_what_another_process_cleared(open_root: Open, root: Path) -> None:
    now = [0.0]
    one = open_root(refresh=NEVER, now=lambda: now[0])
    two = open_root(refresh=NEVER, janitor="never")
    two.put(singles(5))
    two.clear(NAMESPACE, 1)
    assert two.wait_swept(30)
    assert len(list(root.rglob("*hg1-*"))) == 5
    look(one)
    assert not list(root.rglob("*hg1-*"))
    assert books_of(root)["cleared"] == {NAMESPACE.hex(): 1}, "it is swept once more, for late puts"
    late = make_object(make_key(1), pattern(1, SIZE))
    two._labels._seen[NAMESPACE] = (0, float("inf"))  # a process that has not looked for long
    assert status_of(two.put([late])) == [OK]
    one._keeper._later[NAMESPACE.hex()] = 0.0
    look(one)
    assert not list(root.rglob("*hg1-*"))
    assert books_of(root)["cleared"] == {}


def test_raises_of_the_generation_do_not_overtake_each_other(open_root: Open) -> None:
    backends = [open_root() for _ in range(4)]
    in_threads(4, lambda i: [backends[i].clear(NAMESPACE, 10 * step + i) for step in range(20)])
    assert {backend.generation(NAMESPACE) for backend in backends} == {193}


# --- who is the janitor ---------------------------------------------------------------------------------------------


def janitors(*backends: FileBackend) -> list[bool]:
    for backend in backends:
        look(backend)
    return [backend.is_janitor for backend in backends]


def test_there_is_one_janitor_and_another_when_it_is_gone(open_root: Open) -> None:
    one, two, three = (open_root(refresh=NEVER) for _ in range(3))
    assert janitors(one, two, three) == [True, False, False]
    die(one)
    assert janitors(two, three) == [True, False]
    two.close()
    assert janitors(three) == [True]


def test_one_that_was_told_to_be_it_takes_over_from_one_that_was_not(open_root: Open) -> None:
    one = open_root(refresh=NEVER)
    two = open_root(refresh=NEVER, janitor="always")
    assert janitors(one, two) == [False, True]
    assert janitors(one, two) == [False, True]
    two.close()
    assert janitors(one) == [True]


def test_two_that_were_told_to_be_it_are_one_too_many(open_root: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicache_file.election._TRIES", 2)
    first = open_root(janitor="always")
    with pytest.raises(ConfigError, match="janitor=always already") as caught:
        open_root(janitor="always")
    assert "\n" not in str(caught.value)
    assert os.listdir(f"{first.path}/writers") == [f"{first._root.token}.lock"], "who was refused leaves nothing"
    first.close()
    open_root(janitor="always")


def test_one_that_was_told_not_to_be_it_never_is(open_root: Open, root: Path) -> None:
    backend = open_root(refresh=NEVER, janitor="never", capacity=20 * COST)
    assert janitors(backend) == [False]
    assert status_of(backend.put(make_chain(5, SIZE))) == [OK] * 5


# --- sharing --------------------------------------------------------------------------------------------------------


def test_who_wants_to_be_alone_keeps_others_out(open_root: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicache_file.ledger._PATIENCE", 0.05)
    first = open_root(shared="no", capacity=20 * COST)
    with pytest.raises(ConfigError, match="shared=no"):
        open_root()
    assert status_of(first.put(singles(30))) == [OK] * 30
    assert first.is_janitor
    first.close()
    second = open_root()
    with pytest.raises(ConfigError, match="in use by 1 other"):
        open_root(shared="no")
    assert second.statistics().objects == 20
    second.close()
    open_root(shared="no")


class NoLocks(FileSystem):
    def flock(self, fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def test_without_locks_a_root_is_for_one_process(open_root: Open, root: Path) -> None:
    with pytest.raises(ConfigError, match="without locks"):
        open_root(shared="yes", fs=NoLocks())
    backend = open_root(capacity=10 * COST, fs=NoLocks())
    assert status_of(backend.put(singles(15))) == [OK] * 15
    assert backend.is_janitor
    assert on_disk(root) == 10 * STORED
    (root / "00000000deadbeef-1.hicache-tmp").write_bytes(b"half")
    backend.close()
    again = open_root(capacity=10 * COST, fs=NoLocks())
    assert again.statistics().objects == 10
    assert not (root / "00000000deadbeef-1.hicache-tmp").exists()


def test_locks_that_do_not_reach_other_machines_are_not_enough_for_who_asks_for_sharing(
    open_root: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hicache_file.mounts import Mount

    monkeypatch.setattr("hicache_file.opening.mount_of", lambda path: Mount("nfs4", network=True, locks_reach=False))
    with pytest.raises(ConfigError, match="nfs4"):
        open_root(shared="yes")
    open_root()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"io": "fast"}, "io='fast' is unknown: use auto, direct, buffered"),
        ({"janitor": "yes"}, "janitor='yes' is unknown"),
        ({"shared": "1"}, "shared='1' is unknown"),
        ({"refresh": 0.0}, "refresh is 0.0 seconds"),
        ({"refresh": float("nan")}, "refresh is nan"),
        ({"shared": "no", "janitor": "never"}, "drop janitor=never"),
    ],
)
def test_parameters_that_cannot_work_are_refused_in_one_line(open_root: Open, options: Any, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_root(**options)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)
