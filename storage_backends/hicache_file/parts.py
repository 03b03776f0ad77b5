"""What the pieces of one backend share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .accounts import Accounts
from .directories import Directories
from .files import ObjectFiles
from .filesystem import FileSystem
from .labels import Labels
from .names import Names
from .removal import Removal
from .root import Root
from .space import Space

__all__ = ["Parts"]


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of one backend; each is thread-safe.

    Attributes:
        fs: the operating system's calls.
        root: the root folder.
        names: where objects lie.
        space: index, claims and byte accounts of this process.
        accounts: its part in the ledger that all processes share.
        directories: makes and checks directories.
        files: reads and writes object files.
        removal: takes objects away.
        labels: generations and manifests.
        now: monotonic clock in seconds.
        wall: wall clock in seconds; only stamps files.
    """

    fs: FileSystem
    root: Root
    names: Names
    space: Space
    accounts: Accounts
    directories: Directories
    files: ObjectFiles
    removal: Removal
    labels: Labels
    now: Callable[[], float]
    wall: Callable[[], float]
