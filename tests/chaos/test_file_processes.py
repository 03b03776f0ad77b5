"""Real processes on one folder: at once, killed at any moment, and never a wrong byte or a byte too many."""

from __future__ import annotations

import json
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hicache.storage.base import ObjectStatus, StoredObject
from hicache.testing.objects import make_key, make_object, pattern, read
from hicache_file import FileBackend

pytestmark = pytest.mark.chaos

PATIENCE = 60.0
SIZE = 20_000
STORED = 4096 + 20_480
COST = STORED + 256
OK, MISSING = ObjectStatus.OK, ObjectStatus.MISSING


class Crew:
    """Processes of `file_worker.py`."""

    def __init__(self) -> None:
        script = Path(__file__).with_name("file_worker.py")
        self.server = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.alive: list[int] = []
        self.said: deque[dict[str, Any]] = deque()
        self._lines: queue.Queue[dict[str, Any]] = queue.Queue()
        self._reader = threading.Thread(target=self._listen)
        self._reader.start()

    def start(self, **options: Any) -> int:
        self._command({"work": options})
        pid = int(self.until(lambda line: "started" in line)["started"])
        self.alive.append(pid)
        return pid

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        self.wait(pid)

    def wait(self, pid: int) -> None:
        self._command({"wait": pid})
        self.until(lambda line: line.get("dead") == pid)
        self.alive.remove(pid)

    def until(self, met: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The next line that meets a condition; others are kept in `said`."""
        end = time.monotonic() + PATIENCE
        while True:
            line = self._lines.get(timeout=max(0.0, end - time.monotonic()))
            assert "error" not in line, line["error"]
            if met(line):
                return line
            self.said.append(line)

    def finish(self, pid: int) -> dict[str, Any]:
        """What a process says in the end, waited for."""
        for line in self.said:
            if line["pid"] == pid and "done" in line:
                break
        else:
            line = self.until(lambda line: line["pid"] == pid and "done" in line)
        self.wait(pid)
        return line

    def frozen(self, look: Callable[[], Any]) -> Any:
        """What is true while all processes are stopped, wherever they are."""
        for pid in self.alive:
            os.kill(pid, signal.SIGSTOP)
        end = time.monotonic() + PATIENCE
        try:
            while not all(map(stopped, self.alive)):
                assert time.monotonic() < end, "a process does not stop"
            return look()
        finally:
            for pid in self.alive:
                os.kill(pid, signal.SIGCONT)

    def close(self) -> None:
        for pid in self.alive:
            os.kill(pid, signal.SIGKILL)
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        self.server.stdin.close()
        self.server.wait(PATIENCE)
        self._reader.join(PATIENCE)
        self.server.stdout.close()

    def _command(self, command: dict[str, Any]) -> None:
        assert self.server.stdin is not None
        self.server.stdin.write(json.dumps(command).encode() + b"\n")
        self.server.stdin.flush()

    def _listen(self) -> None:
        assert self.server.stdout is not None
        for line in self.server.stdout:
            self._lines.put(json.loads(line))


def stopped(pid: int) -> bool:
    """Whether each thread of a process has stopped, or the process has ended."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state not in "TtZX":
            return False
    return True


@pytest.fixture
def crew() -> Iterator[Crew]:
    crew = Crew()
    yield crew
    crew.close()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


def things(count: int, namespace: int = 0) -> list[StoredObject]:
    return [
        make_object(make_key(i, namespace=bytes([namespace] * 16)), pattern((i, namespace), SIZE), depth=i % 8)
        for i in range(count)
    ]


def weigh(root: Path) -> int:
    """Bytes of objects and of what is being written."""
    total = 0
    for directory, _, names in os.walk(root):
        total += sum(
            os.lstat(os.path.join(directory, name)).st_size
            for name in names
            if "hg1-" in name or (name.endswith("-tmp") and directory != str(root))
        )
    return total


def used(root: Path) -> int:
    content = (root / "HICACHE-LEDGER").read_bytes()
    return int(json.loads(content[18 : 18 + int(content[:8], 16)])["used"])


def in_order(root: Path, capacity: int, objects: list[StoredObject]) -> int:
    """Open the root anew: what is there is right and not too much, and nothing else is left. How many are there."""
    backend = FileBackend(str(root), capacity=capacity)
    assert backend.wait_ready(PATIENCE)
    found = 0
    for stored in objects:
        result, payload = read(backend, stored.key, SIZE)
        assert result.status in (OK, MISSING), result
        if result.status is OK:
            assert payload == stored.payload
            found += 1
    assert backend.wait_swept(PATIENCE)
    assert backend.statistics().objects == found
    backend.close()
    assert not list(root.rglob("*.hicache-tmp"))
    assert not list((root / "writers").iterdir())
    assert weigh(root) == found * STORED <= capacity
    assert used(root) == found * COST
    return found


@pytest.mark.case("FILE-1", "KEY-3", "RACE-6")
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("namespaces", [1, 4], ids=["one namespace", "different ones"])
def test_processes_at_once(crew: Crew, root: Path, count: int, namespaces: int) -> None:
    capacity = 40 * COST
    pids = [
        crew.start(
            root=str(root), capacity=capacity, size=SIZE, universe=100, seed=i, operations=300, namespace=i % namespaces
        )
        for i in range(count)
    ]
    most = looks = 0
    while sum("done" in line for line in crew.said) < count:
        most = max(most, crew.frozen(lambda: weigh(root)))
        looks += 1
        crew.said.append(crew.until(lambda line: True))
    ends = [crew.finish(pid) for pid in pids]
    assert [end["wrong"] for end in ends] == [0] * count
    assert sum(end["hits"] for end in ends) > 20, ends
    assert all(end["stored"] > 10 for end in ends), ends
    assert looks > 10
    assert 20 * STORED < most <= capacity, "what is being written counts as well"
    assert in_order(root, capacity, [s for n in range(namespaces) for s in things(100, n)]) >= 30


@pytest.mark.case("FILE-1")
def test_killed_at_twenty_random_points_under_load(crew: Crew, root: Path) -> None:
    rng = random.Random(20)
    capacity = 40 * COST
    options = {"root": str(root), "capacity": capacity, "size": SIZE, "universe": 100, "operations": None}
    stays = crew.start(seed="stays", **options)
    for number in range(20):
        victim = crew.start(seed=number, **options)
        crew.until(lambda line, pid=victim: line["pid"] == pid and "ready" in line)  # type: ignore[misc]
        for _ in range(rng.randrange(8)):
            crew.until(lambda line, pid=victim: line["pid"] == pid and "step" in line)  # type: ignore[misc]
        crew.kill(victim)
        assert crew.frozen(lambda: weigh(root)) <= capacity
    assert crew.until(lambda line: line["pid"] == stays and "step" in line)["wrong"] == 0
    crew.kill(stays)
    assert in_order(root, capacity, things(100)) >= 10


@pytest.mark.case("FILE-1", "FAIL-1")
def test_killed_at_each_call_that_a_write_makes(crew: Crew, root: Path) -> None:
    """Objects are written, replaced (one was damaged), evicted; afterwards each is whole or a miss."""
    capacity, objects = 4 * COST, things(8)
    rng = random.Random(1)
    for point in range(1, 1000):
        options = {"root": str(root), "capacity": capacity, "size": SIZE, "universe": 8, "point": point}
        pid = crew.start(**options)
        crew.wait(pid)
        in_order(root, capacity, objects)
        if any(line["pid"] == pid and "done" in line for line in crew.said):
            break
        spoil(root, rng)
    assert 60 < point < 999


def spoil(root: Path, rng: random.Random) -> None:
    """Damage one object, take another away."""
    files = sorted(root.rglob("*hg1-*"))
    if files:
        with rng.choice(files).open("r+b") as file:
            file.seek(4096 + rng.randrange(SIZE))
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1]))
        rng.choice(files).unlink()


def test_a_janitor_that_is_killed_is_followed_by_another(crew: Crew, root: Path) -> None:
    options = {"root": str(root), "capacity": 40 * COST, "size": SIZE, "universe": 60, "operations": None}
    for seed in range(3):
        crew.start(seed=seed, threads=1, **options)
    for _ in range(2):
        janitor = crew.until(lambda line: line.get("janitor") is True)["pid"]
        others = {
            crew.until(lambda line, a=pid: line["pid"] == a and "janitor" in line)["janitor"]  # type: ignore[misc]
            for pid in crew.alive
            if pid != janitor
        }
        assert others == {False}
        crew.kill(janitor)
        crew.said.clear()
        while not crew._lines.empty():
            crew._lines.get()  # what was said before
    crew.until(lambda line: line.get("janitor") is True)
    assert crew.frozen(lambda: weigh(root)) <= 40 * COST


@pytest.mark.case("FILE-7")
def test_a_clear_in_one_process_stops_the_hits_of_the_others(crew: Crew, root: Path) -> None:
    options = {"root": str(root), "capacity": 100 * COST, "size": SIZE, "universe": 20, "operations": None}
    for seed in range(2):
        crew.start(seed=seed, puts=0.3, **options)
    for pid in crew.alive:
        crew.until(lambda line, a=pid: line["pid"] == a and line.get("hits", 0) > 10)  # type: ignore[misc]
    backend = FileBackend(str(root), capacity=100 * COST)
    backend.clear(bytes(16), 1)
    backend.close()
    hits: dict[int, int] = {}
    still = set(crew.alive)
    while still:
        line = crew.until(lambda line: "step" in line)
        if hits.get(line["pid"]) == line["hits"]:
            still.discard(line["pid"])  # twenty operations without a hit: there is none any more
        hits[line["pid"]] = line["hits"]
    for pid in list(crew.alive):
        crew.kill(pid)
    assert in_order(root, 100 * COST, things(20)) == 0
