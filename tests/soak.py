"""Long random runs with faults: `python tests/soak.py [--seconds N] [--mode MODE] [--seed N]`, or `make soak`.

Several processes at once play rounds of three kinds, each from a seed of its own:

core      the core alone against a model, every order of completions
cache     the whole runtime in one thread, real bytes, faults at every place (repeats exactly from its seed)
threads   the whole runtime with real threads and files, under several engines, while storage fails, is slow and is
          damaged behind its back

The first failure ends it with exit code 1; a flight recording is kept, and the commands to repeat it are printed.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import logging
import os
import queue
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hicache
from hicache.core.config import CoreConfig, EdgePolicy
from hicache.core.recorder import RecordedCore
from hicache.core.recordings import MemorySegments
from hicache.errors import OutOfSlots, StorageError
from hicache.runtime.queues import Bound
from hicache.storage.breaker import BreakerPolicy
from hicache.testing.cachedriver import CacheDriver
from hicache.testing.choices import SeededChoices
from hicache.testing.coredriver import CoreDriver
from hicache.testing.engine import FakeEngine, prompt, small_namespace
from hicache.testing.faults import Call, DamageableMemory, FaultyStorage

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "build" / "soak"
SECONDS = 600
GRACE = 120  # seconds that a round under way gets to end before it counts as hung
CALL_TIMEOUT = 0.1  # seconds; calls that take longer count as hung
POLICIES = ("write_through", "write_through_selective", "write_back", EdgePolicy(1, on_eviction=True))


class RoundError(Exception):
    """A round failed; `recording` is where what led to it is, if it could be kept."""

    def __init__(self, recording: Path | None) -> None:
        self.recording = recording
        super().__init__(str(recording))


# ---- rounds: each returns what happened how often, and raises RoundError


def core_round(seed: int) -> Counter[str]:
    choice = random.Random(seed)
    config = CoreConfig(
        choice.choice([8, 20, 40]),
        choice.choice([0, 8, 20, 40]),
        eviction=choice.choice(["lru", "lfu", "slru", "priority"]),
        device_to_host=_edge(choice),
        host_to_storage=_edge(choice),
        fetch_pages=choice.choice([1, 2, 5]),
        reserve=0.3,
        touch_seconds=choice.choice([None, 1]),
        stub_pages=choice.choice([5, 1000]),
        span_bytes=choice.choice([6, 1000]),
        events=choice.random() < 0.5,
    )
    if config.host_pages and choice.random() < 0.8:
        config = _with_storage(config)
    segments = MemorySegments()
    core = RecordedCore(config, segments, segment_bytes=1 << 20)
    driver = CoreDriver(SeededChoices(seed), config, core=core)
    try:
        for step in range(3_000):
            driver.step()
            if not step % 20:
                driver.check()
        driver.finish()
    except BaseException as error:
        path = OUT / f"core-{seed}.hcr"
        path.write_bytes(segments.dump())
        raise RoundError(path) from error
    return Counter(driver.seen) + Counter({"steps": driver.steps})


def cache_round(seed: int) -> Counter[str]:
    choice = random.Random(seed)
    backend = DamageableMemory(capacity=choice.choice([None, 4_000, 100_000]))

    def damage(key: Any) -> bool:
        there = backend.contains([key])[0]
        if there:
            backend.damage(key, bit=5)
        return there

    host = choice.choice([0, 6, 12, 24])
    backing: dict[str, Any] = {"storage": backend, "damage": damage} if host else {}
    driver = CacheDriver(
        SeededChoices(seed),
        device=choice.choice([6, 10, 14, 24]),
        host=host,
        eviction=choice.choice(["lru", "lfu", "slru", "priority"]),
        write_policy=(choice.choice(POLICIES), choice.choice(POLICIES)),
        prefetch=choice.choice(["timeout", "wait_complete", "best_effort"]),
        prefetch_timeout=choice.choice([0.0, 0.5, 4.0]),
        fetch_bytes=choice.choice([64, 128, 8192]),
        absent_seconds=choice.choice([0.0, 1.0]),
        reserve=0.3,
        stub_pages=choice.choice([0, 5, 1000]),
        ghost_pages=choice.choice([0, 20]),
        read_bound=_bound(choice),
        write_bound=_bound(choice),
        copy_bound=_bound(choice),
        breaker=choice.choice([None, BreakerPolicy(failures=1, timeout=1.0, interval=1.0)]),
        flight_recorder=hicache.FlightRecorder(segment_bytes=1 << 20),
        **backing,
    )
    try:
        while driver.steps < 3_000:
            driver.step()
        driver.finish()
    except BaseException as error:
        path = _dump(driver._life.cache, f"cache-{seed}")
        driver.abandon()
        raise RoundError(path) from error
    return Counter(driver.seen) + Counter({"steps": driver.steps})


def threads_round(seed: int) -> Counter[str]:
    choice = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="hicache-soak-") as folder:
        storage = FaultyStorage(hicache_storage(folder, choice))
        for verb in ("get_into", "put", "contains", "touch"):
            storage.always(verb, _sometimes(random.Random(f"{seed} {verb}")))
        cache = hicache.open(
            small_namespace(),
            device=choice.choice([24, 64]),
            host=choice.choice([24, 96]),
            storage=storage,
            write_policy=choice.choice(POLICIES),
            prefetch=choice.choice(["timeout", "wait_complete", "best_effort"]),
            prefetch_timeout=choice.choice([0.01, 0.2]),
            prefill_tokens_per_second=choice.choice([None, None, 100.0, 1e6]),
            call_timeout=CALL_TIMEOUT,
            probe_seconds=0.1,
            max_hung=choice.choice([1, 4, 16]),
            breaker=BreakerPolicy(failures=choice.choice([2, 5]), timeout=CALL_TIMEOUT, interval=0.2),
            flight_recorder=hicache.FlightRecorder(segment_bytes=1 << 20),
        )
        try:
            seen = _engines(cache, storage, Path(folder), seed)
            _at_rest(cache)
        except BaseException as error:
            path = _dump(cache, f"threads-{seed}")
            cache.close(deadline=5.0)
            raise RoundError(path) from error
        finally:
            cache.close(deadline=20.0)
            storage.close()
    return seen


ROUNDS: dict[str, Callable[[int], Counter[str]]] = {"core": core_round, "cache": cache_round, "threads": threads_round}


def hicache_storage(folder: str, choice: random.Random) -> Any:
    from hicache.storage.registry import configured

    return configured(f"file://{folder}/store?capacity={choice.choice(['200KiB', '100MiB'])}")


def _engines(
    cache: hicache.EmbeddedCache, storage: FaultyStorage, folder: Path, seed: int, *, engines: int = 4
) -> Counter[str]:
    """Engines at work for some seconds, and somebody who damages files and takes storage away meanwhile."""
    end = time.monotonic() + 4.0
    errors: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
    seen: Counter[str] = Counter()
    counted = threading.Lock()

    def work(number: int) -> None:
        choice = random.Random(f"{seed} engine {number}")
        engine = FakeEngine(cache, patience=5.0)
        here: Counter[str] = Counter()
        try:
            while time.monotonic() < end and errors.empty():
                here[_one_request(engine, cache, choice)] += 1
        except BaseException as error:  # whatever it is, the round has failed
            errors.put(error)
        with counted:
            seen.update(here)
            seen["pages verified"] += engine.verified

    threads = [threading.Thread(target=work, args=(number,)) for number in range(engines)]
    for thread in threads:
        thread.start()
    damaging = random.Random(f"{seed} damage")
    while any(thread.is_alive() for thread in threads):
        seen["objects damaged"] += _damage(folder, damaging)
        if damaging.random() < 0.1:
            seen[_exchange(cache, storage, damaging)] += 1
        threads[0].join(0.05)
        if not threads[0].is_alive():
            for thread in threads:
                thread.join()
    if not errors.empty():
        raise errors.get()
    return seen


def _one_request(engine: FakeEngine, cache: hicache.EmbeddedCache, choice: random.Random) -> str:
    tokens = prompt(choice.randrange(12), choice.randrange(1, 70))
    if choice.random() < 0.5:
        tokens = [*tokens, *prompt(choice.randrange(50), choice.randrange(30))]
    options: dict[str, Any] = {"deadline": choice.choice([None, 0.0, 0.05]), "priority": choice.randrange(3)}
    if choice.random() < 0.2:
        options["tenant"] = choice.choice(["a", "b"])
    what = choice.random()
    try:
        if what < 0.01:
            cache.clear(deadline=0.2)
            return "cleared"
        if what < 0.02:
            cache.flush(deadline=0.2)
            return "flushed"
        engine.run(tokens, **options)
    except OutOfSlots:
        return "out of slots"
    except StorageError:
        return "storage in trouble"
    return "requests"


def _damage(folder: Path, choice: random.Random) -> int:
    """Now and then a bit of some stored object flips."""
    if choice.random() < 0.7:
        return 0
    try:
        files = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size >= 4096]
        path = choice.choice(sorted(files))
        content = bytearray(path.read_bytes())
        content[choice.randrange(len(content))] ^= 1 << choice.randrange(8)
        path.write_bytes(content)
    except (OSError, ValueError, IndexError):
        return 0  # it is being replaced, or has gone
    return 1


def _exchange(cache: hicache.EmbeddedCache, storage: FaultyStorage, choice: random.Random) -> str:
    """Storage is detached, or is there again."""
    try:
        if "storage: detached" in cache.statistics().degraded:
            cache.attach_storage(storage)
            return "attached"
        cache.detach_storage(choice.choice([0.0, 0.2]), force=choice.random() < 0.7)
        return "detached"
    except (StorageError, OSError):
        return "not exchanged"


def _sometimes(choice: random.Random) -> Callable[[Call], Any]:
    """Most calls go well; some raise, lie, are slow, or so slow that they count as hung."""

    def fault(call: Call) -> Any:
        what = choice.random()
        if what < 0.02:
            raise OSError(5, "the soak says so")
        if what < 0.03:
            return None
        if what < 0.05:
            return list(call.apply())[:-1]
        if what < 0.10:
            time.sleep(choice.random() * 0.02)
        if what > 0.99:
            time.sleep(4 * CALL_TIMEOUT)
        return call.apply()

    return fault


def _at_rest(cache: hicache.EmbeddedCache) -> None:
    """Everything ends, and nothing is left behind."""
    end = time.monotonic() + 30.0
    while True:
        cache.flush(deadline=1.0)
        statistics = cache.statistics()
        if not statistics.core.transfers or time.monotonic() > end:
            break
    cache.check()
    assert statistics.internal_errors == 0, f"{statistics.internal_errors} internal errors"
    assert statistics.core.transfers == 0, "transfers never end"
    for tier in (statistics.core.device, statistics.core.host):
        assert tier.pinned == 0, f"pins left: {tier}"
        assert tier.free + tier.resident + tier.quarantined == tier.capacity, f"slots left behind: {tier}"


def _with_storage(config: CoreConfig) -> CoreConfig:
    from dataclasses import replace

    return replace(config, storage=True)


def _edge(choice: random.Random) -> EdgePolicy:
    return choice.choice([EdgePolicy(1), EdgePolicy(2), EdgePolicy(None, on_eviction=True)])


def _bound(choice: random.Random) -> Bound:
    return Bound(bytes=choice.choice([192, 10**6, 10**6]), requests=choice.choice([1, 3, 100]))


def _dump(cache: hicache.EmbeddedCache, name: str) -> Path | None:
    path = OUT / f"{name}.hcr"
    try:
        cache.dump_recording(path)
    except hicache.HicacheError:
        return None  # it was closed before it failed
    return path


# ---- processes


def worker(options: argparse.Namespace) -> int:
    """Rounds until the time is over, told on stdout one by one."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    logging.disable(logging.CRITICAL)  # storage in trouble is what this is about
    end = time.monotonic() + options.seconds
    modes = [options.mode] if options.mode else list(ROUNDS)
    number = 0
    while time.monotonic() < end or not number:
        mode = modes[number % len(modes)]
        seed = options.seed + number * options.stride
        number += 1
        try:
            seen = ROUNDS[mode](seed)
        except RoundError as error:
            text = "".join(traceback.format_exception(error.__cause__))
            recording = None if error.recording is None else str(error.recording)
            print(json.dumps({"mode": mode, "seed": seed, "failure": text, "recording": recording}), flush=True)
            return 1
        print(json.dumps({"mode": mode, "seed": seed, "seen": dict(seen)}), flush=True)
        if options.once:
            break
    return 0


def start(options: argparse.Namespace, number: int, told: queue.SimpleQueue[Any]) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        __file__,
        "--worker",
        "--seconds",
        str(options.seconds),
        "--stride",
        str(options.processes),
    ]
    command += ["--seed", str(options.seed + number)] + (["--mode", options.mode] if options.mode else [])
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            told.put(json.loads(line))
        told.put(None)

    threading.Thread(target=read, daemon=True).start()
    return process


def watch(told: queue.SimpleQueue[Any], processes: list[subprocess.Popen[str]], end: float) -> dict[str, Any] | None:
    """Add up what the workers tell, until all have ended or one has failed. Returns the failure, if there is one."""
    rounds: Counter[str] = Counter()
    seen: dict[str, Counter[str]] = {}
    running = len(processes)
    failure: dict[str, Any] | None = None
    while running and failure is None:
        try:
            what = told.get(timeout=max(0.1, end - time.monotonic()))
        except queue.Empty:
            failure = {"mode": "?", "failure": f"hung: no end {GRACE} s after the time was over", "recording": None}
            for process in processes:
                process.send_signal(signal.SIGUSR1)  # say where, on stderr
            time.sleep(2.0)
            break
        if what is None:
            running -= 1
        elif "failure" in what:
            failure = what
        else:
            rounds[what["mode"]] += 1
            seen.setdefault(what["mode"], Counter()).update(what["seen"])
    for mode, count in sorted(rounds.items()):
        figures = ", ".join(f"{name} {number:,}" for name, number in seen[mode].most_common(8))
        print(f"{mode:8} {count:6,} rounds: {figures}")
    if failure is None and any(process.wait() for process in processes):
        failure = {"mode": "?", "failure": "a process died; see above", "recording": None}
    return failure


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=float(os.environ.get("SOAK_SECONDS", SECONDS)))
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--mode", choices=list(ROUNDS), help="only rounds of this kind")
    parser.add_argument("--seed", type=int, default=None, help="of the first round; default: another one each time")
    parser.add_argument("--once", action="store_true", help="one round, in this process")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--stride", type=int, default=1, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.seed is None:
        options.seed = random.SystemRandom().randrange(10**9)
    OUT.mkdir(parents=True, exist_ok=True)
    if options.worker or options.once:
        return worker(options)
    print(f"{options.seconds:g} s in {options.processes} processes, seeds from {options.seed}", flush=True)
    told: queue.SimpleQueue[Any] = queue.SimpleQueue()
    processes = [start(options, number, told) for number in range(options.processes)]
    try:
        failure = watch(told, processes, time.monotonic() + options.seconds + GRACE)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if failure is None:
        print("no failure")
        return 0
    print(f"FAILED in {failure['mode']}:\n{failure['failure']}")
    if "seed" in failure:
        print(f"once more: {sys.executable} {__file__} --once --mode {failure['mode']} --seed {failure['seed']}")
    if failure["recording"]:
        print(f"what led to it: hicache replay {shlex.quote(failure['recording'])}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
