"""Host memory that a device may reach: pinned where that works, and known not to be where it does not."""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

import numpy as np

from hicache.core.arenas import ArenaPlan
from hicache.cuda.driver import ALREADY_PINNED, CudaDriver, CudaError
from hicache.cuda.runs import HostPart
from hicache.errors import ConfigError
from hicache.memory.arena import Arena
from hicache.memory.arenapool import ArenaHostPool
from hicache.memory.base import Bytes, HostPool
from hicache.memory.rankpages import RankPages
from hicache.units import format_size

__all__ = ["HostPins", "PinnedBuffer", "PinnedHostPool", "PinnedStatistics", "Pinning", "host_parts", "rank_parts"]

_LOG = logging.getLogger(__name__)

Pinning: TypeAlias = Literal["try", "require", "off"]
"""What becomes of host memory that cannot be pinned: it is used as it is, or opening fails; or none is asked for."""

PINNINGS: Final = ("try", "require", "off")


@dataclass(frozen=True, slots=True)
class PinnedStatistics:
    """How a copy engine's host memory is pinned.

    Attributes:
        bytes: host memory that it copies from and to.
        pinned_bytes: of these, pinned.
        failures: why the rest is not, in words, with sizes.
    """

    bytes: int = 0
    pinned_bytes: int = 0
    failures: tuple[str, ...] = ()

    @property
    def pinned(self) -> bool:
        """Whether all of it is."""
        return self.pinned_bytes == self.bytes


class HostPins:
    """Ranges of host memory, pinned for as long as this is open. Thread-safe.

    A forked child has no part in it: what it closes stays the parent's.

    Args:
        driver: of the device.
        pinning: see `Pinning`.
    """

    def __init__(self, driver: CudaDriver, pinning: Pinning = "try") -> None:
        if pinning not in PINNINGS:
            raise ConfigError(f"pinning {pinning!r:.40} is none of {', '.join(PINNINGS)}")
        self._driver = driver
        self._pinning = pinning
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._ranges: dict[int, int] = {}
        self._bytes = 0
        self._others = 0  # bytes that somebody else has pinned, and will unpin
        self._failures: list[str] = []

    def pin(self, address: int, size: int, what: str, *, writes: bool = True) -> bool:
        """Pin a range that is mapped and will be until `close` or `unpin`.

        Args:
            address: of its first byte, at the start of a page of the machine.
            size: bytes.
            what: it is, for the text.
            writes: whether it is mapped for writing too.

        Returns:
            Whether it is pinned. A failure was logged and is in `statistics`.

        Raises:
            ConfigError: it cannot be pinned, and pinning is required.
        """
        with self._lock:
            self._bytes += size
            if self._pinning == "off":
                self._failures.append(f"{what} of {format_size(size)} is not pinned, as was asked")
                return False
            try:
                if self._is_pinned(address) and self._is_pinned(address + size - 1):
                    self._others += size
                    return True
                self._driver.host_register(address, size, read_only=not writes)
            except CudaError as error:
                said = _refusal(what, size, error)
                if self._pinning == "require":
                    raise ConfigError(f"{said}, or do without by pinned='try'") from error
                self._failures.append(said)
                _LOG.warning("%s; copies of it are slower and block their thread", said)
                return False
            self._ranges[address] = size
            return True

    def _is_pinned(self, address: int) -> bool:
        return self._driver.pointer(address).kind == "host"

    def covers(self, address: int) -> bool:
        """Whether an address is pinned by this."""
        with self._lock:
            return any(start <= address < start + size for start, size in self._ranges.items())

    def statistics(self) -> PinnedStatistics:
        """A snapshot."""
        with self._lock:
            return PinnedStatistics(self._bytes, sum(self._ranges.values()) + self._others, tuple(self._failures))

    def unpin(self, address: int) -> None:
        """Undo one `pin`; nothing where it failed. No copy may touch the range any more."""
        with self._lock:
            size = self._ranges.pop(address, None)
        if size is not None and os.getpid() == self._process:
            self._unregister(address, size)

    def close(self) -> None:
        """Undo all, while the memory is still mapped. Idempotent; no copy may be under way."""
        with self._lock:
            ranges, self._ranges = self._ranges, {}
        if os.getpid() == self._process:
            for address, size in ranges.items():
                self._unregister(address, size)

    def _unregister(self, address: int, size: int) -> None:
        try:
            self._driver.host_unregister(address)
        except CudaError as error:  # the device is gone, and with it all that was pinned for it
            _LOG.warning("host memory of %s could not be unpinned: %s", format_size(size), error)


def _refusal(what: str, size: int, error: CudaError) -> str:
    said = f"{what} of {format_size(size)} could not be pinned: {error.name} ({error.code})"
    if error.name == ALREADY_PINNED:
        return f"{said}: a part of it was pinned by somebody else; let hicache pin all of it, or nobody else a part"
    if error.name == "cudaErrorNotSupported":
        return f"{said}: {error.text}"
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "" if soft == resource.RLIM_INFINITY else f" (this process may lock {format_size(soft)})"
    return f"{said}{limit}; make it smaller, or raise the limit by ulimit -l"


class PinnedHostPool(ArenaHostPool):
    """A host pool in one shared memory, pinned from its first to its last moment.

    Shared memory, since private memory that is pinned would be copied on the next write after a fork, and the device
    would go on with the old copy. Make it with `open`.
    """

    _pins: HostPins | None = None

    @classmethod
    def open(
        cls,
        plan: ArenaPlan,
        slots: int,
        *,
        driver: CudaDriver,
        pinning: Pinning = "try",
        numa_node: int | None = None,
        numa_required: bool = True,
        root: Path = Path("/"),
    ) -> PinnedHostPool:
        """Make the memory and pin it.

        Args:
            plan: of one rank.
            slots: number of slots.
            driver: of the device.
            pinning: see `Pinning`.
            numa_node: of the host, from which the memory is taken; None: wherever.
            numa_required: whether it must come from there; else it comes from wherever, with a warning, where the
                node has too little or the kernel does not let it be chosen, as in many containers.
            root: folder under which `proc` and `sys` are looked up for the limits.

        Raises:
            ConfigError: more than there is, or it cannot be pinned and must be; nothing is left.
        """
        pins = HostPins(driver, pinning)
        nodes = () if numa_node is None else (numa_node,)
        try:
            made = cls.create(plan, slots, numa_nodes=nodes, root=root)
        except ConfigError as error:
            if numa_required or not nodes:
                raise
            made = cls.create(plan, slots, root=root)
            _LOG.warning("host memory is taken from any NUMA node, not from the GPU's: %s", error)
        assert isinstance(made, PinnedHostPool)
        made._pins = pins
        try:
            for arena in made.arenas:
                pins.pin(_address(arena), arena.size, f"a host pool of {slots} pages")
        except BaseException:
            made.close()
            raise
        return made

    @property
    def pins(self) -> HostPins:
        """How it is pinned."""
        assert self._pins is not None, "made by `open`"
        return self._pins

    def close(self) -> None:
        """Unpin the memory and give it back."""
        if self._pins is not None:
            self._pins.close()
        super().close()


class PinnedBuffer:
    """New pinned memory of so many canonical pages: `rows`, (pages, page_bytes), until `close`."""

    def __init__(self, driver: CudaDriver, pages: int, page_bytes: int) -> None:
        self.pages = pages
        self._driver = driver
        self._address = driver.host_alloc(pages * page_bytes)
        memory = (ctypes.c_uint8 * (pages * page_bytes)).from_address(self._address)
        self.rows: Bytes = np.ctypeslib.as_array(memory).reshape(pages, page_bytes)
        self.parts = (HostPart.whole(self._address, pages, page_bytes),)

    def close(self) -> None:
        """Give it back. Idempotent; no copy may be under way."""
        address, self._address = self._address, 0
        if address:
            try:
                self._driver.host_free(address)
            except CudaError:  # the device is gone, and the memory with it
                return


def host_parts(host: HostPool) -> tuple[HostPart, ...]:
    """Where the canonical pages of a host pool lie in this process."""
    if isinstance(host, ArenaHostPool):
        return tuple(
            HostPart(_address(arena), host.slots, arena.stride, shape.runs)
            for arena, shape in zip(host.arenas, host.plan.arenas, strict=True)
        )
    pages = host.pages
    return (HostPart.whole(pages.ctypes.data, host.slots, host.page_bytes, pages.strides[0]),)


def rank_parts(pages: RankPages) -> tuple[HostPart, ...]:
    """Where one rank's pages lie in the arenas that it maps, as a client of a service has them."""
    return tuple(
        HostPart(memory.rows.ctypes.data, pages.slots, memory.rows.strides[0], memory.runs, memory.writes)
        for memory in pages.memories
    )


def _address(arena: Arena) -> int:
    return int(arena.rows.ctypes.data)
