"""Writing: one writer at a time, every failure cleans up, every crash leaves old, new or a miss."""

from __future__ import annotations

import errno
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
from hicache.storage.base import ObjectResult, ObjectStatus
from hicache.testing.faults import interpose
from hicache.testing.gates import Gate
from hicache.testing.storage import in_threads, make_chain, make_key, make_object, pattern, read, status_of
from hicache_file import FileBackend, FileSystem
from hicache_file.space import Ticket

Open = Callable[..., FileBackend]
PathOf = Callable[[FileBackend, ObjectKey], Path]
SIZE = 8192
OK = ObjectStatus.OK


class Script:
    """Raises or waits at chosen calls of the file system, once the test has armed it."""

    def __init__(self) -> None:
        self.armed: dict[str, list[OSError | Gate | None]] = {}
        self.calls: list[str] = []

    def __call__(self, name: str, number: int, args: tuple[Any, ...]) -> None:
        if name == "open" and not args[0].endswith(".hicache-tmp"):
            return
        self.calls.append(name)
        steps = self.armed.get(name)
        step = steps.pop(0) if steps else None
        if isinstance(step, Gate):
            step.enter()
        elif step is not None:
            raise step


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def backend(open_root: Open, script: Script) -> FileBackend:
    return open_root(capacity=64 * 2**20, fs=interpose(FileSystem(), script))


def temps(root: Path) -> list[Path]:
    return list(root.rglob("*.hicache-tmp"))


@pytest.mark.case("FAIL-1", "FAIL-6", "RACE-6")
@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.ENOSPC, errno.EDQUOT, errno.EROFS])
@pytest.mark.parametrize("call", ["mkdir", "open", "pwritev", "rename_new"])
def test_a_write_that_fails_anywhere_leaves_nothing_and_can_be_repeated(
    backend: FileBackend, script: Script, root: Path, call: str, code: int
) -> None:
    stored = make_object(make_key(1), pattern(1, SIZE))
    script.armed[call] = [OSError(code, os.strerror(code))] * 2
    (result,) = backend.put([stored])
    assert result.status is ObjectStatus.FAILED
    assert result.reason == ("no_space" if code in (errno.ENOSPC, errno.EDQUOT) else errno.errorcode[code].lower())
    assert backend.contains([stored.key]) == [False]
    assert temps(root) == []
    assert backend._space.usage() == (0, 0)
    assert backend._space.standing().idle == backend._space.standing().held, "nothing is set aside any more"
    script.armed.clear()
    backend._writer._refuse_until = 0.0
    assert status_of(backend.put([stored])) == [OK]
    assert read(backend, stored.key, SIZE)[1] == bytes(stored.payload)


@pytest.mark.case("RACE-6")
def test_sixteen_threads_put_one_key_two_hundred_times_with_one_write_each(
    backend: FileBackend, script: Script
) -> None:
    for round_ in range(200):
        stored = make_object(make_key(round_), pattern(round_, 4096))
        script.calls.clear()
        results = in_threads(16, lambda _, s=stored: backend.put([s])[0])  # type: ignore[misc]
        assert {result.status for result in results} == {OK}
        assert script.calls.count("pwritev") == 1
        assert script.calls.count("rename_new") == 1
    assert backend.statistics().bytes_used == 200 * 8192


@pytest.mark.case("RACE-6", "FAIL-6")
@pytest.mark.parametrize("fails", [True, False])
def test_who_waits_for_a_write_has_its_outcome(
    backend: FileBackend, script: Script, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    gate, waiting = Gate(), Gate(opened=True)
    wait = Ticket.wait

    def noted_wait(self: Ticket, timeout: float) -> bool:
        waiting.enter()
        return wait(self, timeout)

    monkeypatch.setattr(Ticket, "wait", noted_wait)
    stored = make_object(make_key(1), pattern(1, SIZE))
    script.armed["open"] = [gate]
    script.armed["pwritev"] = [OSError(errno.EIO, "broken")] if fails else []
    script.calls.clear()
    results: list[ObjectResult] = []
    threads = [threading.Thread(target=lambda: results.extend(backend.put([stored]))) for _ in range(4)]
    for thread in threads:
        thread.start()
    gate.until_arrived(1)
    waiting.until_arrived(3)
    gate.open()
    for thread in threads:
        thread.join(30)
    assert results == [ObjectResult(ObjectStatus.FAILED, "eio") if fails else ObjectResult(OK)] * 4
    assert script.calls.count("pwritev") == 1
    assert status_of(backend.put([stored])) == [OK]


def test_a_writer_that_waits_too_long_gives_up(
    backend: FileBackend, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    stored = make_object(make_key(1), pattern(1, SIZE))
    script.armed["rename_new"] = [gate]
    first = threading.Thread(target=lambda: backend.put([stored]))
    first.start()
    gate.until_arrived()
    monkeypatch.setattr("hicache_file.backend.CLAIM_WAIT", 0.0)
    assert backend.put([stored]) == [ObjectResult(ObjectStatus.FAILED, "busy")]
    gate.open()
    first.join(30)
    assert backend.contains([stored.key]) == [True]


@pytest.mark.case("RACE-2")
def test_what_is_being_written_is_no_hit_and_no_second_write(backend: FileBackend, script: Script) -> None:
    gate = Gate()
    stored = make_object(make_key(1), pattern(1, SIZE))
    script.calls.clear()
    script.armed["rename_new"] = [gate]
    results: list[ObjectResult] = []
    first = threading.Thread(target=lambda: results.extend(backend.put([stored])))
    first.start()
    gate.until_arrived()
    assert backend.contains([stored.key]) == [False]
    assert read(backend, stored.key, SIZE)[0].status is ObjectStatus.MISSING
    second = threading.Thread(target=lambda: results.extend(backend.put([stored])))
    second.start()
    gate.open()
    first.join(30)
    second.join(30)
    assert status_of(results) == [OK, OK]
    assert backend.contains([stored.key]) == [True]
    assert script.calls.count("pwritev") == 1


def test_other_objects_go_on_while_one_write_hangs(backend: FileBackend, script: Script) -> None:
    gate = Gate()
    chain = make_chain(4, SIZE)
    script.armed["pwritev"] = [gate]
    hanging = threading.Thread(target=lambda: backend.put(chain[:1]))
    hanging.start()
    gate.until_arrived()
    assert status_of(backend.put(chain[1:])) == [OK] * 3
    assert read(backend, chain[2].key, SIZE)[0].status is OK
    assert backend.delete([chain[3].key]) == [True]
    assert backend.statistics().objects == 2
    gate.open()
    hanging.join(30)
    assert backend.contains([chain[0].key]) == [True]


def test_short_writes_are_continued(open_root: Open) -> None:
    class Short(FileSystem):
        def pwritev(self, fd: int, buffers: Any, offset: int) -> int:
            first = memoryview(buffers[0])
            return super().pwritev(fd, [first[: min(1000, first.nbytes)]], offset)

    backend = open_root(fs=Short())
    for number, length in enumerate((100, 5000, 300_000)):
        stored = make_object(make_key(number), pattern(number, length))
        assert status_of(backend.put([stored])) == [OK]
        assert read(backend, stored.key, length)[1] == bytes(stored.payload)


def test_short_reads_are_continued(open_root: Open) -> None:
    class Short(FileSystem):
        def preadv(self, fd: int, buffers: Any, offset: int) -> int:
            if len(buffers) == 2:
                return super().preadv(fd, [buffers[0], memoryview(buffers[1])[:777]], offset)
            return super().preadv(fd, [memoryview(buffers[0])[:5000]], offset)

    backend = open_root(fs=Short())
    stored = make_object(make_key(1), pattern(1, 50_000))
    backend.put([stored])
    assert read(backend, stored.key, 50_000)[1] == bytes(stored.payload)


@pytest.mark.parametrize("at", ["open", "pwritev"])
def test_a_file_system_without_direct_writes_is_written_through_the_cache(open_root: Open, root: Path, at: str) -> None:
    import fcntl
    import mmap

    class NoDirect(FileSystem):
        refused = 0

        def open(self, path: str, flags: int, mode: int = 0o600) -> int:
            if at == "open" and flags & os.O_DIRECT:
                NoDirect.refused += 1
                raise OSError(errno.EINVAL, "no direct I/O")
            return super().open(path, flags, mode)

        def pwritev(self, fd: int, buffers: Any, offset: int) -> int:
            if at == "pwritev" and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
                NoDirect.refused += 1
                raise OSError(errno.EINVAL, "no direct I/O")
            return super().pwritev(fd, buffers, offset)

    backend = open_root(fs=NoDirect())
    length = 512 * 1024
    for number in range(3):
        memory = memoryview(mmap.mmap(-1, length))  # aligned, so that direct writes are tried
        memory[:] = pattern(number, length)
        stored = make_object(make_key(number), bytes(memory))
        stored = type(stored)(stored.key, stored.header, memory)
        assert status_of(backend.put([stored])) == [OK]
        assert read(backend, stored.key, length)[1] == bytes(memory)
    backend.close()
    assert NoDirect.refused <= 2, "it is tried once, and measured once"
    assert temps(root) == []


@pytest.mark.parametrize("length", [256 * 1024, 256 * 1024 + 1, 2**20 - 3])
@pytest.mark.parametrize("shift", [0, 1, 512])
def test_direct_writes_of_any_length_and_address(open_root: Open, length: int, shift: int) -> None:
    import mmap

    backend = open_root()
    memory = memoryview(mmap.mmap(-1, length + 4096))[shift : shift + length]
    memory[:] = pattern(length, length)
    stored = make_object(make_key(1), bytes(memory))
    assert status_of(backend.put([type(stored)(stored.key, stored.header, memory)])) == [OK]
    assert read(backend, stored.key, length)[1] == bytes(memory)


CRASHES = """
    import os, signal, sys
    from hicache.storage.base import StoredObject
    from hicache.testing.faults import interpose
    from hicache.testing.storage import make_chain
    from hicache_file import FileBackend, FileSystem

    root, points = sys.argv[1], [int(p) for p in sys.argv[2].split(",")]
    SIZE = 20_000

    class HalfWrites(FileSystem):
        def pwritev(self, fd, buffers, offset):
            part = b"".join(bytes(b) for b in buffers)
            super().pwritev(fd, [part[: len(part) // 2]], offset)
            hook("half", 0, ())
            return super().pwritev(fd, [part], offset)

    count = 0

    def hook(name, number, args):
        global count
        if name == "scandir" or name == "lstat":
            return
        count += 1
        if count == point:
            os.kill(os.getpid(), signal.SIGKILL)

    for point in points:
        child = os.fork()
        if child == 0:
            count = 0
            backend = FileBackend(root, fs=interpose(HalfWrites(), hook))
            backend.put(make_chain(6, SIZE))
            os._exit(0)
        os.waitpid(child, 0)
        # What is there now must be whole: delete one so that the next child writes again.
        backend = FileBackend(root)
        backend.wait_ready(60)
        chain = make_chain(6, SIZE)
        for stored in chain:
            buffer = bytearray(SIZE)
            (result,) = backend.get_into([stored.key], [memoryview(buffer)])
            assert result.status in ("ok", "missing"), (point, result)
            assert result.status != "ok" or bytes(buffer) == bytes(stored.payload), point
        found = sum(backend.contains([stored.key for stored in chain]))
        statistics = backend.statistics()
        assert statistics.objects == found, (point, statistics, found)
        backend.delete([stored.key for stored in chain])
        backend.close()
        left = [os.path.join(d, f) for d, _, files in os.walk(root) for f in files if f.endswith(".hicache-tmp")]
        assert not left, (point, left)
        locks = os.listdir(os.path.join(root, "writers"))
        assert not locks, (point, locks)
    print("done")
"""


@pytest.mark.case("FILE-1")
def test_a_writer_killed_anywhere_leaves_whole_objects_or_misses(root: Path) -> None:
    points = ",".join(str(point) for point in range(1, 61))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(CRASHES), str(root), points],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout.strip() == "done", done.stderr[-2000:]
