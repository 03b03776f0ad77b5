"""The conformance suite for storage backends: yours is done when it passes.

    class TestMyBackend(StorageBackendTests):
        def make_backend(self) -> StorageBackend:
            return MyBackend(...)

Run it with pytest. `make_backend` gives a new, empty backend; the suite closes it. The other hooks are optional, each
says what is tested only where it is given. `hicache.testing.objects` makes keys and objects for tests of your own; its
names are here too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from hicache.storage import codec
from hicache.storage.base import (
    Listing,
    Manifests,
    ObjectKey,
    ObjectStatus,
    Shard,
    StorageBackend,
    StoredObject,
)
from hicache.testing.objects import (
    NAMESPACE,
    SHARD,
    in_threads,
    make_chain,
    make_key,
    make_object,
    pattern,
    read,
    status_of,
)

__all__ = [
    "NAMESPACE",
    "SHARD",
    "StorageBackendTests",
    "in_threads",
    "make_chain",
    "make_key",
    "make_object",
    "pattern",
    "read",
    "status_of",
]


class StorageBackendTests:
    """Subclass it, call the subclass `Test...`, give `make_backend`."""

    payload_length: ClassVar[int] = 8192
    """Bytes of most payloads here; choose what is typical for the backend."""

    backend: StorageBackend

    # --- hooks --------------------------------------------------------------------------------------------------

    def make_backend(self) -> StorageBackend:
        """A new, empty backend without a limit."""
        raise NotImplementedError

    def reopen(self) -> StorageBackend | None:
        """Close `self.backend` and open its content again; None if nothing survives closing."""
        return None

    def make_small(self, objects: int) -> StorageBackend | None:
        """A new, empty backend with room for so many objects of `payload_length`, but not for one more."""
        del objects
        return None

    def corrupt(self, key: ObjectKey) -> bool:
        """Spoil the stored payload behind the backend's back; False if that cannot be done."""
        del key
        return False

    def plant(self, key: ObjectKey, header: bytes, payload: bytes) -> bool:
        """Put any bytes under the key's name behind the backend's back; False if that cannot be done."""
        del key, header, payload
        return False

    def setup_method(self) -> None:
        """Before each test."""
        self.backend = self.make_backend()

    def teardown_method(self) -> None:
        """After each test."""
        self.backend.close()

    # --- tools --------------------------------------------------------------------------------------------------

    def objects(self, count: int, *, first: int = 0) -> list[StoredObject]:
        """A chain of objects with payloads of `payload_length`."""
        return make_chain(count, self.payload_length, first=first)

    def put(self, objects: Sequence[StoredObject]) -> None:
        """Store, and see that it worked."""
        assert status_of(self.backend.put(objects)) == [ObjectStatus.OK] * len(objects)

    def holds(self, stored: StoredObject) -> bool:
        """Whether it can be read; what is read must be right."""
        result, payload = read(self.backend, stored.key, stored.payload.nbytes)
        if result.status is not ObjectStatus.OK:
            return False
        assert payload == bytes(stored.payload), "another payload than was stored"
        return True

    # --- single objects -----------------------------------------------------------------------------------------

    def test_what_was_put_is_read_back_with_its_header(self) -> None:
        """Payload and header come back as they were given."""
        stored = make_object(make_key(1), pattern(1, self.payload_length), depth=3)
        self.put([stored])
        result, payload = read(self.backend, stored.key, self.payload_length)
        assert result.status is ObjectStatus.OK
        assert payload == bytes(stored.payload)
        assert result.header == codec.decode_header(stored.header)

    def test_what_was_never_put_is_missing(self) -> None:
        """A miss is a result, not an error."""
        result, _ = read(self.backend, make_key(1), self.payload_length)
        assert result.status is ObjectStatus.MISSING
        assert self.backend.contains([make_key(1)]) == [False]

    def test_every_bit_pattern_of_any_length_is_kept(self) -> None:
        """Payloads are raw bytes: no length is rounded, no byte is special."""
        for number, length in enumerate((1, 63, 4095, 4096, 4097, 3 * 4096 + 5, 1 << 20, (1 << 20) + 1)):
            payload = bytes(range(256)) * (length // 256) + pattern(number, length % 256)
            self.put([make_object(make_key(number), payload)])
            result, back = read(self.backend, make_key(number), length)
            assert result.status is ObjectStatus.OK, length
            assert back == payload, length

    def test_keys_that_differ_anywhere_are_different_objects(self) -> None:
        """Namespace, generation, hash, hash size, layers, head group and geometry all count."""
        base = make_key(1)
        keys = [
            base,
            make_key(2),
            make_key(1, namespace=bytes(16)),
            make_key(1, generation=1),
            make_key(1, hash_size=32),
            make_key(1, shard=Shard(SHARD.geometry, (0, 5), 0)),
            make_key(1, shard=Shard(SHARD.geometry, (4, 8), 0)),
            make_key(1, shard=Shard(SHARD.geometry, (0, 4), 1)),
            make_key(1, shard=Shard(SHARD.geometry, (0, 4), None)),
            make_key(1, shard=Shard("hg1-fedcba9876543210", (0, 4), 0)),
        ]
        objects = [make_object(key, pattern(i, self.payload_length)) for i, key in enumerate(keys)]
        self.put(objects)
        assert all(self.holds(stored) for stored in objects)
        assert self.backend.delete([base]) == [True]
        assert [self.holds(stored) for stored in objects] == [False] + [True] * (len(keys) - 1)

    def test_a_put_of_what_exists_succeeds(self) -> None:
        """And changes nothing."""
        (stored,) = self.objects(1)
        self.put([stored])
        used = self.backend.statistics().bytes_used
        self.put([stored])
        self.put([stored, stored])
        assert self.holds(stored)
        assert self.backend.statistics().bytes_used == used

    def test_a_buffer_of_the_wrong_size_is_no_hit_and_no_damage(self) -> None:
        """Who brings the wrong buffer learns nothing about the object, and the object stays."""
        (stored,) = self.objects(1)
        self.put([stored])
        for length in (1, self.payload_length - 1, self.payload_length + 1, 2 * self.payload_length):
            result, _ = read(self.backend, stored.key, length)
            assert result.status is ObjectStatus.FAILED, length
        assert self.holds(stored)

    def test_buffers_are_not_kept(self) -> None:
        """What the caller does with its payload after the call is its own business."""
        key, payload = make_key(1), bytearray(pattern(1, self.payload_length))
        stored = make_object(key, bytes(payload))
        self.put([StoredObject(key, stored.header, memoryview(payload))])
        payload[:] = bytes(self.payload_length)
        assert self.holds(stored)

    def test_a_header_that_does_not_belong_to_the_key_is_not_stored_as_it(self) -> None:
        """Whatever the backend answers, nobody gets a hit from it."""
        one, two = self.objects(2)
        self.backend.put([StoredObject(one.key, two.header, two.payload)])
        assert not self.holds(one)
        self.put([one])
        assert self.holds(one)

    def test_delete_says_what_it_removed(self) -> None:
        """True where there was something; absence is no error."""
        one, two = self.objects(2)
        self.put([one])
        assert self.backend.delete([one.key, two.key, one.key]) == [True, False, False]
        assert not self.holds(one)
        self.put([one])
        assert self.holds(one)

    def test_touch_says_what_is_there(self) -> None:
        """False where the object is absent, so that it can be put again."""
        one, two = self.objects(2)
        self.put([one])
        assert self.backend.touch([two.key, one.key]) == [False, True]

    def test_looking_changes_nothing(self) -> None:
        """`contains` of a key makes nothing and counts no hit."""
        (stored,) = self.objects(1)
        before = self.backend.statistics()
        assert self.backend.contains([stored.key]) == [False]
        after = self.backend.statistics()
        assert (after.objects, after.hits, after.bytes_used) == (before.objects, before.hits, before.bytes_used)

    # --- batches ------------------------------------------------------------------------------------------------

    def test_batches_of_any_size_answer_each_key_in_order(self) -> None:
        """0, 1 and 7 keys: as many results, in the order of what was asked."""
        for count in (0, 1, 7):
            objects = self.objects(count, first=100 * count)
            there = [i % 3 != 1 for i in range(count)]
            kept = [stored for stored, keep in zip(objects, there, strict=True) if keep]
            keys = [stored.key for stored in objects]
            assert len(self.backend.put(kept)) == len(kept)
            assert self.backend.contains(keys) == there
            buffers = [memoryview(bytearray(self.payload_length)) for _ in keys]
            results = self.backend.get_into(keys, buffers)
            assert [result.status is ObjectStatus.OK for result in results] == there
            for stored, buffer, good in zip(objects, buffers, there, strict=True):
                assert not good or bytes(buffer) == bytes(stored.payload)
            assert self.backend.touch(keys) == there
            assert self.backend.delete(keys) == there

    def test_only_verified_hits_are_counted(self) -> None:
        """Three of eight are there: three hits, in one call or in eight."""
        objects = self.objects(8)
        self.put(objects[:2] + objects[5:6])
        self.backend.get_into(
            [stored.key for stored in objects], [memoryview(bytearray(self.payload_length)) for _ in objects]
        )
        assert self.backend.statistics().hits == 3
        for stored in objects:
            self.holds(stored)
        assert self.backend.statistics().hits == 6
        assert self.backend.statistics().gets == 16

    def test_stop_at_first_miss_never_lies_about_the_leading_run(self) -> None:
        """The leading hits are right; behind the first miss nothing is promised but False may be."""
        objects = self.objects(7)
        self.put(objects[:3] + objects[4:])
        answers = self.backend.contains([stored.key for stored in objects], stop_at_first_miss=True)
        assert answers[:4] == [True, True, True, False]
        assert len(answers) == 7

    def test_one_bad_object_does_not_spoil_its_batch(self) -> None:
        """Items of a batch are independent."""
        objects = self.objects(5)
        batch = list(objects)
        batch[2] = StoredObject(objects[2].key, objects[0].header, objects[0].payload)
        results = self.backend.put(batch)
        assert len(results) == 5
        assert [self.holds(stored) for stored in objects] == [True, True, False, True, True]

    # --- generations and namespaces -----------------------------------------------------------------------------

    def test_a_generation_starts_at_zero_and_only_rises(self) -> None:
        """An older or equal number changes nothing."""
        assert self.backend.generation(NAMESPACE) == 0
        self.backend.clear(NAMESPACE, 3)
        assert self.backend.generation(NAMESPACE) == 3
        self.backend.clear(NAMESPACE, 2)
        assert self.backend.generation(NAMESPACE) == 3
        assert self.backend.generation(bytes(16)) == 0

    def test_clear_is_about_one_namespace(self) -> None:
        """What another namespace holds stays, and what is put into the new generation is found."""
        mine = make_object(make_key(1), pattern(1, self.payload_length))
        others = make_object(make_key(1, namespace=bytes(16)), pattern(2, self.payload_length))
        self.put([mine, others])
        self.backend.clear(NAMESPACE, 1)
        assert self.holds(others)
        fresh = make_object(make_key(1, generation=1), pattern(3, self.payload_length))
        assert not self.holds(fresh)
        self.put([fresh])
        assert self.holds(fresh)
        assert self.holds(others)

    def test_a_put_that_comes_after_the_clear_harms_nothing(self) -> None:
        """A late write of the old generation is no hit of the new one, whatever becomes of it."""
        self.backend.clear(NAMESPACE, 1)
        self.backend.put([make_object(make_key(1), pattern(1, self.payload_length))])
        fresh = make_object(make_key(1, generation=1), pattern(2, self.payload_length))
        assert not self.holds(fresh)
        self.put([fresh])
        assert self.holds(fresh)

    # --- damage -------------------------------------------------------------------------------------------------

    def test_a_damaged_payload_is_corrupt_once_and_healed_by_a_put(self) -> None:
        """It is withdrawn, and a put does not skip because something was there."""
        (stored,) = self.objects(1)
        self.put([stored])
        if not self.corrupt(stored.key):
            return
        result, _ = read(self.backend, stored.key, self.payload_length)
        assert result.status is ObjectStatus.CORRUPT
        assert result.reason
        assert not self.holds(stored)
        self.put([stored])
        assert self.holds(stored)

    def test_another_identity_under_the_name_is_missing_until_the_next_put(self) -> None:
        """What does not say that it is what was asked for is no hit, and a put replaces it."""
        one, two = self.objects(2)
        if not self.plant(one.key, two.header, bytes(two.payload)):
            return
        result, _ = read(self.backend, one.key, self.payload_length)
        assert result.status is ObjectStatus.MISSING
        assert result.reason == "foreign"
        self.put([one])
        assert self.holds(one)

    def test_bytes_that_are_no_object_are_no_hit(self) -> None:
        """Not even bytes that would run as code somewhere else."""
        (stored,) = self.objects(1)
        bomb = b"cposix\nsystem\n(S'exit 1'\ntR."
        for junk in (b"", bytes(4096), b"x" * 100, bomb.ljust(4096, b"."), stored.header[:70]):
            if not self.plant(stored.key, junk, b"y" * self.payload_length):
                return
            result, _ = read(self.backend, stored.key, self.payload_length)
            assert result.status in (ObjectStatus.MISSING, ObjectStatus.CORRUPT), junk[:20]

    def test_a_listing_has_every_object_and_changes_nothing(self) -> None:
        """Objects of all namespaces are listed with their keys; what is damaged is told and left as it is."""
        if not isinstance(self.backend, Listing):
            return
        objects = [*self.objects(5), make_object(make_key(1, namespace=bytes(16)), pattern(9, self.payload_length))]
        self.put(objects)
        listed = {entry.key: entry for entry in self.backend.list_objects()}
        assert set(listed) == {stored.key for stored in objects}
        assert all(entry.size >= self.payload_length and entry.name for entry in listed.values())
        for stored in objects:
            verdict = self.backend.check_object(stored.key)
            assert verdict is not None
            assert verdict.header == codec.decode_header(stored.header)
        assert self.backend.check_object(make_key(77)) is None
        if self.corrupt(objects[0].key):
            for _ in range(2):
                verdict = self.backend.check_object(objects[0].key)
                assert verdict is not None
                assert verdict.kind is codec.VerdictKind.CORRUPT
        if self.plant(objects[1].key, objects[2].header, bytes(objects[2].payload)):
            verdict = self.backend.check_object(objects[1].key)
            assert verdict is not None
            assert verdict.kind is codec.VerdictKind.FOREIGN
        assert {entry.key for entry in self.backend.list_objects()} == set(listed)

    # --- several threads ----------------------------------------------------------------------------------------

    def test_many_threads_putting_one_object_store_it_once(self) -> None:
        """All have the same outcome, and it counts once."""
        for round_ in range(20):
            (stored,) = self.objects(1, first=round_)
            results = in_threads(16, lambda _, s=stored: self.backend.put([s])[0].status)  # type: ignore[misc]
            assert results == [ObjectStatus.OK] * 16
            assert self.holds(stored)
        one = self.objects(1)
        used = self.backend.statistics().bytes_used
        self.backend.delete([one[0].key])
        assert self.backend.statistics().bytes_used == used // 20 * 19

    def test_readers_and_writers_of_the_same_objects_see_whole_ones(self) -> None:
        """Put, read, delete by several threads at once: a hit is always the whole right payload."""
        objects = self.objects(4)

        def work(index: int) -> int:
            hits = 0
            for step in range(60):
                stored = objects[(index + step) % len(objects)]
                if index % 4 == 0:
                    self.backend.put([stored])
                elif index % 4 == 1 and step % 5 == 0:
                    self.backend.delete([stored.key])
                else:
                    hits += self.holds(stored)
            return hits

        in_threads(8, work)
        self.put(objects)
        assert all(self.holds(stored) for stored in objects)

    # --- capacity -----------------------------------------------------------------------------------------------

    def test_the_capacity_is_kept_and_what_was_used_last_stays(self) -> None:
        """Twenty single pages through room for ten: the ten newest are there, an old one only if it was read."""
        small = self.make_small(10)
        if small is None:
            return
        self.backend.close()
        self.backend = small
        objects = [make_object(make_key(i), pattern(i, self.payload_length)) for i in range(20)]
        for index, stored in enumerate(objects):
            self.put([stored])
            if index < 15:
                assert self.holds(objects[0])
            statistics = small.statistics()
            assert statistics.capacity is not None
            assert statistics.bytes_used <= statistics.capacity
        kept = [self.backend.contains([stored.key])[0] for stored in objects]
        assert sum(kept) == 10
        assert kept[0]
        assert all(kept[-5:])
        assert small.statistics().evicted == 10

    def test_a_chain_loses_its_tail_first(self) -> None:
        """Of pages that are equally recent the deepest goes, so that what stays can be used."""
        small = self.make_small(10)
        if small is None:
            return
        self.backend.close()
        self.backend = small
        chain = self.objects(10)
        self.put(chain)
        for index in range(4):
            self.put([make_object(make_key(1000 + index), pattern(index, self.payload_length))])
        assert small.contains([stored.key for stored in chain]) == [True] * 6 + [False] * 4

    def test_touch_keeps_an_old_object(self) -> None:
        """A touched object is as new as one that was put."""
        small = self.make_small(4)
        if small is None:
            return
        self.backend.close()
        self.backend = small
        objects = [make_object(make_key(i), pattern(i, self.payload_length)) for i in range(6)]
        for stored in objects[:4]:
            self.put([stored])
        assert small.touch([objects[0].key]) == [True]
        for stored in objects[4:]:
            self.put([stored])
        assert small.contains([stored.key for stored in objects]) == [True, False, False, True, True, True]

    def test_what_cannot_fit_is_refused_and_evicts_nothing(self) -> None:
        """An object larger than everything must not empty the store first."""
        small = self.make_small(4)
        if small is None:
            return
        self.backend.close()
        self.backend = small
        objects = self.objects(4)
        self.put(objects)
        giant = make_object(make_key(99), pattern(99, 6 * self.payload_length))
        (result,) = small.put([giant])
        assert result.status is ObjectStatus.FAILED
        assert all(self.holds(stored) for stored in objects)
        self.put([make_object(make_key(100), pattern(100, self.payload_length))])

    # --- life ---------------------------------------------------------------------------------------------------

    def test_what_was_stored_is_there_after_reopening(self) -> None:
        """Objects, generations and counts of what is held survive, where anything does."""
        objects = self.objects(7)
        self.put(objects)
        self.backend.clear(bytes(16), 5)
        again = self.reopen()
        if again is None:
            return
        self.backend = again
        assert again.contains([stored.key for stored in objects]) == [True] * 7
        assert all(self.holds(stored) for stored in objects)
        assert again.generation(bytes(16)) == 5
        self.put(objects)

    def test_close_twice_is_fine(self) -> None:
        """Closing is idempotent."""
        self.backend.close()
        self.backend.close()

    def test_manifests_are_kept_where_the_backend_keeps_any(self) -> None:
        """The newest document of each namespace comes back."""
        if not isinstance(self.backend, Manifests):
            return
        assert self.backend.read_manifests() == {}
        self.backend.write_manifest(NAMESPACE, b'{"model": "a"}')
        self.backend.write_manifest(bytes(16), b"{}")
        self.backend.write_manifest(NAMESPACE, b'{"model": "b"}')
        assert self.backend.read_manifests() == {NAMESPACE: b'{"model": "b"}', bytes(16): b"{}"}
