"""Long run of `vllm serve` under many turns at once, while the service is killed every minute: nothing fails or grows.

`.engines/vllm/bin/python tests/soak_vllm.py` takes SOAK_SECONDS (1,800). Sessions grow turn by turn, as people's do;
each turn brings back the tokens of those before. Turns are those of a folder of recorded sessions where one is given
(`--sessions`), scaled down to what the tiny model takes, else made up. A second engine without a connector has users of
the same kind: vLLM's kernels keep something for each new length of a batch, and ours may grow by no more than that.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests/engines/vllm"))

from test_processes import Server  # noqa: E402  found by the line above

LONGEST = 900
"""Tokens of a session; the tiny model takes 1,024."""

FEW_BLOCKS = ("--num-gpu-blocks-override", "80")
"""Too few for all sessions at once, so that pages come back from the service and not from the engine's own blocks."""

USERS = 4
"""Of each engine."""

NAMES = ("with", "without")

MOST_GROWN = 64
"""MiB above what the engine without a connector grows by."""

KILL_SECONDS = 60.0
SCALE = 200
"""Recorded tokens to one of ours."""


class Soak:
    """One run."""

    def __init__(self, seconds: float, sessions: Path | None) -> None:
        self.counts: Counter[str] = Counter()
        self.errors: list[str] = []
        self._sessions = sessions
        self._seconds = seconds
        self._end = 0.0

    def run(self) -> int:
        with tempfile.TemporaryDirectory(prefix="hicache-soak-") as name:
            folder = Path(name)
            address = f"unix://{folder}/service.sock"
            service = _serve(address, folder)
            servers: list[Server] = []
            try:
                # A core each: on one, the engine that spins first would leave the other next to nothing.
                ours, its = (sorted(os.sched_getaffinity(0)) * 2)[:2]
                extra = {"address": address, "deadline": 0.5}
                servers.append(Server(extra, folder / "ours.log", *FEW_BLOCKS, core=ours))
                servers.append(Server(None, folder / "control.log", *FEW_BLOCKS, core=its))
                self._end = time.monotonic() + self._seconds
                users = [
                    threading.Thread(target=self._user, args=(server, name, user))
                    for server, name in zip(servers, NAMES, strict=True)
                    for user in range(USERS)
                ]
                for user in users:
                    user.start()
                before = self._while_killing(servers, service, address, folder)
                for user in users:
                    user.join()
                return self._report(servers, before)
            finally:
                for server in servers:
                    server.stop()
                service.kill()

    def _user(self, server: Server, name: str, seed: int) -> None:
        draw = random.Random(seed)
        while time.monotonic() < self._end:
            tokens: list[int] = [draw.randrange(3, 800) for _ in range(40)]
            for turn in self._turns(draw):
                tokens += [draw.randrange(3, 800) for _ in range(turn)]
                if len(tokens) > LONGEST or time.monotonic() > self._end:
                    break
                try:
                    tokens += server.complete(tokens, max_tokens=8)
                    self.counts[f"requests {name}"] += 1
                except Exception as error:
                    self.errors.append(f"{name}: {type(error).__name__}: {error}")
                    return
            self.counts["sessions"] += 1

    def _turns(self, draw: random.Random) -> Iterator[int]:
        """New tokens of each turn of a session."""
        if self._sessions is not None:
            path = draw.choice(sorted(self._sessions.glob("*.json*")))
            sizes = [int(one.get("in", one.get("input_tokens", 0))) for one in _requests(path)]
            yield from (max(1, (after - before) // SCALE) for before, after in zip([0, *sizes], sizes, strict=False))
        else:
            yield from (draw.randrange(5, 120) for _ in range(20))

    def _while_killing(
        self, servers: list[Server], service: subprocess.Popen[bytes], address: str, folder: Path
    ) -> list[int]:
        """Kill the service every minute, and start it again some seconds later; returns what was used early on."""
        before: list[int] = []
        while (left := self._end - time.monotonic()) > 0:
            time.sleep(min(KILL_SECONDS, left))
            used = [_used(server) for server in servers]
            print(f"{dict(self.counts)}, MiB with and without a connector: {used}", flush=True)
            before = before or used
            service.send_signal(signal.SIGKILL)
            service.wait()
            self.counts["kills"] += 1
            time.sleep(2.0)
            fresh = _serve(address, folder)
            service.__dict__.update(fresh.__dict__)
        return before

    def _report(self, servers: list[Server], before: list[int]) -> int:
        after = [_used(server) for server in servers]
        ours, control = (end - begin for begin, end in zip(before, after, strict=True))
        hits = servers[0].metric("vllm:hicache_hit_tokens_total{")
        print(f"{dict(self.counts)}, {hits:,.0f} tokens hit, {len(self.errors)} failed requests")
        print(f"memory grew by {ours} MiB since the first minute, without a connector by {control} MiB")
        for error in self.errors[:5]:
            print("failed:", error)
        grown = ours > control + MOST_GROWN
        if grown:
            print(f"that is more than {MOST_GROWN} MiB above what the engine grows by itself")
        return int(bool(self.errors or grown or not hits))


def _requests(path: Path) -> list[dict[str, object]]:
    text = path.read_text()
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in text.splitlines() if line]
    found = json.loads(text)
    return list(found["requests"] if isinstance(found, dict) else found)


def _serve(address: str, folder: Path) -> subprocess.Popen[bytes]:
    storage = f"file://{folder}/kv?capacity=256MiB"
    command = [sys.executable, "-m", "hicache", "serve", "--listen", address, "--host", "64MiB", "--storage", storage]
    process = subprocess.Popen([*command, "--log-level", "error"], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def _used(server: Server) -> int:
    """MiB that the server's processes have for themselves."""
    pages = 0
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if os.getpgid(int(path.name)) == server.process.pid:
                resident, shared = (path / "statm").read_text().split()[1:3]
                pages += int(resident) - int(shared)
        except (OSError, ProcessLookupError):
            continue
    return pages * os.sysconf("SC_PAGE_SIZE") // 2**20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=Path, help="folder of recorded sessions")
    options = parser.parse_args()
    return Soak(float(os.environ.get("SOAK_SECONDS", "1800")), options.sessions).run()


if __name__ == "__main__":
    sys.exit(main())
