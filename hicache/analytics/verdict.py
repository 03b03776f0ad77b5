"""What is said at the end of a replay: what was wrong, what the input lacked, and what a user should know."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import hicache
from hicache.errors import ConfigError
from hicache.runtime.storage_io import QUEUE_FULL
from hicache.storage.codec import padded
from hicache.storage.url import redacted
from hicache.units import format_size

_DAMAGED: Final = frozenset(
    {
        "zeroed",
        "empty",
        "truncated",
        "version",
        "header_length",
        "header_checksum",
        "fields",
        "payload_length",
        "payload_checksum",
    }
)
_FOREIGN: Final = frozenset({"foreign", "newer"})
_NO_TROUBLE: Final = frozenset({"absent", "cleared"})
_ADVICE: Final = (
    ({"unavailable", "breaker_open", "timeout", "connection"}, "bring it back, or name another place"),
    ({"no_space", "no_room", "enospc", "edquot", "oom"}, "make room there, raise its capacity, or name another place"),
    ({"too_large"}, "its capacity is too small for one page: raise it"),
    ({"eacces", "eperm", "erofs", "readonly", "acl"}, "give this user the right to write there, or name another place"),
)
_LEAST_HEADER: Final = 64


def check_capacity(options_url: str, capacity: int | None, page_bytes: int) -> None:
    """See that storage has room for at least one page.

    Args:
        options_url: the storage's URL.
        capacity: its byte limit, if it has one.
        page_bytes: bytes of a page, which is one object.

    Raises:
        ConfigError: it has not.
    """
    file = options_url.startswith("file:")
    size = padded(page_bytes) + padded(_LEAST_HEADER) if file else page_bytes + _LEAST_HEADER
    if capacity is not None and capacity < size:
        raise ConfigError(
            f"--storage {redacted(options_url)}: its capacity of {format_size(capacity)} is less than one page takes "
            f"there ({format_size(size)}): raise capacity"
        )


def trouble(statistics: hicache.CacheStatistics) -> dict[str, int]:
    """Objects that storage answered for with something else than what was asked and "not there", by reason."""
    if statistics.storage is None:
        return {}
    return {name: count for name, count in statistics.storage.by_reason.items() if name not in _NO_TROUBLE}


def problems(statistics: hicache.CacheStatistics) -> tuple[str, ...]:
    """What the cache itself found wrong."""
    if statistics.internal_errors:
        return (f"{statistics.internal_errors} internal errors of the cache, which are bugs of hicache; see the log",)
    return ()


def refusal(statistics: hicache.CacheStatistics, url: str | None) -> str:
    """Says so when storage took nothing at all: then its place is wrong, or full."""
    refused = _refused(statistics)
    if url is None or refused <= 0 or statistics.bytes_to_storage or statistics.bytes_from_storage:
        return ""
    reasons = trouble(statistics)
    return f"--storage {redacted(url)}: took none of {refused} pages ({_counts(reasons)}): {_advice(reasons)}"


def warnings(statistics: hicache.CacheStatistics, report: hicache.CloseReport, url: str | None) -> Iterator[str]:
    """What a user should know about a run that went to its end."""
    if url is None or refusal(statistics, url):
        return  # without storage nothing is written at the end, and a refusal says it all
    where, reasons = f"--storage {redacted(url)}", trouble(statistics)
    if report.abandoned_pages:
        yield f"{where}: {report.abandoned_pages} pages were still being written when closing gave up on them"
    elif not report.complete:
        yield f"{where}: closing could not write everything down, as it takes no more: {_advice(reasons)}"
    refused = _refused(statistics)
    if refused > 0:
        yield f"{where}: {refused} pages were not taken ({_counts(reasons)}): {_advice(reasons)}"
    if damaged := _only(reasons, _DAMAGED):
        yield f"{where}: damaged objects were found ({_counts(damaged)}), each a miss that is written anew: check it"
    if foreign := _only(reasons, _FOREIGN):
        yield f"{where}: objects of others lie under our names ({_counts(foreign)}), each a miss, and are left alone"


def _refused(statistics: hicache.CacheStatistics) -> int:
    """Pages that storage was given and did not take; those shed before are counted apart."""
    return statistics.failed_pages.get("put", 0) - statistics.shed_by_reason.get(QUEUE_FULL, 0)


def _only(reasons: Mapping[str, int], names: frozenset[str]) -> dict[str, int]:
    return {name: count for name, count in reasons.items() if name in names}


def _counts(reasons: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in sorted(reasons.items())) or "for no reason it told"


def _advice(reasons: Mapping[str, int]) -> str:
    for names, advice in _ADVICE:
        if names & set(reasons):
            return advice
    return "see what ails it there, or name another place"
