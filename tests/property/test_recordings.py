"""A recording, replayed, goes the same way step by step, from its start or from a checkpoint."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.core import copies as copies_module
from hicache.core.cache import Core
from hicache.core.config import CoreConfig, EdgePolicy
from hicache.core.prompt import Prompt
from hicache.core.recorder import RecordedCore, mark
from hicache.core.recordings import HEAD, MemorySegments, read_segments, untorn
from hicache.core.replayer import DivergenceError, Replayer, ReplayError
from hicache.errors import HicacheInternalError, InvalidInput
from hicache.testing.choices import CountingHasher, SeededChoices
from hicache.testing.coredriver import CoreDriver

POLICIES = st.sampled_from([EdgePolicy(1), EdgePolicy(2), EdgePolicy(None, on_eviction=True)])
CONFIGS = st.builds(
    CoreConfig,
    device_pages=st.sampled_from([8, 20, 0]),
    host_pages=st.sampled_from([8, 20]),
    storage=st.booleans(),
    eviction=st.sampled_from(["lru", "lfu", "slru", "priority"]),
    device_to_host=POLICIES,
    host_to_storage=POLICIES,
    reserve=st.just(0.3),
    touch_seconds=st.sampled_from([None, 1]),
    stub_pages=st.sampled_from([5, 1000]),
    span_bytes=st.sampled_from([6, 1000]),
    fetch_pages=st.just(2),
)


def record(config, seed, steps, *, segment_bytes):
    segments = MemorySegments()
    core = RecordedCore(config, segments, segment_bytes=segment_bytes)
    driver = CoreDriver(SeededChoices(seed), config, core=core)
    for _ in range(steps):
        driver.step()
    return core, segments.dump()


def run_checked(driver, core):
    for _ in range(300):
        driver.step()
        core.check()


def replay(data, *, keep_last=False):
    """Repeat all segments one after the other on the first one's core, or the last alone."""
    replayer = None
    for header, entries in read_segments(data):
        if replayer is None or keep_last:
            replayer = Replayer(header)
        for entry in entries:
            replayer.repeat(entry)
    return replayer


def states(core: Core):
    tables = core.registry.tables
    return [(t.state.tolist(), t.pins.tolist(), t.owner.tolist(), t.counts, t.pinned) for t in tables]


@pytest.mark.slow
@settings(max_examples=60)
@given(config=CONFIGS, seed=st.integers(0, 2**32), segment_bytes=st.sampled_from([600, 3_000, 1 << 20]))
def test_a_replay_ends_where_the_recording_did(config, seed, segment_bytes):
    core, data = record(config, seed, 150, segment_bytes=segment_bytes)
    segments = [header.number for header, _ in read_segments(data)]
    assert len(segments) <= 2
    for keep_last in (False, True):
        replayer = replay(data, keep_last=keep_last)
        assert mark(replayer.core) == mark(core)
        assert states(replayer.core) == states(core)
        replayer.core.check()


def test_checkpoints_are_reached():
    """Small segments wrap, so what is replayed begins at a checkpoint."""
    _, data = record(CoreConfig(8, 8, storage=True), 1, 300, segment_bytes=600)
    numbers = [(header.number, bool(header.state)) for header, _ in read_segments(data)]
    assert [has_state for _, has_state in numbers] == [True, True]
    assert numbers[0][0] > 5


def test_a_failing_run_fails_at_the_same_step(monkeypatch):
    """A bug that breaks an invariant is repeated by the recording of it, where it happened."""
    monkeypatch.setattr(
        copies_module.Copies,
        "raise_belief",
        lambda self, node: setattr(node, "believed", node.pages + 1),
    )
    config = CoreConfig(16, 16, storage=True)
    segments = MemorySegments()
    core = RecordedCore(config, segments)
    driver = CoreDriver(SeededChoices(3), config, core=core)
    with pytest.raises(HicacheInternalError, match="believes") as recorded:
        run_checked(driver, core)
    data = segments.dump()
    with pytest.raises(ReplayError) as repeated:
        replay(data)
    assert str(recorded.value) in str(repeated.value)
    assert repeated.value.operation == "check"
    steps = sum(1 for _, entries in read_segments(data) for _ in entries)
    assert repeated.value.step == steps  # the last thing that was recorded
    monkeypatch.undo()
    with contextlib.suppress(DivergenceError):  # the code without the bug may go another way, and says so
        replay(data)


def test_a_core_that_goes_another_way_is_noticed():
    _, data = record(CoreConfig(8, 8), 1, 60, segment_bytes=1 << 16)
    header, entries = next(read_segments(data))
    replayer = Replayer(msgspec.structs.replace(header, config=CoreConfig(9, 8)))
    with pytest.raises(DivergenceError, match="step 1 "):
        replayer.repeat(next(entries))


def test_what_is_no_recording_is_refused():
    _, data = record(CoreConfig(8), 1, 20, segment_bytes=1 << 16)
    for bad in (b"", b"hello", data[4:], b"\xff" * 64, data[:4] + bytes([data[4] ^ 1]) + data[5:]):
        with pytest.raises(InvalidInput):
            replay(bad)


@settings(max_examples=50)
@given(at=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_every_damaged_bit_is_noticed(at, bit):
    _, data = record(CoreConfig(8), 1, 20, segment_bytes=1 << 16)
    damaged = bytearray(data)
    damaged[int(at * len(data))] ^= 1 << bit
    with pytest.raises(InvalidInput):
        replay(bytes(damaged))


def test_a_recording_of_another_version_names_both(monkeypatch):
    monkeypatch.setattr("hicache.core.recorder.VERSION", 9)
    _, data = record(CoreConfig(8), 1, 20, segment_bytes=1 << 16)
    with pytest.raises(InvalidInput, match="version 9; this hicache reads version 3"):
        replay(data)


class RawSegments:
    """Buffers as they are, as files of a process that was killed would be."""

    def __init__(self):
        self.all = []

    def begin(self, size):
        self.all.append(bytearray(size))
        return memoryview(self.all[-1])


def test_an_input_cut_short_by_death_does_not_count():
    segments = RawSegments()
    core = RecordedCore(CoreConfig(8), segments, segment_bytes=4096)
    core.flush()
    (raw,) = segments.all
    end = len(untorn(bytes(raw))) - HEAD.size
    core.flush()
    assert replay(untorn(bytes(raw))).steps == 2
    raw[end : end + 4] = bytes(4)  # the second input is there, its length is not
    assert replay(untorn(bytes(raw))).steps == 1


def test_an_input_larger_than_a_segment_gets_one_that_holds_it():
    segments = MemorySegments()
    core = RecordedCore(CoreConfig(8), segments, segment_bytes=64)
    CoreDriver(SeededChoices(1), CoreConfig(8), core=core)
    hasher = CountingHasher()
    tree = core.tree(bytes(16), width=2, hasher=hasher)
    core.release(core.lease(tree, Prompt(bytes(2000), 2, hasher)))
    assert replay(segments.dump(), keep_last=True).steps == 3
    core.check()


def test_a_failure_is_told_before_it_is_raised(monkeypatch):
    told = []
    core = RecordedCore(CoreConfig(8), MemorySegments(), on_failure=told.append)
    monkeypatch.setattr(copies_module.Copies, "evict", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError) as raised:
        core.evict(0, 1)
    assert told == [raised.value]
    with pytest.raises(InvalidInput):
        core.allocate(closed_lease(core), 1)
    assert len(told) == 1


def closed_lease(core):
    hasher = CountingHasher()
    lease = core.lease(core.tree(bytes(16), width=2, hasher=hasher), Prompt(b"", 2, hasher))
    core.release(lease)
    return lease
