"""How much memory this process may really take: the machine's, and that of the control groups it runs in.

A container sees the machine's `/proc/meminfo`, but is killed at its control group's limit. So both are asked, in
cgroup v1 and v2, from the process's own group up to the root. Page cache counts as available, as the kernel takes it
back under pressure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from hicache.errors import ConfigError
from hicache.units import format_size

__all__ = ["AvailableMemory", "available_memory", "check_memory"]

_UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as a number near 2**63, rounded to pages


@dataclass(frozen=True, slots=True)
class AvailableMemory:
    """What is left to take.

    Attributes:
        bytes: bytes that can be taken now without being killed or swapping.
        limit: bytes of the limit that is met first: a control group's, or the machine's memory.
        source: where that limit comes from, for messages.
    """

    bytes: int
    limit: int
    source: str


@dataclass(frozen=True, slots=True)
class _Files:
    """Names and meaning of one cgroup version's files."""

    limits: tuple[str, ...]
    usage: str
    cache: tuple[str, ...]


_V2 = _Files(("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file"))
_V1 = _Files(("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))


def available_memory(*, root: Path = Path("/")) -> AvailableMemory:
    """The least of what the machine and each control group of this process leave.

    Args:
        root: folder under which `proc` and `sys` are read.

    Raises:
        ConfigError: `/proc/meminfo` cannot be read, so nothing is known.
    """
    found = [_machine(root)]
    for folder, files in _groups(root):
        found.extend(_group(folder, files, root))
    return min(found, key=lambda memory: memory.bytes)


def check_memory(size: int, what: str, *, root: Path = Path("/")) -> None:
    """Refuse a size that does not fit into memory, before anything is allocated.

    Raises:
        ConfigError: more than is available; the text has the numbers.
    """
    memory = available_memory(root=root)
    if size > memory.bytes:
        raise ConfigError(
            f"{what} of {format_size(size)} does not fit: {format_size(memory.bytes)} of {format_size(memory.limit)} "
            f"are available ({memory.source}); use a smaller size or raise that limit"
        )


def _machine(root: Path) -> AvailableMemory:
    try:
        text = (root / "proc/meminfo").read_text("ascii", "replace")
        rows = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
        available, total = (int(rows[name].split()[0]) * 1024 for name in ("MemAvailable", "MemTotal"))
    except (OSError, KeyError, ValueError, IndexError) as error:
        raise ConfigError(f"{root / 'proc/meminfo'} does not tell the machine's memory: {error}") from error
    return AvailableMemory(available, total, "the machine's memory")


def _groups(root: Path) -> Iterator[tuple[Path, _Files]]:
    """Folders of the process's control groups, each followed by its parents up to the mount."""
    text = _read(root / "proc/self/cgroup") or ""
    for line in text.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            mounts = ("sys/fs/cgroup", "sys/fs/cgroup/unified")
            yield from ((folder, _V2) for mount in mounts for folder in _upward(root / mount, path))
        elif "memory" in controllers.split(","):
            yield from ((folder, _V1) for folder in _upward(root / "sys/fs/cgroup/memory", path))


def _upward(mount: Path, path: str) -> Iterator[Path]:
    # Inside a container the path may be the one that the host sees, of which nothing is mounted here: then only
    # the mount itself, which is the container's own group, exists. A path with ".." is outside of what is mounted.
    parts = PurePosixPath(path).parts[1:]
    if ".." in parts:
        parts = ()
    for depth in range(len(parts), -1, -1):
        yield mount.joinpath(*parts[:depth])


def _group(folder: Path, files: _Files, root: Path) -> Iterator[AvailableMemory]:
    usage = _number(folder / files.usage)
    if usage is None:
        return
    reclaimable = _cache(folder, files)
    for name in files.limits:
        limit = _number(folder / name)
        if limit is not None and limit < _UNLIMITED:
            left = min(max(0, limit - usage + reclaimable), limit)
            yield AvailableMemory(left, limit, f"/{(folder / name).relative_to(root)}")


def _cache(folder: Path, files: _Files) -> int:
    total = 0
    for line in (_read(folder / "memory.stat") or "").splitlines():
        name, _, value = line.partition(" ")
        if name in files.cache and value.strip().isdigit():
            total += int(value)
    return total


def _number(path: Path) -> int | None:
    text = (_read(path) or "").strip()
    return int(text) if text.isdigit() else None  # "max" and an absent file are no limit


def _read(path: Path) -> str | None:
    try:
        return path.read_text("ascii", "replace")
    except OSError:
        return None
