"""Engines of vLLM with the tiny model, and what they say without a connector; `make engines` runs these tests."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from vllm_engine import Engine

PATIENT = {"serve": ("--set", "policies.prefetch=wait_complete")}
"""For private services: what is computable is a hit where storage takes longer than a prompt is worth, too."""


def prompt_of(number: int, tokens: int) -> list[int]:
    """A prompt of its own: no two of different numbers share a first page."""
    draw = random.Random(number)
    return [draw.randrange(3, 800) for _ in range(tokens)]


def settled(engine: Engine) -> None:
    """Let the engine forget its own blocks, once it keeps none for a store."""
    end = time.monotonic() + 30.0
    while not engine.reset():
        assert time.monotonic() < end, "the engine keeps blocks"
        time.sleep(0.05)


@pytest.fixture(scope="session")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., list[int]]]:
    """What an engine without a connector generates, and without a prefix cache of its own."""
    log = tmp_path_factory.mktemp("plain") / "engine.log"
    with Engine(None, log, enable_prefix_caching=False) as engine:

        @cache
        def answer(prompt: tuple[int, ...], tokens: int) -> list[int]:
            return engine.generate(list(prompt), tokens=tokens)[0].new

        yield lambda prompt, tokens=16: answer(tuple(prompt), tokens)


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    """Makes engines, and ends those that still run; logs are numbered."""
    made: list[Engine] = []

    def make(extra: dict[str, Any] | None, **options: Any) -> Engine:
        if extra is not None and "host" in extra:
            extra = PATIENT | extra
        made.append(Engine(extra, tmp_path / f"engine-{len(made)}.log", **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def storage(tmp_path: Path) -> str:
    return f"file://{tmp_path}/kv?capacity=256MiB"
