"""The reducer: what is posted is applied, and what the core wants is begun, without ever going round in circles."""

from __future__ import annotations

import pytest

from hicache.core.cache import Core
from hicache.core.config import CoreConfig, EdgePolicy
from hicache.core.prompt import Prompt
from hicache.core.transfers import Transfer, TransferKind
from hicache.records import PageResult
from hicache.runtime.reducer import Reducer
from hicache.testing.choices import CountingHasher


def flushing() -> tuple[Core, Reducer]:
    """A core that wants all of DEVICE clean, and its reducer."""
    policy = EdgePolicy(None, on_eviction=True)
    core = Core(CoreConfig(device_pages=8, host_pages=8, reserve=1.0, device_to_host=policy))
    return core, Reducer(core, wait=lambda condition, timeout: None, publish=lambda events: None, flushes=True)


def fill_half(core: Core) -> None:
    """Commit a request of four pages."""
    hasher = CountingHasher()
    tree = core.tree(bytes(16), width=2, hasher=hasher)
    lease = core.lease(tree, Prompt(b"abcdefgh", 2, hasher))
    core.allocate(lease, 4)
    core.commit(lease, 4, ready=True)
    core.release(lease)


@pytest.mark.case("FAIL-5")
def test_settling_ends_although_a_full_queue_turns_away_all_that_the_clean_reserve_needs():
    core, reducer = flushing()
    shed: list[int] = []

    def turn_away(transfer: Transfer) -> None:
        assert len(shed) < 100, "it goes on for ever"
        shed.append(transfer.id)
        reducer.post(core.complete, transfer.id, [PageResult.FAILED] * transfer.count)

    reducer.dispatch = turn_away
    fill_half(core)
    with reducer.lock:
        reducer.flush()
    assert 1 <= len(shed) <= 2
    assert reducer.internal_errors == 0
    assert core.statistics().failed[TransferKind.WRITE_BACK] == 4 * len(shed)
    core.check()


def test_writes_that_only_fail_are_not_planned_again_until_somebody_asks():
    """Completions that come later bring no new plan: with storage in trouble that would never end."""
    core, reducer = flushing()
    begun: list[Transfer] = []
    reducer.dispatch = begun.append
    fill_half(core)
    with reducer.lock:
        reducer.flush()
        for _ in range(10):
            assert len(begun) <= 2, "failures plan their own repetition"
            for transfer in begun:
                if transfer.id in core.log.open:
                    reducer.post(core.complete, transfer.id, [PageResult.FAILED] * transfer.count)
            reducer.settle()
        before = len(begun)
        reducer.flush()
        assert len(begun) == before + 1  # a request tries again
