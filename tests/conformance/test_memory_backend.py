"""The store in memory keeps the contract, bare and inside each wrapper."""

from __future__ import annotations

import pytest

from hicache.core.keys import ObjectKey
from hicache.storage.base import StorageBackend
from hicache.storage.memory import MemoryBackend
from hicache.testing.faults import DamageableMemory
from hicache.testing.storage import StorageBackendTests
from hicache.testing.wrapped import WRAPPERS

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


class TestInEachWrapper(TestMemoryBackend):
    def setup_method(self) -> None:
        pass  # the wrapper comes first

    @pytest.fixture(autouse=True, params=WRAPPERS)
    def opened(self, request: pytest.FixtureRequest) -> None:
        self.wrapper = WRAPPERS[request.param]
        self.backend = self.make_backend()

    def wrap(self, backend: StorageBackend) -> StorageBackend:
        return self.wrapper(backend)
