"""Run tables, which say what a copy between a GPU and pinned memory moves: the time they take on the CPU.

Models of 32 layers with 8 kv heads of 128 bfloat16, pages of 16 tokens (2 MiB), one tensor a layer; 128 pages in random
slots. Beside it one plain copy of the same bytes in main memory: what the table costs is hidden where that is longer.
"""

from __future__ import annotations

import numpy as np

from benchmarks.measure import Row, microseconds, row
from hicache.core.layout import KVGeometry
from hicache.cuda.kernels import kernel_table
from hicache.cuda.regions import TensorMemory, regions_of
from hicache.cuda.runs import HostPart, PageRuns
from hicache.memory.layout import PageLayout

LAYERS, HEADS, DIM, TOKENS = 32, 8, 128, 16
SLOTS, PAGES = 4096, 128
BAR = 0.1
"""Part of the copy's time that a table may take."""


def rows() -> list[Row]:
    """The table of one layer, as loads ask for them, and of whole pages."""
    page = PageLayout.of(KVGeometry.mha(LAYERS, kv_heads=HEADS, head_dim=DIM, dtype="bfloat16"), TOKENS)
    shape = (2, SLOTS, TOKENS, HEADS, DIM)
    strides = tuple(2 * int(np.prod(shape[at + 1 :], dtype=np.int64)) for at in range(len(shape)))
    tensors = [TensorMemory(layer << 40, shape, strides, 2) for layer in range(LAYERS)]
    runs = PageRuns(page, regions_of(tensors, "split/nhd", page), [HostPart.whole(1 << 50, SLOTS, page.page_bytes)])
    random = np.random.default_rng(1)
    slots, host_slots = (random.permutation(SLOTS)[:PAGES].astype(np.int64) for _ in range(2))
    found = []
    for name, layers, size in (
        ("a layer", (3, 4), PAGES * page.layer_bytes),
        ("whole pages", None, PAGES * page.page_bytes),
    ):
        source, target = (np.ones(size, np.uint8) for _ in range(2))
        copy = microseconds(lambda to=target, of=source: np.copyto(to, of))

        def make(layers: tuple[int, int] | None = layers) -> None:
            for table in runs.tables(slots, host_slots, to_device=True, layers=layers):
                kernel_table(table, blocks=16)

        made = microseconds(make)
        found.append(row(f"run table of {name}, {PAGES} pages", made, "us", reference=copy, bar=BAR * copy))
    return found
