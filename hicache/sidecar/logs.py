"""Structured logs: a line for people or a JSON document a line, with what a request, session and tenant have in common.

Only fields that are named here are ever written, so that no token, prompt or salt gets into a log because some record
happened to carry it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any, Final, TextIO

from hicache.config import Log
from hicache.storage.url import redacted

__all__ = ["FIELDS", "fields", "set_up"]

FIELDS: Final = (
    "request", "session", "tenant", "client", "verb", "lease", "pool", "model", "group", "rank", "pid", "uid",
    "address", "storage", "tier", "pages", "bytes", "slots", "seconds", "count", "reason", "boot", "signal",
)  # fmt: skip
"""What records may carry, by `extra=` or `fields`; anything else is left out."""

_LONGEST: Final = 2000
_bound: ContextVar[Mapping[str, Any]] = ContextVar("hicache_log_fields", default={})  # noqa: B039  never changed


@contextlib.contextmanager
def fields(**values: Any) -> Iterator[None]:
    """Put fields into every record that this task logs inside the block.

    Raises:
        ValueError: a field that is not among `FIELDS`.
    """
    if unknown := set(values) - set(FIELDS):
        raise ValueError(f"{sorted(unknown)} are no fields of logs: {FIELDS}")
    token = _bound.set({**_bound.get(), **values})
    try:
        yield
    finally:
        _bound.reset(token)


def set_up(settings: Log, stream: TextIO | None = None) -> logging.Handler:
    """Send all records of this package to a stream, stderr by default, as configured. Returns the handler.

    For processes that are ours alone: a library leaves logging to its application.
    """
    logger = logging.getLogger("hicache")
    for handler in [handler for handler in logger.handlers if isinstance(handler, _Handler)]:
        logger.removeHandler(handler)
    ours = _Handler(sys.stderr if stream is None else stream)
    ours.setFormatter(_Json() if settings.format == "json" else _Text())
    logger.addHandler(ours)
    logger.setLevel(settings.level.upper())
    logger.propagate = False
    return ours


class _Handler(logging.StreamHandler[TextIO]):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  the library's name
        """A log that cannot be written is no reason for another message, which could not be written either."""


def _given(record: logging.LogRecord) -> dict[str, Any]:
    """Fields of a record, those given with it before those of its surroundings."""
    found = {name: getattr(record, name) for name in FIELDS if hasattr(record, name)}
    return {**_bound.get(), **found}


def _message(record: logging.LogRecord) -> str:
    text = redacted_message(record.getMessage())
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def redacted_message(text: str) -> str:
    """A message without users and passwords of the URLs in it."""
    return " ".join(redacted(word) if "://" in word and "@" in word else word for word in text.split(" "))


def _moment(record: logging.LogRecord) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"


class _Json(logging.Formatter):
    """`{"time": ..., "level": ..., "logger": ..., "message": ..., fields...}`; numbers stay numbers."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, always."""
        document: dict[str, Any] = {
            "time": _moment(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _message(record),
        }
        document |= {name: _plain(value) for name, value in _given(record).items()}
        if record.exc_info:
            document["exception"] = self.formatException(record.exc_info)
        return json.dumps(document, ensure_ascii=False)


class _Text(logging.Formatter):
    """`2026-01-31T12:00:00.000Z info    message  session=7 tenant=acme`."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, and the lines of a traceback where there is one."""
        given = "".join(f" {name}={_word(value)}" for name, value in _given(record).items() if value is not None)
        message = " ".join(_message(record).splitlines())
        line = f"{_moment(record)} {record.levelname.lower():<7} {message}{' ' if given else ''}{given}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()[:64]
    if isinstance(value, float) and not abs(value) < float("inf"):
        return str(value)
    return value if isinstance(value, bool | int | float | None) else str(value)[:_LONGEST]


def _word(value: Any) -> str:
    text = str(_plain(value))
    return text if text and not set(text) & set(" \t\r\n\"'=") else json.dumps(text)
