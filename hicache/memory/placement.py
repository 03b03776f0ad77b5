"""Where the kernel takes memory from: a NUMA node, huge pages. Both are asked for, checked and never assumed."""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path
from typing import Final

from hicache.errors import ConfigError
from hicache.memory.limits import check_memory
from hicache.memory.shared import HUGE_PAGE, libc
from hicache.units import format_size, whole_number

__all__ = ["bind_to_node", "check_huge_pages", "check_node", "check_place"]

_SYS_MBIND: Final = {"x86_64": 237, "aarch64": 235, "ppc64le": 259, "riscv64": 235, "s390x": 268}
_MPOL_BIND: Final = 2
_MOST_NODES: Final = 1024
_NODES: Final = "sys/devices/system/node"
_HUGE: Final = "sys/kernel/mm/hugepages/hugepages-2048kB"


def check_place(size: int, what: str, *, nodes: tuple[int, ...] = (), huge_pages: bool = False, root: Path) -> None:
    """Refuse memory that is not there, before anything is allocated.

    Args:
        size: bytes in all.
        what: it is, for the text.
        nodes: NUMA nodes over which it is spread; empty: wherever.
        huge_pages: whether it is to be in huge pages, which were taken from the machine's memory already.
        root: folder under which `proc` and `sys` are read.

    Raises:
        ConfigError: there is not so much; the text has the numbers.
    """
    if huge_pages:
        check_huge_pages(size, what, root=root)
    else:
        check_memory(size, what, root=root)
    for node in dict.fromkeys(nodes):
        check_node(node, 0 if huge_pages else -(-size // len(nodes)) * nodes.count(node), what, root=root)


def check_huge_pages(size: int, what: str, *, root: Path = Path("/")) -> None:
    """See that so many huge pages of 2 MiB are free.

    Raises:
        ConfigError: they are not.
    """
    try:
        free, promised = (int((root / _HUGE / name).read_text()) for name in ("free_hugepages", "resv_hugepages"))
    except (OSError, ValueError):
        free = promised = 0
    needed, left = -(-size // HUGE_PAGE), max(0, free - promised)
    if needed > left:
        raise ConfigError(
            f"{what} of {format_size(size)} needs {needed} huge pages of 2 MiB, and {left} are free: raise "
            "vm.nr_hugepages, or do without huge pages"
        )


def check_node(node: int, size: int, what: str, *, root: Path = Path("/")) -> None:
    """See that a NUMA node exists and has so much memory that can be taken.

    Raises:
        ConfigError: it does not, or has not.
    """
    number = whole_number(node)
    if number is None or not 0 <= number < _MOST_NODES:
        raise ConfigError(f"NUMA node {node!r:.40} of {what} must be an integer of 0 to {_MOST_NODES - 1}")
    path = root / _NODES / f"node{number}" / "meminfo"
    try:
        rows = dict(line.split()[2:4] for line in path.read_text("ascii", "replace").splitlines() if line.strip())
        left = sum(int(rows[name]) * 1024 for name in ("MemFree:", "Active(file):", "Inactive(file):"))
    except (OSError, KeyError, ValueError) as error:
        raise ConfigError(f"NUMA node {number} of {what} does not exist here: {path} cannot be read") from error
    if size > left:
        raise ConfigError(
            f"{what} does not fit on NUMA node {number}: {format_size(size)} are needed there and {format_size(left)} "
            "are available; use a smaller size or more nodes"
        )


def bind_to_node(address: int, size: int, node: int, what: str) -> None:
    """Let the pages of a mapping, when they are taken, come from one NUMA node only.

    Raises:
        ConfigError: the kernel, or this kind of machine, cannot.
    """
    call = _SYS_MBIND.get(platform.machine())
    if call is None:
        raise ConfigError(f"{what} cannot be bound to NUMA node {node}: not known how on a {platform.machine()}")
    words = (ctypes.c_ulong * (_MOST_NODES // (8 * ctypes.sizeof(ctypes.c_ulong))))()
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    words[node // bits] = 1 << node % bits
    arguments = (ctypes.c_ulong(address), ctypes.c_ulong(size), ctypes.c_int(_MPOL_BIND), words)
    # The kernel takes one off the number of bits it is told.
    if libc().syscall(ctypes.c_long(call), *arguments, ctypes.c_ulong(_MOST_NODES + 1), ctypes.c_uint(0)):
        raise ConfigError(f"{what} cannot be bound to NUMA node {node}: {os.strerror(ctypes.get_errno())}")
