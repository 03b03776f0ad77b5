"""vLLM's sleep mode, since 0.33: the memory of blocks goes away, and no copy may be under way in it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from vllm_small_engine import BLOCK, SmallEngine

Engines = Callable[..., SmallEngine]


def test_copies_are_over_before_memory_goes(engines: Engines, service: Any) -> None:
    engine = engines()
    (worker,) = engine.workers
    begun, go_on, over = threading.Event(), threading.Event(), threading.Event()
    side = worker._worker
    store = side._tensors.store

    def slow(*arguments: Any) -> Any:
        begun.set()
        assert go_on.wait(10)
        found = store(*arguments)
        over.set()
        return found

    side._tensors.store = slow
    engine.add(list(range(4 * BLOCK)))
    while not begun.is_set():
        engine.step()
    slept: list[bool] = []
    sleeper = threading.Thread(target=lambda: (worker.unregister_kv_caches(), slept.append(over.is_set())))
    sleeper.start()
    go_on.set()
    sleeper.join(10)
    assert slept == [True]
    engine.run()
    (again,) = engine.generate(list(range(4 * BLOCK)))
    assert again.external


def test_copy_that_does_not_end_is_given_up(engines: Engines, service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker leaves, so that it touches no block again, and the engine goes on without a cache."""
    engine = engines()
    (worker,) = engine.workers
    monkeypatch.setattr("hicache_vllm.worker.FENCE_SECONDS", 0.01)
    begun, go_on = threading.Event(), threading.Event()
    side = worker._worker
    side._tensors.mark = lambda: lambda: (begun.set(), go_on.wait(10))
    engine.add(list(range(4 * BLOCK)))
    while not begun.is_set():
        engine.step()
    monkeypatch.setattr("hicache_vllm.copier.CLOSE_SECONDS", 0.01)
    worker.unregister_kv_caches()
    assert worker._worker is not side
    go_on.set()
    engine.run()
    assert not engine.scheduler._scheduler._finder.usable
