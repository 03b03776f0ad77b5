"""How a CUDA pool's pages are copied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from hicache.cuda.pinned import PINNINGS, Pinning
from hicache.errors import ConfigError
from hicache.units import whole_number

__all__ = ["DEFAULTS", "CudaOptions", "Method", "Reuse"]

Method: TypeAlias = Literal["auto", "plain", "batch", "kernel"]

Reuse: TypeAlias = Literal["stream", "told"]
"""Behind what a page may be written into a slot that others had before: all that the engine's streams hold when it is
asked for; or what `CudaDevicePool.used_until` was told, for engines that know better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaOptions:
    """How pages are copied.

    Attributes:
        pinned: "try" pins host memory and goes on without where that fails; "require" stops then; "off" does not try.
        numa_node: of the host, from which the host tier is taken; "gpu" is the one that the GPU hangs on, where it is
            known and can be chosen; None is wherever the kernel likes.
        method: "auto" measures what is fastest for each direction when the pool is attached; or "plain", "batch" or
            "kernel" for all copies.
        blocks: of the copy kernel, half a multiprocessor each; None is a sixteenth of the device.
        in_flight_bytes: of each direction; more waits its turn.
        reuse: see `Reuse`.

    Raises:
        ConfigError: a value that none of them can have.
    """

    pinned: Pinning = "try"
    numa_node: int | Literal["gpu"] | None = "gpu"
    method: Method = "auto"
    blocks: int | None = None
    in_flight_bytes: int = 256 << 20
    reuse: Reuse = "stream"

    def __post_init__(self) -> None:
        known: tuple[tuple[str, Any, tuple[str, ...]], ...] = (
            ("pinned", self.pinned, PINNINGS),
            ("method", self.method, ("auto", "plain", "batch", "kernel")),
            ("reuse", self.reuse, ("stream", "told")),
        )
        for name, value, allowed in known:
            if value not in allowed:
                raise ConfigError(f"{name}={value!r:.40} of a CUDA pool is none of {', '.join(allowed)}")
        for name, number in (("blocks", self.blocks), ("in_flight_bytes", self.in_flight_bytes)):
            if number is not None and (whole_number(number) is None or number < 1):
                raise ConfigError(f"{name}={number!r:.40} of a CUDA pool is not a whole number of 1 or more")


DEFAULTS: Final = CudaOptions()
