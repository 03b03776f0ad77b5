"""A request may go on to bring pages up only to see how long that takes. What it was given stays what it was."""

from __future__ import annotations

from threading import Condition

import pytest

from hicache.memory.writer import READY
from hicache.records import Tier
from hicache.testing.cachelife import NAMESPACE, Life
from hicache.testing.truth import Truth

TOKENS = list(range(8))
PAGES = len(TOKENS) // NAMESPACE.page_size


def evict(life: Life) -> None:
    life.settle()
    with life.parts.reducer.lock:
        assert life.core.evict(Tier.DEVICE, PAGES) == PAGES


@pytest.mark.case("RACE-3")
def test_pages_that_come_after_load_has_answered_do_not_move_the_requests_own() -> None:
    """Else the engine's first own page would land where the cache expects the second, under the second's name."""

    def slow_copies(condition: Condition, timeout: float) -> None:
        condition.release()
        life.clock.advance(50.0)
        life.pool.copies.end_all()
        condition.acquire()

    options = {"prefill_tokens_per_second": 1e6}
    truth = Truth(NAMESPACE)
    life = Life(None, truth, device=12, host=8, meanwhile=lambda: None, on_wait=slow_copies, options=options)
    with life.cache as cache:
        with cache.request(TOKENS, logits=False) as request:
            request.allocate()
            request.commit(ready=READY)
        life.pool.copies.end_all()
        evict(life)
        with cache.request(TOKENS, logits=False) as request:
            assert len(request.load()) == PAGES  # took 50 s: from now on computing is known to be faster
        evict(life)
        life.clock.advance(60.0)
        with cache.request(TOKENS, logits=False) as request:
            assert len(request.load()) == 0
            assert life.pool.copies.pending, "nothing was begun to see how long it takes"
            life.pool.copies.end_all()
            life.settle()
            assert len(request.load()) == 0
            assert len(request.allocate()) == PAGES
        assert request.counts.host == 0
        cache.check()
        assert cache.statistics().internal_errors == 0
