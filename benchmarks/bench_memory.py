"""Pages between an engine's layout and canonical form, against one plain copy of the same bytes in the same run.

Pages of a 32-layer model with 8 kv heads of 128 bfloat16, 64 tokens a page: 8 MiB each, in slots in random order, in
memory far larger than the caches. One thread each.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchmarks.measure import Row, row
from hicache.core.layout import KVGeometry
from hicache.memory.device import TensorDevicePool
from hicache.memory.host import MmapHostPool

LAYERS, HEADS, DIM, TOKENS = 32, 8, 128, 64
SLOTS, MOVED, ROUNDS = 16, 8, 15
LAYOUTS = ("layer_first", "page_first")
HEAD_GROUPS = (8, 4, 2, 1)


@dataclass(frozen=True, slots=True)
class Speeds:
    """GB/s of the same bytes, one direction counted."""

    copy: float
    gather: float
    scatter: float
    scatter_by_layer: float


def speeds(layout: str, head_group: int) -> Speeds:
    """Measure a plain copy and the two conversions turn by turn, so that all see the same machine."""
    geometry = KVGeometry.mha(LAYERS, kv_heads=HEADS, head_dim=DIM, dtype="bfloat16", head_group=head_group)
    device = TensorDevicePool.allocate(geometry, page_size=TOKENS, slots=SLOTS, layout=layout)
    host, other = MmapHostPool(SLOTS, device.page_bytes), MmapHostPool(SLOTS, device.page_bytes)
    for pool in (host, other):
        pool.pages[:] = 1  # no page of the machine is missing when the clock runs
    device.scatter(host, np.arange(SLOTS), np.arange(SLOTS))
    random = np.random.default_rng(1)
    slots, host_slots = (random.permutation(SLOTS)[:MOVED].astype(np.int64) for _ in range(2))

    def copy() -> None:
        for target, source in zip(host_slots.tolist(), slots.tolist(), strict=True):
            np.copyto(host.page(target), other.page(source))

    def by_layer() -> None:
        for layer in range(LAYERS):
            device.scatter(host, host_slots, slots, layers=(layer, layer + 1))

    works = (
        copy,
        lambda: device.gather(slots, host, host_slots),
        lambda: device.scatter(host, host_slots, slots),
        by_layer,
    )
    seconds = np.array([[_seconds(work) for work in works] for _ in range(ROUNDS)])
    host.close()
    other.close()
    # Shares are taken turn by turn, since a busy machine is not as fast in one turn as in the next.
    shares = np.median(seconds[:, :1] / seconds, axis=0)
    plain = MOVED * device.page_bytes / np.median(seconds[:, 0]) / 1e9
    return Speeds(*(plain * shares).tolist())


def gather() -> list[Row]:
    """Rows of the way down."""
    return [_row("gather", layout, group, found.gather, found.copy) for layout, group, found in _all()]


def scatter() -> list[Row]:
    """Rows of the way up."""
    return [_row("scatter", layout, group, found.scatter, found.copy) for layout, group, found in _all()]


def rows() -> list[Row]:
    return [*gather(), *scatter()]


def _all() -> list[tuple[str, int, Speeds]]:
    if not _FOUND:
        _FOUND.extend((layout, group, speeds(layout, group)) for layout in LAYOUTS for group in HEAD_GROUPS)
    return _FOUND


_FOUND: list[tuple[str, int, Speeds]] = []


def _row(name: str, layout: str, head_group: int, value: float, reference: float) -> Row:
    """The plain name is the engine's usual case: layer first, a rank's heads in one group."""
    if (layout, head_group) != (LAYOUTS[0], HEADS):
        name = f"{name}_{layout}_group{head_group}"
    share = 0.7 if head_group <= 2 else 0.8
    ratio = value / reference
    reason = "" if ratio >= share else f"{ratio:.2f} of a plain copy where {share} is asked"
    return row(name, value, "GB/s", reference=reference, bar=share * reference, at_least=True, reason=reason)


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


if __name__ == "__main__":
    for layout, head_group, found in _all():
        line = " ".join(f"{name} {getattr(found, name) / found.copy:.2f}" for name in Speeds.__slots__[1:])
        print(f"{layout:12} head group {head_group}: copy {found.copy:5.1f} GB/s, of it {line}")
