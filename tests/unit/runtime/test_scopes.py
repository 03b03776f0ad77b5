"""Namespaces that requests bring along: found, bounded, and never mixed up."""

from __future__ import annotations

from typing import Any

import pytest

import hicache
from hicache.runtime import scopes
from hicache.storage.memory import MemoryBackend
from hicache.testing.engine import FakeEngine, prompt, small_namespace


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scopes, "MANY", 8)
    monkeypatch.setattr(scopes, "LOOKED_AT", 4)


def _known(cache: hicache.EmbeddedCache) -> int:
    return len(cache.parts.scopes.resolved())


def test_namespaces_that_hold_nothing_any_more_are_forgotten_and_found_again() -> None:
    with hicache.open(small_namespace(), device=11) as cache:
        engine = FakeEngine(cache)
        for user in range(100):  # each takes all of DEVICE, so the one before holds nothing
            engine.run(prompt(1, 41), salt=f"user {user}", tenant=str(user % 2))
        assert _known(cache) <= 9
        assert len(cache.parts.scopes._scopes) <= 9
        assert len(cache.parts.core.trees) == _known(cache)
        assert engine.run(prompt(1, 41), salt="user 99", tenant="1").device == 10
        assert engine.run(prompt(1, 41), salt="user 5", tenant="1").device == 0
        assert engine.run(prompt(1, 41), salt="user 5", tenant="1").device == 10
        cache.check()


def test_those_that_hold_pages_or_are_in_use_are_kept() -> None:
    with hicache.open(small_namespace(), device=400) as cache:
        engine = FakeEngine(cache)
        held = cache.request(prompt(2, 41), salt="held")
        for user in range(30):
            engine.run(prompt(1, 41), salt=str(user))
        assert _known(cache) == 32
        assert all(engine.run(prompt(1, 41), salt=str(user)).device == 10 for user in range(30))
        engine.prefill(held, prompt(2, 41))
        held.close()
        assert engine.run(prompt(2, 41), salt="held").device == 10
        cache.check()


def test_the_generation_of_one_that_was_forgotten_is_asked_for_again() -> None:
    storage = MemoryBackend()
    options: dict[str, Any] = {"device": 11, "host": 11, "stub_pages": 0, "prefetch": "wait_complete", "canary": False}
    with hicache.open(small_namespace(), storage=storage, **options) as cache:
        engine = FakeEngine(cache)
        engine.run(prompt(1, 41), salt="first")
        assert cache.flush()
        cache.clear(salt="first")
        for user in range(40):
            engine.run(prompt(1, 41), salt=str(user))
            assert cache.flush()
        derived = small_namespace().derive(salt="first")
        assert derived.digest not in {tree.namespace for tree in cache.parts.core.trees}
        assert engine.run(prompt(1, 41), salt="first").storage == 0
        tree = next(tree for tree in cache.parts.core.trees if tree.namespace == derived.digest)
        assert tree.generation == 1
        cache.check()
