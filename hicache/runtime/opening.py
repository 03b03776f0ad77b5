"""Puts a cache together from its settings. What fails halfway is taken apart again."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from hicache.clock import Clock, MonotonicClock
from hicache.core.identity import Namespace
from hicache.errors import ConfigError, NamespaceError
from hicache.runtime.accesslog.settings import AccessLog
from hicache.runtime.accesslog.settings import access_log as read_access_log
from hicache.runtime.accesslog.writer import AccessLogWriter
from hicache.runtime.arguments import clock_of, flag, storage_of
from hicache.runtime.attaching import open_backend, warn_if_small
from hicache.runtime.cache import EmbeddedCache
from hicache.runtime.flight import FlightRecorder
from hicache.runtime.flight import flight_recorder as read_flight_recorder
from hicache.runtime.options import PrefetchTimeout, WritePolicy
from hicache.runtime.pools import DeviceSize, HostSize, make_pools
from hicache.runtime.port import StoragePort
from hicache.runtime.wiring import close_pools, settings_of, wire
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
    access_log: AccessLog | str | os.PathLike[str] | None = None,
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
        access_log: a folder in which what each request asked for and got is written, by page hashes and without any
            token, for `hicache analyze`; an `AccessLog` sets more. None writes nothing.
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
    options["access_log"] = read_access_log(access_log)
    settings = settings_of(options, write_policy, prefetch_timeout)
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
        undo.callback(close_pools, pools)
        port = None
        if storage is not None or settings.attachable:
            backend = None if storage is None else open_backend(storage, settings, clock)
            port = StoragePort(backend, owned=isinstance(storage, str), now=clock.now)
            undo.callback(port.close)
            if backend is not None and pools.host is not None:
                warn_if_small(backend, pools.host)
        parts = wire(namespace, settings, pools=pools, port=port, clock=clock, undo=undo)
        log = None
        if settings.access_log is not None:
            log = AccessLogWriter(settings.access_log, now=clock.now, background=settings.background)
            undo.callback(log.close)
        cache = EmbeddedCache(parts)
        if log is not None:
            cache.record_access(log, owned=True)
        undo.pop_all()
    return cache


# Users know it as `hicache.open`; under that name it would hide Python's own `open` in this module.
open_cache.__name__ = open_cache.__qualname__ = "open"
