"""Long run of `vllm serve` under many turns at once, while the service is killed every minute: nothing fails or grows.

`.engines/vllm/bin/python tests/soak_vllm.py` takes SOAK_SECONDS (1,800). Sessions grow turn by turn, as people's do;
each turn brings back the tokens of those before. Turns are those of a folder of recorded sessions where one is given
(`--sessions`), scaled down to what the tiny model takes, else made up. With `--control` the engine has no connector:
what it grows by itself.
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
KILL_SECONDS = 60.0
SCALE = 200
"""Recorded tokens to one of ours."""


class Soak:
    """One run."""

    def __init__(self, seconds: float, sessions: Path | None, *, control: bool = False) -> None:
        self.counts: Counter[str] = Counter()
        self.errors: list[str] = []
        self._sessions = sessions
        self._control = control
        self._end = time.monotonic() + seconds

    def run(self) -> int:
        with tempfile.TemporaryDirectory(prefix="hicache-soak-") as name:
            folder = Path(name)
            address = f"unix://{folder}/service.sock"
            service = _serve(address, folder)
            extra = None if self._control else {"address": address, "deadline": 0.5}
            server = Server(extra, folder / "server.log", *FEW_BLOCKS)
            try:
                users = [threading.Thread(target=self._user, args=(server, user)) for user in range(USERS)]
                for user in users:
                    user.start()
                before = self._while_killing(server, service, address, folder)
                for user in users:
                    user.join()
                return self._report(server, before)
            finally:
                server.stop()
                service.kill()

    def _user(self, server: Server, seed: int) -> None:
        draw = random.Random(seed)
        while time.monotonic() < self._end:
            tokens: list[int] = [draw.randrange(3, 800) for _ in range(40)]
            for turn in self._turns(draw):
                tokens += [draw.randrange(3, 800) for _ in range(turn)]
                if len(tokens) > LONGEST or time.monotonic() > self._end:
                    break
                try:
                    tokens += server.complete(tokens, max_tokens=8)
                    self.counts["requests"] += 1
                except Exception as error:
                    self.errors.append(f"{type(error).__name__}: {error}")
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
        self, server: Server, service: subprocess.Popen[bytes], address: str, folder: Path
    ) -> dict[str, int]:
        """Kill the service every minute, and start it again some seconds later; returns what was used early on."""
        before: dict[str, int] = {}
        while (left := self._end - time.monotonic()) > 0:
            time.sleep(min(KILL_SECONDS, left))
            used = _used(server)
            print(f"{self.counts['requests']} requests, memory in MiB {used}", flush=True)
            before = before or used
            service.send_signal(signal.SIGKILL)
            service.wait()
            self.counts["kills"] += 1
            time.sleep(2.0)
            fresh = _serve(address, folder)
            service.__dict__.update(fresh.__dict__)
        return before

    def _report(self, server: Server, before: dict[str, int]) -> int:
        after = _used(server)
        hits = 0.0 if self._control else server.metric("vllm:hicache_hit_tokens_total{")
        print(f"{dict(self.counts)}, {hits:,.0f} tokens hit, {len(self.errors)} failed requests")
        print(f"memory in MiB after a minute {before}, at the end {after}")
        for error in self.errors[:5]:
            print("failed:", error)
        grown = {name: after[name] - used for name, used in before.items() if after.get(name, 0) > 1.2 * used + 64}
        if grown:
            print("grown:", grown)
        return int(bool(self.errors or grown or not (hits or self._control)))


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


def _used(server: Server) -> dict[str, int]:
    """MiB of each of the server's processes that are its own, by a name of it."""
    found: dict[str, int] = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if os.getpgid(int(path.name)) != server.process.pid:
                continue
            pages = int((path / "statm").read_text().split()[1]) - int((path / "statm").read_text().split()[2])
        except (OSError, ProcessLookupError):
            continue
        found[path.name] = pages * os.sysconf("SC_PAGE_SIZE") // 2**20
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=Path, help="folder of recorded sessions")
    parser.add_argument("--control", action="store_true", help="without a connector")
    options = parser.parse_args()
    return Soak(float(os.environ.get("SOAK_SECONDS", "1800")), options.sessions, control=options.control).run()


if __name__ == "__main__":
    sys.exit(main())
