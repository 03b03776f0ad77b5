"""A service and clients in processes of their own: pages pass between them, tenants stay apart, storage may stop."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import hicache
from hicache.rpc.address import Address
from hicache.rpc.client.admin import AdminClient
from hicache.rpc.client.cache import ConnectedCache
from hicache.rpc.client.options import Secrets
from hicache.testing.servers import Server, binaries
from hicache.testing.sidecars import ServiceProcess, namespace_of, page_content
from hicache.testing.waits import eventually

PAGES = int(os.environ.get("HICACHE_PAGES", "400"))
PAGE_BYTES = 256 * 1024
NAMESPACE = namespace_of(PAGE_BYTES)
TOKENS = np.arange(PAGES * NAMESPACE.page_size, dtype=np.uint32)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: sockets have at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="hc") as name:
        yield Path(name)


@pytest.fixture(params=["file", *list(binaries())[:1]])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A store: a folder, or a real server."""
    if request.param == "file":
        yield f"file://{tmp_path}/store?capacity=4GiB"
        return
    with Server(binaries()[request.param], tmp_path / "server") as server:
        host, port = server.address
        yield f"redis://{host}:{port}/0?prefix=test"


def hashes() -> list[bytes]:
    glued = NAMESPACE.derive().hasher().extend(None, TOKENS.tobytes(), PAGES)
    return [glued[first : first + 32] for first in range(0, len(glued), 32)]


def store(address: str) -> None:
    """Commit all pages that are not there."""
    names = hashes()
    with hicache.connect(address, NAMESPACE) as cache, cache.request(TOKENS, logits=False) as request:
        first = len(request.load())
        fresh = request.allocate()
        assert len(fresh) == PAGES - first
        for page in range(first, PAGES):
            request.write_from([page_content(names[page], PAGE_BYTES)], first=page)
        request.commit()


def found(cache: ConnectedCache) -> int:
    """Read all that is found, and compare every byte."""
    names = hashes()
    with cache.request(TOKENS, logits=False, deadline=30.0) as request:
        usable = len(request.load())
        buffer = np.empty((1, PAGE_BYTES), np.uint8)
        for page in range(usable):
            assert request.read_into(buffer, first=page) == 1
            assert np.array_equal(buffer[0], page_content(names[page], PAGE_BYTES)), f"page {page} has wrong bytes"
        return usable


def in_another_interpreter(address: str) -> None:
    """`store`, in a process of its own."""
    here = Path(__file__)
    code = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('processes', {str(here)!r})\n"
        "module = importlib.util.module_from_spec(spec); spec.loader.exec_module(module)\n"
        f"module.store({address!r})\n"
    )
    environment = os.environ | {"HICACHE_PAGES": str(PAGES)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=120)


def test_pages_pass_between_processes_and_outlive_the_service(folder: Path, storage: str) -> None:
    """One stores, another compares every byte, another tenant sees nothing; a new service has it from storage."""
    config = folder / "config.toml"
    other = f"unix://{folder / 'other.sock'}"
    config.write_text(
        f'[listen]\naddresses = ["unix://{folder / "service.sock"}", "{other}"]\n'
        f'[host]\npool_bytes = "{PAGES * PAGE_BYTES + 2**20}"\n'
        f'[tenants.sockets."{other}"]\ntenant = "other"\n'
    )
    options = ["--config", str(config), "--storage", storage, "--drain", "60"]
    size = f"{2 * PAGES * PAGE_BYTES + 4 * 2**20}"
    with ServiceProcess(folder, *options, host=size, listen=False) as service:
        in_another_interpreter(service.address)
        with hicache.connect(service.address, NAMESPACE) as cache:
            assert cache.match(TOKENS, logits=False).host == PAGES
            assert found(cache) == PAGES
        with hicache.connect(other, NAMESPACE) as stranger:
            assert stranger.match(TOKENS, logits=False).pages == 0
            assert found(stranger) == 0
        assert service.stop() == {"dropped": {}}
    with ServiceProcess(folder, *options, host=size, listen=False) as service:
        with hicache.connect(service.address, NAMESPACE) as cache:
            assert found(cache) == PAGES
        with hicache.connect(other, NAMESPACE) as stranger:
            assert found(stranger) == 0
        service.stop()


def quantile(call: Callable[[], object], share: float, times: int) -> float:
    """A quantile of the seconds that a call takes."""
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return sorted(taken)[int(share * times)]


@pytest.mark.redis
@pytest.mark.skipif(not binaries(), reason="no server of Redis is here")
def test_stopped_storage_disturbs_nobody_who_has_the_pages(folder: Path, tmp_path: Path) -> None:
    """With Redis stopped, what is in HOST is leased and matched as before; what needs storage comes back in time."""
    with Server(next(iter(binaries().values())), tmp_path / "server") as server:
        host, port = server.address
        url = f"redis://{host}:{port}/0?prefix=test"
        with (
            ServiceProcess(folder, "--storage", url, "--drain", "1", host="256MiB") as service,
            hicache.connect(service.address, NAMESPACE) as cache,
        ):
            known = TOKENS[: 64 * NAMESPACE.page_size]

            def lease() -> None:
                with cache.request(known, logits=False) as request:
                    assert len(request.load()) == 64

            with cache.request(known, logits=False) as request:
                request.allocate()
                request.write_from(bytes(64 * PAGE_BYTES))
                request.commit()
            before = quantile(lease, 0.99, 200)
            server.pause()
            try:
                after = quantile(lease, 0.99, 200)
                unknown = known + np.uint32(1)
                began = time.monotonic()
                with cache.request(unknown, logits=False, deadline=0.2) as request:
                    assert len(request.load()) == 0
                waited = time.monotonic() - began
            finally:
                server.resume()
            # The bar is 1.5, and measured by benchmarks/; here other tests run beside it.
            assert after < 5 * before + 0.02
            assert waited < 0.2 + 0.25


def test_living_client_keeps_its_leases(folder: Path) -> None:
    """A request may last longer than a lease: the client renews it for as long as its process lives."""
    with (
        ServiceProcess(folder, "--set", "leases.seconds=0.2") as service,
        hicache.connect(service.address, NAMESPACE) as cache,
        AdminClient(Address.parse(service.address), Secrets()) as admin,
    ):
        tokens = TOKENS[: 4 * NAMESPACE.page_size]
        with cache.request(tokens, logits=False) as request:
            request.allocate()
            request.write_from(bytes(4 * PAGE_BYTES))
            until = admin.statistics()["service"]["uptime_seconds"] + 1.5
            eventually(lambda: admin.statistics()["service"]["uptime_seconds"] > until)
            request.commit()
            assert request.lost is None
        assert cache.match(tokens, logits=False).host == 4
        assert admin.statistics()["service"]["leases"]["expired"] == 0


def test_what_an_engine_holds_itself_is_news(folder: Path) -> None:
    """Reported pages show in the service's numbers, of the group that reported them, until the engine is gone."""
    with (
        ServiceProcess(folder) as service,
        AdminClient(Address.parse(service.address), Secrets()) as admin,
    ):
        names = b"".join(hashes()[:4])
        with hicache.connect(service.address, NAMESPACE) as cache:
            cache.match(TOKENS[:16])
            with cache.request(TOKENS[: 4 * NAMESPACE.page_size]):
                pass  # the service knows the namespace from now on
            cache.report_device(stored=names)
            cache.report_device(removed=names[96:])
            assert admin.statistics()["pools"][0]["device_pages"] == 3
            with pytest.raises(hicache.InvalidInput):
                cache.report_device(stored=b"short")
        eventually(lambda: admin.statistics()["pools"][0]["device_pages"] == 0)
