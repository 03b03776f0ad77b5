"""Latencies by verb."""

from __future__ import annotations

from hicache.rpc.latency import BOUNDS, LatencyMeter


def test_each_answer_is_in_one_bucket() -> None:
    """A bound belongs to its own bucket, what is above all bounds to the last one; sums reconcile."""
    meter = LatencyMeter()
    for seconds in (*BOUNDS, 0.0, 99.0):
        meter.answered("match", seconds, failed=seconds == 99.0)
    meter.answered("echo", 0.5, failed=False)
    echo, match = meter.statistics()
    assert (echo.verb, match.verb) == ("echo", "match")
    assert match.buckets == (2, *[1] * (len(BOUNDS) - 1), 1)
    assert (match.answered, match.failed) == (len(BOUNDS) + 2, 1)
    assert match.seconds == sum(BOUNDS) + 99.0
    assert sum(match.buckets) == match.answered
