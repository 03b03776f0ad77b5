"""The class that SGLang loads. It translates, and it never raises into the engine: what does not work is a miss."""

from __future__ import annotations

import importlib
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final, TypeVar

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from hicache.errors import ConfigError, DeadlineExceeded, HicacheError, StorageError
from hicache.storage.breaker import BreakerPolicy
from hicache.storage.registry import open_storage
from hicache.storage.retry import RetryPolicy
from hicache_sglang.calls import Complaints, TimedCalls
from hicache_sglang.counters import Counters, Statistics
from hicache_sglang.facts import engine_facts, names_adapters
from hicache_sglang.fitting import fit
from hicache_sglang.identity import Identity, identify
from hicache_sglang.pool import Bytes, HostPages, describe_pool
from hicache_sglang.service import ServicePages, connect
from hicache_sglang.settings import Settings, read_settings
from hicache_sglang.store import PageChain, PageName, PageStore, StoragePages

__all__ = ["HiCacheStorageBackend"]

T = TypeVar("T")

_log = logging.getLogger("hicache.sglang")

OLDEST: Final = (0, 5, 12)
NEWEST: Final = (0, 5, 23)
"""Range of SGLang's versions whose interface was compared with this module."""

_RANGE: Final = " to ".join(".".join(map(str, bound)) for bound in (OLDEST, NEWEST))
_HASH = re.compile(r"[0-9a-f]{64}")
_METRICS: Final = ("sglang.srt.observability.metrics_collector", "sglang.srt.metrics.collector")
_SERIES: Final = ("prefetch_pgs", "backup_pgs", "prefetch_bandwidth", "backup_bandwidth")
_ANCHOR: Final = "kv"

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
        self._pages: HostPages | None = None
        self._store: PageStore | None = None
        self._opening = threading.Lock()
        self._open_again_at: float | None = None
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
        if self._settings is None:
            return
        with self._opening:
            self._try_to_open(self._settings)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Models with further pools (sliding window, recurrent, indexer) are not stored: half a state is no hit."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if str(host_pool_name) != _ANCHOR:
            self._disable(f"the model has a pool {host_pool_name} beside its KV cache, which is not stored yet")

    def _try_to_open(self, settings: Settings) -> None:
        try:
            self._open(self.mem_pool_host, settings)
            self._open_again_at = None
        except (StorageError, DeadlineExceeded) as error:
            self._open_again_at = time.monotonic() + AGAIN_SECONDS
            self._disabled = f"the storage cannot be opened: {error}"
            self._complaints.say("the storage cannot be opened, and is tried again", error)
        except HicacheError as error:
            self._disable(str(error))
        except Exception as error:  # a host pool of another release, a plug-in of somebody else
            self._disable(f"{type(error).__name__}: {error}")

    def _opened_late(self) -> PageStore | None:
        """The store, if it is time to try again and the storage is there now. One thread tries, others go on."""
        again, settings = self._open_again_at, self._settings
        if again is None or settings is None or time.monotonic() < again or not self._opening.acquire(blocking=False):
            return None
        try:
            if self._open_again_at is not None:
                self._try_to_open(settings)
        finally:
            self._opening.release()
        return self._store

    def _open(self, pool: Any, settings: Settings) -> None:
        facts = engine_facts()
        if (facts.get("enable_lora") or facts.get("lora_paths")) and not names_adapters():
            raise ConfigError(
                "this SGLang leaves LoRA adapters out of its page hashes: upgrade it, or serve without LoRA"
            )
        shape = describe_pool(pool)
        identity = identify(self._config, shape, settings, facts)
        pages = HostPages(pool, shape, head_group=identity.head_group)
        self._close_store()
        store = self._in_a_service(identity, settings) if settings.address else self._in_storage(identity, settings)
        self._pages, self._store, self._disabled = pages, store, ""
        document = identity.namespace.describe()
        for warning in identity.warnings:
            _log.warning("hicache: %s", warning)
        _log.info(
            "hicache: namespace %s, %s %s pages of %d tokens and %d bytes, geometry %s, numerics %s",
            document["digest"],
            shape.kind,
            shape.layout,
            shape.page_size,
            shape.page_bytes,
            document["geometry_digest"],
            document["numerics"],
        )

    def _in_a_service(self, identity: Identity, settings: Settings) -> PageStore:
        return ServicePages(connect(settings, identity), counters=self._counters, complaints=self._complaints)

    def _in_storage(self, identity: Identity, settings: Settings) -> PageStore:
        policy = BreakerPolicy(timeout=settings.timeout)
        url = str(settings.storage)
        backend = self._calls.run(lambda: open_storage(url, retry=RetryPolicy(), breaker=policy))
        try:
            store = StoragePages(
                backend, identity, calls=self._calls, counters=self._counters, complaints=self._complaints
            )
        except Exception:
            self._calls.run(backend.close)
            raise
        try:
            store.write_manifest(json.dumps(identity.namespace.describe()).encode())
        except Exception as error:  # helps people only
            self._complaints.say("the namespace's description could not be stored", error)
        return store

    def _disable(self, why: str) -> None:
        self._open_again_at = None
        self._close_store()
        self._disabled = why
        _log.error("hicache: runs without a cache: %s", why)

    # ---- zero-copy interface: places in the host pool

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Read pages into the host pool. Each result tells whether its page is there."""
        return self._guarded(
            "read", [False] * len(keys), lambda store: store.read(*self._placed(keys, host_indices, extra_info))
        )

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Store pages of the host pool. Each result tells whether its page is stored."""
        return self._guarded(
            "write", [False] * len(keys), lambda store: store.write(*self._placed(keys, host_indices, extra_info))
        )

    # ---- generic interface: flat tensors

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """The page as a flat tensor, `target_location` where one is given; None if it is not there."""
        return self.batch_get([key], None if target_location is None else [target_location], target_sizes)[0]

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        """Each page as a flat tensor, or None."""
        del target_sizes

        def read(store: PageStore) -> list[Any]:
            targets = target_locations or [self.mem_pool_host.get_dummy_flat_data_page() for _ in keys]
            done = store.read(_chain(keys, None), self._flat(keys, targets))
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
        return self._guarded(
            "write", False, lambda store: all(store.write(_chain(keys, None), self._flat(keys, values or [])))
        )

    # ---- look-ups

    def exists(self, key: str) -> bool:
        """Whether the page is there."""
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many pages, from the first on and without a hole, are there."""
        return self._guarded("lookup", 0, lambda store: store.found(_chain(keys, extra_info)))

    # ---- models with several pools: the engine asks, and hears that nothing is there

    def batch_exists_v2(self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        """Pages of the KV cache where no other pool is asked for; none otherwise."""
        from sglang.srt.mem_cache.hicache_storage import PoolTransferResult

        found = 0 if pool_transfers else self.batch_exists(keys, extra_info)
        return PoolTransferResult(kv_hit_pages=found, extra_pool_hit_pages={})

    def batch_get_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """No page of any pool."""
        del extra_info
        return {transfer.name: [False] * len(transfer.keys or []) for transfer in transfers}

    def batch_set_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """No page of any pool is stored."""
        return self.batch_get_v2(transfers, extra_info)

    # ---- the rest

    def clear(self) -> bool:
        """Forget all pages of this namespace, for all who share it. Whether that was done."""

        def clear(store: PageStore) -> bool:
            store.clear()
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
        store, self._store, self._pages = self._store, None, None
        if store is None:
            return
        try:
            store.close()
        except Exception as error:
            self._complaints.say("the storage did not close", error)

    def _guarded(self, kind: str, miss: T, work: Callable[[PageStore], T]) -> T:
        store = self._store or self._opened_late()
        if store is None:
            return miss
        try:
            return work(store)
        except Exception as error:  # an exception here would end one of the engine's threads
            if kind != "clear":
                self._counters.failed(kind, type(error).__name__)
            self._complaints.say(f"{kind} failed", f"{type(error).__name__}: {error}")
            return miss

    def _placed(self, keys: Sequence[str], host_indices: Any, extra_info: Any) -> tuple[PageChain, list[Bytes | None]]:
        """Names, and the views of the pages whose token slots begin at each page's first index."""
        pages = self._host_pages()
        size = pages.shape.page_size
        slots = host_indices.tolist()
        if len(slots) != len(keys) * size:
            raise ConfigError(f"{len(keys)} pages of {size} tokens came with {len(slots)} host indices")
        return _chain(keys, extra_info), [_place(pages, slots[at : at + size]) for at in range(0, len(slots), size)]

    def _flat(self, keys: Sequence[str], tensors: Sequence[Any]) -> list[Bytes | None]:
        if len(tensors) != len(keys):
            raise ConfigError(f"{len(keys)} pages came with {len(tensors)} tensors")
        pages = self._host_pages()
        return [pages.flat(tensor) for tensor in tensors]

    def _host_pages(self) -> HostPages:
        pages = self._pages
        if pages is None:
            raise ConfigError("the storage was detached meanwhile")
        return pages


MISFITS: Final = fit(HiCacheStorageBackend, HiCacheStorage)
"""What the installed SGLang asks for otherwise than this module has it."""


def _place(pages: HostPages, slots: list[int]) -> Bytes | None:
    # A page's slots follow each other: a page at other places is no page of this pool.
    return pages.at(slots[0]) if slots[-1] - slots[0] == len(slots) - 1 else None


def _chain(keys: Sequence[str], extra_info: Any) -> PageChain:
    """Pages by SGLang's hashes. Keys of one call are a chain; where the chain's beginning is known, so are parents.

    Raises:
        ConfigError: a key is no sha256 page hash.
    """
    for key in keys:
        if _HASH.fullmatch(key) is None:
            raise ConfigError(f"page key {key!r:.80} is no sha256 page hash")
    prefix = getattr(extra_info, "prefix_keys", None)
    hashes = [bytes.fromhex(key) for key in keys]
    if prefix is None:
        return PageChain([PageName(found) for found in hashes])
    before = [bytes.fromhex(key) for key in prefix]
    parents = [before[-1] if before else None, *hashes[:-1]]
    names = [PageName(page, parents[i], len(before) + i) for i, page in enumerate(hashes)]
    return PageChain(names, b"".join(before))


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
