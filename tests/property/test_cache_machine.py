"""The whole runtime under random histories: real bytes in all three tiers, every order, every failure, no thread.

After each step every invariant is checked, every byte in both pools and in open requests, events against residency,
and counters against each other; every object is checked when it is put, when it is read, and at the end.
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
from hicache.storage.breaker import BreakerPolicy
from hicache.testing.cachedriver import CacheDriver
from hicache.testing.choices import Choices, DrawnChoices, SeededChoices
from hicache.testing.faults import DamageableMemory
from hicache_file import FileBackend

pytestmark = pytest.mark.usefixtures("nothing_is_logged")

CASES = ("LEAK-1", "LEAK-3", "LEAK-4", "RACE-1", "RACE-3", "RACE-4", "FAIL-2", "FAIL-5", "EVICT-3", "STAT-3", "STAT-4")
STEPS = 500
CHUNKS = 20  # as many tests, each some seconds: one that takes two minutes counts as hanging
POLICIES = ("write_through", "write_through_selective", "write_back", EdgePolicy(1, on_eviction=True))
OFTEN = ("loaded", "matched something", "objects found right")
WHAT_THE_DRIVER_DOES = {
    "attached", "breaker opened", "bypassed", "clear", "clear not confirmed", "closed abruptly", "collision planted",
    "collision read", "commit refused", "committed behind an event", "copy answered wrongly", "copy failed",
    "detach refused", "detached", "dropped", "ended in order", "ended while layers came", "event failed",
    "event passed", "fault in clear", "fault in contains", "fault in generation", "fault in get_into", "fault in put",
    "flush False", "flush True", "late job of a former life", "less came by layer than was told", "loaded",
    "loaded by layer", "loaded from below", "loaded from storage", "loaded less than matched",
    "matched nothing", "matched something", "meanwhile", "object damaged", "object lost", "objects found right",
    "out of slots", "read", "waited",
}  # fmt: skip

Damage = Callable[[ObjectKey], bool]


def any_options(choices: Choices) -> dict[str, Any]:
    """Tiny tiers and queues, so that everything collides; times are multiples of 1/8 s."""

    def pick(*items: Any) -> Any:
        return items[choices.integer(0, len(items) - 1)]

    def bound() -> Bound:
        return Bound(bytes=pick(192, 10**6, 10**6), requests=pick(1, 3, 100, 100))

    return {
        "device": pick(14, 6, 10, 24),
        "host": pick(12, 0, 6, 12, 24, 24),
        "eviction": pick("lru", "lfu", "slru", "priority"),
        "write_policy": (pick(*POLICIES), pick(*POLICIES)),
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
        "copy_bound": bound(),
        "touch_seconds": pick("auto", None, 0.5),
        "generation_seconds": pick(None, 1.0),
        "prefill_tokens_per_second": pick(None, None, 8.0),
        "breaker": pick(None, BreakerPolicy(failures=1, timeout=1.0, interval=1.0)),
    }


def in_memory(capacity: int | None) -> tuple[StorageBackend, Damage]:
    backend = DamageableMemory(capacity=capacity)

    def damage(key: ObjectKey) -> bool:
        if not backend.contains([key])[0]:
            return False
        backend.damage(key, bit=5)
        return True

    return backend, damage


def in_files(folder: Path, capacity: int | None) -> tuple[FileBackend, Damage]:
    backend = FileBackend(str(folder / "store"), capacity=capacity)
    assert backend.wait_ready(30)

    def damage(key: ObjectKey) -> bool:
        path = Path(backend._names.place(key).path)
        if not path.exists():
            return False
        content = bytearray(path.read_bytes())
        content[4096] ^= 32
        path.write_bytes(content)
        return True

    return backend, damage


def drive(choices: Choices, steps: int, **backing: Any) -> CacheDriver:
    options = any_options(choices)
    if not options["host"]:
        backing = {}
    driver = CacheDriver(choices, **backing, **options)
    try:
        while driver.steps < steps:
            driver.step()
        driver.finish()
    except BaseException:
        driver.abandon()
        raise
    return driver


def drive_in_memory(choices: Choices, steps: int) -> CacheDriver:
    storage, damage = in_memory((None, None, 6000)[choices.integer(0, 2)])
    return drive(choices, steps, **({"storage": storage, "damage": damage} if choices.integer(0, 5) else {}))


@pytest.mark.slow
@pytest.mark.case(*CASES)
@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.no_cover  # steps by the ten thousand: the others reach all there is
def test_long_random_histories(chunk: int) -> None:
    """The profile of the checks makes 100 histories, which are 50,000 steps."""
    histories = settings().max_examples // CHUNKS // 2
    steps = sum(drive_in_memory(SeededChoices(chunk + CHUNKS * i), STEPS).steps for i in range(histories))
    assert steps >= histories * STEPS


@pytest.mark.slow
@pytest.mark.case("FAIL-8", *CASES)
@pytest.mark.parametrize("seed", range(6))
def test_random_histories_over_files(seed: int, tmp_path: Path) -> None:
    backend, damage = in_files(tmp_path, (None, 40 * 8192)[seed % 2])
    try:
        drive(SeededChoices(seed), 300, storage=backend, damage=damage)
    finally:
        backend.close()


@pytest.mark.slow
def test_the_driver_reaches_everything() -> None:
    """A driver that never fetches, fails, clears or closes would prove nothing."""
    seen: Counter[str] = Counter()
    for seed in range(32):
        seen.update(drive_in_memory(SeededChoices(seed), STEPS).seen)
        if set(seen) >= WHAT_THE_DRIVER_DOES and min(seen[name] for name in OFTEN) >= 40:
            return
    pytest.fail(f"32 histories never reached {WHAT_THE_DRIVER_DOES - set(seen)}: {seen}")


@pytest.mark.slow
@pytest.mark.case(*CASES)
@settings(max_examples=60)
@given(data=st.data())
@pytest.mark.no_cover
def test_random_histories_that_shrink(data: st.DataObject) -> None:
    """Short ones: shrinking has to end before the time-out of a test does."""
    drive_in_memory(DrawnChoices(data), 25)
