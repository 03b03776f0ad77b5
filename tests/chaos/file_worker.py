"""Processes at work on one root, for the tests beside it: a server that forks them, so that each starts at once.

Commands come as lines of JSON: {"work": {...}} starts a process, {"wait": PID} waits for its end. What the processes
say comes back as lines of JSON with their "pid".
"""

from __future__ import annotations

import functools
import json
import os
import random
import signal
import sys
import traceback
from typing import Any

from hicache.storage.base import ObjectStatus, StoredObject
from hicache.testing.faults import interpose
from hicache.testing.objects import in_threads, make_key, make_object, pattern, read
from hicache_file import FileBackend, FileSystem


def tell(**what: Any) -> None:
    """One line, written at once, so that lines of several processes do not mix."""
    os.write(1, json.dumps({"pid": os.getpid(), **what}).encode() + b"\n")


@functools.cache
def objects(count: int, size: int, namespace: int) -> list[StoredObject]:
    """The same in every process."""
    return [
        make_object(make_key(i, namespace=bytes([namespace] * 16)), pattern((i, namespace), size), depth=i % 8)
        for i in range(count)
    ]


class HalfWrites(FileSystem):
    """Writes each object in two steps, with a chance to die in between."""

    def __init__(self, hook: Any) -> None:
        self.hook = hook

    def pwritev(self, fd: int, buffers: Any, offset: int) -> int:
        whole = b"".join(bytes(buffer) for buffer in buffers)
        super().pwritev(fd, [whole[: len(whole) // 2]], offset)
        self.hook("half", 0, ())
        return super().pwritev(fd, [whole], offset)


def dies_at(point: int) -> FileSystem:
    """A file system in which the process is killed at the n-th call that changes something, or opens or locks."""
    calls = [0]

    def hook(name: str, number: int, args: tuple[Any, ...]) -> None:
        if name in ("lstat", "fstat", "scandir", "preadv", "hook"):
            return
        calls[0] += 1
        if calls[0] == point:
            os.kill(os.getpid(), signal.SIGKILL)

    return interpose(HalfWrites(hook), hook)


class Load:
    """Random puts and gets by several threads; what is read is compared."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.things = objects(options["universe"], options["size"], options.get("namespace", 0))
        self.backend = FileBackend(
            options["root"],
            capacity=options.get("capacity"),
            refresh=options.get("refresh", 0.1),
            janitor=options.get("janitor", "auto"),
        )
        self.wrong = self.hits = self.stored = 0
        self.reasons: dict[str, int] = {}

    def run(self) -> None:
        assert self.backend.wait_ready(60)
        tell(ready=True)
        in_threads(self.options.get("threads", 2), self.thread)
        self.backend.close()
        tell(done=True, wrong=self.wrong, hits=self.hits, stored=self.stored, reasons=self.reasons)

    def thread(self, index: int) -> None:
        rng = random.Random(f"{self.options['seed']}/{index}")
        step = 0
        while self.options["operations"] is None or step < self.options["operations"]:
            step += 1
            stored = rng.choice(self.things)
            if rng.random() < self.options.get("puts", 0.5):
                (result,) = self.backend.put([stored])
                self.stored += result.status is ObjectStatus.OK
            else:
                result, payload = read(self.backend, stored.key, self.options["size"])
                if result.status is ObjectStatus.OK:
                    self.hits += 1
                    self.wrong += payload != stored.payload
            if result.reason:
                self.reasons[result.reason] = self.reasons.get(result.reason, 0) + 1
            if step % 10 == 0:
                tell(step=step, janitor=self.backend.is_janitor, wrong=self.wrong, hits=self.hits)


def put_all(options: dict[str, Any]) -> None:
    """Read and put everything once, one after the other; killed at call number `point`."""
    backend = FileBackend(options["root"], capacity=options["capacity"], refresh=3600.0, fs=dies_at(options["point"]))
    assert backend.wait_ready(60)
    for stored in objects(options["universe"], options["size"], 0):
        read(backend, stored.key, options["size"])
        backend.put([stored])
    backend.close()
    tell(done=True)


def work(options: dict[str, Any]) -> None:
    if "point" in options:
        put_all(options)
    else:
        Load(options).run()


def main() -> None:
    for line in sys.stdin:
        command = json.loads(line)
        if "wait" in command:
            os.waitpid(command["wait"], 0)
            tell(dead=command["wait"])
            continue
        options = command["work"]
        objects(options["universe"], options["size"], options.get("namespace", 0))  # made once, for all children
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                work(options)
                code = 0
            except BaseException:
                tell(error=traceback.format_exc())
            os._exit(code)
        tell(started=pid)


if __name__ == "__main__":
    main()
