"""Files: puts and gets beside a raw loop of open, write, rename or open, read over the same bytes, plus one xxh3 pass.

Both sides run with as many threads, in turns, on the same folder, with the page cache warm; a figure is the median of
its turns. The raw loop writes as the backend does on this file system: past the page cache or through it.
"""

from __future__ import annotations

import mmap
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import xxhash

from benchmarks.measure import Row, row
from hicache.storage import codec
from hicache.storage.base import ObjectKey, ObjectStatus, StoredObject
from hicache.testing.objects import make_key
from hicache_file import FileBackend

THREADS = 4
TURNS = 7
BAR = 0.8
SIZES = {"": (2 * 2**20, 64), "_256k": (256 * 1024, 256), "_64k": (64 * 1024, 512)}  # bytes of an object, objects


class Field:
    """Memory as the runtime has it: one aligned arena, an object per slot."""

    def __init__(self, size: int, count: int) -> None:
        self.size, self.count = size, count
        arena = memoryview(mmap.mmap(-1, size * count))
        arena[:] = os.urandom(2**20) * (size * count // 2**20)
        self.slots = [arena[i * size : (i + 1) * size] for i in range(count)]
        self.keys = [make_key(i) for i in range(count)]

    def encode(self, i: int) -> StoredObject:
        key: ObjectKey = self.keys[i]
        header = codec.encode_header(key, parent_hash=None, depth=0, tokens=b"", payload=self.slots[i])
        return StoredObject(key, header, self.slots[i])


def spread(count: int, work: Callable[[int], None]) -> float:
    """Bytes are not counted here: seconds to do `work(i)` for each i, by the threads of the runtime."""
    barrier = threading.Barrier(THREADS + 1)

    def run(first: int) -> None:
        barrier.wait()
        for i in range(first, count, THREADS):
            work(i)

    threads = [threading.Thread(target=run, args=(first,)) for first in range(THREADS)]
    for thread in threads:
        thread.start()
    barrier.wait()
    start = time.perf_counter()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start


class Raw:
    """The least that a store of files does."""

    def __init__(self, root: Path, field: Field, *, direct: bool) -> None:
        self.root, self.field, self.direct = root, field, direct
        root.mkdir()
        self.block = memoryview(mmap.mmap(-1, 4096))

    def put(self, i: int) -> None:
        payload = self.field.slots[i]
        xxhash.xxh3_64_intdigest(payload)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | (os.O_DIRECT if self.direct else 0)
        temp = f"{self.root}/{i}.tmp"
        fd = os.open(temp, flags, 0o600)
        os.pwritev(fd, [self.block, payload], 0)
        os.close(fd)
        os.rename(temp, f"{self.root}/{i}")

    def get(self, i: int) -> None:
        payload = self.field.slots[i]
        fd = os.open(f"{self.root}/{i}", os.O_RDONLY | os.O_CLOEXEC)
        os.preadv(fd, [bytearray(4096), payload], 0)
        os.close(fd)
        xxhash.xxh3_64_intdigest(payload)

    def clear(self) -> None:
        for path in self.root.iterdir():
            path.unlink()


class Ours:
    """The backend, as the runtime calls it."""

    def __init__(self, root: Path, field: Field) -> None:
        self.field = field
        self.backend = FileBackend(str(root), capacity=64 * 2**30)

    def put(self, i: int) -> None:
        (result,) = self.backend.put([self.field.encode(i)])
        assert result.status is ObjectStatus.OK, result

    def get(self, i: int) -> None:
        (result,) = self.backend.get_into([self.field.keys[i]], [self.field.slots[i]])
        assert result.status is ObjectStatus.OK, result

    def clear(self) -> None:
        assert all(self.backend.delete(self.field.keys))

    def is_direct(self) -> bool:
        """Whether objects of this size go past the page cache, once that was measured."""
        self.put(0)
        deadline = time.monotonic() + 5
        while self.field.size >= 256 * 1024 and time.monotonic() < deadline:
            if os.path.exists(f"{self.backend.path}/HICACHE-IO"):
                break
            time.sleep(0.01)
        self.backend.delete(self.field.keys[:1])
        least = self.backend._files.direct_from
        return least is not None and self.field.size >= least


def measure(folder: Path, suffix: str) -> list[Row]:
    size, count = SIZES[suffix]
    field = Field(size, count)
    ours = Ours(folder / f"ours{suffix}", field)
    direct = ours.is_direct()
    raw = Raw(folder / f"raw{suffix}", field, direct=direct)
    puts: dict[object, list[float]] = {ours: [], raw: []}
    gets: dict[object, list[float]] = {ours: [], raw: []}
    for turn in range(TURNS + 1):
        for side in (ours, raw) if turn % 2 else (raw, ours):
            side.clear() if turn else None
            seconds = spread(count, side.put)
            spread(count, side.get)  # warms the page cache, and the first turn all the rest
            read = spread(count, side.get)
            if turn:
                puts[side].append(seconds)
                gets[side].append(read)
    ours.backend.close()
    gigabytes = size * count / 1e9
    how = "past the page cache" if direct else "through the page cache"
    rows = []
    for name, times in (("file_put", puts), ("file_get", gets)):
        value, reference = (gigabytes / statistics.median(times[side]) for side in (ours, raw))
        bar = BAR * reference if not suffix else 0.0
        note = f"{THREADS} threads, {size // 1024} KiB, written {how}"
        made = row(name + suffix, value, "GB/s", bar=bar, reference=reference, at_least=True)
        rows.append(Row(**{**made.as_dict(), "reason": f"{made.reason}; {note}" if made.reason else note}))  # type: ignore[arg-type]
    return rows


def rows() -> list[Row]:
    folder = Path(tempfile.mkdtemp(prefix="hicache-bench-", dir=os.environ.get("HICACHE_BENCH_DIR", ".")))
    try:
        return [row for suffix in SIZES for row in measure(folder, suffix)]
    finally:
        shutil.rmtree(folder)
