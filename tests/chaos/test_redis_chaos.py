"""A replay on Redis while everything goes wrong, in short; `make chaos` has the long one.

Pages of 256 KiB, every byte checked, on one server, a cluster of three, behind a sentinel and by mutual TLS.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from hicache.analytics.traces import open_trace
from hicache.storage.breaker import BreakerPolicy
from hicache.testing import redischaos
from hicache.testing.chaos import ChaosOptions, ChaosReport, mixed, replay_at
from hicache.testing.redischaos import Place
from hicache.testing.servers import binaries, has_tls

pytestmark = [pytest.mark.chaos, pytest.mark.redis, pytest.mark.slow, pytest.mark.alone]

LIMITS = "&timeout=0.5&connect_timeout=0.5&deadline=1"
OPTIONS = ChaosOptions(
    requests=100,
    request_deadline=0.4,
    call_deadline=1.0,
    probe_seconds=1.0,  # on a busy machine
    # Not below the longest pause that a node can come to in so short a time: see hicache_redis.pool.
    breaker=BreakerPolicy(failures=3, interval=1.5, timeout=60),
)
MAXMEMORY = 1 << 30
HOLD = 0.4
FREEZE = 1.2
OVER_TLS = ("killed and restarted", "frozen", "cut after forwarding", "bits flipped")


def replayed(making: AbstractContextManager[Place], trace: Path, *, only: tuple[str, ...] = ()) -> ChaosReport:
    requests = mixed(list(open_trace([trace])), hot=45)
    with making as place:
        steps = [step for step in place.steps if not only or step.name in only]
        report = replay_at(place.url + LIMITS, OPTIONS, requests, steps)
        assert [step.name for step in report.steps] == [step.name for step in steps]
    return report


def kept(report: ChaosReport, *, quiet: tuple[str, ...] = ()) -> None:
    """All that was promised; and the trouble did strike, but for steps that fail nothing."""
    assert report.broken() == []
    assert report.result.pages_verified > report.result.pages_storage > 0
    assert {step.name for step in report.steps if not step.failed} <= set(quiet)


# What they take away is a miss, found elsewhere, or opened again; "connections killed" itself fails if there are none.
QUIET = ("FLUSHALL", "full, allkeys-lru", "slots move", "connections killed")


@pytest.mark.case("REDIS-1", "REDIS-2", "REDIS-4", "REDIS-6", "REDIS-7", "FAIL-1", "FAIL-3", "LEAK-2")
def test_one_server(small_trace: Path, tmp_path: Path) -> None:
    binary = next(iter(binaries().values()))
    making = redischaos.single_place(binary, tmp_path / "place", maxmemory=MAXMEMORY, hold=HOLD, freeze=FREEZE)
    report = replayed(making, small_trace)
    assert len(report.steps) == 11
    kept(report, quiet=QUIET)


@pytest.mark.case("REDIS-3", "REDIS-4", "REDIS-7")
def test_a_cluster_of_three(small_trace: Path, tmp_path: Path) -> None:
    binary = list(binaries().values())[-1]
    making = redischaos.cluster_place(binary, tmp_path / "place", maxmemory=MAXMEMORY, hold=HOLD, freeze=FREEZE)
    report = replayed(making, small_trace)
    assert len(report.steps) == 14
    kept(report, quiet=QUIET)


@pytest.mark.case("REDIS-7")
def test_a_failover(small_trace: Path, tmp_path: Path) -> None:
    binary = next(iter(binaries().values()))
    kept(replayed(redischaos.sentinel_place(binary, tmp_path / "place", maxmemory=MAXMEMORY), small_trace))


@pytest.mark.redis_tls
@pytest.mark.case("REDIS-6", "REDIS-7")
def test_mutual_tls(small_trace: Path, tmp_path: Path) -> None:
    binary = next(binary for binary in binaries().values() if has_tls(binary))
    making = redischaos.tls_place(binary, tmp_path / "place", maxmemory=MAXMEMORY, hold=HOLD, freeze=FREEZE)
    kept(replayed(making, small_trace, only=OVER_TLS), quiet=QUIET)
