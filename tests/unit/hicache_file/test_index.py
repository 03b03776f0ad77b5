"""The index against a plain model: what is known, how many bytes, and who goes first."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_file.index import UNIT, Index

IDS = [bytes([i]) for i in range(12)]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "use", "remove", "evict", "minute"]),
        st.sampled_from(IDS),
        st.integers(0, 5),
        st.integers(1, 3),
    ),
    max_size=80,
)


@given(STEPS)
def test_against_a_model(steps: list[tuple[str, bytes, int, int]]) -> None:
    index = Index()
    model: dict[bytes, tuple[int, int, int]] = {}  # id -> bucket, depth, units
    minute = 0
    for step, identity, depth, units in steps:
        bucket = index.current(minute)
        if step == "minute":
            minute += 1
        elif step == "add":
            index.add(identity, size=units * UNIT, depth=depth, bucket=bucket)
            model[identity] = (bucket, depth, units)
        elif step == "use":
            answer = index.use(identity, bucket)
            assert (answer is None) == (identity not in model)
            if identity in model:
                model[identity] = (max(bucket, model[identity][0]), *model[identity][1:])
        elif step == "remove":
            size = index.remove(identity)
            assert size == (model.pop(identity)[2] * UNIT if identity in model else 0)
        else:
            busy = {identity}
            taken = index.victims(units * UNIT, busy)
            for gone, size, at, _ in taken:
                bucket_of, depth_of, units_of = model.pop(gone)
                assert (at, size) == (depth_of, units_of * UNIT)
                for other, (b, d, _) in model.items():
                    assert other in busy or (b, -d) >= (bucket_of, -depth_of), "somebody else was due"
            freed = sum(size for _, size, _, _ in taken)
            assert freed >= units * UNIT or not set(model) - busy
            assert not taken or freed - taken[-1][1] < units * UNIT, "one too many"
            if identity in model and not set(model) - busy:
                model[identity] = (2**60, *model[identity][1:])  # passed over: as if used now
        if step == "evict":
            # What was passed over while busy counts as used; take the index's own word for it.
            for known in model:
                model[known] = (index._table[known] >> 64, *model[known][1:])
        assert len(index) == len(model)
        assert index.bytes == sum(units_ * UNIT for _, _, units_ in model.values())
        assert {identity_: index.size(identity_) for identity_ in IDS} == {
            identity_: model[identity_][2] * UNIT if identity_ in model else 0 for identity_ in IDS
        }
        entries = sum(len(b.entries) for b in (*index._live.values(), *index._found.values()))
        assert entries <= 3 * len(model) + 9 * (len(index._live) + 1), "what moved on is not kept for ever"
        assert len(index._live) <= len(model) + 1


@pytest.mark.case("EVICT-3")
def test_found_objects_go_by_minute_then_depth_before_all_that_was_used_here() -> None:
    index = Index()
    index.add(b"here", size=UNIT, depth=9, bucket=index.current(0))
    for identity, minute, depth in ((b"b", 20, 1), (b"a2", 10, 2), (b"c", 30, 0), (b"a1", 10, 1)):
        index.add_found(identity, size=UNIT, depth=depth, minute=minute)
    assert [v[0] for v in index.victims(5 * UNIT, ())] == [b"a2", b"a1", b"b", b"c", b"here"]


def test_a_used_object_is_stamped_once_a_minute() -> None:
    index = Index()
    index.add(b"a", size=UNIT, depth=0, bucket=index.current(5))
    assert index.use(b"a", index.current(5)) is False
    assert index.use(b"a", index.current(6)) is True
    assert index.use(b"a", index.current(6)) is False
    index.add_found(b"b", size=UNIT, depth=0, minute=6)
    assert index.use(b"b", index.current(6)) is False
    assert index.use(b"b", index.current(7)) is True


def test_buckets_stay_small_in_a_large_store() -> None:
    index = Index()
    for number in range(6400):
        index.add(number.to_bytes(4, "big"), size=UNIT, depth=number % 7, bucket=index.current(0))
    assert max(bucket.live for bucket in index._live.values()) <= 6400 // 64 + 2


def test_an_object_costs_little_memory() -> None:
    tracemalloc.start()
    index = Index()
    before = tracemalloc.get_traced_memory()[0]
    count = 20_000
    for number in range(count):
        index.add(number.to_bytes(44, "big"), size=2**20, depth=number % 100, bucket=index.current(0))
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert used / count < 300
