"""Host memory is pinned for as long as it is mapped, or said not to be: with sizes, causes and what to do."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hicache
from hicache.core.arenas import ArenaPlan, Run
from hicache.cuda import CudaDevicePool, CudaOptions
from hicache.cuda.engine import CudaCopyEngine
from hicache.cuda.pinned import HostPins, PinnedHostPool, host_parts, rank_parts
from hicache.cuda.runs import HostPart
from hicache.errors import CacheClosed, ConfigError
from hicache.memory.arena import Arena, MappedArena
from hicache.memory.host import MmapHostPool
from hicache.memory.rankpages import RankMemory, RankPages
from hicache.testing.cuda import FakeCuda

GEOMETRY = hicache.KVGeometry.mha(layers=2, kv_heads=2, head_dim=8, dtype="float16")
PAGE = 4
NAMESPACE = hicache.Namespace(model="a", revision="1", geometry=GEOMETRY, page_size=PAGE)
PLAN = ArenaPlan.of(GEOMETRY, PAGE)


class Watching(FakeCuda):
    """Looks that memory is still mapped when it is unpinned, as a real device would otherwise fail much later."""

    def host_unregister(self, address: int) -> None:
        maps = Path("/proc/self/maps").read_text(encoding="ascii", errors="replace")
        inside = (line.split()[0].split("-") for line in maps.splitlines())
        assert any(int(low, 16) <= address < int(high, 16) for low, high in inside), "unmapped while it was pinned"
        super().host_unregister(address)


def pool_on(cuda: FakeCuda, **options: Any) -> CudaDevicePool:
    return CudaDevicePool.allocate(
        GEOMETRY, page_size=PAGE, slots=8, driver=cuda, options=CudaOptions(**{"method": "plain"} | options)
    )


def copied(pool: CudaDevicePool) -> Any:
    """A cache over the pool copies pages down and up; the statistics of its copies."""
    prompt = list(range(4 * PAGE))
    with hicache.open(NAMESPACE, device=pool, host=16) as cache:
        with cache.request(prompt, logits=False) as request:
            for slot in request.allocate():
                pool.write_page(slot, np.full(pool.page_bytes, 7 + slot, np.uint8))
            written = [pool.read_page(slot) for slot in range(4)]
            request.commit(ready=pool.record())
        cache.flush()
        for other in (1, 2):  # takes the device's slots from the first
            with cache.request([other + 1000] * 4 * PAGE, logits=False) as request:
                for slot in request.allocate():
                    pool.write_page(slot, bytes(pool.page_bytes))
                request.commit(ready=hicache.READY)
            cache.flush()
        with cache.request(prompt, logits=False) as request:
            loaded = [pool.read_page(slot) for slot in request.load()]
        assert len(loaded) == 4
        found = {page.tobytes() for page in loaded}
        assert found == {page.tobytes() for page in written}
        return cache.statistics().copies


def test_a_caches_host_tier_is_pinned_from_its_first_to_its_last_moment() -> None:
    cuda = Watching(memory=1 << 22)
    pool = pool_on(cuda)
    copies = copied(pool)
    assert copies.pinned.pinned
    assert copies.pinned.pinned_bytes == copies.pinned.bytes == 16 * 4096
    assert copies.pages_host_to_device
    assert not cuda.registered
    pool.close()
    assert not cuda.allocated


@pytest.mark.case("MEM-2")
def test_memory_that_cannot_be_pinned_is_said_at_once_and_works(caplog: pytest.LogCaptureFixture) -> None:
    """The bytes, the code and the limit are told when it is made; the copies pass; statistics say not pinned."""
    cuda = FakeCuda(memory=1 << 22, lockable=4096)
    pool = pool_on(cuda)
    with caplog.at_level(logging.WARNING):
        copies = copied(pool)
    text = next(record.getMessage() for record in caplog.records if "pinned" in record.getMessage())
    assert "a host pool of 16 pages of 64 KiB could not be pinned: cudaErrorMemoryAllocation (2)" in text
    assert "ulimit -l" in text
    assert not copies.pinned.pinned
    assert copies.pinned.pinned_bytes == 0
    assert copies.pinned.failures[0] in text
    pool.close()


@pytest.mark.case("MEM-2")
def test_memory_that_must_be_pinned_and_cannot_stops_the_opening_and_leaves_nothing() -> None:
    cuda = FakeCuda(memory=1 << 22, lockable=4096)
    pool = pool_on(cuda, pinned="require")
    with pytest.raises(
        ConfigError, match=r"could not be pinned: .*raise the limit by ulimit -l, or do without"
    ) as told:
        hicache.open(NAMESPACE, device=pool, host=8)
    assert "\n" not in str(told.value)
    assert not cuda.registered
    host = MmapHostPool(4, pool.page_bytes)
    with pytest.raises(ConfigError, match="host memory of 4 pages"):
        pool.copy_engine(host)
    host.close()
    pool.close()
    assert not cuda.allocated


def test_pinning_can_be_left_out() -> None:
    cuda = FakeCuda(memory=1 << 22)
    pool = pool_on(cuda, pinned="off")
    copies = copied(pool)
    assert cuda.calls.get("host_register") is None
    assert "as was asked" in copies.pinned.failures[0]
    pool.close()
    with pytest.raises(ConfigError, match="pinning 'perhaps' is none of try, require, off"):
        HostPins(cuda, "perhaps")  # type: ignore[arg-type]


def test_the_memory_is_taken_from_the_node_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[tuple[int, int]] = []
    monkeypatch.setattr(
        "hicache.memory.arena.bind_to_node", lambda address, size, node, what: bound.append((size, node))
    )
    for where, wanted in (("gpu", 0), (None, None)):
        cuda = FakeCuda(memory=1 << 22, numa_node=0)
        pool = pool_on(cuda, numa_node=where)
        pool.host_pool(GEOMETRY, PAGE, 4).close()
        assert bound == ([] if wanted is None else [(4 * 4096, wanted)])
        bound.clear()
        pool.close()


def test_without_the_devices_node_memory_is_taken_from_any_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Many containers may not say where memory comes from; who asks for a node by its number is told so."""

    def refused(address: int, size: int, node: int, what: str) -> None:
        raise ConfigError(f"{what} cannot be bound to NUMA node {node}: Operation not permitted")

    monkeypatch.setattr("hicache.memory.arena.bind_to_node", refused)
    cuda = FakeCuda()
    with caplog.at_level(logging.WARNING):
        host = PinnedHostPool.open(PLAN, 4, driver=cuda, numa_node=0, numa_required=False)
    assert "from any NUMA node, not from the GPU's: " in caplog.text
    assert "Operation not permitted" in caplog.text
    assert host.pins.statistics().pinned
    host.close()
    with pytest.raises(ConfigError, match="cannot be bound to NUMA node 0"):
        PinnedHostPool.open(PLAN, 4, driver=cuda, numa_node=0)
    assert not cuda.registered


def test_what_another_rank_writes_is_pinned_for_reading() -> None:
    """As ranks of a model whose state they all hold have it: one writes, the others have it mapped for reading."""
    arena = Arena(4, 4096)
    with contextlib.closing(arena):
        theirs = MappedArena(os.dup(arena.fd), 4, 4096, size=arena.size, writable=False)
        cuda = FakeCuda()
        pages = RankPages(4096, [RankMemory(theirs.rows, (Run(0, 0, 4096),), writes=False)])
        (part,) = rank_parts(pages)
        assert not part.writes
        size = part.slots * part.stride
        assert HostPins(cuda).pin(part.address, size, "theirs", writes=part.writes)
        assert cuda.registered == {part.address: size}
        assert not HostPins(FakeCuda()).pin(part.address, size, "theirs")
        pages.close()
        theirs.close()


def test_copies_from_memory_that_another_rank_writes_have_it_pinned() -> None:
    arena = Arena(4, 4096)
    with contextlib.closing(arena):
        theirs = MappedArena(os.dup(arena.fd), 4, 4096, size=arena.size, writable=False)
        cuda = FakeCuda(memory=1 << 22)
        pool = pool_on(cuda, pinned="require")
        part = HostPart(theirs.rows.ctypes.data, 4, 4096, (Run(0, 0, pool.page_bytes),), writes=False)
        engine = CudaCopyEngine(pool, None, parts=(part,))
        assert engine.statistics().pinned.pinned
        arena.rows[2, : pool.page_bytes] = 7
        copy = engine.host_to_device(np.array([2]), np.array([5]), done=lambda _: None)
        assert copy.wait(10.0)
        assert (pool.read_page(5) == 7).all()
        assert engine.close(10.0) == 0
        assert not cuda.registered
        pool.close()
        theirs.close()


def test_memory_that_somebody_else_has_pinned_in_part_is_told_as_that(caplog: pytest.LogCaptureFixture) -> None:
    cuda, memory = FakeCuda(), np.zeros(16384, np.uint8)
    start = memory.ctypes.data
    cuda.host_register(start, 4096)
    pins = HostPins(cuda)
    assert not pins.pin(start, 16384, "a tier")
    assert "a part of it was pinned by somebody else" in caplog.text
    assert "ulimit" not in caplog.text


def test_a_forked_child_leaves_its_parents_pins_alone() -> None:
    cuda = FakeCuda(memory=1 << 22)
    pool = pool_on(cuda)
    host = pool.host_pool(GEOMETRY, PAGE, 4)
    pins = host.pins  # type: ignore[attr-defined]
    child = os.fork()
    if child == 0:
        pins.close()
        pool.close()
        os._exit(0 if not cuda.calls.get("host_unregister") and not cuda.calls.get("free") else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert pins.statistics().pinned
    host.close()
    pool.close()
    assert not cuda.registered


def test_what_fails_when_it_is_unpinned_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    cuda, memory = FakeCuda(), np.zeros(8192, np.uint8)
    start = memory.ctypes.data
    pins = HostPins(cuda)
    assert pins.pin(start, 8192, "memory")
    assert pins.covers(start + 8000)
    assert not pins.covers(start + 8192)
    cuda.fail("host_unregister", "cudaErrorContextIsDestroyed", 709)
    pins.unpin(start)
    pins.unpin(start)
    assert "could not be unpinned" in caplog.text
    assert pins.statistics().pinned_bytes == 0


def test_a_pinned_pool_is_a_host_pool() -> None:
    cuda = FakeCuda()
    host = PinnedHostPool.open(PLAN, 3, driver=cuda)
    host.page(2)[:] = 5
    assert host.pages.shape == (3, PLAN.page_bytes)
    assert host_parts(host)[0].address in cuda.registered
    host.close()
    host.close()
    with pytest.raises(CacheClosed):
        host.page(2)
    assert not cuda.registered
