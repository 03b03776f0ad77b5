"""Puts a cache together from its settings. What fails halfway is taken apart again."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from hicache.clock import Clock, MonotonicClock
from hicache.core.cache import Core
from hicache.core.config import CoreConfig
from hicache.core.identity import Namespace
from hicache.core.partition import ShardPlan, plan_shards
from hicache.core.recorder import RecordedCore
from hicache.core.symbols import EXTRAS_SIZE, TOKEN_SIZE
from hicache.errors import ConfigError, NamespaceError
from hicache.memory.base import HostPool
from hicache.runtime.absent import AbsentPages
from hicache.runtime.arguments import clock_of, flag, storage_of
from hicache.runtime.attaching import open_backend
from hicache.runtime.cache import EmbeddedCache
from hicache.runtime.canary import Canary
from hicache.runtime.events import Publisher
from hicache.runtime.executor import Executor
from hicache.runtime.flight import Flight, FlightRecorder
from hicache.runtime.flight import flight_recorder as read_flight_recorder
from hicache.runtime.loading import Loader
from hicache.runtime.objects import PageObjects
from hicache.runtime.options import Options, PrefetchTimeout, WritePolicy, prefetch_timeout, write_policies
from hicache.runtime.parts import Parts
from hicache.runtime.planner import Planner
from hicache.runtime.pools import DeviceSize, HostSize, Pools, make_pools
from hicache.runtime.port import StoragePort
from hicache.runtime.reducer import Reducer
from hicache.runtime.scopes import Scopes
from hicache.runtime.storage_io import StorageIO
from hicache.runtime.waiting import waiter
from hicache.storage.base import StorageBackend


def open_cache(
    namespace: Namespace,
    *,
    device: DeviceSize,
    host: HostSize | None = 0,
    storage: str | StorageBackend | None = None,
    write_policy: WritePolicy | Sequence[WritePolicy] = "write_through",
    prefetch_timeout: PrefetchTimeout | float = PrefetchTimeout(),  # noqa: B008  frozen
    bytes: bool = True,  # noqa: A002  the word that users know
    clock: Clock | None = None,
    flight_recorder: FlightRecorder | bool | str | os.PathLike[str] | None = None,
    **options: Any,
) -> EmbeddedCache:
    """Open a cache for one model.

    Args:
        namespace: the model as served.
        device: the engine's own pool (`hicache.TensorDevicePool.attach` makes one of its tensors), which stays the
            caller's to close; or the size of one to be made: a number of pages, or bytes in quotes such as "2GiB".
            With `bytes=False` None is without limit.
        host: size of the host tier, in pages or bytes; 0 and None are none.
        storage: URL such as "file:///var/cache/hicache?capacity=100GiB", or an open backend, which stays the
            caller's to close; None is none. It stages through the host tier, so that must not be 0.
        write_policy: `write_through`, `write_through_selective`, `write_back` or an `EdgePolicy`; a pair gives one
            for DEVICE to HOST and one for HOST to STORAGE.
        prefetch_timeout: a `PrefetchTimeout`, or seconds.
        bytes: False makes pools that hold no bytes, for simulation.
        clock: a monotonic clock, an object with `now()` in seconds; None is the machine's.
        flight_recorder: True records what leads to a failure in memory, a folder in files there that outlive the
            process; `hicache replay` repeats it. A `FlightRecorder` sets more. None does not record.
        options: any field of `hicache.Options`, which describes each. Most used: `eviction` ("lru", "lfu", "slru",
            "priority"), `prefetch` ("timeout", "best_effort", "wait_complete"), `prefetch_threshold` (tokens),
            `extras=True` (prompts with images), `events=True` (residency changes).

    Returns:
        The cache; close it, best by `with`.

    Raises:
        ConfigError: sizes, policies or URLs that cannot work here.
        GeometryError: a device pool of another geometry or page size.
        StorageError: storage cannot be reached.
    """
    if not isinstance(namespace, Namespace):
        raise NamespaceError(f"namespace must be a Namespace, not {type(namespace).__name__}")
    options["flight_recorder"] = read_flight_recorder(flight_recorder)
    settings = _settings(options, write_policy, prefetch_timeout)
    storage = storage_of(storage)
    clock = MonotonicClock() if clock is None else clock_of(clock)
    flag("bytes", bytes)
    host = 0 if host is None else host
    if storage is not None and not bytes:
        raise ConfigError("storage keeps bytes, but bytes=False makes pools without any: leave one of them out")
    if (storage is not None or settings.attachable) and host == 0:
        raise ConfigError("storage stages through the host tier, and host is 0: give it a size, such as host='4GiB'")
    with ExitStack() as undo:
        pools = make_pools(namespace, device=device, host=host, with_bytes=bytes, options=settings)
        undo.callback(_close_pools, pools)
        port = None
        if storage is not None or settings.attachable:
            backend = None if storage is None else open_backend(storage, settings, clock)
            port = StoragePort(backend, owned=isinstance(storage, str), now=clock.now)
            undo.callback(port.close)
        config = _core_config(settings, pools, port)
        cache = _wire(namespace, settings, config=config, pools=pools, port=port, clock=clock, undo=undo)
        undo.pop_all()
    return cache


# Users know it as `hicache.open`; under that name it would hide Python's own `open` in this module.
open_cache.__name__ = open_cache.__qualname__ = "open"


def _settings(
    options: dict[str, Any], policy: WritePolicy | Sequence[WritePolicy], timeout: PrefetchTimeout | float
) -> Options:
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
        device_pages=pools.device.slots,
        host_pages=pools.host.slots if pools.host is not None else 0,
        storage=port is not None,
        eviction=options.eviction,
        device_to_host=options.device_to_host,
        host_to_storage=options.host_to_storage,
        fetch_pages=options.fetch_pages(pools.device.page_bytes),
        reserve=options.reserve,
        stub_pages=options.stub_pages,
        ghost_pages=options.ghost_pages,
        touch_seconds=None if port is None else options.touches(port.statistics().ttl),
        events=options.events,
    )


def _wire(
    namespace: Namespace,
    options: Options,
    *,
    config: CoreConfig,
    pools: Pools,
    port: StoragePort | None,
    clock: Clock,
    undo: ExitStack,
) -> EmbeddedCache:
    publisher = Publisher()
    flight, core = _core(config, options, undo)
    flushes = options.device_to_host.on_eviction or options.host_to_storage.on_eviction
    failed = None if flight is None else flight.failed
    reducer = Reducer(core, wait=waiter(clock), publish=publisher.publish, flushes=flushes, failed=failed)
    width = TOKEN_SIZE * namespace.page_size + (EXTRAS_SIZE if options.extras else 0)
    storage = canary = None
    warnings: tuple[str, ...] = ()
    if port is not None:
        assert pools.host is not None
        plan = plan_shards(namespace.geometry, namespace.page_size)
        warnings = plan.warnings
        storage = _storage_io(plan, options, pools.host, port, clock)
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
    )
    if storage is not None:
        storage.manifest = scopes.manifest
    executor = Executor(
        reducer,
        copies=pools.copies,
        storage=storage,
        page_bytes=pools.device.page_bytes,
        copy_bound=options.copy_bound,
    )
    planner = Planner(
        page_size=namespace.page_size,
        fetch_pages=config.fetch_pages,
        rate=options.prefill_tokens_per_second,
        now=clock.now,
    )
    executor.planner = planner
    loader = Loader(
        reducer, storage=storage, options=options, clock=clock, page_size=namespace.page_size, planner=planner
    )
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
        warnings=warnings,
    )
    if port is not None and port.backend is None:
        core.detach_storage()
        core.forget_storage()
        core.forget_storage()
    return EmbeddedCache(parts)


def _core(config: CoreConfig, options: Options, undo: ExitStack) -> tuple[Flight | None, Core]:
    if options.flight_recorder is None:
        return None, Core(config)
    flight = Flight(options.flight_recorder)
    undo.callback(flight.close)
    size = options.flight_recorder.segment_bytes
    return flight, RecordedCore(config, flight, segment_bytes=size, on_failure=flight.failed)


def _storage_io(plan: ShardPlan, options: Options, host: HostPool, port: StoragePort, clock: Clock) -> StorageIO:
    token_bytes = TOKEN_SIZE * plan.page_size
    return StorageIO(
        port,
        objects=PageObjects(port, buffer=host.buffer, plan=plan, token_bytes=token_bytes),
        options=options,
        absent=AbsentPages(clock, seconds=options.absent_seconds),
        page_bytes=host.page_bytes,
        now=clock.now,
    )


def _close_pools(pools: Pools) -> None:
    pools.copies.close(0.0)
    if pools.host is not None:
        pools.host.close()
    if pools.owns_device:
        pools.device.close()
