"""Memory of a device pool that is allocated for it: how large, in which shape."""

from __future__ import annotations

import math

from hicache.cuda.driver import OUT_OF_MEMORY, CudaDriver, CudaError
from hicache.errors import ConfigError, GeometryError
from hicache.memory.layout import LAYOUTS, PageLayout
from hicache.units import format_size

__all__ = ["allocate", "shape_of", "strides_of"]


def allocate(driver: CudaDriver, size: int, what: str) -> int:
    """New memory on a device; its address.

    Raises:
        ConfigError: there is not so much; has the numbers and `what` it was for.
    """
    free, total = driver.memory()
    said = (
        f"{what} of {format_size(size)} does not fit on CUDA device {driver.device}: {format_size(free)} of "
        f"{format_size(total)} are free; use fewer slots, or leave the engine a smaller share"
    )
    if size > free:
        raise ConfigError(said)
    try:
        return driver.malloc(size)
    except CudaError as error:
        if error.name != OUT_OF_MEMORY:
            raise ConfigError(f"{what} of {format_size(size)} cannot be allocated: {error}") from error
        raise ConfigError(said) from error


def shape_of(page: PageLayout, layout: str, slots: int) -> tuple[int, ...]:
    """Elements of so many pages along the axes of a layout, in bytes along the last.

    Raises:
        GeometryError: a layout that is only an engine's.
    """
    axes = LAYOUTS.get(layout)
    if axes is None:
        raise GeometryError(f"layout {layout!r:.40} is not for memory made here: use one of {', '.join(LAYOUTS)}")
    absent = {"plane", "head"} if page.kind == "mla" else set()
    sizes = {"slot": slots, "layer": page.layers, "plane": page.planes, "token": page.tokens, "head": page.heads}
    sizes |= {"dim": page.row_bytes, "byte": page.page_bytes}
    return tuple(sizes[axis] for axis in axes if axis not in absent)


def strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Bytes from one element to the next along each axis, without gaps."""
    return tuple(math.prod(shape[at + 1 :]) for at in range(len(shape)))
