"""Files that an operator names: read whole, in bounds, and an error that says which one it is."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO, Final

from hicache.errors import ConfigError

__all__ = ["read_file", "read_open"]

_LARGEST: Final = 2**20
"""Bytes of a file: settings, tokens and certificates are far smaller."""


def read_file(shown: str, path: str) -> bytes:
    """All of a file.

    Args:
        shown: what it is, and its name, for errors.
        path: where it is.

    Raises:
        ConfigError: it cannot be read, or is larger than any such file.
    """
    try:
        with Path(path).open("rb") as file:
            return read_open(shown, file)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{shown} cannot be read: {reason}") from None


def read_open(shown: str, file: BinaryIO) -> bytes:
    """All of a file that is open; raises ConfigError where it is larger than any such file."""
    data = file.read(_LARGEST + 1)
    if len(data) > _LARGEST:
        raise ConfigError(f"{shown} is larger than 1 MiB: that is none")
    return data
