"""Every token of a request that the engine takes up is local, a hit or missed for one reason; sums reconcile."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from vllm_services import service_config, small
from vllm_small_engine import BLOCK, SmallEngine

from hicache.core.identity import Adapter
from hicache.core.reasons import RequestCounts
from hicache.errors import ServiceUnavailable
from hicache.records import MissReason
from hicache.testing.clients import until
from hicache.testing.serving import ServedApp
from hicache_vllm.accounts import Account, Missed
from hicache_vllm.counters import Counters

Engines = Callable[..., SmallEngine]
PAGE = 2 * BLOCK


def summed(counts: dict[str, float], name: str) -> int:
    return int(sum(count for key, count in counts.items() if key.partition("/")[0] == name))


def reconciles(counts: dict[str, float]) -> bool:
    parts = sum(summed(counts, name) for name in ("local_tokens", "hit_tokens", "missed_tokens"))
    return summed(counts, "asked_tokens") == parts


@given(
    asked=st.integers(1, 400),
    local=st.integers(0, 50).map(lambda blocks: blocks * BLOCK),
    page=st.sampled_from([4, 8, 16]),
    found=st.integers(0, 50),
    storage=st.integers(0, 50),
    gone=st.integers(0, 400),
    audited=st.booleans(),
    missed=st.dictionaries(st.sampled_from(MissReason), st.integers(0, 50)),
    reason=st.none() | st.sampled_from(Missed),
)
@example(asked=64, local=60, page=16, found=2, storage=1, gone=0, audited=True, missed={}, reason=None)
def test_sums_reconcile_whatever_is_said(
    asked: int,
    local: int,
    page: int,
    found: int,
    storage: int,
    gone: int,
    audited: bool,
    missed: dict[MissReason, int],
    reason: Missed | None,
) -> None:
    """Also where the service counts other pages than this side: no token twice, none forgotten, none negative."""
    usable = (asked - 1) // page
    found = min(found, usable)
    counters = Counters()
    account = Account(counters, page=page, asked=asked, local=local)
    account.reason, account.found, account.gone = reason, found, gone
    if reason is None and found * page > local:
        account.audited = found * page - max((found - 1) * page, local) if audited else 0
        tokens = found * page - local - account.audited
        disk = min(storage * page, tokens)
        account.planned = {"host": tokens - disk, "disk": disk}
    account.close(RequestCounts(usable, host=found, missed=missed))
    counts = counters.take()
    assert reconciles(counts)
    assert all(count > 0 for count in counts.values())
    assert summed(counts, "asked_tokens") == asked
    assert summed(counts, "hit_tokens") == max(sum(account.planned.values()) - gone, 0)
    account.close(None)
    assert counters.take() == {}, "counted once"


def test_reasons_of_the_service_are_told_in_tokens() -> None:
    """Two of nine pages came; the engine had a part of the next itself, which was there and late."""
    counters = Counters()
    account = Account(counters, page=8, asked=77, local=20)
    account.found = 2
    account.close(RequestCounts(9, host=2, missed={MissReason.COLD: 4, MissReason.EVICTED: 2, MissReason.LATE: 1}))
    assert counters.take() == {
        "asked_tokens": 77,
        "local_tokens": 20,
        "missed_tokens/late": 4,
        "missed_tokens/evicted": 16,
        "missed_tokens/cold": 32,
        "missed_tokens/unaligned_tail": 5,
    }


def settled(engine: SmallEngine) -> dict[str, float]:
    """What was counted once every lease is given back."""
    engine.run()
    engine.scheduler.shutdown()
    engine._count(engine.scheduler)
    return engine.stats


@pytest.mark.usefixtures("service")
class TestReasons:
    """One request of 40 tokens, 4 pages and a tail of 8, for each reason."""

    tokens = small(200, 40)

    def counts(self, engine: SmallEngine, **fields: Any) -> dict[str, float]:
        """Of the request alone."""
        engine.generate(self.tokens, **fields)
        found = settled(engine)
        assert reconciles(found)
        return {name: count for name, count in found.items() if name.partition("_")[0] in ("hit", "missed", "asked")}

    @pytest.mark.parametrize(
        ("what", "reason"),
        [
            ("prompt_embeds", "bypassed"),
            ("skip_reading_prefix_cache", "bypassed"),
        ],
    )
    def test_request_that_takes_no_part(self, engines: Engines, what: str, reason: str) -> None:
        found = self.counts(engines(), **{what: True})
        assert found == {"asked_tokens": 40, f"missed_tokens/{reason}": 32, "missed_tokens/unaligned_tail": 8}

    def test_adapter_that_cannot_be_read(self, engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("hicache_vllm.adapters.Adapters.adapter", lambda *_: Adapter("sql"))
        lora = SimpleNamespace(lora_name="sql", lora_path="/nowhere", lora_int_id=1)
        assert self.counts(engines(), lora_request=lora)["missed_tokens/bypassed"] == 32

    def test_nothing_is_there(self, engines: Engines) -> None:
        found = self.counts(engines())
        assert found == {"asked_tokens": 40, "missed_tokens/cold": 32, "missed_tokens/unaligned_tail": 8}

    def test_all_is_there(self, engines: Engines) -> None:
        engines().generate(self.tokens)
        found = self.counts(engines())
        assert found == {"asked_tokens": 40, "hit_tokens/host": 32, "missed_tokens/unaligned_tail": 8}

    def test_last_page_is_audited(self, engines: Engines) -> None:
        engines().generate(self.tokens)
        found = self.counts(engines(audit_probability=1.0))
        assert (found["hit_tokens/host"], found["missed_tokens/audited"]) == (24, 8)

    def test_engine_only_stores(self, engines: Engines) -> None:
        changed = {"kv_transfer_config__is_kv_consumer": False}
        assert self.counts(engines(changed=changed))["missed_tokens/off"] == 32

    def test_configuration_that_cannot_work(self, engines: Engines) -> None:
        found = self.counts(engines(page_size=PAGE + 1))
        assert found == {"asked_tokens": 40, "missed_tokens/off": 39, "missed_tokens/unaligned_tail": 1}

    def test_too_many_questions(self, engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = engines()
        monkeypatch.setattr(engine.scheduler._scheduler._tasks, "begin", lambda _: False)
        engine.generate(self.tokens)
        assert engine.stats["missed_tokens/busy"] == 32
        assert reconciles(engine.stats)

    def test_question_that_fails(self, engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
        def fails(*_: Any, **__: Any) -> Any:
            raise ServiceUnavailable("deliberately")

        engine = engines()
        monkeypatch.setattr(engine.scheduler._cache, "request", fails)
        assert self.counts(engine)["missed_tokens/failed"] == 32

    def test_lease_that_is_lost_meanwhile(self, engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
        engines().generate(self.tokens)
        monkeypatch.setattr("hicache_vllm.lookups.Lookup.lost", True)
        assert self.counts(engines())["missed_tokens/lost"] == 32

    def test_cache_that_is_reset_when_pages_are_promised(
        self, engines: Engines, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engines().generate(self.tokens)
        engine = engines()
        ask = engine.scheduler.get_num_new_matched_tokens

        def asked(request: Any, local: int) -> Any:
            found = ask(request, local)
            if found[0]:
                engine.scheduler.reset_cache()
            return found

        monkeypatch.setattr(engine.scheduler, "get_num_new_matched_tokens", asked)
        found = self.counts(engine)
        assert found["missed_tokens/lost"] == 32
        assert "hit_tokens/host" not in found

    @pytest.mark.case("STAT-6")
    def test_page_that_does_not_come(self, engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
        """Three of four pages come: the engine has 24 tokens of us, and asks no more for this request."""
        engines().generate(self.tokens)
        engine = engines()
        read = "hicache.rpc.client.group.JoinedRequest.read_into"
        monkeypatch.setattr(read, lambda _, buffers, first=0: min(len(buffers), 3))
        monkeypatch.setattr(engine.workers[0]._worker._tensors, "load", lambda *_: None)
        monkeypatch.setattr(engine, "_compute", lambda *_: ())  # nothing was really read
        found = self.counts(engine)
        assert (found["hit_tokens/host"], found["missed_tokens/lost"]) == (24, 8)


def test_service_that_is_away(engines: Engines) -> None:
    engine = engines()
    engine.generate(small(201, 40))
    counts = settled(engine)
    assert counts["missed_tokens/away"] == 32
    assert reconciles(counts)


@pytest.mark.case("STAT-6")
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_sums_reconcile_over_random_histories(engines: Engines, folder: Path, seed: int) -> None:
    """Prompts that share prefixes, preemptions, aborts, chunks, a pool that is small, and a service that comes and
    goes: at the end no token is missing, and hits are what the engine was given and really got."""
    draw = random.Random(seed)
    engine = engines(blocks=400, chunk=draw.choice([20, 1000]), deadline=1.0)
    taken_up = watched(engine)
    stems = [small(300 + number, 60) for number in range(3)]
    service = ServedApp(service_config(folder, host=40 * 4096))
    for _ in range(2):
        with service:
            until(lambda: all(one._cache.connected for one in (engine.scheduler, *engine.workers)))
            for _ in range(4):
                requests = [
                    engine.add(
                        draw.choice(stems)[: draw.randint(1, 60)] + small(draw.randint(0, 9), draw.randint(0, 30))
                    )
                    for _ in range(draw.randint(1, 4))
                ]
                for _ in range(draw.randint(1, 6)):
                    engine.step()
                for request in requests:
                    if draw.random() < 0.2 and request in engine._running:
                        engine.preempt(request)
                    elif draw.random() < 0.1 and request in engine._running:
                        engine.abort(request)
                engine.run()
            engine.add(draw.choice(stems))
            engine.step()
        engine.run()
    counts = settled(engine)
    assert summed(counts, "asked_tokens") == sum(taken_up)
    assert summed(counts, "hit_tokens") == engine.external - engine.failed * BLOCK > 0
    assert reconciles(counts)


def watched(engine: SmallEngine) -> list[int]:
    """Notes the tokens of every request that the engine takes up."""
    taken_up: list[int] = []
    ask = engine.scheduler.get_num_new_matched_tokens

    def asked(request: Any, local: int) -> Any:
        tokens, apart = ask(request, local)
        if tokens is not None:
            taken_up.append(request.num_tokens)
        return tokens, apart

    engine.scheduler.get_num_new_matched_tokens = asked
    return taken_up
