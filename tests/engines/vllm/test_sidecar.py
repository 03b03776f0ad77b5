"""A real engine and a service in a process of its own that dies, comes late, freezes, fills up or is damaged.

In each case the engine lives, its tokens are as without a cache, and a request waits no longer than its budget.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import prompt_of
from vllm_engine import PAGE, Engine

from hicache.rpc.address import Address
from hicache.rpc.client.admin import AdminClient
from hicache.rpc.client.options import Secrets

Engines = Callable[..., Engine]
Expected = Callable[..., list[int]]

BUDGET = 1.0
PATIENCE = 30.0
PLUGIN = Path(__file__).parent / "plugin"
"""Has `frozen://`, a folder whose reads hang while a FIFO lies at `gate`."""


class Service:
    """`hicache serve` in a folder of its own; may be started again after it was killed."""

    def __init__(self, folder: Path, *, host: str = "64MiB", storage: str | None = None) -> None:
        self.address = f"unix://{folder}/service.sock"
        self.gate = folder / "gate"
        self._command = [sys.executable, "-m", "hicache", "serve", "--listen", self.address, "--host", host]
        self._command += ["--storage", storage] if storage else []
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        plugin = {"PYTHONPATH": str(PLUGIN), "FROZEN_GATE": str(self.gate)}
        self.process = subprocess.Popen(self._command, stdout=subprocess.PIPE, env=os.environ | plugin)
        assert self.process.stdout is not None
        assert self.process.stdout.readline().startswith(b"serving")

    def send(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def stop(self, number: int = signal.SIGTERM) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.send_signal(number)
            self.process.communicate(timeout=PATIENCE)

    def kill(self) -> None:
        self.stop(signal.SIGKILL)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: sockets have at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="hc") as name:
        yield Path(name)


@pytest.fixture
def service(folder: Path, storage: str) -> Iterator[Service]:
    made = Service(folder, storage=storage)
    yield made
    made.kill()


def connected(engine: Engine, wanted: bool) -> None:
    """Wait until both sides of the engine are with the service, or without, and its metrics say so."""
    end = time.monotonic() + PATIENCE
    while engine.ask(do="connected") != [wanted, wanted]:
        assert time.monotonic() < end, f"the engine is not {'connected' if wanted else 'without a service'}"
        time.sleep(0.01)
    engine.generate(prompt_of(9000, 5), tokens=1)
    assert bool(engine.metrics()["vllm:hicache_connected"]) is wanted


def missed(engine: Engine) -> Counter[str]:
    """Tokens that did not come from the cache so far, by reason; told with the engine's next step."""
    engine.generate(prompt_of(9000, 5), tokens=1)
    front = "vllm:hicache_missed_tokens/"
    found = {name.removeprefix(front): int(count) for name, count in engine.metrics().items() if name.startswith(front)}
    return Counter(found)


def test_service_that_comes_late_dies_and_comes_back(engines: Engines, service: Service, expected: Expected) -> None:
    prompt = prompt_of(300, 300)
    engine = engines({"address": service.address, "deadline": BUDGET})
    (answer,) = engine.generate(prompt)
    assert (answer.new, answer.cached) == (expected(prompt), 0)
    service.start()
    connected(engine, True)
    for cached in (0, 4 * PAGE):
        assert engine.reset()
        (answer,) = engine.generate(prompt)
        assert (answer.new, answer.cached) == (expected(prompt), cached)
    service.stop()
    connected(engine, False)
    assert engine.reset()
    (answer,) = engine.generate(prompt)
    assert (answer.new, answer.cached) == (expected(prompt), 0)
    assert missed(engine)["away"] == 2 * 4 * PAGE
    service.start()
    connected(engine, True)
    assert engine.reset()
    (answer,) = engine.generate(prompt)
    assert (answer.new, answer.cached) == (expected(prompt), 4 * PAGE)


def test_what_the_engine_holds_itself_is_known_to_the_service(engines: Engines, service: Service) -> None:
    """Four pages of a prompt and what was generated; none once the engine has forgotten its blocks."""
    service.start()
    engine = engines({"address": service.address, "deadline": BUDGET})
    engine.generate(prompt_of(305, 300))
    with AdminClient(Address.parse(service.address), Secrets()) as admin:
        for pages in (4, 0):
            end = time.monotonic() + PATIENCE
            while admin.statistics()["pools"][0]["device_pages"] != pages:
                engine.generate(prompt_of(9000, 5), tokens=1)
                assert time.monotonic() < end, admin.statistics()["pools"][0]
            assert engine.reset()


def test_service_that_is_killed_while_it_is_used(engines: Engines, service: Service, expected: Expected) -> None:
    """Again and again, at other moments of a batch: no request waits for it, and what is missed has a reason."""
    prompts = [prompt_of(310 + number, 400) for number in range(8)]
    service.start()
    engine = engines({"address": service.address, "deadline": BUDGET})
    begun = time.monotonic()
    engine.generate(*prompts)
    computed = time.monotonic() - begun
    reasons: Counter[str] = Counter()
    for turn in range(6):
        assert engine.reset()
        before = missed(engine)
        begun = time.monotonic()
        engine.send(do="generate", prompts=prompts, salts=None, tokens=16)
        time.sleep(0.02 * turn)
        service.kill()
        found = engine.answer()
        assert time.monotonic() - begun < 2 * computed + BUDGET + 3.0
        assert [one["new"] for one in found] == [expected(prompt) for prompt in prompts], turn
        service.start()
        connected(engine, True)
        reasons += missed(engine) - before
    assert reasons["unaligned_tail"] < reasons.total()  # the later the service dies, the fewer pages are missed


def test_service_that_freezes_costs_a_budget(engines: Engines, service: Service, expected: Expected) -> None:
    prompts = [prompt_of(330 + number, 300) for number in range(3)]
    service.start()
    engine = engines({"address": service.address, "deadline": BUDGET})
    engine.generate(*prompts)
    assert engine.reset()
    service.send(signal.SIGSTOP)
    for number, prompt in enumerate(prompts):
        begun = time.monotonic()
        (answer,) = engine.generate(prompt)
        seconds = time.monotonic() - begun
        assert (answer.new, answer.cached) == (expected(prompt), 0)
        assert seconds < (BUDGET + 3.0 if number == 0 else 3.0)
    assert engine.metrics()["vllm:hicache_missed_tokens/late"] >= 256
    service.send(signal.SIGCONT)


def test_storage_that_freezes_costs_a_budget(engines: Engines, folder: Path, storage: str, expected: Expected) -> None:
    """Reads of it hang in a new service whose memory is empty: prompts are computed, and found again afterwards."""
    prompts = [prompt_of(335 + number, 300) for number in range(2)]
    frozen = Service(folder, storage=storage.replace("file:", "frozen:"))
    frozen.start()
    engine = engines({"address": frozen.address, "deadline": BUDGET})
    engine.generate(*prompts)
    frozen.stop()
    connected(engine, False)
    frozen.start()
    os.mkfifo(frozen.gate)
    connected(engine, True)
    for prompt in prompts:
        assert engine.reset()
        begun = time.monotonic()
        (answer,) = engine.generate(prompt)
        assert (answer.new, answer.cached) == (expected(prompt), 0)
        assert time.monotonic() - begun < BUDGET + 3.0
    engine.generate(prompt_of(9000, 5), tokens=1)
    assert engine.metrics()["vllm:hicache_missed_tokens/late"] >= 4 * PAGE
    with frozen.gate.open("wb"):  # who waits goes on
        frozen.gate.unlink()
    assert engine.reset()
    (answer,) = engine.generate(prompts[0])
    assert (answer.new, answer.cached) == (expected(prompts[0]), 4 * PAGE)
    frozen.kill()


@pytest.mark.case("FAIL-2")
def test_damaged_objects_are_computed_again(engines: Engines, folder: Path, storage: str, expected: Expected) -> None:
    prompt = prompt_of(340, 300)
    first = Service(folder, storage=storage)
    first.start()
    engine = engines({"address": first.address, "deadline": 10.0})
    engine.generate(prompt)
    first.stop()
    connected(engine, False)
    objects = list(Path(storage.removeprefix("file://").split("?")[0]).rglob("*_L0-4_H0"))
    assert len(objects) == 4
    for path in objects:
        with path.open("r+b") as file:
            file.seek(-5000, os.SEEK_END)
            file.write(b"damaged")
    first.start()
    connected(engine, True)
    assert engine.reset()
    (answer,) = engine.generate(prompt)
    assert (answer.new, answer.cached) == (expected(prompt), 0)
    assert missed(engine)["failed"] == 4 * PAGE
    assert engine.reset()
    (answer,) = engine.generate(prompt)
    assert (answer.new, answer.cached) == (expected(prompt), 4 * PAGE)
    first.kill()


def test_full_host_pool_stores_what_it_can(engines: Engines, folder: Path, expected: Expected) -> None:
    """Eight slots for prompts of twelve pages each: what has no place is counted, and nothing else happens."""
    small = Service(folder, host="600KiB")
    small.start()
    prompts = [prompt_of(350 + number, 800) for number in range(4)]
    engine = engines({"address": small.address, "deadline": BUDGET})
    for _ in range(2):
        answers = engine.generate(*prompts)
        assert [answer.new for answer in answers] == [expected(prompt) for prompt in prompts]
        assert engine.reset()
    assert engine.metrics()["vllm:hicache_failed_pages/store: host pool full"] > 0
    small.kill()


@pytest.mark.case("RACE-3")
@pytest.mark.parametrize("load", ["async", "sync"])
def test_page_that_is_withdrawn_between_match_and_load(
    engines: Engines, service: Service, expected: Expected, load: str
) -> None:
    """The service dies when the engine has blocks for the pages: they are computed, and counted."""
    prompt = prompt_of(360, 300)
    service.start()
    engine = engines({"address": service.address, "load": load})
    engine.generate(prompt)
    assert engine.reset()
    assert service.process is not None
    assert engine.ask(do="lose", pid=service.process.pid)
    (answer,) = engine.generate(prompt)
    assert answer.new == expected(prompt)
    assert engine.metrics()["vllm:hicache_failed_pages/load: lost"] == 4
    assert engine.said("Recovered from KV load failure")


def test_wrong_address_is_one_line_and_no_cache(engines: Engines, expected: Expected) -> None:
    prompt = prompt_of(370, 200)
    engine = engines({"address": "nonsense"})
    assert engine.generate(prompt)[0].new == expected(prompt)
    assert engine.said("hicache: runs without a cache: address 'nonsense' is none that is known")


def test_address_where_nobody_answers_is_one_line(engines: Engines, expected: Expected, tmp_path: Path) -> None:
    prompt = prompt_of(371, 200)
    engine = engines({"address": f"unix://{tmp_path}/nobody.sock"})
    assert engine.generate(prompt)[0].new == expected(prompt)
    assert engine.log.read_text().count("hicache: no service answers at unix://") == 1


def test_private_service_that_cannot_start_is_one_line_and_no_cache(
    engines: Engines, expected: Expected, tmp_path: Path
) -> None:
    prompt = prompt_of(372, 200)
    engine = engines({"host": "64MiB", "storage": f"file://{tmp_path}/kv?capcity=1GiB"})
    assert engine.generate(prompt)[0].new == expected(prompt)
    assert engine.said("unknown parameter capcity")
    assert engine.log.read_text().count("hicache: runs without a cache: the private service cannot start") == 1
    assert not services_of(engine)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_private_service_is_restarted_and_ends_with_the_engine(
    engines: Engines, expected: Expected, how: signal.Signals
) -> None:
    prompt = prompt_of(380, 300)
    engine = engines({"host": "64MiB", "deadline": BUDGET})
    engine.generate(prompt)
    (before,) = services_of(engine)
    os.kill(before, how)
    connected(engine, False)
    connected(engine, True)
    (after,) = services_of(engine)
    assert after != before
    for cached in (0, 4 * PAGE):
        assert engine.reset()
        (answer,) = engine.generate(prompt)
        assert (answer.new, answer.cached) == (expected(prompt), cached)
    os.kill(engine.process.pid, signal.SIGKILL)
    end = time.monotonic() + PATIENCE
    while Path(f"/proc/{after}").exists():
        assert time.monotonic() < end, "the private service outlives its engine"
        time.sleep(0.01)


def services_of(engine: Engine) -> list[int]:
    """Process ids of what the engine has started, and serves."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            command = (path.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if parent == engine.process.pid and b"serve" in command:
            found.append(int(path.parent.name))
    return found
