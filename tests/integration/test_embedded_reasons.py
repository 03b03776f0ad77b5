"""A history whose misses are known by reason, for the reasons that a simulation cannot have (see `hicache synth`)."""

from __future__ import annotations

import hicache
from hicache.records import MissReason
from hicache.testing.engine import FakeEngine, prompt, small_namespace

PAGES, TOKENS = 4, 17  # of each prompt: whole pages that may be taken, and one token behind them


def test_every_reason_is_counted_exactly() -> None:
    """Room for two prompts and a tail: the third evicts the first; then another tenant, a clear, an unknown adapter."""
    first, second, third = (prompt(seed, TOKENS) for seed in range(3))
    with hicache.open(small_namespace(), device=2 * PAGES + 1) as cache:
        engine = FakeEngine(cache)
        found = [engine.run(tokens).missed for tokens in (first, second, third, first)]
        found.append(FakeEngine(cache, variant="tenant").run(first, tenant="another").missed)
        cache.clear()
        found.append(engine.run(first).missed)
        assert engine.run(first).missed == {}
        with cache.request(first, adapter=hicache.Adapter("without a digest")) as request:
            engine.compute(first, request.allocate(), first=len(request.load()))
            request.commit()
        found.append(request.counts.missed)
        reasons = ("cold", "cold", "cold", "evicted", "other_namespace", "expired", "bypassed")
        assert found == [{MissReason(reason): PAGES} for reason in reasons]
        statistics = cache.statistics()
        assert statistics.pages.missed == {MissReason(r): reasons.count(r) * PAGES for r in dict.fromkeys(reasons)}
        # in tokens the tails are missed too, of all eight requests
        assert statistics.tokens.missed[MissReason.UNALIGNED_TAIL] == len(reasons) + 1
        assert statistics.tokens.asked == TOKENS * (len(reasons) + 1)
        hits = statistics.tokens.device + statistics.tokens.host + statistics.tokens.storage
        assert statistics.tokens.asked == hits + sum(statistics.tokens.missed.values())
        cache.check()
