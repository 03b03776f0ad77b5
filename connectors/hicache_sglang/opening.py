"""From a host pool and settings to what the plug-in works on: where pages are, how they are named, who keeps them."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from hicache.errors import ConfigError
from hicache.storage.base import StorageBackend
from hicache.storage.breaker import BreakerPolicy
from hicache.storage.registry import open_storage
from hicache.storage.retry import RetryPolicy
from hicache_sglang.calls import Complaints, TimedCalls
from hicache_sglang.counters import Counters
from hicache_sglang.facts import engine_facts, names_adapters, passes_prefixes
from hicache_sglang.hybrid import Pool
from hicache_sglang.identity import Identity, identify
from hicache_sglang.pool import HostPages, PoolShape, describe_pool
from hicache_sglang.service import ServicePages, connect
from hicache_sglang.settings import Settings
from hicache_sglang.store import PageChain, PageStore, StoragePages

__all__ = ["ANCHOR", "Opened", "Tools", "open_store"]

_log = logging.getLogger("hicache.sglang")

ANCHOR: Final = "kv"
"""SGLang's name of the KV cache among a model's pools."""


@dataclass(frozen=True, slots=True)
class Tools:
    """What every store of one engine uses: who runs calls, who counts, who says what is wrong."""

    calls: TimedCalls
    counters: Counters
    complaints: Complaints


@dataclass(frozen=True, slots=True)
class Opened:
    """An open store. `close` gives it back.

    Attributes:
        pages: the KV cache in host memory.
        store: of its pages.
        backend: the storage behind it; None where a service is.
        beside: further pools of the model, by SGLang's names.
    """

    pages: HostPages
    store: PageStore
    backend: StorageBackend | None
    beside: dict[str, Pool] = field(default_factory=dict)

    def add(self, name: str, host_pool: Any, config: Any, settings: Settings, tools: Tools) -> None:
        """Keep the pages of a further pool too, in a namespace of their own.

        Raises:
            HicacheError: a pool that has no plain pages, or cannot be kept here.
        """
        if self.backend is None:
            raise ConfigError('a service keeps whole prompts of one pool: give "storage" instead of "address"')
        shape = describe_pool(host_pool)
        if shape.page_size != self.pages.shape.page_size:
            raise ConfigError(
                f"its pages have {shape.page_size} tokens, those of the KV cache {self.pages.shape.page_size}"
            )
        identity = identify(config, shape, settings, engine_facts(), pool=name)
        pages = HostPages(host_pool, shape, head_group=identity.head_group)
        self.beside[name] = Pool(pages, _store(self.backend, identity, tools, shared=True))
        _log.info("hicache: pool %s beside the KV cache in namespace %s", name, identity.namespace.digest.hex())

    def of(self, name: str) -> tuple[HostPages, PageStore]:
        """Where a pool's pages are, and what keeps them.

        Raises:
            ConfigError: nobody has registered it.
        """
        if name == ANCHOR:
            return self.pages, self.store
        if name not in self.beside:
            raise ConfigError(f"pool {name} was never registered")
        return self.beside[name].pages, self.beside[name].store

    def there(self, name: str, chain: PageChain) -> list[bool]:
        """Of each page whether a further pool has it; none of a pool that is not known."""
        pool = self.beside.get(name)
        return [False] * len(chain) if pool is None or not chain.names else pool.store.there(chain)

    def clear(self) -> None:
        """Forget the pages of all pools."""
        self.store.clear()
        for pool in self.beside.values():
            pool.store.clear()

    def close(self) -> None:
        """Let go of the storage."""
        self.store.close()


def open_store(host_pool: Any, beside: Mapping[Any, Any], config: Any, settings: Settings, tools: Tools) -> Opened:
    """Name the pages of a rank, and open what keeps them.

    Args:
        host_pool: SGLang's, of the KV cache.
        beside: all host pools of the model that are known, by SGLang's names; the KV cache may be among them.
        config: SGLang's `HiCacheStorageConfig`.
        settings: the user's.
        tools: of the engine.

    Raises:
        HicacheError: pages cannot be named safely, or the storage cannot be opened; says what to change.
    """
    facts = engine_facts()
    if not names_adapters():
        if facts.get("enable_lora") or facts.get("lora_paths"):
            raise ConfigError(
                "this SGLang leaves LoRA adapters out of its page hashes: upgrade it, or serve without LoRA"
            )
        _log.warning(
            "hicache: this SGLang leaves cache_salt and extra_key out of its page hashes: requests that they separate "
            "share pages in storage; upgrade it where they keep tenants apart"
        )
    shape = describe_pool(host_pool)
    identity = identify(config, shape, settings, facts)
    pages = HostPages(host_pool, shape, head_group=identity.head_group)
    opened = _in_a_service(pages, identity, settings, tools) if settings.address else None
    opened = opened or _in_storage(pages, identity, settings, tools)
    try:
        for name, pool in beside.items():
            if str(name) != ANCHOR:
                opened.add(str(name), pool, config, settings, tools)
    except Exception:
        opened.close()
        raise
    _tell(identity, shape)
    return opened


def _in_a_service(pages: HostPages, identity: Identity, settings: Settings, tools: Tools) -> Opened:
    if passes_prefixes(engine_facts()) is False:
        _log.warning(
            'hicache: add "hicache_storage_pass_prefix_keys": true to the extra config: without it a service finds '
            "pages only where a prompt is asked for from its beginning"
        )
    cache = connect(settings, identity)
    return Opened(pages, ServicePages(cache, counters=tools.counters, complaints=tools.complaints), None)


def _in_storage(pages: HostPages, identity: Identity, settings: Settings, tools: Tools) -> Opened:
    policy, url = BreakerPolicy(timeout=settings.timeout), str(settings.storage)
    backend = tools.calls.run(lambda: open_storage(url, retry=RetryPolicy(), breaker=policy))
    try:
        store = _store(backend, identity, tools)
    except Exception:
        tools.calls.run(backend.close)
        raise
    try:
        store.write_manifest(json.dumps(identity.namespace.describe()).encode())
    except Exception as error:  # helps people only
        tools.complaints.say("the namespace's description could not be stored", error)
    return Opened(pages, store, backend)


def _store(backend: StorageBackend, identity: Identity, tools: Tools, *, shared: bool = False) -> StoragePages:
    return StoragePages(
        backend, identity, calls=tools.calls, counters=tools.counters, complaints=tools.complaints, shared=shared
    )


def _tell(identity: Identity, shape: PoolShape) -> None:
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
