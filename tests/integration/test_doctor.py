"""The doctor finds what an engine would stumble over, and says that all is well where it is."""

from __future__ import annotations

import asyncio
import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import hicache
from hicache.rpc.service import Finding
from hicache.sidecar import preflight as module
from hicache.sidecar.preflight import disagreements, preflight, through_tiers
from hicache.sidecar.settings import load_settings
from hicache.storage.base import StorageStatistics
from hicache.storage.memory import MemoryBackend
from hicache.testing import faults
from hicache.testing.faults import FaultyStorage


def found(**values: Any) -> dict[str, Finding]:
    flags = {name.replace("__", "."): ("--set", value) for name, value in {"host__bytes": "8MiB", **values}.items()}
    findings = asyncio.run(preflight(load_settings(flags=flags)))
    return {finding.check: finding for finding in findings}


def test_all_is_well(tmp_path: Path) -> None:
    """A page comes back from both tiers, and nothing is left: no socket, no lock, no object that is still found."""
    findings = found(listen__addresses=f"{tmp_path}/h.sock", storage__url=f"file://{tmp_path}/store")
    assert [finding for finding in findings.values() if not finding.good] == []
    assert findings["canary page"].text == "came back with the same bytes from HOST and STORAGE"
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
    again = found(listen__addresses=f"{tmp_path}/h.sock", storage__url=f"file://{tmp_path}/store")
    assert again["canary page"].good


def test_storage_that_its_disk_cannot_hold(tmp_path: Path) -> None:
    """Both numbers are told; a capacity that fits is no finding."""
    where = {"listen__addresses": f"{tmp_path}/h.sock"}
    disk = found(**where, storage__url=f"file://{tmp_path}/store?capacity=900TiB")["disk"]
    assert not disk.good
    assert disk.text.startswith("the storage's capacity is 900 TiB, and its disk has room for ")
    assert "disk" not in found(**where, storage__url=f"file://{tmp_path}/store?capacity=1MiB")


def test_the_folder_of_an_access_log(tmp_path: Path) -> None:
    """It need not be there, but must be writable, and have room for all that may be written."""
    where = {"listen__addresses": f"{tmp_path}/h.sock"}
    good = found(**where, access_log__folder=f"{tmp_path}/deep/log")["access log"]
    assert (good.good, "up to 1 GiB in " in good.text) == (True, True)
    (tmp_path / "file").touch()
    bad = found(**where, access_log__folder=f"{tmp_path}/file")["access log"]
    assert (bad.good, "no folder that this user may write" in bad.text) == (False, True)
    large = found(**where, access_log__folder=f"{tmp_path}/log", access_log__total_bytes="900TiB")["access log"]
    assert not large.good
    assert "access log" not in found(**where)


def test_without_storage(tmp_path: Path) -> None:
    """The page comes back from host memory alone."""
    findings = found(listen__addresses=f"{tmp_path}/h.sock")
    assert findings["canary page"].text == "came back with the same bytes from HOST"


def test_settings_that_do_not_fit(tmp_path: Path) -> None:
    """They are the only finding: all others would follow from them."""
    assert list(found(host__bytes="0")) == ["settings"]
    assert "host.bytes is not set" in found(host__bytes="0")["settings"].text
    assert not found(tls__key="/k")["settings"].good


def test_more_memory_than_there_is(tmp_path: Path) -> None:
    """The numbers are there."""
    finding = found(listen__addresses=f"{tmp_path}/h.sock", host__bytes="1024TiB")["memory"]
    assert not finding.good
    assert "host.bytes of 1 PiB does not fit" in finding.text


def test_placement_that_is_not_there(tmp_path: Path) -> None:
    """A NUMA node that the machine lacks."""
    findings = found(listen__addresses=f"{tmp_path}/h.sock", host__numa_node="1000")
    assert not findings["memory"].good
    assert "1000" in findings["memory"].text


def test_addresses_that_are_taken(tmp_path: Path) -> None:
    """A socket that something listens on, a port in use, a folder that is missing."""
    with socket.socket(socket.AF_UNIX) as unix, socket.socket() as tcp:
        unix.bind(f"{tmp_path}/h.sock")
        unix.listen()
        tcp.bind(("127.0.0.1", 0))
        tcp.listen()
        port = tcp.getsockname()[1]
        findings = found(
            listen__addresses=f"{tmp_path}/h.sock,127.0.0.1:{port},{tmp_path}/none/h.sock", listen__insecure="true"
        )
    assert "is taken" in findings[f"address unix://{tmp_path}/h.sock"].text
    assert "Address already in use" in findings[f"address 127.0.0.1:{port}"].text
    assert "does not exist: make it" in findings[f"address unix://{tmp_path}/none/h.sock"].text
    assert os.path.exists(f"{tmp_path}/h.sock")


@pytest.mark.parametrize(
    ("mode", "rules", "good"),
    [("0600", "{}", True), ("0660", "{}", False), ("0606", "{}", False), ("0660", '{"7": "acme"}', True)],
)
def test_rights_of_sockets(tmp_path: Path, mode: str, rules: str, good: bool) -> None:
    """Others may connect only where rules say who they are."""
    findings = found(listen__addresses=f"{tmp_path}/h.sock", listen__socket_mode=mode, tenants__uids=rules)
    assert findings["socket rights"].good == good


def test_storage_that_cannot_be_opened(tmp_path: Path) -> None:
    """Its own words are the finding."""
    (tmp_path / "file").write_text("")
    finding = found(listen__addresses=f"{tmp_path}/h.sock", storage__url=f"file://{tmp_path}/file")["storage"]
    assert not finding.good
    assert str(tmp_path / "file") in finding.text


def test_storage_at_which_nobody_answers(tmp_path: Path) -> None:
    """A store that opens lazily is asked, and what is said of it is true; nothing is sent through it then."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and listens not
        url = f"redis://127.0.0.1:{closed.getsockname()[1]}/0?prefix=test"
        findings = found(listen__addresses=f"{tmp_path}/h.sock", storage__url=url)
    assert not findings["storage"].good
    assert "opened, but it does not answer: " in findings["storage"].text
    assert findings["canary page"].text == "came back with the same bytes from HOST"


class Rebuilding(MemoryBackend):
    """Storage whose index is read for a while."""

    def __init__(self, looks: int) -> None:
        super().__init__()
        self.looks = looks

    def statistics(self) -> StorageStatistics:
        self.looks -= 1
        return replace(super().statistics(), ready=self.looks < 0, objects=3 if self.looks < 0 else 1, bytes_used=2048)


@pytest.mark.parametrize(
    ("looks", "text"),
    [
        (3, "it answers, holds 2 KiB in 3 objects"),
        (10**9, "it answers, holds 2 KiB in 1 objects, as far as its index is read, which goes on"),
    ],
)
def test_storage_whose_index_is_being_read(monkeypatch: pytest.MonkeyPatch, looks: int, text: str) -> None:
    """It is waited for, and where that takes too long, what is known is said to be not all."""
    monkeypatch.setattr(module, "_PATIENCE", 0.2)
    assert asyncio.run(module._answer(Rebuilding(looks))).text == text


def manifest(tenant: str | None = None, **changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {"model": "org/m", "revision": "1", "page_size": 16, "hash": "sha256", **changes}
    geometry = hicache.KVGeometry.mha(layers=1, kv_heads=1, head_dim=8, dtype="float16")
    return dict(hicache.Namespace(geometry=geometry, **fields).derive(tenant=tenant).describe())


def test_namespaces_that_disagree() -> None:
    """Two ways to serve one model are told with the fields that differ; tenants and other models are not."""
    assert (
        list(disagreements([manifest(), manifest("a"), manifest("b"), manifest(model="org/other", revision="2")])) == []
    )
    (finding,) = disagreements([manifest(), manifest(numerics="vllm/flash/bf16"), manifest("a", page_size=32)])
    assert "3 of model 'org/m' share nothing" in finding.text
    assert "geometry_digest, numerics, page_size;" in finding.text


@pytest.mark.parametrize("verb", ["put", "get_into"])
def test_storage_that_keeps_nothing(verb: str) -> None:
    """It can be opened, and only the page shows that it is of no use."""
    storage = FaultyStorage(MemoryBackend())
    storage.script(verb, *[faults.fail(OSError("broken"))] * 100)
    config = load_settings(flags={"host.bytes": ("--host", "8MiB")}).config
    finding = asyncio.run(through_tiers(config, storage))
    assert not finding.good
    assert finding.check == "canary page"
