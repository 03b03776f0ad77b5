"""The tools for tests of others are tested themselves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from hicache.core.layout import KVGeometry
from hicache.errors import CacheClosed
from hicache.memory.device import TensorDevicePool
from hicache.memory.host import MmapHostPool
from hicache.memory.writer import ThreadEvent
from hicache.records import PageResult
from hicache.testing.memory import ManualCopyEngine

OK, FAILED = PageResult.OK, PageResult.FAILED
GEOMETRY = KVGeometry.mha(2, kv_heads=1, head_dim=8, dtype="int8")


@pytest.fixture
def device() -> TensorDevicePool:
    return TensorDevicePool.allocate(GEOMETRY, page_size=4, slots=4)


@pytest.fixture
def host(device: TensorDevicePool) -> Iterator[MmapHostPool]:
    pool = MmapHostPool(4, device.page_bytes)
    yield pool
    pool.close()


def test_copies_end_when_and_how_the_test_says(device: TensorDevicePool, host: MmapHostPool) -> None:
    engine = ManualCopyEngine(device, host)
    told: list[Sequence[PageResult]] = []
    for slot in range(3):
        device.write_page(slot, bytes([slot + 1]) * device.page_bytes)
    first = engine.device_to_host(np.array([0]), np.array([0]), ready=None, done=told.append)
    second = engine.device_to_host(np.array([1, 2]), np.array([1, 2]), ready=None, done=told.append)
    assert not host.pages.any()
    engine.end(1, results=[OK, FAILED])
    assert (second.results, first.results) == ((OK, FAILED), None)
    assert [int(host.page(slot)[0]) for slot in range(3)] == [0, 2, 0]
    assert engine.end_all() == 1
    assert told == [[OK, FAILED], [OK]]
    statistics = engine.statistics()
    assert (statistics.pages_device_to_host, statistics.failed_pages, statistics.in_flight) == (2, 1, 0)


def test_loads_tell_their_layers(device: TensorDevicePool, host: MmapHostPool) -> None:
    engine, layers = ManualCopyEngine(device, host), []
    host.pages[:] = 3
    copy = engine.host_to_device(np.array([0]), np.array([1]), done=lambda results: None, layer_done=layers.append)
    engine.end()
    assert layers == [0, 1]
    assert copy.wait_layer(1, 0)
    assert set(device.read_page(1).tolist()) == {3}


@pytest.mark.case("RACE-5")
def test_a_copy_must_not_end_before_its_writer(device: TensorDevicePool, host: MmapHostPool) -> None:
    engine, event = ManualCopyEngine(device, host), ThreadEvent()
    engine.device_to_host(np.array([0]), np.array([0]), ready=event, done=lambda results: None)
    with pytest.raises(AssertionError, match="has not passed"):
        engine.end()


def test_events_are_called_back_when_the_test_says(device: TensorDevicePool, host: MmapHostPool) -> None:
    engine, event, told = ManualCopyEngine(device, host), ThreadEvent(), []
    engine.when_ready(event, told.append)
    assert engine.pass_events() == 0
    event.set()
    assert told == []
    assert engine.pass_events() == 1
    assert told == [True]


def test_close_drops_everything(device: TensorDevicePool, host: MmapHostPool) -> None:
    engine, told = ManualCopyEngine(device, host), []
    engine.device_to_host(np.array([0, 1]), np.array([0, 1]), ready=None, done=told.append)
    engine.when_ready(ThreadEvent(), told.append)
    assert engine.close(0) == 2
    assert told == [[FAILED, FAILED], False]
    assert engine.close(0) == 2
    with pytest.raises(CacheClosed):
        engine.host_to_device(np.array([0]), np.array([0]), done=told.append)
