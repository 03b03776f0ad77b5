"""An engine of vLLM in a process of its own, told what to do over a pipe: for tests that start, kill and compare.

Run as a program it is that process.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
MODELS = Path(os.environ.get("ENGINES_FOLDER", ROOT / ".engines")) / "models"
TINY = os.environ.get("HICACHE_TINY_MODEL", str(MODELS / "tiny"))
SMOLLM2 = os.environ.get("HICACHE_SMOLLM2", str(MODELS / "smollm2"))

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
}
START_SECONDS = 240.0
ANSWER_SECONDS = 120.0
BLOCK = 32
PAGE = 64


DEADLINE = 20.0
"""Long, where a test says nothing of it: what is computable is a hit on a busy machine too."""


def transfer(extra: dict[str, Any], **options: Any) -> dict[str, Any]:
    """What a user gives as --kv-transfer-config."""
    return {
        "kv_connector": "HiCacheConnector",
        "kv_connector_module_path": "hicache_vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"deadline": DEADLINE} | extra,
    } | options


class Engine:
    """One engine; a context manager that ends it.

    Args:
        extra: the connector's configuration; None for an engine without a connector.
        log: file that gets what the engine says.
        processes: whether it runs as vLLM does by default, in several processes; else in one.
        kv: fields of `KVTransferConfig` that differ.
        options: of `LLM` that differ.
    """

    def __init__(
        self,
        extra: dict[str, Any] | None,
        log: Path,
        *,
        processes: bool = False,
        kv: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.log = log
        config = {"options": options, "transfer": None if extra is None else transfer(extra, **(kv or {}))}
        environment = os.environ | ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(processes))}
        if int(options.get("tensor_parallel_size", 1)) * int(options.get("pipeline_parallel_size", 1)) > 1:
            environment["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
        elif not processes:
            config["options"].setdefault("distributed_executor_backend", "uni")
        mine, theirs = os.pipe(), os.pipe()
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(theirs[0]), str(mine[1]), json.dumps(config)],
                pass_fds=(theirs[0], mine[1]),
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
            )
        os.close(theirs[0])
        os.close(mine[1])
        self._tell = os.fdopen(theirs[1], "w")
        self._hear = os.fdopen(mine[0])
        self._read(START_SECONDS)

    def _read(self, seconds: float) -> Any:
        found, _, _ = select.select([self._hear], [], [], seconds)
        line = self._hear.readline() if found else ""
        if not line:
            text = self.log.read_text(errors="replace")[-4000:]
            raise RuntimeError(f"the engine said nothing for {seconds:g} s, its end was {self.process.poll()}:\n{text}")
        return json.loads(line)

    def ask(self, seconds: float = ANSWER_SECONDS, **command: Any) -> Any:
        self.send(**command)
        return self.answer(seconds)

    def send(self, **command: Any) -> None:
        self._tell.write(json.dumps(command) + "\n")
        self._tell.flush()

    def answer(self, seconds: float = ANSWER_SECONDS) -> Any:
        return self._read(seconds)

    def generate(
        self,
        *prompts: list[int],
        salts: list[str] | None = None,
        tokens: int = 16,
        lora: str | None = None,
        image: int | None = None,
    ) -> list[Answer]:
        """`lora` names an adapter's folder beside the models; `image` is the seed of one in front of each prompt."""
        found = self.ask(do="generate", prompts=prompts, salts=salts, tokens=tokens, lora=lora, image=image)
        return [Answer(**one) for one in found]

    def reset(self, *, connector: bool = False) -> bool:
        return bool(self.ask(do="reset", connector=connector))

    def metrics(self) -> dict[str, float]:
        """vLLM's, with the label that tells sources and reasons behind a slash."""
        found: dict[str, float] = self.ask(do="metrics")
        return found

    def said(self, text: str) -> bool:
        return text in self.log.read_text(errors="replace")

    def close(self) -> None:
        if self.process.poll() is None:
            try:
                self.ask(do="quit", seconds=60.0)
                self.process.wait(20.0)
            except (OSError, RuntimeError, subprocess.TimeoutExpired):
                pass
        self.kill()
        self._tell.close()
        self._hear.close()

    def kill(self) -> None:
        """By SIGKILL, with all of its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class Answer:
    """What came of one prompt: its new tokens, cached ones, and seconds until the first."""

    def __init__(self, new: list[int], cached: int, first: float) -> None:
        self.new = new
        self.cached = cached
        self.first = first


# ---- the process


def _main() -> None:
    hear, tell = os.fdopen(int(sys.argv[1])), os.fdopen(int(sys.argv[2]), "w")
    config = json.loads(sys.argv[3])
    llm = _made(config)

    def say(what: Any) -> None:
        tell.write(json.dumps(what) + "\n")
        tell.flush()

    say("ready")
    for line in hear:
        command = json.loads(line)
        if command["do"] == "quit":
            llm.llm_engine.engine_core.shutdown()
            say("bye")
            return
        say(_COMMANDS[command.pop("do")](llm, **command))


def _made(config: dict[str, Any]) -> Any:
    from vllm import LLM
    from vllm.config import KVTransferConfig

    options = {
        "model": TINY,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 1024,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 1024,
        "enable_prefix_caching": True,
        "block_size": BLOCK,
        "disable_log_stats": False,
        "seed": 0,
    } | config["options"]
    given = config["transfer"]
    return LLM(**options, kv_transfer_config=None if given is None else KVTransferConfig(**given))


def _generate(
    llm: Any,
    prompts: list[list[int]],
    salts: list[str] | None,
    tokens: int,
    lora: str | None = None,
    image: int | None = None,
) -> list[dict[str, Any]]:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    for one, salt in zip(asked, salts or (), strict=False):
        one["cache_salt"] = salt
    for one in asked if image is not None else ():
        one["multi_modal_data"] = {"image": _image(image)}
    begun = time.monotonic()
    adapter = None if lora is None else LoRARequest(lora, int(lora.rpartition("-")[2]), str(MODELS / lora))
    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    found = llm.generate(asked, sampling, use_tqdm=False, lora_request=adapter)
    _settle(llm)
    return [
        {
            "new": list(one.outputs[0].token_ids),
            "cached": one.num_cached_tokens or 0,
            "first": _first(one, time.monotonic() - begun),
        }
        for one in found
    ]


def _image(seed: int) -> Any:
    import numpy as np
    from PIL import Image

    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (64, 64, 3), dtype=np.uint8))


def _first(one: Any, otherwise: float) -> float:
    metrics = one.metrics
    return otherwise if metrics is None else float(metrics.first_token_latency)


def _settle(llm: Any) -> None:
    """Let the engine end what it does behind its answers, as a server's loop does."""
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    if core is not None:
        while core.scheduler.has_requests():
            llm.llm_engine.step()


def _reset(llm: Any, connector: bool) -> bool:
    return bool(llm.llm_engine.reset_prefix_cache(False, connector))


def _metrics(llm: Any) -> dict[str, float]:
    found: dict[str, float] = {}
    for metric in llm.get_metrics():
        value = getattr(metric, "value", getattr(metric, "sum", None))
        if value is None:
            continue
        label = "/".join(str(metric.labels[name]) for name in ("source", "tier", "reason") if name in metric.labels)
        found[f"{metric.name}/{label}" if label else metric.name] = value
    return found


def _clients(llm: Any) -> list[Any]:
    """Those of the scheduler and of the worker, in an engine of one process."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector = llm.llm_engine.engine_core.engine_core.scheduler.connector
    return [side._cache for side in (connector, get_kv_transfer_group())]


def _connected(llm: Any) -> list[bool]:
    return [client.connected for client in _clients(llm)]


def _lose(llm: Any, pid: int) -> bool:
    """Let the service die between the next match and its load, and both sides know it."""
    connector = llm.llm_engine.engine_core.engine_core.scheduler.connector
    clients = _clients(llm)
    promise = connector.update_state_after_alloc

    def lose(request: Any, blocks: Any, tokens: int) -> None:
        promise(request, blocks, tokens)
        if tokens:
            os.kill(pid, signal.SIGKILL)
            while any(client.connected for client in clients):
                time.sleep(0.001)
            connector.update_state_after_alloc = promise

    connector.update_state_after_alloc = lose
    return True


_COMMANDS = {"generate": _generate, "reset": _reset, "metrics": _metrics, "lose": _lose, "connected": _connected}

if __name__ == "__main__":
    _main()
