"""How an access log is written."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Final

from hicache.errors import ConfigError

__all__ = ["SAMPLE_BY", "TENANTS", "AccessLog", "access_log", "read_key"]

SAMPLE_BY: Final = ("prefix", "request")
TENANTS: Final = ("digest", "name", "omit")

LEAST_FILE: Final = 2**16
_LEAST_KEY: Final = 16
_MOST_KEY: Final = 4096


@dataclass(frozen=True, slots=True)
class AccessLog:
    """What is recorded of each request that ends, and where. Page hashes only: no token is ever written.

    Whoever can guess a whole page of a prompt, and everything in front of it, can confirm the guess by its hash, unless
    there is a `key_file`. Equal hashes tell in any case which requests began alike.

    Attributes:
        folder: where the files are (`access-TIME-ID-NUMBER.jsonl.gz`); it is made where it is missing. Several
            processes may share it.
        file_bytes: a file that has so many is ended, and the next one begun.
        total_bytes: of all access logs in the folder; the oldest files are removed above it.
        sample: share of the requests that is written.
        sample_by: `prefix` writes all requests with the same beginning or none of them, so that what they share stays
            visible; `request` takes each by itself, which is fairer to hit rates, and hides what requests share.
        sample_tokens: tokens of that beginning; 0 is one page. Take more than a system prompt that all requests share.
        tenants: tenants are written as a `digest`, by `name`, or not: `omit`.
        key_file: file of a secret of 16 bytes or more, by which hashes are hidden: nobody without it can confirm a
            guess. Logs of one key can be analysed together.
    """

    folder: str | os.PathLike[str]
    file_bytes: int = 64 * 2**20
    total_bytes: int = 2**30
    sample: float = 1.0
    sample_by: str = "prefix"
    sample_tokens: int = 0
    tenants: str = "digest"
    key_file: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        folder: object = self.folder
        if not (isinstance(folder, (str, os.PathLike)) and os.fspath(folder)):
            raise ConfigError(f"access_log.folder={folder!r:.60} is not a folder")
        for name, least in (("file_bytes", LEAST_FILE), ("total_bytes", 2 * LEAST_FILE), ("sample_tokens", 0)):
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= 2**60:
                raise ConfigError(f"access_log.{name}={value!r:.60} is not a whole number of {least} or more")
        if self.total_bytes < 2 * self.file_bytes:
            raise ConfigError(
                f"access_log.total_bytes={self.total_bytes} is less than two files of {self.file_bytes} bytes: raise "
                "it, or lower access_log.file_bytes"
            )
        share: object = self.sample
        if isinstance(share, bool) or not isinstance(share, int | float) or not isfinite(share) or not 0 < share <= 1:
            raise ConfigError(f"access_log.sample={share!r:.60} is not a share above 0, and 1 at most")
        for name, known in (("sample_by", SAMPLE_BY), ("tenants", TENANTS)):
            if getattr(self, name) not in known:
                raise ConfigError(f"access_log.{name}={getattr(self, name)!r:.60} is not one of {', '.join(known)}")


def access_log(given: object) -> AccessLog | None:
    """The settings behind what `open` takes: a folder, or all of them; None writes nothing.

    Raises:
        ConfigError: anything else.
    """
    if given is None or isinstance(given, AccessLog):
        return given
    if isinstance(given, (str, os.PathLike)) and os.fspath(given):
        return AccessLog(folder=given)
    raise ConfigError(f"access_log={given!r:.60} is not None, a folder or a hicache.AccessLog")


def read_key(settings: AccessLog) -> bytes:
    """The key, 32 bytes; empty: hashes are not hidden.

    Raises:
        ConfigError: the file cannot be read, is too short to be a secret, or too long to be one.
    """
    if settings.key_file is None:
        return b""
    path = Path(settings.key_file)
    try:
        with path.open("rb") as file:
            secret = file.read(_MOST_KEY + 1).strip()
    except OSError as error:
        raise ConfigError(f"access_log.key_file {str(path)!r:.200} cannot be read: {error.strerror}") from None
    if not _LEAST_KEY <= len(secret) <= _MOST_KEY:
        raise ConfigError(
            f"access_log.key_file {str(path)!r:.200} has {len(secret)} bytes, and a secret has {_LEAST_KEY} to "
            f"{_MOST_KEY}: make one, such as with `openssl rand -hex 32`"
        )
    return hashlib.sha256(b"hicache access log" + secret).digest()
