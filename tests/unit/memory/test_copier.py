from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from hicache.core.layout import KVGeometry
from hicache.errors import CacheClosed, ConfigError, HicacheInternalError
from hicache.memory.base import DevicePool
from hicache.memory.copier import ThreadCopyEngine
from hicache.memory.device import TensorDevicePool
from hicache.memory.host import MmapHostPool
from hicache.memory.writer import READY, ThreadEvent
from hicache.records import PageResult
from hicache.testing.gates import Gate
from hicache.testing.memory import FaultyDevicePool

PATIENCE = 30.0
OK, FAILED = PageResult.OK, PageResult.FAILED
SLOTS, LAYERS = 16, 4
# A layer of a page is 256 KiB, so each is a step of its own on the way up.
GEOMETRY = KVGeometry.mha(LAYERS, kv_heads=2, head_dim=4096, dtype="int8", head_group=1)
TOKENS = 16


class Answers:
    """A `done` that keeps what it is told, and by whom."""

    def __init__(self) -> None:
        self.results: queue.Queue[list[PageResult]] = queue.Queue()
        self.threads: list[str] = []

    def __call__(self, results: Sequence[PageResult]) -> None:
        self.threads.append(threading.current_thread().name)
        self.results.put(list(results))

    def next(self) -> list[PageResult]:
        return self.results.get(timeout=PATIENCE)


class Memory:
    """A device pool, a host pool and engines over them, which are closed at the end."""

    def __init__(self) -> None:
        self.device = TensorDevicePool.allocate(GEOMETRY, page_size=TOKENS, slots=SLOTS)
        self.host = MmapHostPool(SLOTS, self.device.page_bytes)
        self.engines: list[ThreadCopyEngine] = []

    def engine(self, device: DevicePool | None = None, *, threads: int = 2) -> ThreadCopyEngine:
        self.engines.append(ThreadCopyEngine(device or self.device, self.host, threads=threads))
        return self.engines[-1]

    def faulty(
        self, gate: Gate | None = None, fault: Callable[[str, int], BaseException | None] = lambda verb, slot: None
    ) -> FaultyDevicePool:
        return FaultyDevicePool(self.device, gate=gate, fault=fault)

    def write(self, slot: int, value: int) -> None:
        self.device.write_page(slot, bytes([value]) * self.device.page_bytes)


@pytest.fixture
def memory() -> Iterator[Memory]:
    memory = Memory()
    yield memory
    for engine in memory.engines:
        engine.close(PATIENCE)
    memory.host.close()


def slots(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def test_pages_go_down_and_come_up_again(memory: Memory) -> None:
    engine, down, up = memory.engine(), Answers(), Answers()
    for slot in range(3):
        memory.write(slot, slot + 1)
    assert engine.device_to_host(slots(0, 1, 2), slots(7, 5, 6), ready=None, done=down).wait(PATIENCE)
    assert down.next() == [OK, OK, OK]
    assert [int(memory.host.page(slot)[0]) for slot in (7, 5, 6)] == [1, 2, 3]
    copy = engine.host_to_device(slots(7, 5, 6), slots(10, 11, 12), done=up)
    assert copy.wait(PATIENCE)
    assert copy.results == (OK, OK, OK)
    assert up.next() == [OK, OK, OK]
    assert [int(memory.device.read_page(slot)[0]) for slot in (10, 11, 12)] == [1, 2, 3]
    statistics = engine.statistics()
    assert (statistics.pages_device_to_host, statistics.pages_host_to_device) == (3, 3)
    assert statistics.bytes_device_to_host == 3 * memory.device.page_bytes
    assert (statistics.in_flight, statistics.failed_pages, statistics.waiting) == (0, 0, 0)


def test_callbacks_come_from_copy_threads(memory: Memory) -> None:
    engine, down, up = memory.engine(), Answers(), Answers()
    engine.device_to_host(slots(0), slots(0), ready=READY, done=down).wait(PATIENCE)
    engine.host_to_device(slots(0), slots(0), done=up).wait(PATIENCE)
    assert {*down.threads, *up.threads} == {"hicache-copy-0", "hicache-copy-1"}


def test_a_copy_of_nothing_ends_well(memory: Memory) -> None:
    engine, answers = memory.engine(), Answers()
    assert engine.device_to_host(slots(), slots(), ready=None, done=answers).wait(PATIENCE)
    assert engine.host_to_device(slots(), slots(), done=answers).wait(PATIENCE)
    assert [answers.next(), answers.next()] == [[], []]


def test_the_slots_are_read_when_asked_not_later(memory: Memory) -> None:
    """Callers reuse their arrays at once."""
    gate = Gate()
    engine, answers = memory.engine(memory.faulty(gate)), Answers()
    memory.write(1, 77)
    source = slots(1)
    engine.device_to_host(source, slots(2), ready=None, done=answers)
    source[0] = 3
    gate.open()
    assert answers.next() == [OK]
    assert int(memory.host.page(2)[0]) == 77


@pytest.mark.case("RACE-5")
def test_a_copy_waits_for_the_writer_of_its_pages(memory: Memory) -> None:
    """The page is written after the copy was asked for; what arrives is the new content, never a mix."""
    engine, answers = memory.engine(), Answers()
    memory.write(4, 1)
    event = ThreadEvent()
    copy = engine.device_to_host(slots(4), slots(0), ready=event, done=answers)
    # A later copy in the same direction whose pages are written does not wait behind it.
    later = Answers()
    engine.device_to_host(slots(4), slots(1), ready=READY, done=later)
    assert later.next() == [OK]
    assert not copy.finished
    assert engine.statistics().waiting == 1
    assert not memory.host.page(0).any()
    memory.write(4, 2)
    event.set()
    assert answers.next() == [OK]
    assert set(memory.host.page(0).tolist()) == {2}
    assert set(memory.host.page(1).tolist()) == {1}


@pytest.mark.case("RACE-5")
def test_copies_behind_many_events_take_no_threads(memory: Memory) -> None:
    engine = memory.engine()
    before = threading.active_count()
    events = [ThreadEvent() for _ in range(SLOTS)]
    answers = [Answers() for _ in events]
    for slot, (event, done) in enumerate(zip(events, answers, strict=True)):
        memory.write(slot, slot + 1)
        engine.device_to_host(slots(slot), slots(slot), ready=event, done=done)
    assert threading.active_count() <= before + 1
    for slot in reversed(range(SLOTS)):
        events[slot].set()
        assert answers[slot].next() == [OK]
        assert int(memory.host.page(slot)[0]) == slot + 1


@pytest.mark.case("RACE-5")
def test_pages_whose_writer_is_broken_are_not_copied(memory: Memory) -> None:
    class Broken(ThreadEvent):
        def on_passed(self, callback: Callable[[], None]) -> None:
            raise RuntimeError("the device is gone")

    engine, answers = memory.engine(), Answers()
    memory.write(0, 9)
    copy = engine.device_to_host(slots(0, 1), slots(0, 1), ready=Broken(), done=answers)
    assert copy.wait(PATIENCE)
    assert answers.next() == [FAILED, FAILED]
    assert not memory.host.page(0).any()
    assert engine.statistics().failed_pages == 2


def test_when_ready_calls_back_once_the_event_has_passed(memory: Memory) -> None:
    engine = memory.engine()
    told: queue.Queue[bool] = queue.Queue()
    event = ThreadEvent()
    engine.when_ready(event, told.put)
    engine.when_ready(READY, told.put)
    assert told.get(timeout=PATIENCE) is True
    assert told.empty()
    event.set()
    assert told.get(timeout=PATIENCE) is True


def test_copies_of_a_direction_begin_in_order(memory: Memory) -> None:
    order: list[int] = []
    engine = memory.engine(memory.faulty(fault=lambda verb, slot: order.append(slot)))  # type: ignore[func-returns-value]
    answers = Answers()
    for slot in range(10):
        engine.device_to_host(slots(slot), slots(slot), ready=None, done=answers)
    for _ in range(10):
        answers.next()
    assert order == [*range(10)]


def test_one_direction_does_not_wait_for_the_other(memory: Memory) -> None:
    gate = Gate()

    class DownIsGated(FaultyDevicePool):
        def gather(self, *args: object) -> None:
            gate.enter()

    engine, down, up = memory.engine(DownIsGated(memory.device)), Answers(), Answers()
    engine.device_to_host(slots(0), slots(0), ready=None, done=down)
    gate.until_arrived()
    engine.host_to_device(slots(1), slots(1), done=up)
    assert up.next() == [OK]
    gate.open()
    assert down.next() == [OK]


def test_a_single_thread_serves_both_ways_and_loads_first(memory: Memory) -> None:
    gate, order = Gate(), []
    engine = memory.engine(memory.faulty(gate), threads=1)
    answers = Answers()
    for name in ("running", "down"):
        engine.device_to_host(slots(0), slots(0), ready=None, done=lambda results, name=name: order.append(name))  # type: ignore[misc]
    gate.until_arrived()
    engine.host_to_device(slots(0), slots(1), done=lambda results: order.append("up"))
    last = engine.device_to_host(slots(0), slots(0), ready=None, done=answers)
    gate.open()
    assert last.wait(PATIENCE)
    assert order == ["running", "up", "down"]


def test_layers_come_in_order_and_can_be_waited_for_one_by_one(memory: Memory) -> None:
    """An engine computes layer 0 while the others are on their way."""
    gate, told = Gate(), []
    engine, answers = memory.engine(memory.faulty(gate)), Answers()
    memory.host.pages[:2] = 5
    copy = engine.host_to_device(slots(0, 1), slots(2, 3), done=answers, layer_done=told.append)
    for layer in range(LAYERS):
        gate.permit()
        assert copy.wait_layer(layer, PATIENCE)
        assert copy.layers_done == layer + 1
        loaded = memory.device.read_page(3).reshape(2, LAYERS, -1)
        assert (loaded[:, : layer + 1] == 5).all()
        assert not loaded[:, layer + 1 :].any()
        assert layer == LAYERS - 1 or not copy.wait_layer(layer + 1, 0)
    assert answers.next() == [OK, OK]
    assert told == [*range(LAYERS)]


def test_thin_layers_go_together_and_are_told_one_by_one(memory: Memory) -> None:
    geometry = KVGeometry.mha(8, kv_heads=1, head_dim=16, dtype="int8")
    device = TensorDevicePool.allocate(geometry, page_size=4, slots=2)
    host = MmapHostPool(2, device.page_bytes)
    calls: list[str] = []
    pool = FaultyDevicePool(device, fault=lambda verb, slot: calls.append(verb))  # type: ignore[func-returns-value]
    engine = ThreadCopyEngine(pool, host)
    told: list[int] = []
    assert engine.host_to_device(slots(0), slots(1), done=Answers(), layer_done=told.append).wait(PATIENCE)
    assert told == [*range(8)]
    assert calls == ["scatter"]
    engine.close(PATIENCE)
    host.close()


class BackendsOwnError(Exception):
    pass


@pytest.mark.case("THR-1")
@pytest.mark.parametrize("error", [OSError(5, "I/O"), TimeoutError(), ValueError(), BackendsOwnError(), SystemExit(1)])
@pytest.mark.parametrize("verb", ["gather", "scatter"])
def test_an_error_fails_its_page_and_nothing_else(memory: Memory, verb: str, error: BaseException) -> None:
    """The third of ten copies raises: nine succeed, one is reported, and the thread lives on."""
    engine = memory.engine(memory.faulty(fault=lambda what, slot: error if (what, slot) == (verb, 3) else None))
    answers = [Answers() for _ in range(10)]
    copies = [
        engine.device_to_host(slots(slot), slots(slot), ready=None, done=done)
        if verb == "gather"
        else engine.host_to_device(slots(slot), slots(slot), done=done)
        for slot, done in enumerate(answers, 1)
    ]
    assert all(copy.wait(PATIENCE) for copy in copies)
    assert [done.next() for done in answers] == [[OK], [OK], [FAILED]] + [[OK]] * 7
    statistics = engine.statistics()
    assert (statistics.failed_pages, statistics.in_flight) == (1, 0)
    assert all(thread.is_alive() for thread in engine._threads)


@pytest.mark.case("THR-1")
def test_one_bad_page_of_a_batch_fails_alone(memory: Memory) -> None:
    engine = memory.engine(memory.faulty(fault=lambda verb, slot: OSError() if slot == 2 else None))
    for slot in range(4):
        memory.write(slot, slot + 1)
    answers = Answers()
    engine.device_to_host(slots(0, 1, 2, 3), slots(4, 5, 6, 7), ready=None, done=answers)
    assert answers.next() == [OK, OK, FAILED, OK]
    assert [int(memory.host.page(slot)[0]) for slot in (4, 5, 6, 7)] == [1, 2, 0, 4]


def test_layers_behind_a_failure_are_not_promised(memory: Memory) -> None:
    calls: list[int] = []

    def third_layer_of_slot_1(verb: str, slot: int) -> BaseException | None:
        calls.append(slot)
        return OSError() if slot == 1 and calls.count(1) >= 3 else None

    engine, told, answers = memory.engine(memory.faulty(fault=third_layer_of_slot_1)), [], Answers()
    copy = engine.host_to_device(slots(0, 1), slots(0, 1), done=answers, layer_done=told.append)
    assert answers.next() == [OK, FAILED]
    assert copy.wait(PATIENCE)
    assert told == [0, 1]
    assert copy.wait_layer(1, 0)
    assert not copy.wait_layer(2, 0)


def test_slots_that_do_not_exist_fail_their_pages(memory: Memory) -> None:
    engine, answers = memory.engine(), Answers()
    engine.device_to_host(slots(0, SLOTS, -1), slots(0, 1, 2), ready=None, done=answers)
    assert answers.next() == [OK, FAILED, FAILED]


@pytest.mark.case("THR-1")
@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_a_callback_that_raises_harms_nobody(memory: Memory, error: type[BaseException]) -> None:
    def fail(argument: object) -> None:
        raise error

    engine, answers = memory.engine(), Answers()
    assert engine.device_to_host(slots(0), slots(0), ready=None, done=fail).wait(PATIENCE)
    assert engine.host_to_device(slots(0), slots(0), done=answers, layer_done=fail).wait(PATIENCE)
    assert answers.next() == [OK]
    assert engine.statistics().callback_errors == 1 + LAYERS
    assert engine.statistics().in_flight == 0


def test_a_callback_may_ask_for_the_next_copy(memory: Memory) -> None:
    """Callbacks come without a lock held."""
    engine, answers = memory.engine(), Answers()
    memory.write(0, 6)

    def then(results: Sequence[PageResult]) -> None:
        engine.host_to_device(slots(1), slots(2), done=answers)

    engine.device_to_host(slots(0), slots(1), ready=None, done=then)
    assert answers.next() == [OK]
    assert int(memory.device.read_page(2)[0]) == 6


def test_slots_must_pair(memory: Memory) -> None:
    engine = memory.engine()
    with pytest.raises(HicacheInternalError, match="do not pair"):
        engine.device_to_host(slots(0, 1), slots(0), ready=None, done=Answers())
    with pytest.raises(HicacheInternalError, match="do not pair"):
        engine.host_to_device(slots(0), slots(0, 1), done=Answers())


def test_close_waits_for_what_is_on_its_way(memory: Memory) -> None:
    gate = Gate()
    engine, answers = memory.engine(memory.faulty(gate)), Answers()
    for slot in range(5):
        engine.device_to_host(slots(slot), slots(slot), ready=None, done=answers)
    closer = threading.Thread(target=engine.close, args=(PATIENCE,))
    closer.start()
    gate.open()
    closer.join(PATIENCE)
    assert [answers.next() for _ in range(5)] == [[OK]] * 5
    assert engine.close(0) == 0
    assert not any(thread.is_alive() for thread in engine._threads)


def test_close_drops_what_has_not_begun_at_the_deadline(memory: Memory) -> None:
    """Queued copies and those behind events are answered FAILED at once; the moving one when it really ends."""
    gate = Gate()
    engine = memory.engine(memory.faulty(gate))
    moving, queued, parked = Answers(), Answers(), Answers()
    event, told = ThreadEvent(), []
    engine.device_to_host(slots(0, 1), slots(0, 1), ready=None, done=moving)
    gate.until_arrived()
    engine.device_to_host(slots(2, 3, 4), slots(2, 3, 4), ready=None, done=queued)
    engine.device_to_host(slots(5), slots(5), ready=event, done=parked)
    engine.when_ready(event, told.append)
    assert engine.close(0) == 6
    assert queued.next() == [FAILED] * 3
    assert parked.next() == [FAILED]
    assert told == [False]
    event.set()
    assert moving.results.empty()
    gate.open()
    assert moving.next() == [OK, OK]
    assert engine.close(0) == 6
    assert queued.results.empty()
    assert parked.results.empty()


def test_a_closed_engine_takes_nothing(memory: Memory) -> None:
    engine = memory.engine()
    assert engine.close(0) == 0
    with pytest.raises(CacheClosed):
        engine.device_to_host(slots(0), slots(0), ready=None, done=Answers())
    with pytest.raises(CacheClosed):
        engine.host_to_device(slots(0), slots(0), done=Answers())
    with pytest.raises(CacheClosed):
        engine.when_ready(READY, lambda passed: None)


def test_without_a_host_pool_only_events_are_waited_for(memory: Memory) -> None:
    before = threading.active_count()
    engine = ThreadCopyEngine(memory.device, None)
    assert threading.active_count() == before
    told: queue.Queue[bool] = queue.Queue()
    engine.when_ready(READY, told.put)
    assert told.get(timeout=PATIENCE)
    with pytest.raises(HicacheInternalError, match="no host pool"):
        engine.device_to_host(slots(0), slots(0), ready=None, done=Answers())
    assert engine.close(PATIENCE) == 0


@pytest.mark.parametrize("threads", [0, -1, 1.5, True])
def test_an_engine_needs_threads(memory: Memory, threads: int) -> None:
    with pytest.raises(ConfigError, match="threads of a copy engine"):
        ThreadCopyEngine(memory.device, memory.host, threads=threads)


def test_pools_must_have_pages_of_one_size(memory: Memory) -> None:
    host = MmapHostPool(1, 4096)
    with pytest.raises(ConfigError, match="make both alike"):
        ThreadCopyEngine(memory.device, host)
    host.close()
