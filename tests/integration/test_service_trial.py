"""`hicache bench sidecar`: figures of a real service, and what it says of one that gives wrong bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hicache.cli import main
from hicache.errors import ConfigError, ServiceUnavailable
from hicache.rpc.client import trial
from hicache.rpc.client.options import Secrets
from hicache.rpc.client.trial import TrialOptions, run_trial, work
from hicache.testing.sidecars import ServiceProcess

pytestmark = pytest.mark.slow

SMALL = ("--calls", "10", "--rounds", "2", "--bytes", "1MiB", "--tokens", "200")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with ServiceProcess(tmp_path_factory.mktemp("trial"), host="8MiB") as running:
        yield running
        assert running.stop() == {"dropped": {}}


def test_figures(service: ServiceProcess, capsys: pytest.CaptureFixture[str]) -> None:
    """Every verb beside an empty message, pages from one process to another beside a copy, and nothing left behind."""
    assert main(["bench", "sidecar", service.address, *SMALL, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    verbs = {latency["verb"]: latency for latency in document["latencies"]}
    assert list(verbs) == ["echo", "match", "lease", "load", "release", "reserve", "commit"]
    assert all(0 < latency["p50"] <= latency["p99"] for latency in verbs.values())
    assert [(rate["what"], rate["wrong"]) for rate in document["rates"]] == [("store", 0), ("load", 0)]
    assert all(rate["gigabytes_per_second"] > 0 and rate["ratio"] > 0 for rate in document["rates"])
    assert document["batch"] == 2**20
    assert main(["stats", service.address, "--json"]) == 0
    (pool,) = json.loads(capsys.readouterr().out)["pools"]
    assert pool["statistics"]["core"]["host"]["resident"] == 0


def test_tables(service: ServiceProcess, capsys: pytest.CaptureFixture[str]) -> None:
    """For people."""
    assert main(["bench", "sidecar", service.address, *SMALL]) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("echo", "p99 µs", "1 MiB at once", "ratio"))


def test_what_was_stored_is_compared(service: ServiceProcess) -> None:
    """What one process has stored another finds; pages that were never stored are counted as wrong."""
    job: dict[str, Any] = {"address": service.address, "secrets": asdict(Secrets()), "pages": 2, "rounds": 2}
    stored = work({**job, "what": "store", "salt": "one"})
    assert (stored.wrong, stored.gigabytes_per_second > 0, stored.reference > 0) == (0, True, True)
    assert work({**job, "what": "load", "salt": "one"}).wrong == 0
    assert work({**job, "what": "load", "salt": "another"}).wrong > 0


def test_wrong_bytes_are_counted(service: ServiceProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """One page with other bytes is one that is wrong, and the exit code says so."""
    real = trial._load

    def spoiled(cache: Any, prompt: Any, salt: str, pages: np.ndarray[Any, Any]) -> Iterator[int]:
        steps = real(cache, prompt, salt, pages)
        yield next(steps)
        pages[5] ^= 1
        yield next(steps)

    job: dict[str, Any] = {"address": service.address, "secrets": asdict(Secrets()), "pages": 2, "rounds": 1}
    assert work({**job, "what": "store", "salt": "spoiled"}).wrong == 0
    monkeypatch.setattr(trial, "_load", spoiled)
    assert work({**job, "what": "load", "salt": "spoiled"}).wrong == 1


@pytest.mark.parametrize("arguments", [("--calls", "1"), ("--tokens", "3"), ("--rounds", "0"), ("--rounds", "1000")])
def test_what_cannot_be_measured(
    service: ServiceProcess, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    """One line, exit code 2."""
    assert main(["bench", "sidecar", service.address, *SMALL, *arguments]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_service_that_is_away(tmp_path: Path) -> None:
    """Is said to be that, whoever of the processes notices."""
    with pytest.raises(ServiceUnavailable):
        run_trial(f"unix://{tmp_path}/h.sock", Secrets(), TrialOptions())
    with pytest.raises(ConfigError):
        run_trial("nonsense", Secrets(), TrialOptions())
