"""Writes a report: whole or not at all."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from hicache.errors import ConfigError

__all__ = ["check", "write"]


def check(out: Path, sources: Sequence[Path]) -> None:
    """See that a file can be written, before much is done for it.

    Raises:
        ConfigError: it cannot, or is one of the sources.
    """
    try:
        if out.is_dir():
            raise ConfigError(f"--out {out!s:.200}: is a folder; name a file in it")
        if not out.absolute().parent.is_dir():
            raise ConfigError(f"--out {out!s:.200}: its folder does not exist; make it, or name another file")
        for source in sources:
            if out.exists() and source.exists() and out.samefile(source):
                raise ConfigError(f"--out {out!s:.200}: is a source of the report; name another file")
    except OSError as error:
        raise ConfigError(f"--out {str(out)!r:.200}: {error.strerror}; name a file that can be written") from None


def write(text: str, out: Path | None) -> None:
    """Write it to a file, which is replaced only when all is there, or to standard output.

    Raises:
        ConfigError: the file cannot be written.
    """
    if out is None:
        sys.stdout.write(text)
        return
    try:
        if out.exists() and not out.is_file():  # a pipe or a device
            out.write_text(text, encoding="utf-8")
            return
        _replace(Path(os.path.realpath(out)), text)
    except OSError as error:
        raise ConfigError(f"--out {out!s:.200}: {error.strerror}; make room, or name another file") from None


def _replace(path: Path, text: str) -> None:
    """Beside it first, so that nobody ever sees a part of it."""
    beside = path.with_name(f".{path.name[:200]}.{os.getpid()}.part")
    try:
        with open(beside, "x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise
