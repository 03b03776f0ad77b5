from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hicache.errors import CacheClosed, ConfigError
from hicache.memory.arena import Arena, MappedArena, MappedWords, Words, arena_size
from hicache.memory.shared import HUGE_PAGE, OWNERS_ONLY, SEALED

SLOTS, STRIDE = 8, 8192


def descriptors() -> int:
    """How many this process has open; the one that lists them is always there."""
    return len(os.listdir("/proc/self/fd"))


def run_python(code: str, *arguments: str, pass_fds: tuple[int, ...] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        pass_fds=pass_fds,
    )


def mapped(arena: Arena, *, writable: bool = True) -> MappedArena:
    return MappedArena(os.dup(arena.fd), arena.slots, arena.stride, size=arena.size, writable=writable)


def test_what_one_side_writes_the_other_reads_where_it_lies() -> None:
    arena = Arena(SLOTS, STRIDE)
    client, reader = mapped(arena), mapped(arena, writable=False)
    client.rows[3] = 7
    assert arena.rows.shape == (SLOTS, STRIDE)
    assert (arena.rows.max(axis=1)).tolist() == reader.rows.max(axis=1).tolist() == [0, 0, 0, 7, 0, 0, 0, 0]
    for part in (reader, client, arena):
        part.close()


def test_who_does_not_write_an_arena_cannot_by_mistake() -> None:
    arena = Arena(SLOTS, STRIDE)
    reader = mapped(arena, writable=False)
    with pytest.raises(ValueError, match="read-only"):
        reader.rows[0] = 1
    reader.close()
    arena.close()


@pytest.mark.case("MEM-3")
def test_memory_is_really_there_and_nobody_can_take_it_away() -> None:
    """All of it is reserved, and a client that shrinks it, which would kill whoever touches it, is refused."""
    arena = Arena(SLOTS, STRIDE)
    assert os.fstat(arena.fd).st_blocks * 512 >= arena.size == SLOTS * STRIDE
    for size in (0, arena.size - 4096, arena.size * 2):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(arena.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    arena.close()


@pytest.mark.case("MEM-3")
def test_memory_that_cannot_be_reserved_is_an_error_and_leaves_nothing() -> None:
    """The kernel itself refuses: a clear text, no bus error later, no descriptor left."""
    done = run_python("""
import os, resource
from hicache.core.arenas import ArenaPlan
from hicache.core.layout import KVGeometry
from hicache.errors import ConfigError
from hicache.memory.arenapool import ArenaHostPool
plan = ArenaPlan.of(KVGeometry.mha(1, kv_heads=2, head_dim=2**12, dtype="int8", head_group=1), 2**7, tp_size=2)
before = len(os.listdir("/proc/self/fd"))
resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 20, 16 << 20))
ArenaHostPool.create(plan, 16).close()
try:
    ArenaHostPool.create(plan, 17)
except ConfigError as error:
    print(error)
print(len(os.listdir("/proc/self/fd")) - before)
""")
    assert (done.stderr, done.returncode) == ("", 0)
    assert "an arena of 17 slots cannot have 17825792 bytes: File too large" in done.stdout
    assert done.stdout.splitlines()[-1] == "0"


@pytest.mark.case("MEM-3")
def test_a_small_dev_shm_limits_nothing() -> None:
    """As in containers, where it has 64 MB: nothing of a pool lies there, so all of it can be touched."""
    if subprocess.run(["unshare", "-Urm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("the kernel gives no mount namespace to this user")
    code = """
import os, subprocess
from hicache.memory.arena import Arena
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", "/dev/shm"], check=True)
arena = Arena(16, 1 << 20)
arena.rows[:] = 7
print(os.statvfs("/dev/shm").f_blocks * 4096, os.listdir("/dev/shm"), int(arena.rows.min()))
"""
    done = subprocess.run(
        ["unshare", "-Urm", sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.stderr) == ("1048576 [] 7\n", "")


@pytest.mark.case("MEM-4")
def test_more_than_the_control_group_allows_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 99999999 kB\nMemAvailable: 99999999 kB\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/box\n")
    folder = tmp_path / "sys/fs/cgroup/box"
    folder.mkdir(parents=True)
    (folder / "memory.max").write_text("1048576\n")
    (folder / "memory.current").write_text("0\n")
    before = descriptors()
    with pytest.raises(ConfigError, match=r"an arena of 257 slots of 1 MiB does not fit: 1 MiB of 1 MiB are available"):
        Arena(257, 4096, root=tmp_path)
    assert descriptors() == before
    Arena(256, 4096, root=tmp_path).close()


@pytest.mark.case("MEM-1")
@pytest.mark.parametrize("end", ["exit", "kill"])
def test_a_client_that_ends_takes_nothing_with_it(end: str) -> None:
    """However a client ends, the owner's memory and its bytes stay, and nobody warns about anything."""
    arena = Arena(SLOTS, STRIDE)
    arena.rows[1] = 5
    code = f"""
import os, signal, sys
from hicache.memory.arena import MappedArena
client = MappedArena(int(sys.argv[1]), {SLOTS}, {STRIDE}, size={arena.size}, writable=True)
client.rows[2] = client.rows[1] + 1
if {end!r} == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
"""
    done = run_python(code, str(arena.fd), pass_fds=(arena.fd,))
    assert (done.stdout, done.stderr) == ("", "")
    assert done.returncode == (-9 if end == "kill" else 0)
    assert arena.rows.max(axis=1).tolist() == [0, 5, 6, 0, 0, 0, 0, 0]
    arena.rows[:] = 9  # all of it can still be touched
    arena.close()


def test_memory_outlives_its_owner_in_its_clients_and_has_no_name() -> None:
    arena = Arena(SLOTS, STRIDE)
    client = mapped(arena)
    arena.rows[0] = 3
    assert "memfd:" in os.readlink(f"/proc/self/fd/{arena.fd}")
    assert os.fstat(arena.fd).st_nlink == 0
    arena.close()
    arena.close()
    assert client.rows[0].tolist() == [3] * STRIDE
    client.close()


def test_a_view_outlives_its_arena_and_the_arena_gives_no_more() -> None:
    """Closing under somebody's view neither crashes nor raises, and the descriptors are given back at once."""
    before = descriptors()
    arena = Arena(SLOTS, STRIDE)
    client = mapped(arena)
    views = [arena.rows[1], client.rows[1]]
    views[0][:] = 7
    client.close()
    arena.close()
    assert set(views[1].tolist()) == {7}
    for closed in (arena, client):
        with pytest.raises(CacheClosed):
            _ = closed.rows
        assert not closed.populate(4096)
    del views
    assert descriptors() == before


@pytest.mark.parametrize("fork", ["os.fork()", "ctypes.PyDLL(None).fork()"], ids=["python", "native"])
def test_a_forked_child_has_none_of_it(fork: str) -> None:
    """One that touches it ends at once, whoever forked: it must not write where pages are another's by then."""
    code = f"""
import ctypes, os, signal
from hicache.memory.arena import Arena
arena = Arena({SLOTS}, {STRIDE})
rows = arena.rows
child = {fork}
if not child:
    rows[0] = 1
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV, rows.max())
"""
    done = run_python(code)
    assert (done.stdout, done.stderr) == ("True 0\n", "")


def test_a_forked_child_that_drops_it_unmaps_nothing_else() -> None:
    """Its place in the child's memory stays taken, else something of the child's would be there by then."""
    code = """
import gc, mmap, os
from hicache.memory.arena import Arena
arenas = [Arena(256, 4096) for _ in range(8)]
child = os.fork()
if not child:
    others = [mmap.mmap(-1, 256 * 4096) for _ in range(64)]
    del arenas
    gc.collect()
    for other in others:
        other[::4096] = bytes(256)
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = run_python(code)
    assert (done.stdout, done.stderr) == ("7\n", "")


def test_populating_gives_all_pages_in_slices_and_changes_no_byte() -> None:
    arena = Arena(SLOTS, STRIDE)
    arena.rows[2] = 5
    client = mapped(arena, writable=False)
    for part in (arena, client):
        steps = 1
        while part.populate(2 * STRIDE):
            steps += 1
        assert steps == SLOTS // 2
        assert part.rows.max(axis=1).tolist() == [0, 0, 5, 0, 0, 0, 0, 0]
        part.close()


@pytest.mark.parametrize(("slots", "stride"), [(0, 4096), (-1, 4096), (True, 4096), (2**32, 4096), (1, 4097), (1, 0)])
def test_sizes_that_cannot_be_are_refused(slots: int, stride: int) -> None:
    with pytest.raises(ConfigError, match="of an arena"):
        Arena(slots, stride)


class TestDescriptors:
    """A client maps only what is such a memory: anything else would kill or mislead it later."""

    def refusal(self, fd: int, *, size: int = SLOTS * STRIDE) -> str:
        before = descriptors()
        with pytest.raises(ConfigError) as caught:
            MappedArena(fd, SLOTS, STRIDE, size=size, writable=True)
        assert descriptors() == before - 1, "a descriptor that cannot be used is closed all the same"
        return str(caught.value)

    def memfd(self, *, size: int = SLOTS * STRIDE, seals: int = SEALED) -> int:
        fd = os.memfd_create("x", os.MFD_ALLOW_SEALING)
        os.posix_fallocate(fd, 0, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        return fd

    def test_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(bytes(SLOTS * STRIDE))
        assert "is no shared memory" in self.refusal(os.open(tmp_path / "file", os.O_RDWR))

    def test_a_pipe(self) -> None:
        read, write = os.pipe()
        assert "is no shared memory" in self.refusal(read)
        os.close(write)

    def test_a_descriptor_that_is_not_open(self) -> None:
        with pytest.raises(ConfigError, match="is no shared memory"):
            MappedArena(-1, SLOTS, STRIDE, size=SLOTS * STRIDE, writable=True)

    def test_another_size(self) -> None:
        assert "has 4096 bytes where 65536 were expected" in self.refusal(self.memfd(size=4096))

    def test_memory_that_could_still_shrink(self) -> None:
        assert "has seals 0x4 where 0x7" in self.refusal(self.memfd(seals=fcntl.F_SEAL_GROW))

    def test_memory_that_is_not_reserved(self) -> None:
        fd = os.memfd_create("x", os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, SLOTS * STRIDE)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALED)
        assert "only 0 of the 65536 bytes" in self.refusal(fd)

    def test_a_size_that_such_slots_cannot_have(self) -> None:
        assert "cannot have 4096 bytes" in self.refusal(self.memfd(), size=4096)

    def test_words_in_the_place_of_an_arena(self) -> None:
        words = Words(SLOTS * STRIDE // 8)
        assert "has seals 0x17 where 0x7" in self.refusal(os.dup(words.fd))
        words.close()


def test_an_arena_is_taken_over_with_its_bytes() -> None:
    """What an earlier process left is mapped as it is, and checked as a client checks it."""
    arena = Arena(SLOTS, STRIDE)
    arena.rows[4] = 6
    heir = Arena.adopt(os.dup(arena.fd), SLOTS, STRIDE)
    arena.close()
    assert heir.rows.max(axis=1).tolist() == [0, 0, 0, 0, 6, 0, 0, 0]
    assert not os.get_inheritable(heir.fd)
    with pytest.raises(ConfigError, match=r"an arena to take over: descriptor .* has 65536 bytes where 131072"):
        Arena.adopt(heir.fd, SLOTS, 2 * STRIDE)
    heir.close()


class TestPlacement:
    def test_memory_comes_from_the_node_that_was_asked(self) -> None:
        arena = Arena(SLOTS, STRIDE, numa_node=0)
        arena.rows[:] = 1
        maps = [line for line in Path("/proc/self/numa_maps").read_text().splitlines() if "hicache-arena" in line]
        assert any(" bind:0 " in line for line in maps)
        arena.close()

    def test_a_node_that_does_not_exist_is_refused(self) -> None:
        before = descriptors()
        with pytest.raises(ConfigError, match="NUMA node 1023 of an arena of 8 slots does not exist here"):
            Arena(SLOTS, STRIDE, numa_node=1023)
        with pytest.raises(ConfigError, match="NUMA node -1 of an arena of 8 slots must be an integer of 0 to 1023"):
            Arena(SLOTS, STRIDE, numa_node=-1)
        assert descriptors() == before

    def test_a_node_without_so_much_memory_is_refused_with_the_numbers(self, tmp_path: Path) -> None:
        (tmp_path / "proc").mkdir()
        (tmp_path / "proc/meminfo").write_text("MemTotal: 99999999 kB\nMemAvailable: 99999999 kB\n")
        folder = tmp_path / "sys/devices/system/node/node1"
        folder.mkdir(parents=True)
        rows = {"MemTotal:": 99999, "MemFree:": 32, "Active(file):": 16, "Inactive(file):": 8}
        (folder / "meminfo").write_text("".join(f"Node 1 {name} {kib} kB\n" for name, kib in rows.items()))
        with pytest.raises(ConfigError, match="NUMA node 1: 64 KiB are needed there and 56 KiB are available"):
            Arena(SLOTS, STRIDE, numa_node=1, root=tmp_path)

    def test_huge_pages_are_used_where_there_are_any_and_else_refused_with_the_numbers(self) -> None:
        size = arena_size(SLOTS, STRIDE, huge_pages=True)
        assert size == HUGE_PAGE
        folder = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")
        free = int((folder / "free_hugepages").read_text()) if folder.exists() else 0
        if not free:
            with pytest.raises(
                ConfigError, match=r"needs 1 huge pages of 2 MiB, and 0 are free: raise vm.nr_hugepages"
            ):
                Arena(SLOTS, STRIDE, huge_pages=True)
            return
        arena = Arena(SLOTS, STRIDE, huge_pages=True)
        client = mapped(arena)
        client.rows[SLOTS - 1] = 3
        assert arena.size == size
        assert arena.rows[SLOTS - 1].tolist() == [3] * STRIDE
        client.close()
        arena.close()


class TestWords:
    def test_a_reader_sees_which_slots_went_to_others(self) -> None:
        words = Words(SLOTS)
        reader = MappedWords(os.dup(words.fd), SLOTS)
        slots = np.array([1, 5, 7])
        noted = reader.values[slots]
        assert reader.unchanged(slots, noted).tolist() == [True, True, True]
        words.values[5] += np.uint64(1)
        assert reader.unchanged(slots, noted).tolist() == [True, False, True]
        reader.close()
        words.close()

    def test_only_the_owner_can_write_them(self) -> None:
        """Neither the reader's array nor a mapping of its own making can: the seal holds for everybody else."""
        words = Words(SLOTS)
        reader = MappedWords(os.dup(words.fd), SLOTS)
        with pytest.raises(ValueError, match="read-only"):
            reader.values[0] = 1
        with pytest.raises(OSError, match="Operation not permitted"):
            os.pwrite(words.fd, b"x", 0)
        done = run_python("import mmap, sys; mmap.mmap(int(sys.argv[1]), 64)", str(words.fd), pass_fds=(words.fd,))
        assert "Operation not permitted" in done.stderr
        reader.close()
        words.close()

    def test_words_that_are_taken_over_begin_above_their_predecessors(self) -> None:
        """No word that was noted in the earlier life is right in the next, and the heir can raise them again."""
        words = Words(SLOTS)
        words.values[3] = 41
        heir = Words.adopt(words.fd, SLOTS)
        assert heir.values.tolist() == [1, 1, 1, 42, 1, 1, 1, 1]
        heir.values[0] += np.uint64(1)
        assert words.values[0] == 0
        words.close()
        heir.close()

    def test_retiring_makes_every_noted_word_wrong(self) -> None:
        words = Words(SLOTS)
        reader = MappedWords(os.dup(words.fd), SLOTS)
        slots = np.arange(SLOTS)
        noted = reader.values[slots]
        words.retire()
        assert not reader.unchanged(slots, noted).any()
        reader.close()
        words.close()

    def test_other_memory_is_refused(self) -> None:
        """An arena of the same size is no memory of words: others could write it."""
        arena = Arena(1, 4096)
        with pytest.raises(ConfigError, match=f"has seals 0x7 where {SEALED | OWNERS_ONLY:#x}"):
            MappedWords(os.dup(arena.fd), 512)
        with pytest.raises(ConfigError, match="words to take over"):
            Words.adopt(arena.fd, 512)
        with pytest.raises(ConfigError, match="slots with words must be"):
            Words(0)
        arena.close()

    def test_closed_words_give_nothing_and_keep_no_descriptor(self) -> None:
        before = descriptors()
        words = Words(SLOTS)
        reader = MappedWords(os.dup(words.fd), SLOTS)
        for part in (reader, words):
            part.close()
            part.close()
            with pytest.raises(CacheClosed):
                _ = part.values
        assert descriptors() == before
