"""The connector under an engine that checks every key and value: hits, sharing, preemption, ends, ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_services import flushed, small
from vllm_small_engine import SmallEngine

from hicache.testing.clients import until
from hicache.testing.serving import ServedApp

HALF = 192 * 1024
"""Bytes: topologies have pools of their own, and share what is in storage."""

Engines = Callable[..., SmallEngine]

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("service")]


@pytest.mark.case("RACE-5")
@pytest.mark.parametrize("load", ["async", "sync"])
def test_pages_come_back(engines: Engines, load: str) -> None:
    """43 tokens are 5 pages of 8; the last token is always computed, so 40 tokens come back, bit for bit."""
    engine = engines(load=load)
    tokens = small(1, 43)
    engine.generate(tokens)
    assert (engine.external, engine.failed) == (0, 0)
    engine.generate(tokens)
    assert (engine.external, engine.failed) == (40, 0)
    assert engine.sources == {"host": 40}
    # The request is counted once the service has said what it was, which may be after its last step.
    until(lambda: engine.stepped() and engine.stats.get("hit_tokens/host") == 40, "the account of the second request")
    assert engine.free_blocks == 63


def test_lengths_at_edges(engines: Engines) -> None:
    """The last token is always computed, so an exact multiple gives one page less; below a page there is none."""
    engine = engines()
    for tokens, usable in ((8, 0), (9, 8), (16, 8), (17, 16), (7, 0), (1, 0)):
        before = engine.external
        engine.generate(small(200 + tokens, tokens), new=1)
        engine.generate(small(200 + tokens, tokens), new=1)
        assert engine.external - before == usable, tokens


def test_answers_are_stored_too(engines: Engines) -> None:
    engine = engines()
    (first,) = engine.generate(small(3, 10), new=15)
    engine.generate(first.all_token_ids)
    assert engine.external == 24  # 25 tokens, of which the last was never computed


def test_other_engines_find_the_pages(engines: Engines) -> None:
    """A second engine over the same service, and one of another salt."""
    tokens = small(4, 40)
    engines().generate(tokens)
    other = engines()
    other.generate(tokens)
    assert other.external == 32
    other.generate(tokens, cache_salt="mine")
    assert other.external == 32
    other.generate(tokens, cache_salt="mine")
    assert other.external == 64


def test_identical_requests_load_once(engines: Engines) -> None:
    """While one loads, the others wait for it; this engine has no cache of its own, so they load behind it."""
    engine = engines()
    tokens = small(5, 40)
    engine.generate(tokens)
    engine.generate(tokens, tokens, tokens)
    assert engine.external == 3 * 32
    assert engine.asked_again


def test_chunks_are_stored_as_they_come(engines: Engines) -> None:
    engine = engines(chunk=10)
    tokens = small(6, 90)
    engine.generate(tokens, small(7, 50))
    engine.generate(tokens)
    assert engine.external == 88


@pytest.mark.case("RACE-1")
def test_preempted_blocks_are_not_stored_and_not_read_late(engines: Engines) -> None:
    """Blocks are overwritten the moment they are taken away: whoever read them later would store what is wrong."""
    engine = engines(chunk=16)
    requests = [engine.add(small(10 + number, 60), new=5) for number in range(3)]
    for turn in range(12):
        engine.step()
        if turn % 2 and requests[turn % 3] in engine._running:
            engine.preempt(requests[turn % 3])
    engine.run()
    assert engine.failed == 0
    fresh = engines()
    fresh.generate(*(small(10 + number, 60) for number in range(3)))
    assert fresh.external == 3 * 56


def test_requests_that_are_aborted_give_everything_back(engines: Engines, service: ServedApp) -> None:
    """Before they are looked up, while they load, while they run."""
    engine = engines()
    tokens = small(20, 60)
    engine.generate(tokens)
    for steps in range(6):
        request = engine.add(tokens)
        for _ in range(steps):
            engine.step()
        if request.num_tokens < request.wanted:
            engine.abort(request)
        engine.run()
    engine.scheduler.shutdown()
    leases = service.do(service.app.service.leases.statistics)
    assert (leases.open, engine.free_blocks) == (0, 63)


@pytest.mark.case("PLUG-4")
def test_ranks_share_pages_with_one_that_has_all_heads(engines: Engines, service: ServedApp) -> None:
    """Pages written at TP=1 are read at TP=2 and the other way round, where both agree on a head group."""
    one, two = engines(head_group=1, pool_size=HALF), engines(tp=2, head_group=1, pool_size=HALF)
    two.generate(small(30, 40))
    flushed(service)
    one.generate(small(30, 40), small(31, 50))
    flushed(service)
    two.generate(small(31, 50))
    assert (one.sources, two.sources) == ({"disk": 32}, {"disk": 48})
    assert (one.failed, two.failed) == (0, 0)


def test_ranks_that_did_not_agree_miss(engines: Engines, service: ServedApp) -> None:
    engines(tp=2, pool_size=HALF).generate(small(32, 40))
    flushed(service)
    one = engines(pool_size=HALF)
    one.generate(small(32, 40))
    assert one.external == 0


def test_audited_pages_are_compared(engines: Engines) -> None:
    """Each hit is a page shorter, and that page is equal in all bits."""
    engine = engines(audit_probability=1.0)
    for _ in range(3):
        engine.generate(small(40, 40))
    assert engine.external == 2 * 24
    assert engine.stats["audited_pages/equal"] == 2


def test_roles_read_or_write_only(engines: Engines) -> None:
    tokens = small(50, 40)
    reader = engines(changed={"kv_transfer_config__is_kv_producer": False})
    reader.generate(tokens)
    reader.generate(tokens)
    assert reader.external == 0
    writer = engines(changed={"kv_transfer_config__is_kv_consumer": False})
    writer.generate(tokens)
    writer.generate(tokens)
    assert writer.external == 0
    reader.generate(tokens)
    assert reader.external == 32


def test_cleared_pages_are_forgotten(engines: Engines) -> None:
    engine = engines()
    tokens = small(60, 40)
    engine.generate(tokens)
    engine.generate(tokens, cache_salt="s")
    assert engine.scheduler.reset_cache() is True
    engine.generate(tokens)
    engine.generate(tokens, cache_salt="s")
    assert engine.external == 0
    engine.generate(tokens)
    assert engine.external == 32


def test_embeddings_go_past_the_cache(engines: Engines) -> None:
    engine = engines()
    tokens = small(61, 40)
    engine.generate(tokens)
    engine.generate(tokens, prompt_embeds=object())
    assert engine.external == 0
    engine.generate(tokens, skip_reading_prefix_cache=True)
    assert engine.external == 0


def test_publisher_hears_which_pages_are_there(engines: Engines) -> None:
    """As vLLM's own events, with tokens and the page before, once for each tier."""
    engine = engines(changed={"kv_events_config": SimpleNamespace(enable_kv_cache_events=True)})
    tokens = small(70, 20)
    engine.generate(tokens, cache_salt="s")
    found: list[Any] = []

    def heard() -> bool:
        found.extend(engine.scheduler.take_events())
        return {event.medium for event in found} == {"CPU", "FS"}

    until(heard)
    first = next(event for event in found if event.medium == "CPU")
    assert (first.token_ids[:8], first.block_size, first.parent_block_hash) == (tokens[:8], 8, None)
    assert first.extra_keys[0] == ("s",)
    assert engine.scheduler.reset_cache()
    until(lambda: bool(found.extend(engine.scheduler.take_events())) or not hasattr(found[-1], "token_ids"))


def test_images_and_adapters_are_in_the_names(engines: Engines, tmp_path: Path) -> None:
    """The same tokens with another image, or another adapter, are other pages; files of adapters are read once."""
    engine = engines(changed={"model_config__is_multimodal_model": True})
    tokens = small(71, 40)

    def image(name: str) -> list[Any]:
        return [SimpleNamespace(identifier=name, mm_position=SimpleNamespace(offset=3, length=10))]

    (tmp_path / "adapter_config.json").write_text("{}")
    lora = SimpleNamespace(lora_name="sql", lora_path=str(tmp_path))
    unread = SimpleNamespace(lora_name="sql", lora_path="/nowhere")
    for fields, found in (
        ({"mm_features": image("cat")}, 32),
        ({"mm_features": image("dog")}, 32),
        ({"lora_request": lora}, 32),
        ({"lora_request": unread}, 0),
        ({}, 32),
    ):
        before = engine.external
        engine.generate(tokens, **fields)
        assert engine.external == before
        engine.generate(tokens, **fields)
        assert engine.external - before == found


@pytest.mark.case("RACE-7")
def test_preemption_in_every_step_of_a_store(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are taken away while slots are asked for, when they are there, and while a worker reads: no wrong page."""
    engine = engines(chunk=24)
    gate = threading.Event()
    store = engine.workers[0]._worker._tensors.store
    monkeypatch.setattr(engine.workers[0]._worker._tensors, "store", lambda *given: (gate.wait(0.01), store(*given))[1])
    for number, steps in enumerate((1, 2, 3, 4, 5, 6)):
        request = engine.add(small(80 + number, 60), new=4)
        for _ in range(steps):
            engine.step()
        if request in engine._running:
            engine.preempt(request)
        engine.run()
        assert engine.free_blocks == 63
    gate.set()
    fresh = engines(blocks=200)
    fresh.generate(*(small(80 + number, 60) for number in range(6)))
    assert (fresh.external, fresh.failed) == (6 * 56, 0)
