"""Who may do what at a real service, what its end does to clients, and what SIGHUP changes."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hicache
from hicache.cli import main
from hicache.errors import HicacheError, PermissionDenied
from hicache.testing.certificates import make_certificates
from hicache.testing.sidecars import ServiceProcess, namespace_of

pytestmark = pytest.mark.slow

NAMESPACE = namespace_of(8192)
PROMPT = np.arange(70, dtype=np.uint32)
UID = str(os.getuid())


def called(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    code = main([*arguments, "--json"])
    captured = capsys.readouterr()
    return code, json.loads(captured.out) if captured.out else captured.err


def store(address: str, **secrets: Any) -> None:
    cache = hicache.connect(address, NAMESPACE, required=True, **secrets)
    with cache, cache.request(PROMPT) as request:
        request.write_from([bytes(cache.host.page_bytes)] * len(request.allocate()))
        request.commit(ready=hicache.READY)


def becomes(true: Callable[[], bool]) -> bool:
    """Whether something comes true within some seconds; asking takes its time, so this is no busy loop."""
    end = time.monotonic() + 20
    while not true():
        if time.monotonic() > end:
            return False
    return True


def denied(cache: Any) -> bool:
    try:
        cache.match(PROMPT)
    except PermissionDenied:
        return True
    return False


def test_tenants_by_uid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The kernel says who calls: its rule gives tenant and rights, also of calls beside a session."""
    with ServiceProcess(tmp_path, "--set", f"tenants.uids.{UID}=acme") as service:
        assert called(capsys, "ping", service.address)[1]["tenant"] == "acme"
        store(service.address)
        _, document = called(capsys, "stats", service.address)
        assert [pool["tenant"] for pool in document["pools"]] == ["acme"]
        code, message = called(capsys, "clear", service.address, "--all")
        assert (code, "no right to administer" in message) == (2, True)
        assert service.stop() == {"dropped": {}}


def test_uids_without_a_rule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They may do nothing at all, though the file system lets them in."""
    with ServiceProcess(tmp_path, "--set", "tenants.uids.4000000000=acme") as service:
        code, message = called(capsys, "ping", service.address)
        assert (code, f"uid {UID} has no tenant here" in message) == (2, True)
        with pytest.raises(HicacheError, match="has no tenant here"):
            store(service.address)
        assert service.stop() == {"dropped": {}}


def test_tenants_by_socket(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two sockets of one service are two tenants: what one stores the other does not see, not even in statistics."""
    other = f"{tmp_path}/other.sock"
    rules = {f"{tmp_path}/service.sock": "acme", other: {"tenant": "batch", "rights": ["read", "write", "admin"]}}
    options = ("--listen", other, "--set", f"tenants.sockets={json.dumps(rules)}", "--set", "host.pool_bytes=1MiB")
    with ServiceProcess(tmp_path, *options) as service:
        store(service.address)
        with hicache.connect(other, NAMESPACE, required=True) as cache:
            assert cache.match(PROMPT).pages == 0
        with hicache.connect(service.address, NAMESPACE, required=True) as cache:
            assert cache.match(PROMPT).pages == 4
        assert called(capsys, "clear", other, "--all")[0] == 0
        with hicache.connect(service.address, NAMESPACE, required=True) as cache:
            assert cache.match(PROMPT).pages == 4
        for address, tenant in ((service.address, "acme"), (other, "batch")):
            _, document = called(capsys, "stats", address)
            assert [pool["tenant"] for pool in document["pools"]] == [tenant]
        assert service.stop() == {"dropped": {}}


def test_a_quota_is_hard(tmp_path: Path) -> None:
    """A pool that its tenant may not have is refused with the numbers."""
    options = ("--set", f"tenants.uids.{UID}=acme", "--set", 'tenants.quotas={"acme": {"host": "1MiB"}}')
    with ServiceProcess(tmp_path, *options) as service:
        with pytest.raises(HicacheError, match="'acme' may hold 1 MiB in HOST"):
            hicache.connect(service.address, NAMESPACE, required=True, timeout=1.0, pool_size="2MiB")
        with hicache.connect(service.address, NAMESPACE, required=True, pool_size="1MiB") as cache:
            assert cache.host.slots == 128
        assert service.stop() == {"dropped": {}}


def test_a_token_that_is_taken_out(tmp_path: Path) -> None:
    """SIGHUP takes the rights of its sessions, and those of other tokens keep theirs."""
    made = make_certificates(tmp_path / "tls")
    tokens = tmp_path / "tokens.toml"
    names = {name: f"a token of {name} with enough letters" for name in ("one", "two")}

    def write(*chosen: str) -> None:
        tokens.touch(0o600)
        tokens.write_text(
            "".join(f'[[tokens]]\nname = "{name}"\ntoken = "{names[name]}"\ntenant = "acme"\n' for name in chosen)
        )

    write("one", "two")
    tls = ("--tls-certificate", str(made.server), "--tls-key", str(made.server_key))
    with ServiceProcess(tmp_path, "--listen", "127.0.0.1:0", "--tokens", str(tokens), *tls, listen=False) as service:
        address = service.ready["addresses"][0].replace("127.0.0.1", "localhost")
        one, two = (
            hicache.connect(address, NAMESPACE, required=True, ca=str(made.ca), token=names[name]) for name in names
        )
        with one, two:
            write("two")
            service.process.send_signal(signal.SIGHUP)
            assert becomes(lambda: denied(one))
            assert not denied(two)
        assert service.stop() == {"dropped": {}}


def test_insecure_tcp(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where it was allowed on both sides anyone may do anything; for the doctor it is about the connection alone."""
    with ServiceProcess(tmp_path, "--listen", "127.0.0.1:0", "--insecure", listen=False) as service:
        (address,) = service.ready["addresses"]
        code, message = called(capsys, "ping", address)
        assert (code, "give --ca for TLS, or --insecure" in message) == (2, True)
        store(address, insecure=True)
        code, document = called(capsys, "doctor", address, "--insecure")
        assert code == 0, document
        assert "settings" not in {finding["check"] for finding in document["findings"]}
        assert called(capsys, "clear", address, "--insecure", "--all")[1]["namespaces"] >= 1
        assert service.stop() == {"dropped": {}}


def test_the_end_says_what_was_dropped(tmp_path: Path) -> None:
    """SIGTERM waits for clients as long as it may, then ends with exit code 0 all the same."""
    with ServiceProcess(tmp_path, "--drain", "0.3") as service:
        cache = hicache.connect(service.address, NAMESPACE, required=True)
        with cache, cache.request(PROMPT) as request:
            request.allocate()
            assert service.stop() == {"dropped": {"leases": 1}}
            assert request.lost


@pytest.mark.case("THR-2")
def test_a_second_sigterm_ends_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """However long the drain may take; and the next service starts in the same place."""
    with ServiceProcess(tmp_path, "--drain", "600") as service:
        cache = hicache.connect(service.address, NAMESPACE, required=True)
        with cache, cache.request(PROMPT) as request:
            request.allocate()
            service.process.send_signal(signal.SIGTERM)
            assert becomes(lambda: called(capsys, "ping", service.address, "--timeout", "1")[0] != 0)
            assert service.process.poll() is None
            service.process.send_signal(signal.SIGTERM)
            assert service.process.wait(20) == -signal.SIGTERM
    with ServiceProcess(tmp_path) as service:
        assert called(capsys, "ping", service.address)[0] == 0
        assert service.stop() == {"dropped": {}}
