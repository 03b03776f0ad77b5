from __future__ import annotations

from pathlib import Path

import pytest

from hicache.errors import ConfigError
from hicache.memory.limits import available_memory, check_memory

GIB = 1 << 30


def machine(root: Path, *, available: int = 76 * GIB, total: int = 128 * GIB) -> Path:
    write(root / "proc/meminfo", f"MemTotal: {total >> 10} kB\nMemFree: 1 kB\nMemAvailable: {available >> 10} kB\n")
    return root


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def v2(root: Path, group: str, *, limit: str, used: int, cache: int = 0, high: str = "max") -> None:
    folder = root / "sys/fs/cgroup" / group
    write(folder / "memory.max", limit + "\n")
    write(folder / "memory.high", high + "\n")
    write(folder / "memory.current", f"{used}\n")
    write(folder / "memory.stat", f"anon 1\nfile {cache}\nactive_file {cache // 2}\ninactive_file {cache // 2}\n")


def v1(root: Path, group: str, *, limit: int, used: int, cache: int = 0) -> None:
    folder = root / "sys/fs/cgroup/memory" / group
    write(folder / "memory.limit_in_bytes", f"{limit}\n")
    write(folder / "memory.usage_in_bytes", f"{used}\n")
    write(folder / "memory.stat", f"cache 7\nactive_file 9\ntotal_active_file {cache}\ntotal_inactive_file 0\n")


def test_without_control_groups_the_machine_counts(tmp_path: Path) -> None:
    memory = available_memory(root=machine(tmp_path))
    assert (memory.bytes, memory.limit) == (76 * GIB, 128 * GIB)


@pytest.mark.case("MEM-4")
def test_a_cgroup_v2_limit_counts_with_page_cache_taken_off(tmp_path: Path) -> None:
    root = machine(tmp_path)
    write(root / "proc/self/cgroup", "0::/pod/box\n")
    v2(root, "pod/box", limit=str(8 * GIB), used=6 * GIB, cache=4 * GIB)
    memory = available_memory(root=root)
    assert (memory.bytes, memory.limit) == (6 * GIB, 8 * GIB)
    assert memory.source == "/sys/fs/cgroup/pod/box/memory.max"


@pytest.mark.case("MEM-4")
def test_a_limit_of_a_parent_counts(tmp_path: Path) -> None:
    root = machine(tmp_path)
    write(root / "proc/self/cgroup", "0::/pod/box\n")
    v2(root, "pod/box", limit="max", used=GIB)
    v2(root, "pod", limit=str(8 * GIB), used=5 * GIB)
    assert available_memory(root=root).bytes == 3 * GIB


@pytest.mark.case("MEM-4")
def test_no_limit_leaves_the_machine(tmp_path: Path) -> None:
    root = machine(tmp_path)
    write(root / "proc/self/cgroup", "0::/box\n")
    v2(root, "box", limit="max", used=5 * GIB)
    assert available_memory(root=root).bytes == 76 * GIB


def test_the_throttling_limit_counts_as_well(tmp_path: Path) -> None:
    root = machine(tmp_path)
    write(root / "proc/self/cgroup", "0::/box\n")
    v2(root, "box", limit=str(8 * GIB), high=str(4 * GIB), used=GIB)
    memory = available_memory(root=root)
    assert memory.bytes == 3 * GIB
    assert memory.source.endswith("memory.high")


@pytest.mark.case("MEM-4")
def test_a_cgroup_v1_limit_counts(tmp_path: Path) -> None:
    root = machine(tmp_path)
    write(root / "proc/self/cgroup", "9:name=systemd:/x\n4:cpu,memory:/docker/abc\n0::/\n")
    v1(root, "docker/abc", limit=8 * GIB, used=3 * GIB, cache=GIB)
    v1(root, "", limit=9_223_372_036_854_771_712, used=100 * GIB)
    assert available_memory(root=root).bytes == 6 * GIB


@pytest.mark.case("MEM-4")
def test_inside_a_container_the_mount_is_the_own_group(tmp_path: Path) -> None:
    """The path in /proc may be the one that the host sees, of which only the end is mounted."""
    root = machine(tmp_path)
    write(root / "proc/self/cgroup", "4:memory:/kubepods/pod1/abc\n0::/../outside\n")
    v1(root, "", limit=2 * GIB, used=GIB)
    assert available_memory(root=root).bytes == GIB


def test_a_group_above_its_limit_leaves_nothing(tmp_path: Path) -> None:
    root = machine(tmp_path)
    write(root / "proc/self/cgroup", "0::/box\n")
    v2(root, "box", limit=str(GIB), used=3 * GIB)
    assert available_memory(root=root).bytes == 0


def test_an_empty_group_leaves_its_limit_and_no_more(tmp_path: Path) -> None:
    root = machine(tmp_path)
    write(root / "proc/self/cgroup", "0::/box\n")
    v2(root, "box", limit=str(GIB), used=0, cache=GIB)
    assert available_memory(root=root).bytes == GIB


def test_a_machine_that_tells_nothing_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "proc/meminfo", "MemTotal: lots\n")
    with pytest.raises(ConfigError, match="does not tell the machine's memory"):
        available_memory(root=tmp_path)


@pytest.mark.case("MEM-4")
def test_what_does_not_fit_is_refused_with_the_numbers(tmp_path: Path) -> None:
    root = machine(tmp_path)
    write(root / "proc/self/cgroup", "0::/box\n")
    v2(root, "box", limit=str(8 * GIB), used=2 * GIB)
    check_memory(6 * GIB, "a pool", root=root)
    with pytest.raises(ConfigError, match=r"a pool of 6 GiB does not fit: 6 GiB of 8 GiB are available \(/sys/fs"):
        check_memory(6 * GIB + 1, "a pool", root=root)


def test_this_machine_tells_something() -> None:
    memory = available_memory()
    assert 0 < memory.bytes <= memory.limit
