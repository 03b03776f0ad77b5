"""The plug-in as a client of a real service: in its host tier and storage, through its end, and apart from others."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hicache.testing.clients import until
from hicache.testing.sidecars import ServiceProcess

pytestmark = pytest.mark.slow

TIMEOUT = 1.0
PAGES = 3
TARGET = torch.arange(16, 16 + PAGES * 4)


def chain(seed: int, pages: int) -> list[str]:
    """Keys of a prompt."""
    keys = [sha256(bytes([seed])).hexdigest()]
    while len(keys) < pages:
        keys.append(sha256(bytes.fromhex(keys[-1])).hexdigest())
    return keys


KEYS = chain(1, PAGES)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: sockets have at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="hc") as name:
        yield Path(name)


Make = Callable[..., Any]


@pytest.fixture
def engine(plugin: Make, extra_info: Any) -> Make:
    """Makes engines at an address, with the verbs that SGLang's controller uses."""

    def make(pool: Any, address: str, *, extra: dict[str, Any] | None = None, **config: Any) -> SimpleNamespace:
        one = plugin(pool, extra={"address": address, "timeout": TIMEOUT, "interface_v1": 1} | (extra or {}), **config)

        def known(before: list[str]) -> Any:
            return extra_info(prefix_keys=before)

        size = pool.page_size
        return SimpleNamespace(
            plugin=one,
            store=lambda keys, before=(), at=0: one.batch_set_v1(
                keys, torch.arange(at, at + len(keys) * size), known(list(before))
            ),
            load=lambda keys, before=(): one.batch_get_v1(keys, TARGET[: len(keys) * size], known(list(before))),
            exists=lambda keys, before=(): one.batch_exists(keys, known(list(before))),
            written=lambda page: pool.get_data_page(page * size).view(torch.uint8),
            loaded=lambda page: pool.get_data_page(16 + page * size).view(torch.uint8),
        )

    return make


def same(writer: Any, reader: Any, pages: int = PAGES) -> bool:
    return all(torch.equal(writer.written(page), reader.loaded(page)) for page in range(pages))


def test_engines_share_a_service_and_outlive_it(engine: Make, pools: SimpleNamespace, folder: Path) -> None:
    """Bit for bit between engines of any layout; without it they go on at once; a new one has it from its storage."""
    options = ("--storage", f"file://{folder}/store?capacity=64MiB", "--log-level", "error")
    pool = {"pool_size": "1MiB"}  # else whoever comes back first to the next service has all of its memory
    with ServiceProcess(folder, *options) as service:
        first = engine(pools.mha("page_first"), service.address, extra=pool)
        assert first.exists(KEYS) == 0
        assert first.load(KEYS) == [False] * PAGES
        assert first.store(KEYS[:1]) == [True]
        assert first.store(KEYS[1:], KEYS[:1], at=4) == [True, True]
        assert first.store(KEYS) == [True] * PAGES  # what is there succeeds
        second = engine(pools.mha("layer_first"), service.address, extra=pool)
        assert (second.exists(KEYS), second.exists(KEYS[2:], KEYS[:2]), second.exists([*KEYS[:2], "0" * 64])) == (
            3,
            1,
            2,
        )
        assert second.load(KEYS) == [True] * PAGES
        other = engine(pools.mha("layer_first"), service.address, extra=pool)
        other.plugin.mem_pool_host.kv_buffer.zero_()
        assert other.load(KEYS[1:], KEYS[:1]) == [True, True]
        assert torch.equal(other.loaded(0), second.loaded(1))
        lost = chain(9, 3)
        assert first.store(lost[1:], lost[:1]) == [False, False]  # nothing could find them
        assert first.plugin.statistics().write_failures == {"prefix": 2}
        stranger = engine(pools.mha("page_first"), service.address, extra=pool, tp_size=2, tp_rank=1)
        assert stranger.exists(KEYS) == 0
        until(lambda: len(list(folder.glob("store/**/*_*"))) >= PAGES, "the service's writes")
        service.kill()
        assert first.load(KEYS) == [False] * PAGES
        assert first.store(KEYS) == [False] * PAGES
        assert first.plugin.statistics().read_failures["away"] >= PAGES
    with ServiceProcess(folder, *options):
        until(lambda: first.exists(KEYS) == PAGES, "the client's return")
        first.plugin.mem_pool_host.kv_buffer[:, 16:].zero_()
        assert first.load(KEYS) == [True] * PAGES
        assert same(first, first)


def test_latents_are_stored_once_for_all_ranks(engine: Make, pools: SimpleNamespace, folder: Path) -> None:
    """What one rank of MLA stores the others read; and a cleared namespace has nothing."""
    with ServiceProcess(folder, "--log-level", "error") as service:
        first = engine(pools.mla(), service.address, tp_rank=0, tp_size=2)
        second = engine(pools.mla(), service.address, tp_rank=1, tp_size=2)
        assert first.store(KEYS) == [True] * PAGES
        second.plugin.mem_pool_host.kv_buffer[16:].zero_()
        assert second.load(KEYS) == [True] * PAGES
        assert same(first, second)
        backwards = torch.arange(PAGES * 4 - 1, -1, -1)  # no page of the pool lies so
        assert first.plugin.batch_get_v1(KEYS, backwards) == [False] * PAGES
        assert first.plugin.batch_set_v1(chain(2, PAGES), backwards) == [False] * PAGES
        assert first.plugin.clear() is True
        assert second.exists(KEYS) == 0


def test_a_service_that_stands_still_costs_each_call_its_time(
    engine: Make, pools: SimpleNamespace, folder: Path
) -> None:
    """Nobody waits much longer than `timeout`, later calls not at all, and it is used again when it goes on."""
    with ServiceProcess(folder, "--log-level", "error") as service:
        one = engine(pools.mha("page_first"), service.address)
        assert one.store(KEYS) == [True] * PAGES
        os.kill(service.process.pid, signal.SIGSTOP)
        try:
            began = time.monotonic()
            assert one.load(KEYS) == [False] * PAGES
            assert one.exists(KEYS) == 0
            assert time.monotonic() - began < 3 * TIMEOUT + 2
        finally:
            os.kill(service.process.pid, signal.SIGCONT)
        until(lambda: one.load(KEYS) == [True] * PAGES, "the client's return")
        assert same(one, one)


def test_tenants_of_one_service_see_nothing_of_each_other(engine: Make, pools: SimpleNamespace, folder: Path) -> None:
    """The same model and keys at sockets of two tenants; one may only read there, another only write."""
    others = [f"unix://{folder}/{name}.sock" for name in ("reads", "writes")]
    rules: dict[str, Any] = {f"{folder}/service.sock": "acme"}
    rules |= {
        f"{folder}/{name}.sock": {"tenant": "batch", "rights": [name.removesuffix("s")]} for name in ("reads", "writes")
    }
    options = [part for other in others for part in ("--listen", other)]
    options += ["--set", f"tenants.sockets={json.dumps(rules)}", "--set", "host.pool_bytes=1MiB"]
    with ServiceProcess(folder, *options, "--log-level", "error") as service:
        first, stranger, blind = (engine(pools.mha(), address) for address in (service.address, *others))
        assert first.store(KEYS) == [True] * PAGES
        assert stranger.exists(KEYS) == 0
        assert stranger.load(KEYS) == [False] * PAGES
        assert stranger.store(KEYS) == [False] * PAGES
        assert stranger.plugin.statistics().write_failures == {"PermissionDenied": PAGES}
        assert (blind.exists(KEYS), blind.load(KEYS)) == (0, [False] * PAGES)
        assert "has no right to read" in blind.plugin.statistics().disabled
        assert first.plugin.clear() is False


def test_a_full_service_stores_what_it_can(engine: Make, pools: SimpleNamespace, folder: Path) -> None:
    """Pages that nobody uses make room for others; a prompt longer than the pool is refused as a whole."""
    with ServiceProcess(folder, "--log-level", "error") as service:
        pool = pools.mha()
        one = engine(pool, service.address, extra={"pool_size": "16KiB"})  # some pages
        for seed in range(2, 12):
            keys = chain(seed, PAGES)
            assert one.store(keys) == [True] * PAGES
            assert one.exists(keys) == PAGES
        assert one.exists(chain(2, PAGES)) == 0
        assert one.store(chain(20, 8)) == [False] * 8
        assert one.plugin.statistics().write_failures == {"OutOfSlots": 8}


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({"address": "unix:///nowhere", "storage": "memory://"}, 'has "storage" and "address"'),
        ({"address": "host:7420", "interface_v1": 1}, "insecure=True"),
        ({"address": "nonsense", "interface_v1": 1}, "nonsense"),
        ({"address": "unix:///nowhere"}, 'need "interface_v1": 1'),
        ({"address": "unix:///nowhere", "head_group": 2}, "head_group has no meaning for a service"),
        ({"storage": "memory://", "pool_size": "1GiB"}, "pool_size has no meaning for storage without a service"),
    ],
)
def test_settings_that_cannot_be_are_one_line(
    extra: dict[str, Any], text: str, plugin: Make, pools: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    one = plugin(pools.mha(), extra=extra)
    assert one.batch_exists(KEYS) == 0
    assert "runs without a cache" in caplog.text
    assert text in caplog.text


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ('{"hicache_storage_pass_prefix_keys": true}', False),
        ("{}", True),
        ("@{file}", True),
        ("@nowhere.yaml", False),
        (None, False),
    ],
)
def test_a_service_wants_to_know_what_stands_before_a_page(
    given: str | None,
    said: bool,
    plugin: Make,
    pools: SimpleNamespace,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One line at start where SGLang was not told to pass it; it is away here, and the engine runs."""
    (tmp_path / "extra.json").write_text("{}")
    text = given and given.replace("{file}", str(tmp_path / "extra.json"))
    arguments = SimpleNamespace(hicache_storage_backend_extra_config=text)
    extra = {"address": f"unix://{tmp_path}/none.sock", "interface_v1": 1}
    one = plugin(pools.mha(), extra=extra, arguments=arguments)
    assert one.batch_exists(KEYS) == 0
    assert ('add "hicache_storage_pass_prefix_keys": true' in caplog.text) is said
    assert one.statistics().disabled == ""
