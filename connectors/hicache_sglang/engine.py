"""The class that SGLang loads. It translates, and it never raises into the engine: what does not work is a miss."""

from __future__ import annotations

import importlib
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final, TypeVar

from msgspec.structs import replace
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from hicache.errors import ConfigError, DeadlineExceeded, HicacheError, StorageError
from hicache.runtime.fingerprint import revision_of
from hicache_sglang.calls import Complaints, TimedCalls
from hicache_sglang.counters import Counters, Statistics
from hicache_sglang.facts import Weights, served_weights, started_weights
from hicache_sglang.fitting import fit
from hicache_sglang.hybrid import asked_of, fold
from hicache_sglang.opening import ANCHOR, Opened, Tools, open_store
from hicache_sglang.places import chain_of, flat_places, placed
from hicache_sglang.settings import Settings, read_settings
from hicache_sglang.store import PageChain

__all__ = ["HiCacheStorageBackend"]

T = TypeVar("T")

_log = logging.getLogger("hicache.sglang")

OLDEST: Final = (0, 5, 12)
NEWEST: Final = (0, 5, 23)
"""Range of SGLang's versions whose interface was compared with this module."""

_RANGE: Final = " to ".join(".".join(map(str, bound)) for bound in (OLDEST, NEWEST))
_METRICS: Final = ("sglang.srt.observability.metrics_collector", "sglang.srt.metrics.collector")
_SERIES: Final = ("prefetch_pgs", "backup_pgs", "prefetch_bandwidth", "backup_bandwidth")

AGAIN_SECONDS: Final = 10.0
"""Between two tries to open a storage that was away when the engine started."""


class HiCacheStorageBackend(HiCacheStorage):  # type: ignore[misc]  # SGLang is not installed where types are checked
    """SGLang's storage tier, kept by hicache. Thread-safe, as SGLang's threads for look-ups, reads and writes call it.

    A configuration that cannot work is one line in the log, and the engine runs without a storage tier. The host pool
    stays SGLang's: it is read and written only at the places that a call names, and only until the call returns.

    Args:
        storage_config: SGLang's `HiCacheStorageConfig`; our settings are in its `extra_config`.
        kwargs: what SGLang's factory passes on; not used.
    """

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        del kwargs
        self._config = storage_config
        self._counters = Counters()
        self._complaints = Complaints()
        self._settings: Settings | None = None
        self._calls = TimedCalls(5.0)
        self._opened: Opened | None = None
        self._opening = threading.Lock()
        self._open_again_at: float | None = None
        self._weights = started_weights()
        self._disabled = "no host pool is registered yet"
        if MISFITS:
            self._disable(
                f"this SGLang's interface has changed: {'; '.join(MISFITS)}: upgrade hicache, or use SGLang {_RANGE}"
            )
            return
        try:
            self._settings = read_settings(getattr(storage_config, "extra_config", None))
            self._calls = TimedCalls(self._settings.timeout)
            _warn_of_version()
        except HicacheError as error:
            self._disable(str(error))

    # ---- what SGLang tells at start

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Learn where pages are, name them, and open the storage."""
        super().register_mem_pool_host(mem_pool_host)
        if self._settings is not None:
            with self._opening:
                self._try(self._open)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """A pool beside the KV cache (sliding window, draft): stored too where it has plain pages.

        One that is not understood (recurrent, indexer) ends storage altogether: half a state is no hit.
        """
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if str(host_pool_name) != ANCHOR and self._opened is not None:
            with self._opening:
                self._try(lambda settings: self._add(str(host_pool_name), host_pool, settings))

    def _try(self, work: Callable[[Settings], None]) -> None:
        settings = self._settings
        assert settings is not None  # nothing is opened without
        try:
            work(settings)
            self._open_again_at = None
        except (StorageError, DeadlineExceeded) as error:
            self._close_store()
            self._open_again_at = time.monotonic() + AGAIN_SECONDS
            self._disabled = f"the storage cannot be opened: {error}"
            self._complaints.say("the storage cannot be opened, and is tried again", error)
        except HicacheError as error:
            self._disable(str(error))
        except Exception as error:  # a host pool of another release, a plug-in of somebody else
            self._disable(f"{type(error).__name__}: {error}")

    def _opened_late(self) -> Opened | None:
        """What is open, if it is time to try again and the storage is there now. One thread tries, others go on."""
        again = self._open_again_at
        if again is None or time.monotonic() < again or not self._opening.acquire(blocking=False):
            return None
        try:
            if self._open_again_at is not None:
                self._try(self._open)
        finally:
            self._opening.release()
        return self._opened

    def _current(self) -> Opened | None:
        """What is open, as far as it is that of the weights that the engine has now. One thread opens, others miss."""
        opened = self._opened
        if opened is None:
            return self._opened_late()
        if served_weights() == self._weights:
            return opened
        if not self._opening.acquire(blocking=False):
            return None
        try:
            if self._opened is opened and served_weights() != self._weights:
                self._try(self._open)
        finally:
            self._opening.release()
        return self._opened

    def _open(self, settings: Settings) -> None:
        self._close_store()
        weights = served_weights()
        if weights != self._weights:
            settings = replace(settings, revision=_revision_of(weights))
            self._settings, self._weights = settings, weights
            _log.warning("hicache: the engine's weights were exchanged: pages are of revision %s", settings.revision)
        beside = getattr(self, "registered_pools", {})
        self._opened = open_store(self.mem_pool_host, beside, self._config, settings, self._tools())
        self._disabled = ""

    def _add(self, name: str, host_pool: Any, settings: Settings) -> None:
        opened = self._opened
        if opened is None:
            return
        try:
            opened.add(name, host_pool, self._config, settings, self._tools())
        except ConfigError as error:
            raise ConfigError(f"the model's pool {name} beside its KV cache: {error}") from None

    def _tools(self) -> Tools:
        return Tools(self._calls, self._counters, self._complaints)

    def _disable(self, why: str) -> None:
        self._open_again_at = None
        self._close_store()
        self._disabled = why
        _log.error("hicache: runs without a cache: %s", why)

    # ---- zero-copy interface: places in the host pool

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Read pages into the host pool. Each result tells whether its page is there."""

        def read(opened: Opened) -> list[bool]:
            return opened.store.read(*placed(opened.pages, keys, host_indices, extra_info))

        return self._guarded("read", [False] * len(keys), read)

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Store pages of the host pool. Each result tells whether its page is stored."""

        def write(opened: Opened) -> list[bool]:
            return opened.store.write(*placed(opened.pages, keys, host_indices, extra_info))

        return self._guarded("write", [False] * len(keys), write)

    # ---- generic interface: flat tensors

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """The page as a flat tensor, `target_location` where one is given; None if it is not there."""
        return self.batch_get([key], None if target_location is None else [target_location], target_sizes)[0]

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        """Each page as a flat tensor, or None."""
        del target_sizes

        def read(opened: Opened) -> list[Any]:
            targets = target_locations or [self.mem_pool_host.get_dummy_flat_data_page() for _ in keys]
            done = opened.store.read(chain_of(keys, None), flat_places(opened.pages, keys, targets))
            return [target if there else None for target, there in zip(targets, done, strict=True)]

        return self._guarded("read", [None] * len(keys), read)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Store a flat page."""
        del target_location, target_sizes
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Store flat pages; whether all are stored."""
        del target_locations, target_sizes

        def write(opened: Opened) -> bool:
            return all(opened.store.write(chain_of(keys, None), flat_places(opened.pages, keys, values or [])))

        return self._guarded("write", False, write)

    # ---- look-ups

    def exists(self, key: str) -> bool:
        """Whether the page is there."""
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many pages, from the first on and without a hole, are there."""
        return self._guarded("lookup", 0, lambda opened: opened.store.found(chain_of(keys, extra_info)))

    # ---- models with several pools

    def batch_exists_v2(self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        """How much of a prompt all pools can restore, and each alone."""
        from sglang.srt.mem_cache.hicache_storage import PoolTransferResult

        def look(opened: Opened) -> tuple[list[int], dict[Any, int]]:
            chain = chain_of(keys, extra_info)
            found = opened.store.found(chain)
            known = PageChain(chain.names[:found], chain.before)
            asked = [asked_of(transfer) for transfer in pool_transfers or ()]
            longest, common = fold(found, [(one, opened.there(one.name, known)) for one in asked])
            hits: dict[Any, int] = {ANCHOR: found}
            for transfer, count in zip(pool_transfers or (), longest, strict=True):
                hits[transfer.name] = count
            return common, {name: count for name, count in hits.items() if count}

        nothing: tuple[list[int], dict[Any, int]] = ([], {})
        common, hits = self._guarded("lookup", nothing, look)
        result = {"kv_hit_pages": common[-1] if common else 0, "extra_pool_hit_pages": hits}
        if "restorable_prefix_pages" in PoolTransferResult.__dataclass_fields__:
            result["restorable_prefix_pages"] = common
        return PoolTransferResult(**result)

    def batch_get_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Read pages of each pool into its host memory."""
        return {one.name: self._transfer("read", one, extra_info) for one in transfers}

    def batch_set_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Store pages of each pool."""
        return {one.name: self._transfer("write", one, extra_info) for one in transfers}

    def _transfer(self, kind: str, transfer: Any, extra_info: Any) -> list[bool]:
        keys = transfer.keys or []

        def work(opened: Opened) -> list[bool]:
            pages, store = opened.of(str(transfer.name))
            if transfer.host_indices is None:
                raise ConfigError(f"pages of pool {transfer.name} came without host indices")
            chain, views = placed(pages, keys, transfer.host_indices, extra_info)
            return store.read(chain, views) if kind == "read" else store.write(chain, views)

        return self._guarded(kind, [False] * len(keys), work)

    # ---- the rest

    def clear(self) -> bool:
        """Forget all pages of this namespace, for all who share it. Whether that was done."""

        def clear(opened: Opened) -> bool:
            opened.clear()
            return True

        return self._guarded("clear", False, clear)

    def get_stats(self) -> Any:
        """Transfers since the last call as SGLang's `StorageMetrics`; None where this SGLang has no such record."""
        metrics = _metrics_class()
        if metrics is None:
            return None
        prefetched, backed_up = self._counters.drain()
        record = metrics()
        if not all(isinstance(getattr(record, name, None), list) for name in _SERIES):
            return None
        record.prefetch_pgs.extend(sample.pages for sample in prefetched)
        record.prefetch_bandwidth.extend(sample.bandwidth for sample in prefetched)
        record.backup_pgs.extend(sample.pages for sample in backed_up)
        record.backup_bandwidth.extend(sample.bandwidth for sample in backed_up)
        return record

    def statistics(self) -> Statistics:
        """All counts since start."""
        return self._counters.snapshot(hung=self._calls.hung, disabled=self._disabled)

    def close(self) -> None:
        """Let go of the storage; every later call is a miss. Idempotent."""
        self._open_again_at = None
        self._close_store()
        self._disabled = self._disabled or "closed"

    # ---- tools

    def _close_store(self) -> None:
        opened, self._opened = self._opened, None
        if opened is None:
            return
        try:
            opened.close()
        except Exception as error:
            self._complaints.say("the storage did not close", error)

    def _guarded(self, kind: str, miss: T, work: Callable[[Opened], T]) -> T:
        opened = self._current()
        if opened is None:
            return miss
        try:
            return work(opened)
        except Exception as error:  # an exception here would end one of the engine's threads
            if kind != "clear":
                self._counters.failed(kind, type(error).__name__)
            self._complaints.say(f"{kind} failed", f"{type(error).__name__}: {error}")
            return miss


MISFITS: Final = fit(HiCacheStorageBackend, HiCacheStorage)
"""What the installed SGLang asks for otherwise than this module has it."""


def _revision_of(weights: Weights) -> str:
    """What names weights that a running engine got: what is in their folder, or, from elsewhere, nothing but once."""
    if weights.path and not weights.labelled and os.path.isdir(weights.path):
        return revision_of(weights.path)
    return f"exchanged-{secrets.token_hex(16)}"


def _metrics_class() -> Any:
    for name in _METRICS:
        try:
            return importlib.import_module(name).StorageMetrics
        except (ImportError, AttributeError):
            continue
    return None


def _warn_of_version() -> None:
    try:
        found = version("sglang")
    except PackageNotFoundError:
        return
    numbers = tuple(int(part) for part in re.findall(r"\d+", found)[:3])
    if not OLDEST <= numbers <= NEWEST:
        _log.warning("hicache: SGLang %s is outside %s, with which this plug-in was compared", found, _RANGE)
