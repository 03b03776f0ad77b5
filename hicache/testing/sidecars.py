"""Real services and their clients as processes, for tests that kill, stop and restart them.

`python -m hicache.testing.sidecars ADDRESS --seed N` is a client: until it is told to stop it leases, reads and
compares every byte, computes what is missing and commits it, and prints what it has seen as one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

from hicache.core.identity import Namespace
from hicache.core.layout import KVGeometry
from hicache.core.prompt import Prompt
from hicache.core.symbols import symbols
from hicache.errors import HicacheError, OutOfSlots

__all__ = ["ServiceProcess", "WorkerProcess", "namespace_of", "page_content"]

T = TypeVar("T")

START_SECONDS: Final = 30.0
_PAGE_SIZE: Final = 16


def namespace_of(page_bytes: int, *, model: str = "testing/model") -> Namespace:
    """A namespace whose pages have so many bytes, a multiple of 8 KiB."""
    layers, rest = divmod(page_bytes, 2 * 2 * 128 * _PAGE_SIZE)
    if rest or not layers:
        raise ValueError(f"{page_bytes} is no multiple of {2 * 2 * 128 * _PAGE_SIZE}")
    geometry = KVGeometry.mha(layers, kv_heads=1, head_dim=128, dtype="bfloat16")
    return Namespace(model, geometry=geometry, page_size=_PAGE_SIZE, hash="sha256")


def page_content(page_hash: bytes, page_bytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """What stands in a page: it follows from the page's hash, so that bytes of any other page show."""
    block = np.frombuffer(page_hash * (4096 // len(page_hash)), np.uint8)
    pages = np.tile(block, -(-page_bytes // len(block)))[:page_bytes].reshape(-1, 4096).copy()
    pages[:, 0] ^= np.arange(len(pages), dtype=np.uint8)
    return pages.reshape(-1)


class ServiceProcess:
    """`hicache serve` as a process of its own; a context manager that ends it.

    Args:
        folder: for its socket.
        options: more flags.
        takeover: whether it takes over from the one that runs in the folder.
        host: its memory.
        listen: whether it is told where to listen; else the options do.
        wait: whether to wait until it is ready; else call `started`.
        program: what Python runs in the place of the command `hicache`.

    Attributes:
        address: where it listens.
        process: the process.
    """

    def __init__(
        self,
        folder: Path,
        *options: str,
        takeover: bool = False,
        host: str = "64MiB",
        listen: bool = True,
        wait: bool = True,
        program: Sequence[str] = ("-m", "hicache"),
    ) -> None:
        self.address = f"unix://{folder / 'service.sock'}"
        command = [sys.executable, *program, "serve", "--host", host, "--json", *options]
        command += ["--listen", self.address] if listen else []
        command += ["--takeover"] if takeover else []
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: S603  ours
        if wait:
            self.started()

    def started(self) -> None:
        """Wait until it is ready, for the first time or again.

        Raises:
            RuntimeError: it has ended instead.
        """
        self.ready = self._line()

    def _line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        found, _, _ = select.select([self.process.stdout], [], [], START_SECONDS)
        line = self.process.stdout.readline() if found else ""
        if not line:
            self.kill()
            raise RuntimeError(f"the service did not start; it ended with {self.process.wait()}")
        document: dict[str, Any] = json.loads(line)
        return document

    def kill(self) -> None:
        """End it by SIGKILL, and wait."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> dict[str, Any]:
        """SIGTERM; returns what it says at its end."""
        self.process.send_signal(signal.SIGTERM)
        return self.ended()

    def ended(self) -> dict[str, Any]:
        """Wait for its end; returns what it says."""
        output, _ = self.process.communicate(timeout=START_SECONDS)
        if self.process.returncode:
            raise RuntimeError(f"the service ended with {self.process.returncode}")
        document: dict[str, Any] = json.loads(output.splitlines()[-1])
        return document

    @property
    def memory(self) -> int:
        """Resident bytes that are its own, without the shared memory of its pools."""
        with open(f"/proc/{self.process.pid}/status", encoding="ascii") as file:
            rows = dict(line.split(":", 1) for line in file)
        return (int(rows["RssAnon"].split()[0]) + int(rows["RssFile"].split()[0])) * 1024

    @property
    def descriptors(self) -> int:
        """Open files."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def shared_memory(self, name: str) -> int:
        """Bytes of the memfds by a name that it holds."""
        folder = f"/proc/{self.process.pid}/fd"
        paths = [f"{folder}/{number}" for number in os.listdir(folder)]
        found = [os.stat(path) for path in paths if os.readlink(path).startswith(f"/memfd:{name} ")]
        return sum({each.st_ino: each.st_size for each in found}.values())

    def __enter__(self) -> ServiceProcess:
        return self

    def close(self) -> None:
        """End it, if it has not ended. Idempotent."""
        if self.process.poll() is None:
            self.kill()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def __exit__(self, *_: object) -> None:
        self.close()


class WorkerProcess:
    """A client as a process of its own; a context manager that ends it.

    Args:
        address: of the service.
        seed: of its random choices.
        options: more flags.
        module: what it runs.
        wait: whether to wait until it works; else call `started`.
        within: seconds in which it must work.
    """

    def __init__(
        self,
        address: str,
        *,
        seed: int,
        options: Sequence[str] = (),
        module: str = "hicache.testing.sidecars",
        wait: bool = True,
        within: float = START_SECONDS,
    ) -> None:
        self._within = within
        command = [sys.executable, "-m", module, address, "--seed", str(seed), *options]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # noqa: S603  ours
        if wait:
            self.started()

    def started(self) -> None:
        """Wait until it works."""
        assert self.process.stdout is not None
        found, _, _ = select.select([self.process.stdout], [], [], self._within)
        if not found or self.process.stdout.readline() != "working\n":
            self.process.kill()
            raise RuntimeError("the worker did not start")

    def stop(self) -> dict[str, Any]:
        """Let it finish; returns what it has seen."""
        output, _ = self.process.communicate("stop\n", timeout=self._within)
        if self.process.returncode:
            raise RuntimeError(f"the worker ended with {self.process.returncode}")
        document: dict[str, Any] = json.loads(output)
        return document

    def signal(self, number: int) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """End it by SIGKILL, and wait. Idempotent."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class Latencies:
    """How long the calls of one thread took that began while the service was away.

    Attributes:
        seconds: of each call, without the time in which the thread would have run and had no core.
        longest: of any, with that time.
    """

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.longest = 0.0

    def timed(self, call: Callable[[], T], *, away: bool) -> T:
        """Call, and note how long it took if the service is away."""
        waited, began = _waited_for_a_core(), time.perf_counter()
        try:
            return call()
        finally:
            took = time.perf_counter() - began
            if away:
                self.seconds.append(took - (_waited_for_a_core() - waited))
                self.longest = max(self.longest, took)

    def document(self) -> dict[str, float]:
        """Quantiles in seconds."""
        ordered = sorted(self.seconds) or [0.0]
        return {
            "calls": len(self.seconds),
            "p50": ordered[len(ordered) // 2],
            "p99": ordered[len(ordered) * 99 // 100],
            "most": ordered[-1],
            "longest": self.longest,
        }


def _waited_for_a_core() -> float:
    """Seconds for which this thread could have run and did not."""
    try:
        with open("/proc/thread-self/schedstat", "rb") as file:
            return int(file.read().split()[1]) / 1e9
    except OSError:
        return 0.0


class Worker:
    """One client's work: prompts of a family that share beginnings, so that workers hit each other's pages."""

    def __init__(self, options: argparse.Namespace, seed: int, stop: threading.Event) -> None:
        from hicache.rpc.client.cache import connect

        self._namespace = namespace_of(options.page_bytes)
        self._random = np.random.default_rng(seed)
        self._families = options.families
        self._most = options.pages
        self._slow = options.hold
        self._report = options.report
        self._stop = stop
        self.counts: Counter[str] = Counter()
        self.longest = 0.0
        self.away = Latencies()
        self.client: dict[str, Any] = {}
        self._cache = connect(
            options.address, self._namespace, deadline=options.deadline, token_file=options.token_file
        )

    def run(self) -> None:
        """Work until told to stop."""
        while not self._stop.is_set():
            began = time.monotonic()
            try:
                self._request()
            except OutOfSlots:
                self.counts["out_of_slots"] += 1
            except HicacheError as error:
                self.counts[f"error: {type(error).__name__}: {error}"[:200]] += 1
            self.longest = max(self.longest, time.monotonic() - began)
        self.client = asdict(self._cache.statistics())
        self._cache.close()

    def _timed(self, call: Callable[[], T]) -> T:
        return self.away.timed(call, away=not self._cache.connected)

    def _request(self) -> None:
        counts, random = self.counts, self._random
        family, branch = int(random.integers(self._families)), int(random.integers(4))
        pages = int(random.integers(1, self._most + 1))
        tokens = np.arange(pages * _PAGE_SIZE, dtype=np.uint32) + np.uint32(family * 1_000_000)
        tokens[pages * _PAGE_SIZE // 2 :] += np.uint32(branch * 100_000)
        prompt = Prompt(symbols(tokens, _PAGE_SIZE), 4 * _PAGE_SIZE, self._namespace.derive().hasher())
        hashes = prompt.hashes(0, pages)
        size = self._namespace.geometry.page_bytes(_PAGE_SIZE)
        with self._timed(lambda: self._cache.request(tokens, logits=False)) as request:
            counts["requests"] += 1
            found = len(self._timed(request.load))
            buffers = np.empty((found, size), np.uint8)
            read = self._timed(lambda: request.read_into(buffers))
            for page in range(read):
                if not np.array_equal(buffers[page], page_content(hashes[page], size)):
                    counts["wrong"] += 1
                    if self._report:  # told at once: this process may be killed before its end
                        Path(self._report).touch()
            counts["read"] += read
            fresh = self._timed(request.allocate)
            if len(fresh):
                first = pages - len(fresh)
                content = np.stack([page_content(name, size) for name in hashes[first:]])
                counts["written"] += self._timed(lambda: request.write_from(content, first=first))
                self._timed(request.commit)
            if self._slow:
                self._stop.wait(float(random.random()) * self._slow)
            self._timed(request.close)


def main() -> int:
    """The worker."""
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--page-bytes", type=int, default=32768)
    parser.add_argument("--families", type=int, default=8)
    parser.add_argument("--pages", type=int, default=40)
    parser.add_argument("--hold", type=float, default=0.0)
    parser.add_argument("--deadline", type=float, default=1.0)
    parser.add_argument("--token-file")
    parser.add_argument("--report", help="file that is made when a page has wrong bytes")
    parser.add_argument("--sessions", type=int, default=1)
    options = parser.parse_args()
    stop = threading.Event()
    workers = [Worker(options, options.seed + number, stop) for number in range(options.sessions)]
    sys.stdout.write("working\n")
    sys.stdout.flush()
    threads = [threading.Thread(target=worker.run) for worker in workers]
    for thread in threads:
        thread.start()
    sys.stdin.readline()
    stop.set()
    for thread in threads:
        thread.join()
    counts: Counter[str] = Counter()
    for worker in workers:
        counts.update(worker.counts)
    longest = max(worker.longest for worker in workers)
    away = Latencies()
    for worker in workers:
        away.seconds += worker.away.seconds
        away.longest = max(away.longest, worker.away.longest)
    result = {"counts": counts, "longest": longest, "client": workers[0].client, "away": away.document()}
    sys.stdout.write(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
