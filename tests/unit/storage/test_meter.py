"""The meter's buckets: each call is in exactly one, by what it took."""

from __future__ import annotations

from hicache.storage.memory import MemoryBackend
from hicache.storage.wrappers import CALL_BOUNDS, MeteredBackend


def test_calls_are_counted_by_what_they_took() -> None:
    """A bound belongs to its own bucket, and what is above all of them to the last."""
    took = [0.0, CALL_BOUNDS[0], CALL_BOUNDS[0] * 1.01, CALL_BOUNDS[-1], CALL_BOUNDS[-1] * 2]
    times = iter([moment for seconds in took for moment in (0.0, seconds)])
    backend = MeteredBackend(MemoryBackend(), now=lambda: next(times))
    for _ in took:
        backend.contains([])
    buckets = backend.verbs()["contains"].buckets
    assert len(buckets) == len(CALL_BOUNDS) + 1
    assert (buckets[0], buckets[1], buckets[-2], buckets[-1], sum(buckets)) == (2, 1, 1, 1, len(took))
