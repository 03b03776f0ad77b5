"""vLLM as people run it: several processes, tensor parallelism, and a server over HTTP."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import PATIENT, prompt_of, settled
from vllm_engine import BLOCK, ENVIRONMENT, PAGE, TINY, Engine, transfer

Engines = Callable[..., Engine]
Expected = Callable[..., list[int]]

START_SECONDS = 300.0


def test_engine_of_several_processes(engines: Engines, expected: Expected, storage: str) -> None:
    """The scheduler in a process of its own, as by default: cold, local, external, and a fresh engine."""
    prompts = [prompt_of(400 + number, 300) for number in range(2)]
    extra = {"host": "64MiB", "storage": storage}
    with engines(extra, processes=True) as engine:
        for cached in (0, 9 * BLOCK, 4 * PAGE):
            if cached == 4 * PAGE:
                settled(engine)
            answers = engine.generate(*prompts)
            assert [answer.new for answer in answers] == [expected(prompt) for prompt in prompts]
            assert [answer.cached for answer in answers] == 2 * [cached]
    with engines(extra, processes=True) as engine:
        answers = engine.generate(*prompts)
        assert [answer.new for answer in answers] == [expected(prompt) for prompt in prompts]
        assert [answer.cached for answer in answers] == 2 * [4 * PAGE]


@pytest.mark.case("PLUG-4")
def test_two_ranks_write_what_one_reads_and_the_other_way_round(
    engines: Engines, expected: Expected, storage: str
) -> None:
    """Four kv heads, two a rank: with a head group of two, TP=1 and TP=2 share objects in storage."""
    first, second = prompt_of(410, 300), prompt_of(411, 300)
    extra = {"host": "64MiB", "storage": storage, "head_group": 2}
    with engines(extra, processes=True, tensor_parallel_size=2) as two:
        for cached in (0, 4 * PAGE):
            (answer,) = two.generate(first)
            assert (answer.new, answer.cached) == (expected(first), cached)
            settled(two)
    with engines(extra) as one:
        answers = one.generate(first, second)
        assert [answer.new for answer in answers] == [expected(first), expected(second)]
        assert [answer.cached for answer in answers] == [4 * PAGE, 0]
    with engines(extra, processes=True, tensor_parallel_size=2) as two:
        (answer,) = two.generate(second)
        assert (answer.new, answer.cached) == (expected(second), 4 * PAGE)


class Server:
    """`vllm serve` on a free port of the loopback interface; `core` is the one that computes, where that matters."""

    def __init__(self, extra: dict[str, Any] | None, log: Path, *options: str, core: int | None = None) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        command = [str(Path(sys.executable).parent / "vllm"), "serve", TINY, "--served-model-name", "tiny"]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32", "--enforce-eager"]
        command += ["--max-model-len", "1024", "--max-num-seqs", "8", "--block-size", str(BLOCK)]
        if extra is not None:
            command += ["--kv-transfer-config", json.dumps(transfer(extra))]
        command += options
        environment = os.environ | ENVIRONMENT | {"VLLM_SERVER_DEV_MODE": "1"}
        if core is not None:
            environment["VLLM_CPU_OMP_THREADS_BIND"] = str(core)
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=output, env=environment, start_new_session=True
            )
        end = time.monotonic() + START_SECONDS
        while not self._healthy():
            assert self.process.poll() is None, log.read_text(errors="replace")[-4000:]
            assert time.monotonic() < end, "the server does not answer"
            time.sleep(0.2)

    def _healthy(self) -> bool:
        try:
            self.get("/health")
        except OSError:
            return False
        return True

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=60) as answer:
            return str(answer.read().decode())

    def post(self, path: str, document: dict[str, Any] | None = None) -> Any:
        data = json.dumps(document or {}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            body = answer.read()
        return json.loads(body) if body else None

    def complete(self, prompt: list[int], **more: Any) -> list[int]:
        asked = {"model": "tiny", "prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
        found = self.post("/v1/completions", asked | {"return_token_ids": True} | more)
        return list(found["choices"][0]["token_ids"])

    def metric(self, name: str) -> float:
        return sum(
            float(line.rpartition(" ")[2]) for line in self.get("/metrics").splitlines() if line.startswith(name)
        )

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()


@pytest.fixture
def server(tmp_path: Path, storage: str) -> Iterator[Server]:
    made = Server(PATIENT | {"host": "64MiB", "storage": storage}, tmp_path / "server.log")
    yield made
    made.stop()


def test_server_over_http(server: Server, expected: Expected) -> None:
    prompt = prompt_of(420, 300)
    assert server.complete(prompt) == expected(prompt)
    forget(server)
    assert server.complete(prompt) == expected(prompt)
    assert server.metric("vllm:external_prefix_cache_hits_total") == 4 * PAGE
    assert server.metric("vllm:hicache_hit_tokens_total{") == 4 * PAGE
    assert server.metric("vllm:hicache_missed_tokens_total{") > 0
    assert server.metric("vllm:hicache_connected{") == 1
    assert server.metric("vllm:hicache_store_bytes_total{") > 0
    forget(server)
    assert server.complete(prompt, cache_salt="other") == expected(prompt)
    assert server.metric("vllm:external_prefix_cache_hits_total") == 4 * PAGE


def forget(server: Server) -> None:
    """The server's own blocks, once it keeps none for a store."""
    end = time.monotonic() + 30.0
    while not server.post("/reset_prefix_cache")["success"]:
        assert time.monotonic() < end, "the server keeps blocks"
        time.sleep(0.05)
