"""What the whole runtime did, under random histories, is repeated exactly by its recording."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.analytics.recording import read_recording, repeat
from hicache.core.config import EdgePolicy
from hicache.runtime.flight import FlightRecorder
from hicache.storage.memory import MemoryBackend
from hicache.testing.cachedriver import CacheDriver
from hicache.testing.choices import SeededChoices
from hicache.testing.hosteddriver import HostedDriver

pytestmark = pytest.mark.usefixtures("nothing_is_logged")

POLICIES = st.sampled_from(["write_through", "write_through_selective", "write_back", EdgePolicy(1, on_eviction=True)])


@pytest.mark.slow
@settings(max_examples=24)
@given(
    seed=st.integers(0, 2**32),
    device=st.sampled_from([6, 14, 24]),
    host=st.sampled_from([0, 6, 24]),
    policies=st.tuples(POLICIES, POLICIES),
    segment_bytes=st.sampled_from([4096, 1 << 20]),
)
def test_a_recording_of_a_cache_repeats_it(
    seed: int,
    device: int,
    host: int,
    policies: tuple[str | EdgePolicy, str | EdgePolicy],
    segment_bytes: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    driver = CacheDriver(
        SeededChoices(seed),
        device=device,
        host=host,
        storage=MemoryBackend() if host else None,
        write_policy=policies,
        flight_recorder=FlightRecorder(segment_bytes=segment_bytes),
    )
    path: Path = tmp_path_factory.mktemp("recordings") / "a.hcr"
    try:
        while driver.steps < 200:
            driver.step()
        while driver._life.over:
            driver.step()
        cache = driver._life.cache
        cache.dump_recording(path)
        result = repeat(read_recording([path]))
        assert (result.outcome, result.failure) == ("ok", "")
        core = cache.parts.core.statistics()
        for tier in ("device", "host"):
            here = getattr(core, tier)
            assert result.tiers[tier] == {name: getattr(here, name) for name in result.tiers[tier]}
        assert (result.requests, result.transfers) == (core.leases, core.transfers)
        driver.finish()
    except BaseException:
        driver.abandon()
        raise


@pytest.mark.slow
@settings(max_examples=20)
@given(
    seed=st.integers(0, 2**32),
    host=st.sampled_from([6, 24]),
    policy=POLICIES,
    segment_bytes=st.sampled_from([4096, 1 << 20]),
)
def test_a_recording_of_a_hosted_cache_repeats_it(
    seed: int, host: int, policy: str | EdgePolicy, segment_bytes: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    driver = HostedDriver(
        SeededChoices(seed),
        host=host,
        storage=MemoryBackend(),
        write_policy=policy,
        flight_recorder=FlightRecorder(segment_bytes=segment_bytes),
    )
    path: Path = tmp_path_factory.mktemp("recordings") / "a.hcr"
    try:
        while driver.steps < 200:
            driver.step()
        cache = driver._life.cache
        cache.dump_recording(path)
        result = repeat(read_recording([path]))
        assert (result.outcome, result.failure) == ("ok", "")
        core = cache.parts.core.statistics()
        assert result.tiers["host"] == {name: getattr(core.host, name) for name in result.tiers["host"]}
        assert (result.requests, result.transfers) == (core.leases, core.transfers)
        driver.finish()
    except BaseException:
        driver.abandon()
        raise
