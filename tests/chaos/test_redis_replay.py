"""A trace replayed on Redis: by several processes, and while the server is killed, frozen, emptied and filled up."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hicache.analytics.run import ReplayOptions, replay
from hicache.analytics.traces import open_trace
from hicache.testing.proxy import Fault, Proxy
from hicache.testing.servers import Server, binaries

pytestmark = [pytest.mark.chaos, pytest.mark.redis, pytest.mark.slow]

REQUESTS = 240


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    options = {"maxmemory": "1gb", "maxmemory-policy": "allkeys-lru"}
    with Server(next(iter(binaries().values())), tmp_path / "server", options) as running:
        yield running


def options(port: int) -> ReplayOptions:
    url = f"redis://127.0.0.1:{port}/0?timeout=0.3&connect_timeout=0.3&deadline=1"
    return ReplayOptions(device_pages=400, host_pages=500, page_bytes=8192, requests=REQUESTS, storage=url)


@pytest.mark.case("FAIL-8")
def test_two_processes_share_what_one_has_stored(server: Server, small_trace: Path) -> None:
    words = ["--device", "400", "--host", "500", "--page-bytes", "8192", "--requests", str(REQUESTS), "--json"]
    storage = ["--storage", f"redis://127.0.0.1:{server.port}/0"]
    command = [sys.executable, "-c", "import sys; from hicache.cli import main; sys.exit(main())", "replay"]

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen([*command, str(small_trace), *words, *storage], stdout=subprocess.PIPE, text=True)

    documents = []
    for together in (1, 2):
        running = [start() for _ in range(together)]
        for process in running:
            said, _ = process.communicate(timeout=120)
            assert process.returncode == 0
            documents.append(json.loads(said))
    assert [document["pages_wrong"] for document in documents] == [0, 0, 0]
    assert all(document["pages_storage"] > documents[0]["pages_storage"] for document in documents[1:])


@pytest.mark.case("REDIS-1", "REDIS-2", "REDIS-4", "REDIS-6", "REDIS-7", "FAIL-1", "FAIL-3")
def test_nothing_is_wrong_while_everything_goes_wrong(
    server: Server, small_trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hicache.analytics.pace.SHOW_EVERY", 1)
    timers: list[threading.Timer] = []

    def freeze() -> None:
        server.pause()
        timers.append(threading.Timer(1.0, server.resume))
        timers[-1].start()

    def full(policy: str) -> None:
        used = int(server.info("memory", "used_memory"))
        server.call("CONFIG", "SET", "maxmemory-policy", policy)
        server.call("CONFIG", "SET", "maxmemory", used + (1 << 20))

    with Proxy(server.address) as proxy:
        steps: list[Callable[[], object]] = [
            server.restart,
            lambda: server.call("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"),
            lambda: full("noeviction"),
            lambda: full("allkeys-lru"),
            lambda: server.call("FLUSHALL"),
            lambda: proxy.set(Fault(cut_reply=0, times=3)),
            lambda: proxy.set(Fault(cut_request=5000, times=3)),
            lambda: proxy.set(Fault(cut_reply=5000, times=3)),
            lambda: proxy.set(Fault(flip=9000, times=20)),
            lambda: proxy.set(Fault(delay=0.5)),
            proxy.set,
            freeze,
        ]
        due = {(i + 1) * REQUESTS // (len(steps) + 1): step for i, step in enumerate(steps)}

        def progress(done: int, total: int) -> None:
            del total
            for at in [at for at in due if at <= done][:1]:
                due.pop(at)()

        try:
            result = replay(open_trace([small_trace]), options(proxy.port), progress=progress)
        finally:
            for timer in timers:
                timer.join()
        assert not due, "every step was taken"
        assert result.requests == REQUESTS
        assert result.pages_wrong == 0
        assert result.problems == ()
        assert result.requests_refused == 0
