"""Opening a root: what was asked for against what the file system can do, and the parts that work on it."""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple, Self, TypeVar

from hicache.errors import ConfigError

from .accounts import Accounts
from .directories import Directories
from .election import Election, JanitorMode
from .files import ObjectFiles
from .filesystem import FileSystem
from .labels import Labels
from .ledger import LEDGER, Ledger, LedgerBusy
from .locks import LockFile, locks_work
from .measuring import IoChoice, IoMode
from .mounts import mount_of
from .names import Names
from .parts import Parts
from .removal import Removal
from .root import Root
from .space import Space

__all__ = ["Opened", "Settings", "Sharing"]

E = TypeVar("E", bound=StrEnum)

_SHORTEST, _LONGEST = 0.01, 3600.0


class Sharing(StrEnum):
    """Whether other processes may use the root at the same time."""

    AUTO = "auto"  # yes where there are locks, else no
    YES = "yes"
    NO = "no"


class Settings(NamedTuple):
    """The parameters that are words, checked."""

    io: IoMode
    janitor: JanitorMode
    shared: Sharing
    refresh: float

    @classmethod
    def of(cls, *, io: str, janitor: str, shared: str, refresh: float) -> Self:
        """Check them.

        Raises:
            ConfigError: one is not a word that is known, or contradicts another.
        """
        settings = cls(
            _word("io", io, IoMode), _word("janitor", janitor, JanitorMode), _word("shared", shared, Sharing), refresh
        )
        if not (math.isfinite(refresh) and _SHORTEST <= refresh <= _LONGEST):
            raise ConfigError(f"file storage: refresh is {refresh} seconds: use {_SHORTEST} to {_LONGEST:.0f}")
        if settings.shared is Sharing.NO and settings.janitor is JanitorMode.NEVER:
            raise ConfigError("file storage: shared=no leaves nobody else to be the janitor: drop janitor=never")
        return settings


def _word(name: str, value: str, kind: type[E]) -> E:
    try:
        return kind(value)
    except ValueError:
        raise ConfigError(f"file storage: {name}={value!r:.40} is unknown: use {', '.join(kind)}") from None


class Opened:
    """An opened root, not yet at work.

    Attributes:
        parts: what the pieces share.
        election: who is the janitor.
        io: how objects are written.
    """

    def __init__(
        self,
        fs: FileSystem,
        path: str,
        *,
        capacity: int | None,
        fsync: bool,
        settings: Settings,
        now: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        root = Root(fs, path, capacity=capacity)
        try:
            locking = _locking(fs, root, settings.shared)
            root.alone = settings.shared is Sharing.NO or not locking
            self.io = IoChoice(fs, root, settings.io)
            files = ObjectFiles(fs, fsync=fsync, direct_from=self.io.first())
            self.election = Election(fs, root.path, root.alive, settings.janitor, alone=root.alone)
            self.election.open()
        except BaseException:
            root.leave()
            raise
        space = Space(capacity=capacity, wall=wall, ready=root.created)
        ledger = Ledger(fs, f"{root.path}/{LEDGER}", root.alive, locking=locking)
        accounts = Accounts(ledger, space, token=root.token, is_living=root.is_living, pause=settings.refresh, now=now)
        self._join(root, ledger, accounts, alone=root.alone and locking)
        names = Names(root.path, root.fan_out)
        directories = Directories(fs, names, self._alive)
        self.parts = Parts(
            fs=fs,
            root=root,
            names=names,
            space=space,
            accounts=accounts,
            directories=directories,
            files=files,
            removal=Removal(fs, names, space, shared=lambda: accounts.others),
            labels=Labels(fs, root, names, directories, ledger=ledger, refresh=settings.refresh, now=now),
            now=now,
            wall=wall,
        )

    def close(self) -> None:
        """Leave the root."""
        self.parts.accounts.leave()
        self.election.close()
        self.parts.root.leave()

    def _join(self, root: Root, ledger: Ledger, accounts: Accounts, *, alone: bool) -> None:
        try:
            if alone:
                root.alone = False  # only now, to see who is really there
                others = accounts.living()
                root.alone = True
                if others:
                    raise ConfigError(
                        f"file storage: {root.path!r} is in use by {len(others)} other process(es): "
                        "close them, or drop shared=no"
                    )
                ledger.keep()
            accounts.join(empty=root.created)
        except LedgerBusy:
            self._give_up(root, ledger)
            raise ConfigError(
                f"file storage: {root.path!r} is kept by another process (shared=no), or its file system hangs: "
                "close that process, or use another folder"
            ) from None
        except OSError as error:
            self._give_up(root, ledger)
            raise ConfigError(
                f"file storage: folder {root.path!r} cannot be used ({error.strerror}): "
                "name a writable folder with space"
            ) from error
        except BaseException:
            self._give_up(root, ledger)
            raise

    def _give_up(self, root: Root, ledger: Ledger) -> None:
        ledger.close()
        self.election.close()
        root.leave()

    def _alive(self) -> bool:
        """Whether the root is there; makes it again where it was emptied."""
        root = self.parts.root
        if root.alive():
            return True
        if not root.revive():
            return False
        self.parts.space.reset()
        self.parts.labels.forget()
        self.parts.accounts.start_over()
        return True


def _locking(fs: FileSystem, root: Root, shared: Sharing) -> bool:
    """Whether locks work on the root.

    Raises:
        ConfigError: they do not, or not across machines, and sharing was asked for.
    """
    lock = LockFile(fs, f"{root.path}/{LEDGER}")
    try:
        lock.try_lock()
    except OSError as error:
        if locks_work(error):
            raise ConfigError(
                f"file storage: folder {root.path!r} cannot be used ({error.strerror}): "
                "name a writable folder with space"
            ) from error
        if shared is Sharing.YES:
            raise ConfigError(
                f"file storage: {root.path!r} is on a file system without locks, which shared=yes needs: "
                "use shared=no and one process, or another file system"
            ) from None
        return False
    finally:
        lock.close()
    mount = mount_of(root.path)
    if shared is Sharing.YES and not mount.locks_reach:
        raise ConfigError(
            f"file storage: {root.path!r} is mounted ({mount.kind}) so that locks stay on this machine, "
            "which shared=yes forbids: mount it with locks, or use shared=auto with the processes of one machine"
        )
    return True
