"""Takeovers that go wrong: a service is there again, the old or a new one, never two, and no byte is wrong."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import hicache
from hicache.errors import ConfigError
from hicache.sidecar import takeover
from hicache.sidecar.processes import Peer
from hicache.sidecar.takeover import inherit_at
from hicache.testing.admin import Admin, within
from hicache.testing.sidecars import ServiceProcess, WorkerProcess, namespace_of, page_content

pytestmark = [pytest.mark.chaos, pytest.mark.slow]

ROUNDS = max(1, int(os.environ.get("HICACHE_CHAOS_ROUNDS", "12")) // 3)
"""Kills at random moments of a takeover."""

BACK_SECONDS = 10.0
"""Within which somebody serves again; most of it is Python that starts, on a machine that is busy."""

PAGES = 20
PAGE_BYTES = 32768
NAMESPACE = namespace_of(PAGE_BYTES)
TOKENS = np.arange(PAGES * NAMESPACE.page_size, dtype=np.uint32)
NAMES = NAMESPACE.derive().hasher().extend(None, TOKENS.tobytes(), PAGES)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path, as sockets have at most 107 bytes; nothing is left there, and no process has memory from it."""
    with tempfile.TemporaryDirectory(prefix="hc") as name:
        yield Path(name)
        assert os.listdir(name) == []


def contents() -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    return np.stack([page_content(NAMES[32 * page :][:32], PAGE_BYTES) for page in range(PAGES)])


def fill(service: ServiceProcess) -> None:
    """Store the pages."""
    with hicache.connect(service.address, NAMESPACE) as cache, cache.request(TOKENS, logits=False) as request:
        assert len(request.allocate()) == PAGES
        assert request.write_from(contents()) == PAGES
        request.commit()


def found(service: ServiceProcess) -> int:
    """How many of the pages are there, with every byte compared."""
    with (
        hicache.connect(service.address, NAMESPACE, required=True) as cache,
        cache.request(TOKENS, logits=False) as request,
    ):
        pages = len(request.load())
        buffers = np.empty((pages, PAGE_BYTES), np.uint8)
        assert request.read_into(buffers) == pages
        assert np.array_equal(buffers, contents()[:pages])
        return pages


def memory(service: ServiceProcess) -> set[int]:
    """The memfds that a service has, by inode."""
    return set(memfds(service.process.pid))


def memfds(pid: int) -> Iterator[int]:
    with suppress(FileNotFoundError, PermissionError, ProcessLookupError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(FileNotFoundError):
                if os.readlink(f"/proc/{pid}/fd/{name}").startswith("/memfd:hicache"):
                    yield os.stat(f"/proc/{pid}/fd/{name}").st_ino


def everywhere() -> set[int]:
    """The memfds that any process has."""
    return {inode for name in os.listdir("/proc") if name.isdecimal() for inode in memfds(int(name))}


def ended(service: ServiceProcess) -> int:
    """The exit code of one that has to end by itself."""
    return service.process.wait(timeout=30)


def test_next_service_is_killed_while_it_waits(folder: Path) -> None:
    """The one that runs had begun to end, with a lease open; it goes on, with all of its pages and nothing else."""
    with ServiceProcess(folder, "--drain", "20") as old, Admin(old) as admin:
        fill(old)
        files, known = old.descriptors, memory(old)
        other = TOKENS[: 3 * NAMESPACE.page_size] + np.uint32(10**6)
        with hicache.connect(old.address, NAMESPACE) as cache, cache.request(other, logits=False) as request:
            assert len(request.allocate()) == 3
            request.page(0)
            with ServiceProcess(folder, "--drain", "20", takeover=True, wait=False) as heir:
                within(20.0, lambda: not cache.connected)  # it drains, and waits for the request
                assert admin.leases()["open"] == 1
                with pytest.raises(ConfigError, match="another one is taking it over"):
                    ask(folder, seconds=5.0)
                heir.kill()
                old.started()
            assert request.lost
            assert found(old) == PAGES
            assert admin.host()["private"] == 3  # as this process might still write, with the view that it was given
        within(BACK_SECONDS, lambda: old.descriptors <= files)
        again = memory(old)
        assert len(again) == len(known)
        assert again & known  # the same pages, under new generation words
        assert old.stop() == {"dropped": {}}
    assert not everywhere() & (known | again)


def test_next_service_has_less_memory(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It says how much it needs, and the one before goes on with all of its pages."""
    with ServiceProcess(folder, "--drain", "1") as old:
        fill(old)
        with ServiceProcess(folder, takeover=True, wait=False, host="32MiB") as heir:
            assert ended(heir) == 2
        old.started()
        assert found(old) == PAGES
        assert old.stop() == {"dropped": {}}
    assert (
        "has 64 MiB of host memory in use, and this one may have 32 MiB: give --host as much" in capfd.readouterr().err
    )


def test_next_service_cannot_start(folder: Path) -> None:
    """It has got the memory already, and finds a port taken: the one before goes on."""
    with socket.create_server(("127.0.0.1", 0)) as taken, ServiceProcess(folder, "--drain", "1") as old:
        fill(old)
        known = memory(old)
        metrics = f"metrics.address=127.0.0.1:{taken.getsockname()[1]}"
        with ServiceProcess(folder, "--set", metrics, takeover=True, wait=False) as heir:
            assert ended(heir) == 2
        old.started()
        assert found(old) == PAGES
        assert old.stop() == {"dropped": {}}
    assert not everywhere() & known


def test_services_are_killed_at_any_moment_of_a_takeover(folder: Path) -> None:
    """Killed is the old one: the new one serves, with all pages or none. Killed is the new one: the old one does."""
    chance = random.Random(5)
    seen: set[int] = set()
    services = [ServiceProcess(folder, "--drain", "1")]
    try:
        for number in range(ROUNDS):
            old = services[-1]
            fill(old)
            seen |= memory(old)
            with Admin(old) as admin:
                heir = ServiceProcess(folder, "--drain", "1", takeover=True, wait=False)
                services.append(heir)
                with suppress(hicache.ServiceUnavailable):  # it has ended meanwhile
                    admin.wait(chance.random() * 2.0)
            victim, other = (old, heir) if number % 2 else (heir, old)
            victim.kill()
            if not back(other):  # the new one had taken over before it was killed
                assert victim is heir
                other = ServiceProcess(folder, "--drain", "1")
            services.append(other)
            assert found(other) in (0, PAGES)
            within(BACK_SECONDS, lambda: cleared(services[-1]))
        assert services[-1].stop() == {"dropped": {}}
    finally:
        for service in services:
            service.close()
    assert not everywhere() & seen


def back(service: ServiceProcess) -> bool:
    """Wait until it serves; whether it does. If not, it has ended in order."""
    began = time.monotonic()
    while service.process.poll() is None:
        with (
            suppress(hicache.ServiceUnavailable),
            hicache.connect(service.address, NAMESPACE, required=True, timeout=1.0),
        ):
            return True
        assert time.monotonic() - began < BACK_SECONDS
    assert service.process.returncode == 0
    return False


def cleared(service: ServiceProcess) -> bool:
    """Whether it could forget all pages."""
    with (
        suppress(hicache.ServiceUnavailable),
        hicache.connect(service.address, NAMESPACE, required=True, timeout=1.0) as cache,
    ):
        cache.clear()
        return True
    return False


def test_two_services_want_to_take_over(folder: Path) -> None:
    """One is refused, or both do, one after the other; in the end one serves, with all pages."""
    with ServiceProcess(folder, "--drain", "1") as old:
        fill(old)
        heirs = [ServiceProcess(folder, "--drain", "1", takeover=True, wait=False) for _ in range(2)]
        try:
            assert ended(old) == 0
            within(30.0, lambda: any(heir.process.poll() is not None for heir in heirs))
            (loser,) = (heir for heir in heirs if heir.process.poll() is not None)
            (winner,) = (heir for heir in heirs if heir is not loser)
            assert loser.process.returncode in (0, 2)
            winner.started()
            assert found(winner) == PAGES
            assert winner.stop() == {"dropped": {}}
        finally:
            for heir in heirs:
                heir.close()


@pytest.mark.parametrize("stopped", [True, False])
def test_service_is_taken_over_from_a_client_that_goes_on(folder: Path, stopped: bool) -> None:
    """At the end of the drain a client lets go of all pages, and they are hits; a stopped one keeps its own."""
    with ServiceProcess(folder, "--drain", "1") as old, Admin(old) as before:
        fill(old)
        options = ["--hold", "60", "--page-bytes", str(PAGE_BYTES), "--families", "1", "--pages", "100"]
        with WorkerProcess(old.address, seed=4, options=options) as client:
            within(20.0, lambda: before.leases()["open"] == 1 and before.host()["resident"] > PAGES)
            known = before.host()["resident"]
            if stopped:
                client.signal(signal.SIGSTOP)
            with ServiceProcess(folder, "--drain", "1", takeover=True) as new, Admin(new) as after:
                assert ended(old) == 0
                kept = after.host()["private"]
                assert (kept > 0) == stopped
                assert after.host()["resident"] + kept == known
                client.kill()
                within(2.0, lambda: after.host()["private"] == 0)
                assert new.stop() == {"dropped": {}}


def test_service_that_does_not_end_is_not_taken_over(folder: Path) -> None:
    """It hangs: whoever asks gives up in time and says so; when it wakes up it goes on."""
    with ServiceProcess(folder, "--drain", "1") as old:
        fill(old)
        old.process.send_signal(signal.SIGSTOP)
        with pytest.raises(ConfigError, match=r"did not end within 0\.2 seconds"):
            ask(folder, seconds=0.2)
        old.process.send_signal(signal.SIGCONT)
        old.started()
        assert found(old) == PAGES
        assert old.stop() == {"dropped": {}}


def ask(folder: Path, *, seconds: float) -> None:
    """Want to take over."""
    inherit_at(str(folder / "service.sock"), seconds=seconds).close()


def test_other_users_may_not_take_over(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where the socket's rights would let them: they are told so, and the service has heard nothing."""
    monkeypatch.setattr(takeover, "peer_of", lambda _: Peer(1, 4242, 4242))

    async def test() -> None:
        asked: list[bool] = []
        server = takeover.TakeoverServer(lambda: asked.append(True))
        server.listen(str(folder / "service.sock"))
        with pytest.raises(ConfigError, match="user 4242 may not"):
            await asyncio.to_thread(ask, folder, seconds=5.0)
        server.close()
        assert not asked
        assert not server.asked

    asyncio.run(test())


def test_end_by_an_operator_is_one(folder: Path) -> None:
    """Told to end, it ends, also where the service that wanted to take over is gone."""
    with ServiceProcess(folder, "--drain", "20") as old:
        fill(old)
        with hicache.connect(old.address, NAMESPACE) as cache, cache.request(TOKENS, logits=False):
            old.process.send_signal(signal.SIGTERM)
            within(20.0, lambda: not cache.connected)
            with pytest.raises(ConfigError, match="did not end"):
                ask(folder, seconds=0.2)
        assert ended(old) == 0
