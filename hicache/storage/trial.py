"""Timing a store with real objects, beside a loop on the same medium: the figures of `hicache bench storage`."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import numpy as np

from hicache.errors import ConfigError
from hicache.storage import codec
from hicache.storage.base import ObjectKey, ObjectStatus, RawMedium, Shard, StorageBackend, StoredObject

__all__ = ["SizeResult", "Timing", "TrialOptions", "run_trial"]

ASKED: Final = 512
"""Keys of one `contains`."""
_SHARD: Final = Shard("hg1-0000000000000000", (0, 1))
_TOKENS: Final = bytes(4 * 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialOptions:
    """What is timed.

    Attributes:
        sizes: bytes of payloads, one measurement each.
        threads: callers at the same time.
        batch: objects of one call.
        total: bytes of payloads that are stored at the same time.
        rounds: how often everything is done; a figure is the median.
    """

    sizes: tuple[int, ...] = (64 << 10, 256 << 10, 1 << 20, 2 << 20, 8 << 20)
    threads: int = 1
    batch: int = 8
    total: int = 64 << 20
    rounds: int = 5

    def __post_init__(self) -> None:
        for name in ("threads", "batch", "total", "rounds"):
            if getattr(self, name) < 1:
                raise ConfigError(f"bench: {name} is {getattr(self, name)}, must be 1 or more")
        if not self.sizes or min(self.sizes) < 1:
            raise ConfigError("bench: sizes must be 1 byte or more")


@dataclass(frozen=True, slots=True)
class Timing:
    """One verb at one size.

    Attributes:
        gigabytes_per_second: payload bytes moved, median of rounds; 0 for look-ups.
        p50, p99: milliseconds of one call.
        reference: GB/s of the raw loop, one caller; None where the backend has none.
        failed: objects that did not end well, by reason.
    """

    gigabytes_per_second: float
    p50: float
    p99: float
    reference: float | None = None
    failed: dict[str, int] = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        """Of the figure to its reference."""
        return self.gigabytes_per_second / self.reference if self.reference else None


@dataclass(frozen=True, slots=True)
class SizeResult:
    """Everything at one size.

    Attributes:
        size: bytes of a payload.
        put, get, contains: the verbs.
        wrong: objects that were read as right and were not.
    """

    size: int
    put: Timing
    get: Timing
    contains: Timing
    wrong: int

    def document(self) -> dict[str, Any]:
        """As a JSON document."""
        timings = {"put": self.put, "get": self.get, "contains": self.contains}
        return asdict(self) | {name: asdict(each) | {"ratio": each.ratio} for name, each in timings.items()}


def run_trial(
    backend: StorageBackend, options: TrialOptions, *, progress: Callable[[int, int], None] | None = None
) -> Iterator[SizeResult]:
    """Time a store, size by size. What was stored is removed at the end, also after an error.

    Args:
        backend: the store; other users of it are not disturbed, but for its capacity.
        options: what is timed.
        progress: told how many rounds are done, and of how many.

    Raises:
        StorageError: the store cannot be asked.
    """
    total = len(options.sizes) * options.rounds
    for index, size in enumerate(options.sizes):
        trial = _Trial(backend, size, options)
        try:
            trial.warm_up()
            for round_ in range(options.rounds):
                trial.round()
                if progress is not None:
                    progress(index * options.rounds + round_ + 1, total)
            yield trial.result()
        finally:
            trial.clean()


class _Trial:
    def __init__(self, backend: StorageBackend, size: int, options: TrialOptions) -> None:
        self._backend = backend
        self._size = size
        self._options = options
        count = max(options.batch * options.threads, options.total // size)
        self._keys = _keys(count)
        self._payloads = _payloads(size, options.batch)
        self._seconds: dict[str, list[float]] = {"put": [], "get": [], "contains": []}
        self._calls: dict[str, list[float]] = {"put": [], "get": [], "contains": []}
        self._failed: dict[str, Counter[str]] = {"put": Counter(), "get": Counter(), "contains": Counter()}
        self._raw: list[tuple[float, float]] = []
        self._wrong = 0
        self._warm = False
        self._local = threading.local()

    def warm_up(self) -> None:
        """A round that does not count, but in which every byte that comes back is compared."""
        self.round()
        for figures in (*self._seconds.values(), *self._calls.values()):
            figures.clear()
        self._raw.clear()
        self._warm = True

    def round(self) -> None:
        batch, threads = self._options.batch, self._options.threads
        batches = [self._keys[at : at + batch] for at in range(0, len(self._keys), batch)]
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda _: self._buffers(), range(threads)))
            for verb, work in (("put", self._put), ("get", self._get)):
                start = time.perf_counter()
                list(pool.map(work, batches))
                self._seconds[verb].append(time.perf_counter() - start)
        self._look()
        self._backend.delete(self._keys)
        if isinstance(self._backend, RawMedium):
            times = len(self._keys) // len(self._payloads)  # as many bytes, in and out of as many buffers
            self._raw.append(self._backend.raw_loop(self._payloads * times, self._buffers() * times))

    def result(self) -> SizeResult:
        put, get = self._timing("put", self._reference(0)), self._timing("get", self._reference(1))
        return SizeResult(self._size, put, get, self._timing("contains", None), self._wrong)

    def clean(self) -> None:
        self._backend.delete(self._keys)

    def _put(self, keys: Sequence[ObjectKey]) -> None:
        start = time.perf_counter()
        objects = [
            StoredObject(key, _header(key, payload), payload)
            for key, payload in zip(keys, self._payloads, strict=False)
        ]
        results = self._backend.put(objects)
        self._calls["put"].append(time.perf_counter() - start)
        self._failed["put"].update(result.reason for result in results if result.status is not ObjectStatus.OK)

    def _get(self, keys: Sequence[ObjectKey]) -> None:
        buffers = self._buffers()[: len(keys)]
        start = time.perf_counter()
        results = self._backend.get_into(keys, buffers)
        self._calls["get"].append(time.perf_counter() - start)
        for result, buffer, payload in zip(results, buffers, self._payloads, strict=False):
            if result.status is not ObjectStatus.OK:
                self._failed["get"][result.reason] += 1
            elif not self._warm and not np.array_equal(np.asarray(buffer), np.asarray(payload)):
                self._wrong += 1

    def _buffers(self) -> list[memoryview]:
        """This thread's, kept as slots of a pool are, so that no round pays for new memory."""
        if not hasattr(self._local, "buffers"):
            self._local.buffers = [memoryview(bytearray(self._size)) for _ in self._payloads]
        found: list[memoryview] = self._local.buffers
        return found

    def _look(self) -> None:
        keys = (self._keys * (ASKED // len(self._keys) + 1))[:ASKED]
        start = time.perf_counter()
        answers = self._backend.contains(keys)
        self._calls["contains"].append(time.perf_counter() - start)
        self._failed["contains"].update("absent" for answer in answers if not answer)

    def _reference(self, direction: int) -> float | None:
        if not self._raw:
            return None
        moved = self._size * (len(self._keys) // len(self._payloads)) * len(self._payloads)
        return moved / float(np.median([seconds[direction] for seconds in self._raw])) / 1e9

    def _timing(self, verb: str, reference: float | None) -> Timing:
        calls = 1e3 * np.asarray(self._calls[verb])
        seconds = self._seconds[verb]
        speed = self._size * len(self._keys) / float(np.median(seconds)) / 1e9 if seconds else 0.0
        p50, p99 = (float(np.percentile(calls, share)) for share in (50, 99))
        return Timing(speed, p50, p99, reference, dict(self._failed[verb]))


def _keys(count: int) -> list[ObjectKey]:
    """Of a namespace that nobody else has."""
    namespace = secrets.token_bytes(16)
    return [ObjectKey(namespace, 0, os.urandom(16), _SHARD) for _ in range(count)]


def _payloads(size: int, count: int) -> list[memoryview]:
    random = np.random.default_rng(size)
    return [memoryview(random.bytes(size)) for _ in range(count)]


def _header(key: ObjectKey, payload: memoryview) -> bytes:
    return codec.encode_header(key, parent_hash=None, depth=0, tokens=_TOKENS, payload=payload)
