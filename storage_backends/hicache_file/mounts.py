"""What kind of file system a folder is on: some are shared between machines, and some of those lock only locally."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

__all__ = ["Mount", "mount_of", "parse_mounts"]

_MOUNTS: Final = "/proc/self/mountinfo"
_NETWORK: Final = {
    "9p", "afs", "beegfs", "ceph", "cifs", "coda", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "ocfs2",
    "orangefs", "smb3", "smbfs", "virtiofs", "wekafs",
}  # fmt: skip
_LOCAL_LOCKS: Final = {"nolock", "nobrl", "local_lock=all", "local_lock=flock"}
_ESCAPE = re.compile(r"\\([0-7]{3})")


class Mount(NamedTuple):
    """Where a folder lies.

    Attributes:
        kind: the file system's type, e.g. "ext4"; empty if unknown.
        network: whether other machines may have it mounted too.
        locks_reach: whether locks on its files exclude those machines, as far as the mount's options tell.
    """

    kind: str = ""
    network: bool = False
    locks_reach: bool = True


def mount_of(path: str) -> Mount:
    """The mount that a resolved path is on; unknown counts as local."""
    try:
        with open(_MOUNTS, encoding="utf-8", errors="surrogateescape") as file:
            return parse_mounts(file.read(), path)
    except OSError:
        return Mount()


def parse_mounts(table: str, path: str) -> Mount:
    """As `mount_of`, from the text of a mountinfo table."""
    best, found = -1, Mount()
    for line in table.splitlines():
        left, separator, right = line.partition(" - ")
        fields, tail = left.split(" "), right.split(" ")
        if not separator or len(fields) < 6 or len(tail) < 3:
            continue
        point = _ESCAPE.sub(lambda match: chr(int(match[1], 8)), fields[4])
        below = path == point or path.startswith(point.rstrip("/") + "/")
        if below and len(point) >= best:  # of two on one point the later one is on top
            best = len(point)
            options = {*fields[5].split(","), *tail[2].split(",")}
            kind = tail[0]
            network = kind in _NETWORK or kind.startswith("fuse.") or kind == "fuse"
            found = Mount(kind, network, not (network and options & _LOCAL_LOCKS))
    return found
