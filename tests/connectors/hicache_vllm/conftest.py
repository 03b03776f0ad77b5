"""A small engine with the real connector, and a service of its own on a thread."""

from __future__ import annotations

import importlib
import itertools
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from hicache.testing.serving import ServedApp

sys.path.insert(0, str(Path(__file__).parent))  # the stand-ins beside this file
from vllm_cuda import EngineCuda, on_gpu
from vllm_recorded import RELEASE, FullAttentionSpec, Role, cache_config, modules, vllm_config
from vllm_services import service_config
from vllm_small_engine import BLOCK, DTYPE, HEADS, LAYERS, WIDTH, SmallEngine, kernel

OURS = ("hicache_vllm.connector", "hicache_vllm.wire", "hicache_vllm.metrics")


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Loads the connector's module beside a release of vLLM, with these further methods."""

    def load(more: dict[str, str] | None = None, *, release: str = RELEASE) -> Any:
        monkeypatch.delitem(sys.modules, "vllm.v1.metrics.cache_hit_source", raising=False)  # not every release has it
        for name, module in modules(more, kernel=kernel, release=release).items():
            monkeypatch.setitem(sys.modules, name, module)
        for name in OURS:
            monkeypatch.delitem(sys.modules, name, raising=False)
        module = importlib.import_module(OURS[0])
        for name in OURS:  # what was made of these modules goes with them
            monkeypatch.setitem(sys.modules, name, sys.modules[name])
        monkeypatch.setattr("hicache_vllm.compat.engine_version", lambda: release)
        return module

    return load


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: sockets have at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="hc") as name:
        yield Path(name)


@pytest.fixture
def service(folder: Path) -> Iterator[ServedApp]:
    """A service whose pool holds 64 pages of the small engine, with a folder as storage."""
    with ServedApp(service_config(folder)) as served:
        yield served


@pytest.fixture
def spec() -> FullAttentionSpec:
    return FullAttentionSpec(heads=HEADS, width=WIDTH, block=BLOCK, dtype=DTYPE)


@pytest.fixture
def engines(install: Callable[..., Any], folder: Path) -> Iterator[Callable[..., SmallEngine]]:
    """Makes engines; their settings are those of the connector, `tp` its ranks."""
    numbers = itertools.count(1)
    with ExitStack() as stack:

        def make(*, tp: int = 1, blocks: int = 64, chunk: int = 1000, changed: Any = None, **extra: Any) -> SmallEngine:
            connector = install().HiCacheConnector
            settings = {"address": f"unix://{folder}/service.sock", "page_size": 2 * BLOCK, "deadline": 5.0} | extra
            settings = {name: value for name, value in settings.items() if value is not None}
            own = FullAttentionSpec(heads=HEADS // tp, width=WIDTH, block=BLOCK, dtype=DTYPE)
            made = []
            name = f"engine-{next(numbers)}"
            for rank in (*range(tp), None):
                config = vllm_config(settings, own, layers=LAYERS, tp=tp, **(changed or {}))
                config.parallel_config.rank = rank or 0
                config.kv_transfer_config.engine_id = name
                role = Role.SCHEDULER if rank is None else Role.WORKER
                made.append(connector(config, role, cache_config(own)))
                stack.callback(made[-1].shutdown)
            *workers, scheduler = made
            engine = SmallEngine(scheduler, workers, blocks=blocks, chunk=chunk)
            for one in made:
                if one._cache is not None and (folder / "service.sock").exists():
                    one._cache.wait_connected(5.0)
            return engine

        yield make


@pytest.fixture
def cudas(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[EngineCuda]]:
    """The devices of the engines that are made from now on, a worker each."""
    made: list[EngineCuda] = []
    monkeypatch.setattr("hicache_vllm.start.made_of", lambda layers, _, form: on_gpu(made, layers, form))
    yield made
    for cuda in made:
        cuda.let_go()
        assert not cuda.allocated
