"""A private service: started by the engine, restarted when it dies, ended with it. Its clients are as of any other.

It ends with its standard input, so with the engine's process, whatever happens to that.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Final

from hicache.errors import ConfigError
from hicache.rpc.client.options import Backoff
from hicache_vllm.settings import Settings

__all__ = ["PrivateService", "private_address", "refuses"]

_log = logging.getLogger("vllm.hicache")

DRAIN_SECONDS: Final = 5.0
"""That storage gets for what is on its way when the engine ends."""

_HEALTHY_SECONDS: Final = 10.0
"""After so long a service counts as one that works, so that the next restart is quick again."""

_SOCKET: Final = "hicache.sock"

_REFUSED: Final = "refused"
"""In the folder of the socket: says to all processes of an engine that no service will come."""

_WRONG_SETTINGS: Final = 2
"""Exit code of `hicache serve` whose settings cannot work."""


def private_address(engine: str) -> str:
    """Where the private service of an engine listens: every process of the engine computes the same."""
    name = f"hicache-vllm-{os.getuid()}-{sha256(engine.encode()).hexdigest()[:16]}"
    return f"unix://{Path(tempfile.gettempdir()) / name / _SOCKET}"


def refuses(address: str) -> bool:
    """Whether a private service has ended at its start because of its settings, and is not started again."""
    return (_folder(address) / _REFUSED).exists()


class PrivateService:
    """Keeps one running until `close`. Owns the folder of its socket.

    One that ends at its start because its settings cannot work is not started again; its own line says why.

    Args:
        address: of `private_address`.
        settings: `host`, `storage` and `serve` of them.
        backoff: waits between a death and the next start.
        command: runs `hicache serve` with the arguments that follow; for tests.
    """

    def __init__(
        self,
        address: str,
        settings: Settings,
        *,
        backoff: Backoff | None = None,
        command: Sequence[str] | None = None,
    ) -> None:
        self._folder = _folder(address)
        _own(self._folder)
        (self._folder / _REFUSED).unlink(missing_ok=True)
        self._command = [*(command or launcher(self._folder)), "serve", *_flags(address, settings)]
        self._backoff = backoff or Backoff(first=0.1, most=5.0)
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self.starts = 0
        self._thread = threading.Thread(target=self._keep, name="hicache-vllm-service", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """The process; None while there is none."""
        process = self._process
        return None if process is None or process.poll() is not None else process.pid

    def _keep(self) -> None:
        failed = 0
        while not self._stop.is_set():
            begun = threading.Event()
            process = self._start()
            if process is not None:
                timer = threading.Timer(_HEALTHY_SECONDS, begun.set)
                timer.daemon = True
                timer.start()
                process.wait()
                _end_input(process)
                timer.cancel()
            if self._stop.is_set():
                return
            if process is not None and process.returncode == _WRONG_SETTINGS and self.starts == 1:
                self._refuse()
                return
            failed = 1 if begun.is_set() else failed + 1
            seconds = self._backoff.seconds(failed)
            ended = "could not be started" if process is None else f"has ended with {process.returncode}"
            _log.warning("hicache: the private service %s, and is started again in %.1f s", ended, seconds)
            self._stop.wait(seconds)

    def _start(self) -> subprocess.Popen[bytes] | None:
        with self._lock:
            if self._stop.is_set():
                return None
            try:
                _own(self._folder)  # one that has ended in order has taken it along
                self._process = subprocess.Popen(  # noqa: S603  our own module, with checked settings
                    self._command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
                )
            except (OSError, ConfigError) as error:
                _log.warning("hicache: the private service: %s", error)
                return None
            self.starts += 1
            return self._process

    def _refuse(self) -> None:
        _log.error("hicache: the private service ends at its start: its own line says what to change")
        with contextlib.suppress(OSError, ConfigError):
            _own(self._folder)
            (self._folder / _REFUSED).touch()

    def close(self) -> None:
        """Let it end: it drains by itself, for at most DRAIN_SECONDS, and nobody waits for that. Idempotent."""
        with self._lock:
            self._stop.set()
            process = self._process
        if process is not None:
            _end_input(process)
        with contextlib.suppress(OSError):
            (self._folder / _REFUSED).unlink()
            self._folder.rmdir()

    def wait(self, timeout: float) -> bool:
        """Whether it has ended, now or within so many seconds; for tests."""
        self._thread.join(timeout)
        return not self._thread.is_alive()


def _folder(address: str) -> Path:
    return Path(address.removeprefix("unix://")).parent


def launcher(folder: Path) -> list[str]:
    """Runs the `hicache` command in a process that ends with its standard input."""
    return [sys.executable, "-m", "hicache_vllm.launch", str(folder)]


def _end_input(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        process.stdin.close()


def _flags(address: str, settings: Settings) -> list[str]:
    flags = ["--listen", address, "--host", str(settings.host), "--drain", str(DRAIN_SECONDS), "--log-level", "warning"]
    if settings.storage is not None:
        flags += ["--storage", settings.storage]
    return [*flags, *settings.serve]


def _own(folder: Path) -> None:
    """Make a folder that nobody else can write to.

    Raises:
        ConfigError: it is there already and somebody else's.
    """
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        found = folder.lstat()
        if found.st_uid != os.getuid() or found.st_mode & 0o077 or folder.is_symlink():
            raise ConfigError(f"{folder} belongs to somebody else or is open to others: remove it") from None
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made ({error.strerror}): set TMPDIR to a folder of yours") from None
