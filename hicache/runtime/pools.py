"""From what `open` is given to pools, and the engine that copies between them. Checks come before memory is taken."""

from __future__ import annotations

from contextlib import ExitStack
from typing import NamedTuple

from hicache.core.identity import Namespace
from hicache.errors import ConfigError
from hicache.memory.base import CopyEngine, DevicePool, HostPool
from hicache.runtime.options import Options, pool_pages

DeviceSize = DevicePool | int | str | None
HostSize = int | str


class Pools(NamedTuple):
    """The memory of one cache.

    Attributes:
        device: where engines compute; None where that is the engine's.
        owns_device: whether it was made here, and is closed with the cache.
        host: the host tier; None without one.
        copies: moves pages between the two; None without a device pool.
        owns_host: whether the host pool is closed with the cache.
    """

    device: DevicePool | None
    owns_device: bool
    host: HostPool | None
    copies: CopyEngine | None
    owns_host: bool = True

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        pool = self.host if self.device is None else self.device
        assert pool is not None
        return pool.page_bytes


def make_pools(
    namespace: Namespace, *, device: DeviceSize, host: HostSize, with_bytes: bool, options: Options
) -> Pools:
    """Pools of real memory, or pools that hold no bytes.

    Raises:
        ConfigError: a size that is not one, is too small, or does not fit into memory.
        GeometryError: a device pool of another geometry or page size.
    """
    if not with_bytes:
        return _null_pools(device, host)
    from hicache.memory.copier import ThreadCopyEngine

    page_bytes = namespace.geometry.page_bytes(namespace.page_size)
    host_pages = pool_pages(host, page_bytes=page_bytes, tier="host")
    owns_device = not isinstance(device, DevicePool)
    device_pool = device if isinstance(device, DevicePool) else _allocate(namespace, device, page_bytes)
    device_pool.check_geometry(namespace.geometry, namespace.page_size)
    with ExitStack() as undo:
        if owns_device:
            undo.callback(device_pool.close)
        host_pool = _host_pool(namespace, device_pool, host_pages, page_bytes)
        if host_pool is not None:
            undo.callback(host_pool.close)
        copies = device_pool.copy_engine(host_pool)
        if copies is None:
            copies = ThreadCopyEngine(device_pool, host_pool, threads=options.copy_threads)
        undo.pop_all()
    return Pools(device_pool, owns_device, host_pool, copies)


def _host_pool(namespace: Namespace, device: DevicePool, pages: int, page_bytes: int) -> HostPool | None:
    from hicache.memory.host import MmapHostPool

    if not pages:
        return None
    return device.host_pool(namespace.geometry, namespace.page_size, pages) or MmapHostPool(pages, page_bytes)


def _allocate(namespace: Namespace, device: object, page_bytes: int) -> DevicePool:
    from hicache.memory.device import TensorDevicePool

    if device is None:
        raise ConfigError("device=None means no limit, which only bytes=False can have: give pages, a size or a pool")
    pages = pool_pages(device, page_bytes=page_bytes, tier="device")
    if pages < 1:
        raise ConfigError(f"device={device!r}: the device tier needs at least one page")
    return TensorDevicePool.allocate(namespace.geometry, page_size=namespace.page_size, slots=pages)


def _null_pools(device: DeviceSize, host: HostSize) -> Pools:
    from hicache.memory.null import NullCopyEngine, NullDevicePool, NullHostPool

    if isinstance(device, DevicePool):
        raise ConfigError("device is a pool, but bytes=False asks for pools without bytes: give a number of pages")
    pages = None if device is None else pool_pages(device, page_bytes=0, tier="device")
    if pages is not None and pages < 1:
        raise ConfigError(f"device={device!r}: the device tier needs at least one page")
    host_pages = pool_pages(host, page_bytes=0, tier="host")
    device_pool = NullDevicePool(pages)
    host_pool = NullHostPool(host_pages) if host_pages else None
    return Pools(device_pool, True, host_pool, NullCopyEngine(device_pool, host_pool))
