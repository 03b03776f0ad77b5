"""The store in memory keeps the contract, bare and inside each wrapper."""

from __future__ import annotations

from hicache.core.keys import ObjectKey
from hicache.storage.base import StorageBackend
from hicache.storage.breaker import BreakerBackend, BreakerPolicy
from hicache.storage.memory import MemoryBackend
from hicache.storage.retry import RetryingBackend, RetryPolicy
from hicache.storage.wrappers import GuardedBackend, MeteredBackend, WrapperBackend
from hicache.testing.faults import DamageableMemory, FaultyStorage, LatencyStorage
from hicache.testing.storage import StorageBackendTests

HEADERS = 200  # more than any header here, less than half a payload


class TestMemoryBackend(StorageBackendTests):
    store: DamageableMemory

    def wrap(self, backend: StorageBackend) -> StorageBackend:
        return backend

    def make_backend(self) -> StorageBackend:
        self.store = DamageableMemory()
        return self.wrap(self.store)

    def make_small(self, objects: int) -> StorageBackend:
        return self.wrap(MemoryBackend(capacity=objects * (self.payload_length + HEADERS)))

    def corrupt(self, key: ObjectKey) -> bool:
        self.store.damage(key, bit=1234)
        return True

    def plant(self, key: ObjectKey, header: bytes, payload: bytes) -> bool:
        self.store.plant(key, header, payload)
        return True


class TestBare(StorageBackendTests):
    """Every optional hook left out: what a first version of a plug-in would run."""

    def make_backend(self) -> StorageBackend:
        return MemoryBackend()


class TestGuarded(TestMemoryBackend):
    def wrap(self, backend: StorageBackend) -> StorageBackend:
        return GuardedBackend(backend)


class TestMetered(TestMemoryBackend):
    def wrap(self, backend: StorageBackend) -> StorageBackend:
        return MeteredBackend(backend)


class TestPassedOn(TestMemoryBackend):
    def wrap(self, backend: StorageBackend) -> StorageBackend:
        return WrapperBackend(backend)


class TestFaultyWithoutFaults(TestMemoryBackend):
    def wrap(self, backend: StorageBackend) -> StorageBackend:
        return FaultyStorage(backend)


class TestFarAway(TestMemoryBackend):
    def wrap(self, backend: StorageBackend) -> StorageBackend:
        return LatencyStorage(backend, per_call=0.01, bytes_per_second=1e9, sleep=lambda seconds: None)


class TestBehindABreaker(TestMemoryBackend):
    def wrap(self, backend: StorageBackend) -> StorageBackend:
        return BreakerBackend(backend, BreakerPolicy())


class TestTriedAgain(TestMemoryBackend):
    def wrap(self, backend: StorageBackend) -> StorageBackend:
        return RetryingBackend(backend, RetryPolicy())
