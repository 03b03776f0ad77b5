"""A prompt that is hot in memory outlives three times `maxmemory` of others in Redis: a fresh process hits it."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import hicache
from hicache.testing.clock import ManualClock
from hicache.testing.engine import FakeEngine, prompt
from hicache.testing.servers import Server, binaries

pytestmark = [pytest.mark.redis, pytest.mark.slow]

PAGE = 64 << 10
PAGES = 10
SYSTEM = prompt(0, 4 * PAGES)
MAXMEMORY = 12 << 20
ROUNDS = 3 * MAXMEMORY // (12 * PAGE)  # of twelve pages each that nobody asks for again

FRESH = f"""
import sys
import hicache
from hicache.testing.engine import FakeEngine, prompt

geometry = hicache.KVGeometry.opaque(engine="t", backend="t", version="1", shape="pages", page_bytes={PAGE})
namespace = hicache.Namespace(model="hot", revision="1", geometry=geometry, page_size=4)
with hicache.open(namespace, device=48, host=48, storage=sys.argv[1], prefetch="wait_complete") as cache:
    counts = FakeEngine(cache).run([*prompt(0, 4 * {PAGES}), 1])  # compares every byte
    print(counts.storage, sum(counts.missed.values()))
"""


def _next_second(server: Server) -> None:
    """Wait for the server's clock, in which recency counts, to go on."""
    before, end = server.info("server", "lru_clock"), time.monotonic() + 10
    while server.info("server", "lru_clock") == before:
        assert time.monotonic() < end
        threading.Event().wait(0.02)


@pytest.mark.parametrize(("policy", "touched"), [("allkeys-lru", True), ("volatile-lru", True), ("allkeys-lru", False)])
def test_a_fresh_process_hits_the_hot_prefix(tmp_path: Path, policy: str, touched: bool) -> None:
    geometry = hicache.KVGeometry.opaque(engine="t", backend="t", version="1", shape="pages", page_bytes=PAGE)
    namespace = hicache.Namespace(model="hot", revision="1", geometry=geometry, page_size=4)
    clock = ManualClock()
    options = {"maxmemory": str(MAXMEMORY), "maxmemory-policy": policy, "maxmemory-samples": "10"}
    with Server(next(iter(binaries().values())), tmp_path / "server", options) as server:
        url = f"redis://127.0.0.1:{server.port}/0?ttl=1h&deadline=20&timeout=20"
        with hicache.open(
            namespace,
            device=48,
            host=48,
            storage=url,
            clock=clock,
            touch_seconds=60.0 if touched else None,
            canary=False,
        ) as cache:
            engine = FakeEngine(cache)
            for number in range(ROUNDS):
                counts = engine.run([*SYSTEM, *prompt(1000 + number, 4 * 12 + 1)])
                assert counts.device >= PAGES or not number, "it is hot in DEVICE all along"
                assert cache.flush()
                clock.advance(20.0)
                if number % 6 == 0:  # as many requests in a second as there may be between two touches
                    _next_second(server)
        assert int(server.info("stats", "evicted_keys")) > ROUNDS * 12 / 2
        found = subprocess.run(
            [sys.executable, "-c", FRESH, url], capture_output=True, text=True, timeout=60, check=True
        ).stdout.split()
        if touched:
            assert int(found[0]) >= PAGES - 2, "its start, but for what was evicted by chance since the last touch"
        else:
            assert found[0] == "0", "why there are touches"
