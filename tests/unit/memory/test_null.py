from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from hicache.errors import CacheClosed, GeometryError, HicacheInternalError
from hicache.memory.null import NullCopyEngine, NullDevicePool, NullHostPool
from hicache.memory.writer import READY, ThreadEvent
from hicache.records import PageResult

OK, FAILED = PageResult.OK, PageResult.FAILED
TWO = np.array([0, 1])


@pytest.fixture
def engine() -> NullCopyEngine:
    return NullCopyEngine(NullDevicePool(None), NullHostPool(4))


def test_copies_have_ended_when_the_call_returns(engine: NullCopyEngine) -> None:
    told: list[Sequence[PageResult]] = []
    layers: list[int] = []
    down = engine.device_to_host(TWO, TWO, ready=READY, done=told.append)
    up = engine.host_to_device(TWO, TWO, done=told.append, layer_done=layers.append)
    assert engine.inline
    assert told == [[OK, OK], [OK, OK]]
    assert down.results == up.results == (OK, OK)
    assert layers == [0]
    assert up.wait_layer(0, 0)
    statistics = engine.statistics()
    assert (statistics.pages_device_to_host, statistics.pages_host_to_device, statistics.in_flight) == (2, 2, 0)
    assert statistics.bytes_device_to_host == 0


@pytest.mark.case("RACE-5")
def test_a_copy_whose_event_has_not_passed_ends_in_run(engine: NullCopyEngine) -> None:
    event, other = ThreadEvent(), ThreadEvent()
    told: list[object] = []
    copy = engine.device_to_host(TWO, TWO, ready=event, done=told.append)
    engine.when_ready(other, told.append)
    engine.when_ready(READY, told.append)
    assert told == [True]
    assert engine.run() == 0
    event.set()
    assert engine.run() == 1
    assert told == [True, [OK, OK]]
    assert copy.finished
    other.set()
    assert engine.run() == 1
    assert told[-1] is True


def test_close_drops_what_waits(engine: NullCopyEngine) -> None:
    told: list[object] = []
    engine.device_to_host(TWO, TWO, ready=ThreadEvent(), done=told.append)
    engine.when_ready(ThreadEvent(), told.append)
    assert engine.close(0) == 2
    assert told == [[FAILED, FAILED], False]
    assert engine.close(0) == 2
    with pytest.raises(CacheClosed):
        engine.host_to_device(TWO, TWO, done=told.append)


@pytest.mark.case("THR-1")
def test_a_callback_that_raises_harms_nobody(engine: NullCopyEngine) -> None:
    def fail(results: Sequence[PageResult]) -> None:
        raise ValueError

    copy = engine.device_to_host(TWO, TWO, ready=None, done=fail)
    assert copy.results == (OK, OK)
    assert engine.statistics().callback_errors == 1


def test_copies_need_pools_and_pairs(engine: NullCopyEngine) -> None:
    with pytest.raises(HicacheInternalError, match="do not pair"):
        engine.device_to_host(TWO, TWO[:1], ready=None, done=lambda results: None)
    alone = NullCopyEngine(NullDevicePool(2), None)
    with pytest.raises(HicacheInternalError, match="no host pool"):
        alone.device_to_host(TWO, TWO, ready=None, done=lambda results: None)


def test_pages_have_no_bytes() -> None:
    device, host = NullDevicePool(None), NullHostPool(2)
    device.write_page(10**9, b"")
    assert device.read_page(10**9).size == host.page(1).size == len(host.buffer(0)) == 0
    assert host.pages.shape == (2, 0)
    with pytest.raises(GeometryError, match="no bytes"):
        device.write_page(0, b"x")
    with pytest.raises(GeometryError, match="does not exist"):
        host.page(2)
    with pytest.raises(GeometryError, match="does not exist"):
        NullDevicePool(3).read_page(-1)
