"""Backends against a dict, over random histories with damage, strangers, clears and restarts."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hicache.core.keys import ObjectKey
from hicache.storage.base import ObjectStatus, StorageBackend, StoredObject
from hicache.storage.memory import MemoryBackend
from hicache.storage.wrappers import GuardedBackend
from hicache.testing.storage import NAMESPACE, make_key, make_object, pattern, read
from hicache_file import FileBackend

SIZE = 4096
FILE_COST = 2 * 4096 + 256
NUMBERS = st.integers(0, 11)
BATCHES = st.lists(NUMBERS, max_size=7)
OK = ObjectStatus.OK


class BackendMachine(RuleBasedStateMachine):
    """`self.model` has what must be there where nothing is evicted, and may be there where something is."""

    capacity: int | None = None

    def make(self) -> StorageBackend:
        raise NotImplementedError

    @initialize()
    def start(self) -> None:
        self.generation = 0
        self.model: dict[ObjectKey, bytes] = {}
        self.backend = self.make()

    def stored(self, number: int, generation: int | None = None) -> StoredObject:
        generation = self.generation if generation is None else generation
        key = make_key(number, generation=generation, namespace=NAMESPACE if number % 3 else bytes(16))
        return make_object(key, pattern((number, generation), SIZE), depth=number)

    def key(self, number: int) -> ObjectKey:
        return self.stored(number).key

    @rule(numbers=BATCHES)
    def put(self, numbers: list[int]) -> None:
        objects = [self.stored(number) for number in numbers]
        results = self.backend.put(objects)
        assert [(result.status, result.reason) for result in results] == [(OK, "")] * len(objects)
        self.model.update((stored.key, bytes(stored.payload)) for stored in objects)

    @rule(numbers=BATCHES)
    def get(self, numbers: list[int]) -> None:
        keys = [self.key(number) for number in numbers]
        buffers = [bytearray(SIZE) for _ in keys]
        results = self.backend.get_into(keys, [memoryview(buffer) for buffer in buffers])
        assert len(results) == len(keys)
        for key, buffer, result in zip(keys, buffers, results, strict=True):
            if result.status is OK:
                assert bytes(buffer) == self.model[key]
            else:
                assert result.status is ObjectStatus.MISSING
                assert self.capacity is not None or key not in self.model

    @rule(numbers=BATCHES, stop=st.booleans())
    def contains(self, numbers: list[int], stop: bool) -> None:
        keys = [self.key(number) for number in numbers]
        answers = self.backend.contains(keys, stop_at_first_miss=stop)
        assert len(answers) == len(keys)
        for key, answer in zip(keys, answers, strict=True):
            assert not answer or key in self.model
            if not answer and key in self.model and self.capacity is None:
                assert stop
            if stop and not answer:
                break

    @rule(numbers=BATCHES)
    def touch(self, numbers: list[int]) -> None:
        keys = [self.key(number) for number in numbers]
        expected = self.backend.contains(keys)
        assert self.backend.touch(keys) == expected

    @rule(numbers=BATCHES)
    def delete(self, numbers: list[int]) -> None:
        keys = [self.key(number) for number in numbers]
        answers = self.backend.delete(keys)
        assert len(answers) == len(keys)
        for key, answer in zip(keys, answers, strict=True):
            known = self.model.pop(key, None) is not None
            assert answer == known or (self.capacity is not None and not answer)

    @rule(by=st.integers(-1, 2))
    def clear(self, by: int) -> None:
        target = max(0, self.generation + by)
        for namespace in (NAMESPACE, bytes(16)):
            self.backend.clear(namespace, target)
            assert self.backend.generation(namespace) == max(self.generation, target)
        if target > self.generation:
            self.generation = target
            self.model = {key: value for key, value in self.model.items() if key.generation >= target}

    @rule(number=NUMBERS)
    def late_put(self, number: int) -> None:
        if self.generation:
            self.backend.put([self.stored(number, self.generation - 1)])

    @invariant()
    def capacity_is_kept(self) -> None:
        if hasattr(self, "backend"):
            statistics = self.backend.statistics()
            assert statistics.bytes_used >= 0
            assert self.capacity is None or statistics.bytes_used <= self.capacity

    def teardown(self) -> None:
        if hasattr(self, "backend"):
            self.backend.close()


class MemoryMachine(BackendMachine):
    def make(self) -> StorageBackend:
        return GuardedBackend(MemoryBackend(capacity=self.capacity))


class SmallMemoryMachine(MemoryMachine):
    capacity = 5 * (SIZE + 200)


class FileMachine(BackendMachine):
    def make(self) -> StorageBackend:
        self.root = Path(tempfile.mkdtemp(prefix="hicache-machine-"))
        return self.open()

    def open(self) -> FileBackend:
        self.files = FileBackend(str(self.root / "root"), capacity=self.capacity)
        assert self.files.wait_ready(60)
        return self.files

    def path(self, key: ObjectKey) -> Path:
        return Path(self.files._names.place(key).path)

    @rule(clean=st.booleans())
    def restart(self, clean: bool) -> None:
        assert self.files.wait_swept(60)
        self.files.close()
        if not clean:
            (self.files.path / Path("HICACHE-LEDGER")).unlink()
        self.backend = self.open()

    @rule(number=NUMBERS, data=st.data())
    def damage(self, number: int, data: st.DataObject) -> None:
        key = self.key(number)
        path = self.path(key)
        if not path.exists():
            return
        content = bytearray(path.read_bytes())
        header = self.stored(number).header
        offset = data.draw(st.one_of(st.integers(0, len(header) - 1), st.integers(4096, len(content) - 1)))
        content[offset] ^= data.draw(st.sampled_from([1, 16, 128]))
        path.write_bytes(content)
        self.model.pop(key, None)
        result, _ = read(self.backend, key, SIZE)
        # A flipped bit in the payload's length reads like a buffer of the wrong size only if the checksum held.
        assert result.status is ObjectStatus.CORRUPT, (offset, result)
        assert not path.exists()

    @rule(number=NUMBERS)
    def lose(self, number: int) -> None:
        key = self.key(number)
        self.path(key).unlink(missing_ok=True)
        self.model.pop(key, None)
        assert self.backend.contains([key]) == [False]

    @rule(number=NUMBERS, other=NUMBERS)
    def confuse(self, number: int, other: int) -> None:
        """Another object's file comes to lie under this name."""
        source, target = self.path(self.key(other)), self.path(self.key(number))
        if number == other or not source.exists() or not target.parent.exists():
            return
        target.write_bytes(source.read_bytes())
        self.model.pop(self.key(number), None)
        result, _ = read(self.backend, self.key(number), SIZE)
        assert (result.status, result.reason) == (ObjectStatus.MISSING, "foreign")
        self.put([number])

    @invariant()
    def index_and_files_agree(self) -> None:
        if not hasattr(self, "files") or not self.files.wait_swept(60):
            return
        files = [path for path in self.root.rglob("*hg1-*") if path.is_file()]
        statistics = self.files.statistics()
        total = sum(path.stat().st_size for path in files)
        # What was taken away behind its back is only noticed when it is asked for.
        assert statistics.objects >= len(files)
        assert statistics.bytes_used >= total
        assert self.capacity is None or total <= self.capacity
        assert not list(self.root.rglob("*.hicache-tmp"))

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "root"):
            shutil.rmtree(self.root)


class SmallFileMachine(FileMachine):
    capacity = 5 * FILE_COST


MACHINES: list[Any] = [MemoryMachine, SmallMemoryMachine, FileMachine, SmallFileMachine]


@pytest.mark.case("KEY-3", "FAIL-4", "FAIL-8", "FILE-4", "FILE-7")
@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.__name__)
def test_machine(machine: Any) -> None:
    case = machine.TestCase
    share = 8 if issubclass(machine, FileMachine) else 4  # files cost seven times as much
    histories = max(10, settings().max_examples // share)
    case.settings = settings(max_examples=histories, stateful_step_count=30, deadline=None)
    case().runTest()
