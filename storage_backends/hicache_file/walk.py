"""Walking through a root: only directories and names of ours, without hurry."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from threading import Event
from typing import Final, NamedTuple

from .filesystem import FileSystem
from .names import Names

__all__ = ["GENERATION_NAME", "Leaf", "Walk"]

GENERATION_NAME = re.compile(r"0|[1-9][0-9]{0,19}")

_BYTE = re.compile(r"[0-9a-f]{2}")
_NAMESPACE = re.compile(r"[0-9a-f]{32}")
_PAUSE_EVERY: Final = 64  # files
_PAUSE: Final = 0.001  # seconds: a walk over millions of files leaves the interpreter to others in between


class Leaf(NamedTuple):
    """A directory that holds objects."""

    namespace: str
    generation: str
    number: int
    path: str


class Walk:
    """For one thread. Follows no link.

    Args:
        fs: the operating system's calls.
        names: where objects lie.
        stop: set when the walk shall end early.
    """

    def __init__(self, fs: FileSystem, names: Names, stop: Event) -> None:
        self._fs = fs
        self._names = names
        self._stop = stop
        self._since_pause = 0
        self.errors = 0

    def namespaces(self) -> Iterator[str]:
        """Paths of all namespaces."""
        for prefix in self.directories(self._names.root, _BYTE):
            for namespace in self.directories(prefix, _NAMESPACE):
                if os.path.basename(namespace).startswith(os.path.basename(prefix)):
                    yield namespace

    def generations(self, namespace: str) -> list[str]:
        """Paths of all generations of a namespace."""
        return self.directories(namespace, GENERATION_NAME)

    def leaves(self, generation: str) -> Iterator[Leaf]:
        """All leaves of a generation."""
        namespace, number = os.path.basename(os.path.dirname(generation)), os.path.basename(generation)
        fan = self._names.fan_out
        for first in self.directories(generation, _BYTE):
            for second in self.directories(first, _BYTE):
                leaf = int(os.path.basename(first), 16) * fan + int(os.path.basename(second), 16)
                yield Leaf(namespace, number, leaf, second)

    def fans(self, generation: str) -> list[str]:
        """The upper fan-out directories of a generation."""
        return self.directories(generation, _BYTE)

    def directories(self, path: str, pattern: re.Pattern[str]) -> list[str]:
        """Real directories of ours in a directory; links and other names are not ours."""
        return [
            entry.path
            for entry in self.entries(path)
            if pattern.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
        ]

    def entries(self, path: str) -> list[os.DirEntry[str]]:
        """What is in a directory, by name; nothing where it is gone."""
        try:
            return sorted(self._fs.scandir(path), key=lambda entry: entry.name)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                self.errors += 1
            return []

    def pause(self) -> None:
        """To be called for each file."""
        self._since_pause += 1
        if self._since_pause >= _PAUSE_EVERY:
            self._since_pause = 0
            self._stop.wait(_PAUSE)
