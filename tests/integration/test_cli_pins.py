"""Several prompts under one name, and certificates of another authority: what the commands say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hicache
from hicache.cli import main
from hicache.testing.certificates import make_certificates
from hicache.testing.sidecars import ServiceProcess, namespace_of

pytestmark = pytest.mark.slow

NAMESPACE = namespace_of(8192, model="org/pinned")


def called(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    code = main([*arguments, "--json"])
    captured = capsys.readouterr()
    return code, json.loads(captured.out) if captured.out else captured.err


def test_several_prompts_under_one_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A pin each, with a number; all of them are made or none, and the name ends them all, but no other pin."""
    with ServiceProcess(tmp_path) as service:
        prompts = [np.arange(first, first + 32, dtype=np.uint32) for first in (0, 1000, 2000)]
        with hicache.connect(service.address, NAMESPACE, required=True) as cache:
            for prompt in prompts:
                with cache.request(prompt) as request:
                    request.write_from([bytes(cache.host.page_bytes)] * len(request.allocate()))
                    request.commit()
        file, one = tmp_path / "all.jsonl", tmp_path / "one.jsonl"
        file.write_text("".join(f"{prompt.tolist()}\n" for prompt in prompts))
        one.write_text(f"{prompts[0].tolist()}\n")

        def pin(prompts: Path, name: str) -> tuple[int, Any]:
            options = ("--model", "org/pinned", "--prompts", str(prompts), "--name", name)
            return called(capsys, "pin", service.address, *options)

        def names() -> list[str]:
            return sorted(pin["name"] for pin in called(capsys, "pins", service.address)[1]["pins"])

        assert pin(one, "system-2")[0] == 0
        code, message = pin(file, "system")
        assert (code, "'system-2' exists already" in message) == (2, True)
        assert names() == ["system-2"]
        assert called(capsys, "unpin", service.address, "--name", "system-2") == (0, {"pins": 1})
        code, made = pin(file, "system")
        assert [pin["name"] for pin in made["pins"]] == ["system-1", "system-2", "system-3"]
        assert pin(one, "system-else")[0] == 0
        assert called(capsys, "unpin", service.address, "--name", "system-3") == (0, {"pins": 1})
        assert called(capsys, "unpin", service.address, "--name", "system") == (0, {"pins": 2})
        assert names() == ["system-else"]
        code, message = called(capsys, "unpin", service.address, "--name", "system")
        assert (code, "no pin is called 'system'" in message) == (2, True)


def test_an_authority_that_did_not_sign(tmp_path: Path) -> None:
    """One line that says so, and none of gRPC's own."""
    right, wrong = make_certificates(tmp_path / "right"), make_certificates(tmp_path / "wrong")
    tls = ("--tls-certificate", str(right.server), "--tls-key", str(right.server_key), "--insecure")
    with ServiceProcess(tmp_path, "--listen", "127.0.0.1:0", *tls, listen=False) as service:
        (address,) = service.ready["addresses"]
        command = [sys.executable, "-m", "hicache", "ping", address, "--timeout", "5", "--ca"]
        run = subprocess.run([*command, str(wrong.ca)], capture_output=True, text=True, check=False)
        assert run.returncode == 2
        assert run.stderr.count("\n") == 1
        assert "its certificate is not trusted" in run.stderr
        assert subprocess.run([*command, str(right.ca)], capture_output=True, check=False).returncode == 0
