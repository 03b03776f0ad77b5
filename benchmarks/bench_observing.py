"""What it costs a service to observe itself: the access log, and the memory of what other sizes would hit.

Pairs of services beside each other: one writes the access log and keeps that memory, the other does neither. A client
asks both in turns, request by request. Each row is a verb's median time at the first, beside that at the second, and
one is the CPU time of the whole process, its thread that writes included. The ratio is the median over the pairs, each
of new processes, as two that are the same differ by some percent.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import numpy as np

import hicache
from benchmarks.measure import Row, row
from hicache.rpc.client.cache import ConnectedCache
from hicache.testing.sidecars import ServiceProcess, namespace_of

NAMESPACE: Final = namespace_of(8192, model="benchmark/model")
TOKENS: Final = 8192
PROMPTS: Final = 8
PAIRS: Final = 10
REQUESTS: Final = 200
SETTLE: Final = 1.2
MOST: Final = 1.05
"""Times the verb's median without."""

BLIND: Final = """
import sys
from hicache.cli import main
from hicache.runtime.insight import Insight
Insight.closed = lambda *_: None
sys.exit(main())
"""


def prompts() -> list[np.ndarray[Any, Any]]:
    return [np.random.default_rng(seed).integers(0, 2**32, TOKENS, dtype=np.uint32) for seed in range(PROMPTS)]


def fill(cache: ConnectedCache) -> None:
    for tokens in prompts():
        with cache.request(tokens, logits=False) as request:
            request.write_from([bytes(cache.host.page_bytes)] * len(request.allocate()))
            request.commit()


def cpu(process: int) -> float:
    """Microseconds of CPU that all threads of a process have had."""
    threads = Path(f"/proc/{process}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e3


def ask(cache: ConnectedCache, tokens: np.ndarray[Any, Any], taken: dict[str, list[float]]) -> None:
    """One request that is hit, and the seconds of its verbs."""
    marks = [time.perf_counter()]
    cache.match(tokens, logits=False)
    marks.append(time.perf_counter())
    request = cache.request(tokens, logits=False)
    marks.append(time.perf_counter())
    pages = len(request.load())
    marks.append(time.perf_counter())
    request.close()
    marks.append(time.perf_counter())
    assert pages == TOKENS // NAMESPACE.page_size
    for name, begin, end in zip(("match", "lease", "load", "release"), marks, marks[1:], strict=False):
        taken.setdefault(name, []).append(end - begin)
    taken.setdefault("request", []).append(marks[-1] - marks[0])


def pair(number: int) -> tuple[dict[str, float], dict[str, float]]:
    """Median microseconds of each verb at a service that observes itself, and at one that does not."""
    with tempfile.TemporaryDirectory(prefix="hc") as folder, ExitStack() as undo:
        services = []
        for name in ("on", "off")[:: 1 if number % 2 else -1]:
            (place := Path(folder, name)).mkdir()
            program = ("-m", "hicache") if name == "on" else ("-c", BLIND)
            options = ("--access-log", str(place / "log")) if name == "on" else ()
            service = ServiceProcess(place, *options, "--log-level", "error", host="128MiB", program=program)
            undo.enter_context(service)
            cache = undo.enter_context(hicache.connect(service.address, NAMESPACE, required=True))
            fill(cache)
            services.append((name, service, cache))
        asked = prompts()
        taken: dict[str, dict[str, list[float]]] = {"on": {}, "off": {}}
        for at in range(PROMPTS):
            for _, _, cache in services:
                ask(cache, asked[at], {})
        before = {name: cpu(service.process.pid) for name, service, _ in services}
        for at in range(REQUESTS):
            for name, _, cache in services[:: 1 if at % 2 else -1]:
                ask(cache, asked[at % PROMPTS], taken[name])
        time.sleep(SETTLE)  # the thread that writes has had its turn
        found = {name: {verb: 1e6 * statistics.median(times) for verb, times in taken[name].items()} for name in taken}
        for name, service, _ in services:
            found[name]["cpu"] = (cpu(service.process.pid) - before[name]) / REQUESTS
    return found["on"], found["off"]


def rows() -> list[Row]:
    pairs = [pair(number) for number in range(PAIRS)]
    rows = []
    for verb in pairs[0][0]:
        ratio = statistics.median(on[verb] / off[verb] for on, off in pairs)
        reference = statistics.median(off[verb] for _, off in pairs)
        rows.append(row(f"observed_{verb}", reference * ratio, "us", bar=MOST * reference, reference=reference))
    return rows
