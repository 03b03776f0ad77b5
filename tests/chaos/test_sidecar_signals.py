"""How a service ends: drained to a deadline, and what it dropped is told; and how little it does with nothing to do."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import hicache
from hicache.errors import ServiceUnavailable
from hicache.rpc.address import Address
from hicache.rpc.client.admin import AdminClient
from hicache.rpc.client.options import Secrets
from hicache.testing.servers import Server, binaries
from hicache.testing.sidecars import ServiceProcess, namespace_of
from hicache.testing.waits import eventually

pytestmark = [pytest.mark.chaos, pytest.mark.slow]

PAGES = 1000
NAMESPACE = namespace_of(8192)
TOKENS = np.arange(PAGES * NAMESPACE.page_size, dtype=np.uint32)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: sockets have at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="hc") as name:
        yield Path(name)


def commit(service: ServiceProcess, tokens: NDArray[np.uint32] = TOKENS) -> None:
    """Give the service a thousand pages to write."""
    with hicache.connect(service.address, NAMESPACE) as cache, cache.request(tokens, logits=False) as request:
        fresh = request.allocate()
        request.write_from(np.zeros((len(fresh), 8192), np.uint8))
        request.commit()


@pytest.mark.case("THR-2")
def test_pages_that_were_waiting_are_stored_before_the_end(folder: Path, tmp_path: Path) -> None:
    """SIGTERM with a thousand writes pending: exit code 0, nothing dropped, and all of it is there afterwards."""
    storage = f"file://{tmp_path}?capacity=1GiB"
    with ServiceProcess(folder, "--storage", storage, "--drain", "60") as service:
        commit(service)
        assert service.stop() == {"dropped": {}}
    with (
        ServiceProcess(folder, "--storage", storage) as service,
        hicache.connect(service.address, NAMESPACE) as cache,
        cache.request(TOKENS, logits=False, deadline=30.0) as request,
    ):
        assert len(request.load()) == PAGES


@pytest.mark.case("THR-2")
@pytest.mark.redis
@pytest.mark.skipif(not binaries(), reason="no server of Redis is here")
def test_storage_that_takes_nothing_holds_up_the_end_to_the_deadline(folder: Path, tmp_path: Path) -> None:
    """What could not be written by then is dropped and told; a second SIGTERM ends at once."""
    with Server(next(iter(binaries().values())), tmp_path / "server") as server:
        host, port = server.address
        storage = f"redis://{host}:{port}/0?prefix=test"
        for drain, again in (("1", False), ("60", True)):
            with (
                ServiceProcess(folder, "--storage", storage, "--drain", drain) as service,
                AdminClient(Address.parse(service.address), Secrets()) as admin,
            ):
                commit(service, TOKENS[:16])  # the namespace is known from now on
                server.pause()
                try:
                    commit(service)
                    eventually(lambda: _pending(admin) > 0)
                    began = time.monotonic()
                    service.process.send_signal(signal.SIGTERM)
                    if again:
                        eventually(lambda: _ends(admin))
                        service.process.send_signal(signal.SIGTERM)
                        assert service.process.wait(10) == -signal.SIGTERM
                    else:
                        assert service.ended()["dropped"]["pages"] > 0
                    assert time.monotonic() - began < 15
                finally:
                    server.resume()


def _ends(admin: AdminClient) -> bool:
    try:
        return not admin.ping().ready
    except ServiceUnavailable:
        return True


def _pending(admin: AdminClient) -> int:
    writes = admin.statistics()["pools"][0]["statistics"]["writes"]
    return int(writes["waiting"] + writes["running"])


def processor_seconds(pid: int) -> float:
    """What a process has used of processors so far."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.case("THR-3")
def test_idle_service_does_nothing(folder: Path, tmp_path: Path) -> None:
    """With clients connected and nothing asked it takes less than a twentieth of a processor."""
    with (
        ServiceProcess(folder, "--storage", f"file://{tmp_path}?capacity=1GiB") as service,
        AdminClient(Address.parse(service.address), Secrets()) as admin,
        hicache.connect(service.address, NAMESPACE),
    ):
        commit(service)
        eventually(lambda: admin.statistics()["pools"][0]["statistics"]["core"]["transfers"] == 0)
        eventually(lambda: _share_used(service) < 0.05, "rest")


def _share_used(service: ServiceProcess) -> float:
    began, used = time.monotonic(), processor_seconds(service.process.pid)
    eventually(lambda: time.monotonic() - began > 2.0)
    return (processor_seconds(service.process.pid) - used) / (time.monotonic() - began)
