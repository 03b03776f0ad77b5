"""What one cache is made of."""

from __future__ import annotations

from dataclasses import dataclass

from hicache.clock import Clock
from hicache.core.cache import Core
from hicache.core.identity import Namespace
from hicache.runtime.canary import Canary
from hicache.runtime.events import Publisher
from hicache.runtime.executor import Executor
from hicache.runtime.flight import Flight
from hicache.runtime.loading import Loader
from hicache.runtime.options import Options
from hicache.runtime.pools import Pools
from hicache.runtime.port import StoragePort
from hicache.runtime.reducer import Reducer
from hicache.runtime.scopes import Scopes
from hicache.runtime.storage_io import StorageIO
from hicache.runtime.tokens import TokenStore


@dataclass(frozen=True, slots=True)
class Parts:
    """The machinery of a cache, put together by `open_cache`.

    Attributes:
        namespace: the model as served.
        options: settings.
        clock: time for all of it.
        pools: memory, and the engine that copies.
        port: where the backend is attached, or may be; None in a cache that has no storage and never will.
        core: the pure core; touched only under the reducer's lock.
        reducer: the lock and the inbox.
        executor: starts and completes transfers.
        storage: threads for storage; None without a port.
        scopes: namespaces and their trees.
        loader: prefetches and loads.
        canary: shows whether storage works; None without a port.
        publisher: hands events out.
        width: bytes of a page's symbol.
        flight: the flight recorder; None without one.
        tokens: tokens of the pages in HOST, where pages' symbols are hashes; else None.
        warnings: what works with these settings but will cost, in words.
    """

    namespace: Namespace
    options: Options
    clock: Clock
    pools: Pools
    port: StoragePort | None
    core: Core
    reducer: Reducer
    executor: Executor
    storage: StorageIO | None
    scopes: Scopes
    loader: Loader
    publisher: Publisher
    width: int
    flight: Flight | None = None
    tokens: TokenStore | None = None
    canary: Canary | None = None
    warnings: tuple[str, ...] = ()
