"""From a URL to an open backend: plug-ins are found by entry point and loaded on first use."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable
from importlib.metadata import EntryPoint, entry_points
from typing import Final

from hicache.errors import BackendUnavailableError, ConfigError
from hicache.storage.base import StorageBackend
from hicache.storage.breaker import BreakerBackend, BreakerPolicy
from hicache.storage.retry import RetryingBackend, RetryPolicy
from hicache.storage.url import StorageUrl
from hicache.storage.wrappers import GuardedBackend, MeteredBackend

__all__ = ["GROUP", "check_backend", "configured", "installed_schemes", "load_backend", "open_storage"]

GROUP: Final = "hicache.storage_backends"
"""Entry point group: the entry's name is the URL scheme, its value the backend class."""

_EXTRAS: Final = {"redis": "redis", "rediss": "redis", "redis+cluster": "redis", "redis+sentinel": "redis"}
"""Schemes that a package extra brings."""


def open_storage(url: str, *, retry: RetryPolicy | None = None, breaker: BreakerPolicy | None = None) -> MeteredBackend:
    """Open the backend that a URL names, guarded (`GuardedBackend`) and measured (`MeteredBackend`).

    Args:
        url: e.g. `file:///var/cache/hicache?capacity=100GiB` or `memory://?capacity=1GiB`.
        retry: repeat transfers that failed for a passing reason; None = never.
        breaker: leave the backend alone while it is in trouble; None = never. Each try of a retry counts for it.

    Returns:
        The backend; the caller closes it.

    Raises:
        BackendUnavailableError: nothing here serves the scheme, or what should does not load.
        ConfigError: the URL is malformed, or the place it names cannot work.
    """
    return _opened(url, retry, breaker, time.monotonic)


def installed_schemes() -> list[str]:
    """Schemes that installed packages serve, sorted."""
    return sorted({entry.name for entry in entry_points(group=GROUP)})


def load_backend(scheme: str) -> type[StorageBackend]:
    """The checked backend class of a scheme.

    Raises:
        BackendUnavailableError: none, several, one that cannot be imported, or one that does not keep the contract.
    """
    entry = _only(scheme, entry_points(group=GROUP, name=scheme))
    try:
        loaded = entry.load()
    except Exception as error:
        # A plug-in's import may fail in any way; the host must go on and say which package it was.
        raise BackendUnavailableError(
            f"storage scheme {scheme!r}: {_source(entry)} does not load "
            f"({type(error).__name__}: {error}): {_hint(scheme)}"
        ) from error
    return check_backend(loaded, f"storage scheme {scheme!r}: {_source(entry)}")


def _only(scheme: str, found: Iterable[EntryPoint]) -> EntryPoint:
    # One distribution may be seen twice on the path; that is the same entry, not a conflict.
    entries = list({(entry.value, _distribution(entry)): entry for entry in found}.values())
    if not entries:
        installed = ", ".join(installed_schemes()) or "none"
        raise BackendUnavailableError(
            f"storage scheme {scheme!r} is served by no installed package: {_hint(scheme)} (installed: {installed})"
        )
    if len(entries) > 1:
        sources = " and ".join(sorted(_source(entry) for entry in entries))
        raise BackendUnavailableError(f"storage scheme {scheme!r} is served by {sources}: uninstall all but one")
    return entries[0]


def _hint(scheme: str) -> str:
    if scheme in _EXTRAS:
        return f"pip install 'hicache[{_EXTRAS[scheme]}]'"
    return f"install the package that serves {scheme}://, or check the spelling"


def _distribution(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else ""


def _source(entry: EntryPoint) -> str:
    return f"{_distribution(entry) or 'unknown package'} ({entry.value})"


def check_backend(candidate: object, what: str) -> type[StorageBackend]:
    """Check a class against the contract of this version, before anything depends on it.

    Args:
        candidate: what a plug-in gave.
        what: how messages name it.

    Raises:
        BackendUnavailableError: says which methods are missing or take other arguments.
    """
    if not (inspect.isclass(candidate) and issubclass(candidate, StorageBackend)):
        raise BackendUnavailableError(f"{what} is not a subclass of hicache.storage.base.StorageBackend")
    missing = sorted(candidate.__abstractmethods__)
    if missing:
        raise BackendUnavailableError(
            f"{what} lacks {', '.join(missing)}: it was made for another version of hicache, upgrade it"
        )
    differing = [name for name in sorted(StorageBackend.__abstractmethods__) if not _accepts(candidate, name)]
    if differing:
        raise BackendUnavailableError(
            f"{what} takes other arguments than this version of hicache gives to {', '.join(differing)}: upgrade it"
        )
    return candidate


def _accepts(candidate: type[StorageBackend], name: str) -> bool:
    """Whether every call that the contract allows binds to the plug-in's method."""
    contract = inspect.signature(getattr(StorageBackend, name)).parameters.values()
    positional = [p.name for p in contract if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    keywords = {p.name: None for p in contract if p.kind is inspect.Parameter.KEYWORD_ONLY}
    try:
        inspect.signature(getattr(candidate, name)).bind(*positional, **keywords)
    except (TypeError, ValueError):
        return False
    return True


def configured(
    backend: StorageBackend | str,
    *,
    retry: RetryPolicy | None = None,
    breaker: BreakerPolicy | None = None,
    now: Callable[[], float] = time.monotonic,
) -> StorageBackend:
    """A backend from what a caller gave: a URL is opened; an object is guarded, and stays its owner's to close.

    Args:
        backend: a URL or a backend.
        retry: as for `open_storage`; not for an object that is measured already.
        breaker: likewise.
        now: the breakers' clock, in seconds.

    Raises:
        ConfigError: neither a URL nor a backend, or one that has its wrappers already.
    """
    if isinstance(backend, str):
        return _opened(backend, retry, breaker, now)
    if not isinstance(backend, StorageBackend):
        raise ConfigError(f"storage must be a URL or a StorageBackend, not {type(backend).__name__}")
    if not isinstance(backend, MeteredBackend):
        return _wrapped(backend, retry, breaker, now)
    if retry is not None or breaker is not None:
        raise ConfigError("storage is wrapped already: give retry and breaker where it is opened, or a bare backend")
    return backend


def _opened(
    url: str, retry: RetryPolicy | None, breaker: BreakerPolicy | None, now: Callable[[], float]
) -> MeteredBackend:
    parsed = StorageUrl.parse(url)
    return _wrapped(load_backend(parsed.scheme).from_url(parsed), retry, breaker, now, scheme=parsed.scheme)


def _wrapped(
    backend: StorageBackend,
    retry: RetryPolicy | None,
    breaker: BreakerPolicy | None,
    now: Callable[[], float],
    *,
    scheme: str = "",
) -> MeteredBackend:
    if breaker is not None:
        backend = BreakerBackend(backend, breaker, now=now)
    if retry is not None:
        backend = RetryingBackend(backend, retry)
    return MeteredBackend(GuardedBackend(backend), scheme=scheme)
