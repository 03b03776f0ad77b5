"""Wires the parts of a cache together."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Final

from hicache.clock import Clock
from hicache.core.cache import Core
from hicache.core.config import CoreConfig
from hicache.core.identity import Namespace
from hicache.core.partition import ShardPlan, plan_shards
from hicache.core.recorder import RecordedCore
from hicache.core.residency import Words
from hicache.core.symbols import EXTRAS_SIZE, TOKEN_SIZE
from hicache.errors import ConfigError
from hicache.memory.base import HostPool
from hicache.runtime.absent import AbsentPages
from hicache.runtime.canary import Canary
from hicache.runtime.events import Publisher
from hicache.runtime.executor import Executor
from hicache.runtime.flight import Flight
from hicache.runtime.loading import Loader
from hicache.runtime.objects import PageObjects
from hicache.runtime.options import Options, PrefetchTimeout, WritePolicy, prefetch_timeout, write_policies
from hicache.runtime.parts import Parts
from hicache.runtime.planner import Planner
from hicache.runtime.pools import Pools
from hicache.runtime.port import StoragePort
from hicache.runtime.reducer import Reducer
from hicache.runtime.scopes import Scopes
from hicache.runtime.storage_io import StorageIO
from hicache.runtime.tokens import PageTokens, SymbolTokens, TokenStore
from hicache.runtime.waiting import waiter

HASH_SIZE: Final = 32
"""Bytes of a symbol where symbols are page hashes: those of sha256."""


def settings_of(
    options: dict[str, Any], policy: WritePolicy | Sequence[WritePolicy], timeout: PrefetchTimeout | float
) -> Options:
    """The options of a cache, from what its opener was given.

    Raises:
        ConfigError: an unknown one, or a value that cannot be.
    """
    unknown = sorted(set(options) - set(Options.__dataclass_fields__))
    if unknown:
        known = ", ".join(sorted(Options.__dataclass_fields__))
        raise ConfigError(f"open: unknown option {', '.join(unknown):.200}; known are: {known}")
    down, out = write_policies(policy)
    defaults: dict[str, Any] = {
        "device_to_host": down,
        "host_to_storage": out,
        "prefetch_timeout": prefetch_timeout(timeout),
    }
    return Options(**(defaults | options))


def _core_config(options: Options, pools: Pools, port: StoragePort | None) -> CoreConfig:
    return CoreConfig(
        device_pages=0 if pools.device is None else pools.device.slots,
        host_pages=pools.host.slots if pools.host is not None else 0,
        storage=port is not None,
        eviction=options.eviction,
        protected_share=options.protected_share,
        device_to_host=options.device_to_host,
        host_to_storage=options.host_to_storage,
        fetch_pages=options.fetch_pages(pools.page_bytes),
        write_pages=options.write_pages(pools.page_bytes),
        reserve=options.reserve,
        stub_pages=options.stub_pages,
        ghost_pages=options.ghost_pages,
        touch_seconds=None if port is None else options.touches(port.statistics().ttl),
        events=options.events,
    )


def wire(
    namespace: Namespace,
    options: Options,
    *,
    pools: Pools,
    port: StoragePort | None,
    clock: Clock,
    undo: ExitStack,
    hashes: bool = False,
    words: Words | None = None,
) -> Parts:
    """The machinery of a cache.

    Args:
        namespace: the model as served.
        options: settings.
        pools: its memory.
        port: where the backend is attached, or may be; None without storage.
        clock: time for all of it.
        undo: gets what must be undone if opening fails later on.
        hashes: whether pages' symbols are their hashes; else they are tokens.
        words: generation words of the HOST slots (see `SlotTable`).
    """
    config = _core_config(options, pools, port)
    publisher = Publisher()
    flight, core = _core(config, options, words, undo)
    flushes = options.device_to_host.on_eviction or options.host_to_storage.on_eviction
    failed = None if flight is None else flight.failed
    reducer = Reducer(core, wait=waiter(clock), publish=publisher.publish, flushes=flushes, failed=failed)
    width, store = _symbols(namespace, options, core, pools.host if hashes else None)
    storage = canary = plan = None
    if port is not None:
        assert pools.host is not None
        plan = plan_shards(namespace.geometry, namespace.page_size)
        tokens = store or SymbolTokens(TOKEN_SIZE * namespace.page_size)
        storage = _storage_io(plan, options, pools.host, port, clock, tokens)
        undo.callback(storage.close, lambda thread: thread.join(1.0))
        reducer.look = storage.look
        canary = Canary(port, storage, shard=plan.anchor)
    scopes = Scopes(
        namespace,
        reducer=reducer,
        port=port,
        storage=storage,
        clock=clock,
        width=width,
        generation_seconds=options.generation_seconds,
        hashes=hashes,
    )
    if storage is not None:
        storage.manifest = scopes.manifest
    executor, loader = _execution(namespace, options, reducer, pools, storage, clock)
    parts = Parts(
        namespace=namespace,
        options=options,
        clock=clock,
        pools=pools,
        port=port,
        core=core,
        reducer=reducer,
        executor=executor,
        storage=storage,
        scopes=scopes,
        loader=loader,
        publisher=publisher,
        width=width,
        flight=flight,
        canary=canary,
        warnings=() if plan is None else plan.warnings,
        tokens=store,
    )
    if port is not None and port.backend is None:
        core.detach_storage()
        while core.forget_storage():  # nothing is believed yet, and something may be attached at once
            pass
    return parts


def _core(config: CoreConfig, options: Options, words: Words | None, undo: ExitStack) -> tuple[Flight | None, Core]:
    if options.flight_recorder is None:
        return None, Core(config, words)
    flight = Flight(options.flight_recorder)
    undo.callback(flight.close)
    size = options.flight_recorder.segment_bytes
    return flight, RecordedCore(config, flight, words=words, segment_bytes=size, on_failure=flight.failed)


def _symbols(
    namespace: Namespace, options: Options, core: Core, hashed: HostPool | None
) -> tuple[int, TokenStore | None]:
    """Bytes of a page's symbol and, where symbols are hashes, the tokens beside the slots of `hashed`."""
    if hashed is None:
        return TOKEN_SIZE * namespace.page_size + (EXTRAS_SIZE if options.extras else 0), None
    store = TokenStore(hashed.slots, namespace.page_size)
    core.registry.tokens = store.tokens
    return HASH_SIZE, store


def _execution(
    namespace: Namespace,
    options: Options,
    reducer: Reducer,
    pools: Pools,
    storage: StorageIO | None,
    clock: Clock,
) -> tuple[Executor, Loader]:
    """What carries out what the core wants, and what brings pages up, with one planner for both."""
    page_size = namespace.page_size
    executor = Executor(
        reducer,
        copies=pools.copies,
        storage=storage,
        page_bytes=pools.page_bytes,
        copy_bound=options.copies(pools.page_bytes),
    )
    executor.planner = planner = Planner(
        page_size=page_size,
        fetch_pages=reducer.core.config.fetch_pages,
        rate=options.prefill_tokens_per_second,
        now=clock.now,
    )
    loader = Loader(reducer, storage=storage, options=options, clock=clock, page_size=page_size, planner=planner)
    return executor, loader


def _storage_io(
    plan: ShardPlan, options: Options, host: HostPool, port: StoragePort, clock: Clock, tokens: PageTokens
) -> StorageIO:
    return StorageIO(
        port,
        objects=PageObjects(port, buffer=host.buffer, plan=plan, tokens=tokens),
        options=options,
        absent=AbsentPages(clock, seconds=options.absent_seconds),
        page_bytes=host.page_bytes,
        now=clock.now,
    )


def close_pools(pools: Pools) -> None:
    """Undo `make_pools`."""
    if pools.copies is not None:
        pools.copies.close(0.0)
    if pools.host is not None and pools.owns_host:
        pools.host.close()
    if pools.device is not None and pools.owns_device:
        pools.device.close()
