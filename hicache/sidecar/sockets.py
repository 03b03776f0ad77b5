"""Who may use a Unix socket's path, and sockets bound to one.

A server that was killed leaves its sockets behind, and gRPC removes whatever lies where it is told to listen. So the
path is claimed first: by a lock on a file beside it, which the kernel ends with the process, whatever its end. Only
who has the lock removes what is stale there, and what answers, with or without a lock, is never displaced.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
from pathlib import Path
from typing import Final

from hicache.errors import ConfigError
from hicache.rpc.address import LIFELINE_SUFFIX, LONGEST_PATH

__all__ = ["Claim", "bind", "claim"]

_LOCK_SUFFIX: Final = ".lock"
_TRIES: Final = 100  # each means that another server has just let go


class Claim:
    """The right to a service's socket path and the lifeline's beside it, until `release` or the process's end."""

    def __init__(self, path: str, lock: int) -> None:
        self.path = path
        self._lock = lock

    def release(self) -> None:
        """Let others have the path; sockets there that nobody listens on any more are removed. Idempotent."""
        if self._lock < 0:
            return
        for path in (self.path, self.path + LIFELINE_SUFFIX):
            with contextlib.suppress(ConfigError):  # what another program made there meanwhile is not ours
                _remove_stale(path)
        # Before it is unlocked: who waits for the lock sees that its file is not the one at the path any more.
        with contextlib.suppress(OSError):
            os.unlink(self.path + _LOCK_SUFFIX)
        os.close(self._lock)
        self._lock = -1


def claim(path: str) -> Claim:
    """Claim a socket path for this process, and remove what a killed server left there.

    Raises:
        ConfigError: a living server has it, something else lies there, the folder is missing or may not be written,
            or the path is too long for a Unix socket with the lifeline's suffix.
    """
    _check_length(path)
    lock = _lock(path)
    try:
        for each in (path, path + LIFELINE_SUFFIX):
            _remove_stale(each)
    except BaseException:
        Claim(path, lock).release()
        raise
    return Claim(path, lock)


def bind(path: str, kind: socket.SocketKind, *, mode: int = 0o600, backlog: int = 128) -> socket.socket:
    """A socket that listens at a path that was claimed; nobody without rights can connect at any moment.

    Args:
        path: of the socket.
        kind: such as `socket.SOCK_SEQPACKET`.
        mode: rights of the file; who may write it may connect.
        backlog: connections that wait to be accepted.

    Raises:
        ConfigError: it cannot be bound.
    """
    listener = socket.socket(socket.AF_UNIX, kind | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    # The rights are there when the file is: chmod alone would come too late for who connects at once.
    before = os.umask(~mode & 0o777)
    try:
        listener.bind(path)
    except OSError as error:
        listener.close()
        raise ConfigError(f"socket {path!r:.200} cannot be bound: {error.strerror}") from error
    finally:
        os.umask(before)
    try:
        Path(path).chmod(mode)
        listener.listen(backlog)
    except BaseException:
        listener.close()
        raise
    return listener


def _check_length(path: str) -> None:
    size = len(os.fsencode(path)) + len(LIFELINE_SUFFIX)
    if not path or "\0" in path or size > LONGEST_PATH:
        raise ConfigError(
            f"socket {path!r:.200}: a Unix socket's path has at most {LONGEST_PATH} bytes, and this one has {size} "
            f"with {LIFELINE_SUFFIX} behind it: use a shorter path, such as /run/hicache/hicache.sock"
        )


def _lock(path: str) -> int:
    name = path + _LOCK_SUFFIX
    for _ in range(_TRIES):
        try:
            lock = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError as error:
            raise ConfigError(
                f"socket {path!r:.200}: folder {os.path.dirname(path) or '.'!r:.200} does not exist: make it, or give "
                "--listen with a path in a folder that exists"
            ) from error
        except OSError as error:
            raise ConfigError(
                f"socket {path!r:.200}: its lock file {name!r:.200} cannot be opened: {error.strerror}; use a folder "
                "that exists and that this user may write"
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(lock, name):
                os.ftruncate(lock, 0)
                os.write(lock, b"%d\n" % os.getpid())
                return lock
        except BlockingIOError:
            holder = os.pread(lock, 20, 0).decode("ascii", "replace").strip()
            os.close(lock)
            raise ConfigError(
                f"socket {path!r:.200} is taken: a server runs there (process {holder or 'unknown'}); stop it first, "
                "or use another path"
            ) from None
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)
    raise ConfigError(f"socket {path!r:.200}: servers come and go there too fast to be one of them")


def _is_at(fd: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _remove_stale(path: str) -> None:
    try:
        found = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"socket {path!r:.200} cannot be looked at: {error.strerror}") from error
    if not stat.S_ISSOCK(found.st_mode):
        raise ConfigError(f"{path!r:.200} is no socket: remove it, or use another path")
    trouble = _answer(path)
    if trouble in {0, errno.EPROTOTYPE, errno.EAGAIN, errno.EINPROGRESS}:  # of another kind, or too busy: it lives
        raise ConfigError(f"socket {path!r:.200} is taken: another program listens there; use another path")
    if trouble not in {errno.ECONNREFUSED, errno.ENOENT}:
        raise ConfigError(
            f"socket {path!r:.200} cannot be tried: {os.strerror(trouble)}; remove it, or use another path"
        )
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"stale socket {path!r:.200} cannot be removed: {error.strerror}") from error


def _answer(path: str) -> int:
    """What connecting says: 0 where somebody listens, else the error's number."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        return probe.connect_ex(path)
