"""The core under random histories: completions in any order, failures, cancels, clears, splits and extensions.

Every step is followed by all checks. The driver knows which bytes lie in which slot, so a page read too early, freed
too early, shared or published under another hash fails at the step where it happens.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.core.config import CoreConfig, EdgePolicy
from hicache.testing.choices import DrawnChoices, SeededChoices
from hicache.testing.coredriver import CoreDriver

POLICIES = st.sampled_from([EdgePolicy(1), EdgePolicy(2), EdgePolicy(None, on_eviction=True)])
CONFIGS = st.builds(
    CoreConfig,
    device_pages=st.sampled_from([8, 16, 28]),
    host_pages=st.sampled_from([6, 14, 28]),
    storage=st.booleans(),
    eviction=st.sampled_from(["lru", "lfu", "slru", "priority"]),
    device_to_host=POLICIES,
    host_to_storage=POLICIES,
    fetch_pages=st.sampled_from([2, 3, 32]),
    write_pages=st.sampled_from([None, 1, 4]),
    reserve=st.just(0.3),
    touch_seconds=st.sampled_from([None, 1, 3]),
    stub_pages=st.sampled_from([0, 5, 1000]),
    ghost_pages=st.sampled_from([0, 20]),
    span_bytes=st.sampled_from([2, 6, 10, 1000]),
    events=st.booleans(),
)


HOSTED = st.builds(
    CoreConfig,
    device_pages=st.just(0),
    host_pages=st.sampled_from([8, 14, 28]),
    storage=st.sampled_from([True, True, False]),
    eviction=st.sampled_from(["lru", "lfu", "slru", "priority"]),
    host_to_storage=POLICIES,
    fetch_pages=st.sampled_from([2, 3, 32]),
    write_pages=st.sampled_from([None, 1, 4]),
    reserve=st.just(0.3),
    touch_seconds=st.sampled_from([None, 1, 3]),
    stub_pages=st.sampled_from([0, 5, 1000]),
    ghost_pages=st.sampled_from([0, 20]),
    span_bytes=st.sampled_from([8, 24, 40, 1000]),
    events=st.booleans(),
)
"""HOST is the top tier; pages are named by hashes of 8 bytes."""


def run(driver: CoreDriver, steps: int) -> None:
    for _ in range(steps):
        driver.step()
        driver.check()
    driver.finish()


@pytest.mark.slow
@pytest.mark.case("LEAK-3", "RACE-1", "RACE-3", "RACE-7", "FAIL-2", "EVICT-3", "STAT-3", "STAT-4")
@settings(max_examples=80)
@given(config=CONFIGS, data=st.data())
@pytest.mark.no_cover
def test_random_histories_that_shrink(config, data):
    run(CoreDriver(DrawnChoices(data), config), 40)


@pytest.mark.slow
@pytest.mark.case("LEAK-3", "RACE-4")
@pytest.mark.parametrize("part", range(10))  # each well under the time that the slowest machine gives one test
@settings(max_examples=20)
@given(config=CONFIGS, seed=st.integers(0, 2**32))
@pytest.mark.no_cover  # steps by the ten thousand: the others reach all there is
def test_long_random_histories(part, config, seed):
    run(CoreDriver(SeededChoices(seed * 10 + part), config), 300)


@pytest.mark.slow
@pytest.mark.case("LEAK-3", "RACE-1", "RACE-3", "RACE-4", "RACE-7", "FAIL-2", "EVICT-3", "STAT-3", "STAT-4")
@pytest.mark.parametrize("part", range(2))
@settings(max_examples=40)
@given(config=HOSTED, seed=st.integers(0, 2**32))
@pytest.mark.no_cover  # steps by the ten thousand: the others reach all there is
def test_long_random_histories_where_host_is_the_top_tier(part, config, seed):
    """24,000 steps in the profile of the checks: the engines own DEVICE, and all verbs work on HOST."""
    run(CoreDriver(SeededChoices(seed * 2 + part), config, hashes=True), 300)


@pytest.mark.slow
@settings(max_examples=80)
@given(config=HOSTED, data=st.data())
@pytest.mark.no_cover
def test_random_histories_where_host_is_the_top_tier_that_shrink(config, data):
    run(CoreDriver(DrawnChoices(data), config, hashes=True), 40)


def test_the_driver_reaches_everything_where_host_is_the_top_tier():
    config = CoreConfig(
        device_pages=0, host_pages=14, storage=True, reserve=0.3, fetch_pages=2, touch_seconds=1, events=True
    )
    seen: set[str] = set()
    for seed in range(16):
        driver = CoreDriver(SeededChoices(seed), config, hashes=True)
        run(driver, 300)
        seen |= set(driver.seen)
    assert seen >= {
        "FETCH", "PUT", "TOUCH", "dropped", "writer", "cancelled", "clear", "handed over", "interest withdrawn",
        "out of slots", "stored page lost", "detached", "attached", "declined", "unanswered",
    }  # fmt: skip
    assert seen.isdisjoint({"LOAD", "WRITE_BACK"})


def test_the_driver_reaches_everything():
    """A driver that never loads, fetches, cancels or clears would prove nothing."""
    config = CoreConfig(
        device_pages=16, host_pages=14, storage=True, reserve=0.3, fetch_pages=2, touch_seconds=1, events=True
    )
    seen: set[str] = set()
    for seed in range(8):
        driver = CoreDriver(SeededChoices(seed), config)
        run(driver, 300)
        seen |= set(driver.seen)
    assert seen >= {
        "WRITE_BACK",
        "LOAD",
        "FETCH",
        "PUT",
        "TOUCH",
        "dropped",
        "writer",
        "cancelled",
        "clear",
        "handed over",
        "interest withdrawn",
        "given up",
        "out of slots",
        "stored page lost",
        "detached",
        "attached",
        "declined",
        "unanswered",
    }
