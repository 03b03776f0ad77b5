"""`hicache explain` of a running service, as its users run it."""

from __future__ import annotations

import json
from concurrent import futures
from pathlib import Path

import grpc
import numpy as np
import pytest

import hicache
from hicache.cli import main
from hicache.errors import InvalidInput
from hicache.rpc.address import Address
from hicache.rpc.client.admin import AdminClient
from hicache.rpc.client.options import Secrets
from hicache.rpc.service import Target
from hicache.testing.sidecars import ServiceProcess, namespace_of

NAMESPACE = namespace_of(8192, model="org/explained")
PROMPT = np.arange(70, dtype=np.uint32)


def test_misses_are_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a prompt would get and why not more, of the model that is named; nothing is counted for it."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps(PROMPT.tolist()) + "\n" + json.dumps([*range(32), *range(100, 132)]) + "\n")
    with ServiceProcess(tmp_path, "--set", "storage.url=memory://") as service:
        cache = hicache.connect(service.address, NAMESPACE, required=True)
        with cache, cache.request(PROMPT) as request:
            request.write_from([bytes(cache.host.page_bytes)] * len(request.allocate()))
            request.commit(ready=hicache.READY)
        command = ["explain", service.address, "--model", "org/explained", "--prompts", str(prompts)]
        assert main([*command, "--json"]) == 0
        whole, edited = json.loads(capsys.readouterr().out)["explanations"]
        assert (whole["prompt"], whole["usable_pages"], whole["causes"][0]["reason"]) == (0, 4, "unaligned_tail")
        assert (edited["prompt"], edited["usable_tokens"], edited["causes"][0]["reason"]) == (1, 32, "cold")
        assert main([*command, "--salt", "s"]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert "known under another namespace, which differs in salt: asked digest" in shown
        assert main(["stats", service.address, "--json"]) == 0
        (pool,) = json.loads(capsys.readouterr().out)["pools"]
        assert pool["statistics"]["requests"] == 1
        command[3] = "nobody"
        assert main(command) == 2
        message = capsys.readouterr().err
        assert (message.count("\n"), "no pool of model" in message) == (1, True)


def test_a_prompt_that_is_no_prompt() -> None:
    """More tokens than a message may have are refused before anything is sent."""
    with (
        AdminClient(Address.parse("127.0.0.1:1"), Secrets(insecure=True)) as admin,
        pytest.raises(InvalidInput) as caught,
    ):
        admin.explain(Target(model="m"), np.zeros(4 * 2**20 + 1, np.uint32))
    assert "4,194,305 tokens is longer than the 4,194,304" in str(caught.value)


def test_a_service_that_is_older(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A service that does not know the call says so; the answer is what to do, not that nobody is there."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("[1, 2]\n")
    server = grpc.server(futures.ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        command = ["explain", f"127.0.0.1:{port}", "--insecure", "--model", "m", "--prompts", str(prompts)]
        assert main(command) == 2
    finally:
        server.stop(0).wait()
    message = capsys.readouterr().err
    assert (message.count("\n"), "does not know this call: upgrade it" in message) == (1, True)
