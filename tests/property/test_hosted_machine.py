"""The hosted cache under random histories: real bytes in HOST and storage, every order, every failure, no thread.

After each step every invariant is checked, every byte in HOST and in open requests, the tokens beside the slots, the
generation words, events against residency, and counters against each other; storage checks each object put and read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.core.config import EdgePolicy
from hicache.core.keys import ObjectKey
from hicache.runtime.queues import Bound
from hicache.storage.base import StorageBackend
from hicache.testing.choices import Choices, DrawnChoices, SeededChoices
from hicache.testing.faults import DamageableMemory
from hicache.testing.hosteddriver import HostedDriver
from hicache_file import FileBackend

pytestmark = pytest.mark.usefixtures("nothing_is_logged")

CASES = ("LEAK-3", "RACE-1", "RACE-3", "RACE-4", "FAIL-2", "FAIL-5", "EVICT-3", "STAT-3", "STAT-4")
STEPS = 400
CHUNKS = 10


def any_options(choices: Choices) -> dict[str, Any]:
    """Tiny tiers and queues, so that everything collides; times are multiples of 1/8 s."""

    def pick(*items: Any) -> Any:
        return items[choices.integer(0, len(items) - 1)]

    def bound() -> Bound:
        return Bound(bytes=pick(192, 10**6, 10**6), requests=pick(1, 3, 100, 100))

    return {
        "host": pick(12, 6, 24),
        "eviction": pick("lru", "lfu", "slru", "priority"),
        "write_policy": pick("write_through", "write_through_selective", "write_back", EdgePolicy(1, on_eviction=True)),
        "prefetch": pick("timeout", "wait_complete", "best_effort"),
        "prefetch_timeout": pick(0.5, 0.0, 4.0),
        "prefetch_threshold": pick(0, 0, 4),
        "fetch_bytes": pick(128, 64, 8192),
        "absent_seconds": pick(0.0, 1.0),
        "reserve": 0.3,
        "stub_pages": pick(1000, 5, 0),
        "ghost_pages": pick(20, 0),
        "read_bound": bound(),
        "write_bound": bound(),
        "touch_seconds": pick("auto", None, 0.5),
        "generation_seconds": pick(None, 1.0),
        "prefill_tokens_per_second": pick(None, None, 8.0),
    }


def in_memory(capacity: int | None) -> tuple[StorageBackend, Callable[[ObjectKey], bool]]:
    backend = DamageableMemory(capacity=capacity)

    def damage(key: ObjectKey) -> bool:
        if not backend.contains([key])[0]:
            return False
        backend.damage(key, bit=5)
        return True

    return backend, damage


def drive(choices: Choices, steps: int, **backing: Any) -> HostedDriver:
    driver = HostedDriver(choices, attachable="storage" in backing, **backing, **any_options(choices))
    try:
        while driver.steps < steps:
            driver.step()
        driver.finish()
    except BaseException:
        driver.abandon()
        raise
    return driver


def drive_in_memory(choices: Choices, steps: int) -> HostedDriver:
    storage, damage = in_memory((None, None, 6000)[choices.integer(0, 2)])
    return drive(choices, steps, **({"storage": storage, "damage": damage} if choices.integer(0, 5) else {}))


@pytest.mark.slow
@pytest.mark.case(*CASES)
@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.no_cover  # steps by the ten thousand: the others reach all there is
def test_long_random_histories(chunk: int) -> None:
    """The profile of the checks makes 100 histories, which are 40,000 steps."""
    histories = settings().max_examples // CHUNKS // 2
    for i in range(histories):
        drive_in_memory(SeededChoices(chunk + CHUNKS * i), STEPS)


@pytest.mark.slow
@pytest.mark.case(*CASES)
@pytest.mark.parametrize("seed", range(3))
def test_random_histories_over_files(seed: int, tmp_path: Path) -> None:
    backend = FileBackend(str(tmp_path / "store"), capacity=(None, 40 * 8192)[seed % 2])
    try:
        assert backend.wait_ready(30)
        drive(SeededChoices(seed), 300, storage=backend)
    finally:
        backend.close()


@pytest.mark.slow
def test_the_driver_reaches_everything() -> None:
    """A driver that never fetches, fails, clears or closes would prove nothing."""
    wanted = {
        "attached", "bypassed", "cancelled loading", "clear", "clear not confirmed", "closed abruptly",
        "collision planted", "collision read", "commit refused", "committed", "committed by hash", "detached",
        "dropped", "ended in order", "fault in contains", "fault in generation", "fault in get_into", "fault in put",
        "loaded", "loaded from storage", "meanwhile", "object damaged", "object lost", "out of slots", "prefetch",
        "read", "request", "waits",
    }  # fmt: skip
    seen: Counter[str] = Counter()
    for seed in range(24):
        seen.update(drive_in_memory(SeededChoices(seed), STEPS).seen)
        if set(seen) >= wanted and min(seen["committed"], seen["loaded"], seen["objects found right"]) >= 60:
            return
    pytest.fail(f"24 histories never reached {wanted - set(seen)}: {seen}")


@pytest.mark.slow
@pytest.mark.case(*CASES)
@settings(max_examples=30)
@given(data=st.data())
@pytest.mark.no_cover
def test_random_histories_that_shrink(data: st.DataObject) -> None:
    """Short ones: shrinking has to end before the time-out of a test does."""
    drive_in_memory(DrawnChoices(data), 25)
