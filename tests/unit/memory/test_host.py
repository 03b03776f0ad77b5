from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hicache.errors import CacheClosed, ConfigError, GeometryError
from hicache.memory.base import POISON
from hicache.memory.host import MmapHostPool


@pytest.fixture(params=[False, True], ids=["anonymous", "memfd"])
def memfd(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_pages_are_writable_views_that_do_not_overlap(memfd: bool) -> None:
    pool = MmapHostPool(3, 5000, memfd=memfd)
    for slot in range(3):
        pool.page(slot)[:] = slot + 1
    assert [set(pool.page(slot).tolist()) for slot in range(3)] == [{1}, {2}, {3}]
    assert pool.pages.shape == (3, 5000)
    assert np.array_equal(pool.pages[1], pool.page(1))
    pool.close()


def test_slots_begin_on_pages_of_the_machine(memfd: bool) -> None:
    pool = MmapHostPool(2, 5000, memfd=memfd)
    assert pool.stride == 8192
    assert all(pool.page(slot).ctypes.data % 4096 == 0 for slot in range(2))
    pool.close()


def test_a_buffer_is_a_window_into_its_page() -> None:
    pool = MmapHostPool(2, 8192)
    window = pool.buffer(1, 4096, 100)
    assert (window.format, len(window), window.readonly) == ("B", 100, False)
    window[:3] = b"abc"
    assert bytes(pool.page(1)[4096:4099]) == b"abc"
    assert len(pool.buffer(1)) == 8192
    del window
    pool.close()


@pytest.mark.parametrize(("offset", "length"), [(-1, 1), (0, 4097), (4096, 1), (10, -20)])
def test_a_buffer_never_leaves_its_page(offset: int, length: int) -> None:
    pool = MmapHostPool(2, 4096)
    with pytest.raises(GeometryError, match="not inside a page of 4096 bytes"):
        pool.buffer(0, offset, length)
    pool.close()


@pytest.mark.parametrize("slot", [-1, 2])
def test_slots_that_do_not_exist_are_refused(slot: int) -> None:
    pool = MmapHostPool(2, 4096)
    with pytest.raises(GeometryError, match=f"host slot {slot} does not exist: the pool has 2"):
        pool.page(slot)
    pool.close()


def test_poison_fills_only_what_was_named() -> None:
    pool = MmapHostPool(3, 4096)
    pool.poison(np.array([0, 2]))
    assert [int(pool.page(slot).max()) for slot in range(3)] == [POISON, 0, POISON]
    assert int(pool.page(2).min()) == POISON
    pool.close()


def test_a_closed_pool_gives_nothing(memfd: bool) -> None:
    pool = MmapHostPool(1, 4096, memfd=memfd)
    pool.close()
    pool.close()
    assert pool.fd == -1
    with pytest.raises(CacheClosed):
        pool.page(0)


def test_a_view_outlives_the_pool(memfd: bool) -> None:
    """Closing under somebody's view must neither crash nor raise; the view stays readable."""
    pool = MmapHostPool(2, 4096, memfd=memfd)
    view = pool.page(1)
    view[:] = 7
    pool.close()
    assert set(view.tolist()) == {7}


@pytest.mark.parametrize(("slots", "page_bytes"), [(0, 1), (-1, 1), (1, 0), (True, 1), (1, 2**61), (1.5, 1)])
def test_sizes_must_be_positive_integers(slots: int, page_bytes: int) -> None:
    with pytest.raises(ConfigError, match="must be a positive integer"):
        MmapHostPool(slots, page_bytes)


@pytest.mark.case("MEM-4")
def test_more_than_the_control_group_allows_is_refused_before_it_is_mapped(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 99999999 kB\nMemAvailable: 99999999 kB\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/box\n")
    folder = tmp_path / "sys/fs/cgroup/box"
    folder.mkdir(parents=True)
    (folder / "memory.max").write_text("1048576\n")
    (folder / "memory.current").write_text("0\n")
    with pytest.raises(ConfigError, match=r"a host pool of 257 pages of 1 MiB does not fit: 1 MiB of 1 MiB"):
        MmapHostPool(257, 4096, root=tmp_path)
    MmapHostPool(256, 4096, root=tmp_path).close()


def test_absurd_sizes_are_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"does not fit: .* are available"):
        MmapHostPool(2**40, 2**20)


@pytest.mark.case("MEM-3")
def test_memory_of_a_memfd_is_really_there() -> None:
    pool = MmapHostPool(16, 1 << 20, memfd=True)
    assert os.fstat(pool.fd).st_blocks * 512 >= 16 << 20
    pool.close()


@pytest.mark.case("MEM-3")
def test_memory_that_cannot_be_reserved_is_an_error_and_leaves_no_file() -> None:
    """The kernel itself refuses: no bus error later, a clear text now, and no descriptor is left."""
    script = """
import os, resource
from hicache.errors import ConfigError
from hicache.memory.host import MmapHostPool
before = len(os.listdir("/proc/self/fd"))
resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 20, 16 << 20))
try:
    MmapHostPool(64, 1 << 20, memfd=True)
except ConfigError as error:
    print(error)
print(len(os.listdir("/proc/self/fd")) - before)
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert "a host pool of 64 MiB in a memfd cannot be reserved" in ran.stdout
    assert "EFBIG" in ran.stdout
    assert ran.stdout.splitlines()[-1] == "0"
    assert ran.stderr == ""
