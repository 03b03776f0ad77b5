"""Which process is the janitor of a root: the one that has a lock, so that there is never more than one."""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import StrEnum
from typing import Final

from hicache.errors import ConfigError

from .filesystem import FileSystem
from .locks import LockFile, locks_work

__all__ = ["Election", "JanitorMode"]

JANITOR: Final = "HICACHE-JANITOR"
ALWAYS: Final = "HICACHE-JANITOR-ALWAYS"
_TRIES, _PAUSE = 50, 0.01


class JanitorMode(StrEnum):
    """What a process does about being the janitor."""

    AUTO = "auto"  # becomes it when nobody is
    ALWAYS = "always"  # becomes it, and whoever is so by `auto` steps back
    NEVER = "never"


class Election:
    """For one thread besides `open` and `close`.

    Args:
        fs: the operating system's calls.
        root: the resolved path of the root.
        alive: whether the root is there.
        mode: what this process wants.
        alone: whether it is the only one by agreement, so that there is nothing to elect.
    """

    def __init__(self, fs: FileSystem, root: str, alive: Callable[[], bool], mode: JanitorMode, *, alone: bool) -> None:
        self._root = root
        self._mode = mode
        self._alone = alone
        self._janitor = LockFile(fs, f"{root}/{JANITOR}", alive)
        self._always = LockFile(fs, f"{root}/{ALWAYS}", alive)
        self.elected = alone

    def open(self) -> None:
        """Claim the office where this process was told to have it.

        Raises:
            ConfigError: another process was told so too.
            OSError: the lock cannot be made.
        """
        if self._mode is not JanitorMode.ALWAYS or self._alone:
            return
        for _ in range(_TRIES):
            if self._always.try_lock():
                return
            time.sleep(_PAUSE)  # perhaps somebody just looks whether it is taken
        raise ConfigError(
            f"file storage: {self._root!r} has a process with janitor=always already: "
            "give janitor=auto or janitor=never to all but one"
        )

    def hold(self) -> bool:
        """Whether this process is the janitor now; becomes it if it may and nobody is."""
        if not self._alone:
            try:
                self.elected = self._try()
            except OSError as error:
                self.elected = False
                if locks_work(error):
                    raise
        return self.elected

    def close(self) -> None:
        """Leave the office. Idempotent."""
        self.elected = False
        self._janitor.close()
        self._always.close()

    def _try(self) -> bool:
        if self._mode is JanitorMode.NEVER:
            return False
        if self._mode is JanitorMode.ALWAYS:
            return (self._always.check() or self._always.try_lock()) and self._take()
        if not self._always.try_lock(shared=True):
            self._janitor.close()
            return False
        self._always.close()
        return self._take()

    def _take(self) -> bool:
        return self._janitor.check() or self._janitor.try_lock()
