"""Groups of ranks as processes: one schedules, all read and write their own part of every page.

`python -m hicache.testing.ranks ADDRESS --seat PATH ...` is a rank that waits at a socket for tickets of requests;
with `--seats PATHS` it makes them, hands them to the ranks that sit there, and waits for none of them long. What
stands in a part of a page follows from the page's hash and from who writes it, so that a page that lacks a part, or
has another's, shows. At its end each prints what it has seen as one JSON document.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Final, TypeVar

import msgspec
import numpy as np

from hicache.core.identity import Namespace
from hicache.core.layout import KVGeometry
from hicache.errors import CacheClosed, HicacheError, LeaseExpired, OutOfSlots
from hicache.rpc.client.group import JoinedRequest
from hicache.testing.sidecars import WorkerProcess, page_content

__all__ = ["SHAPES", "RankProcess", "rank_namespace"]

T = TypeVar("T")

_PAGE_SIZE: Final = 16
_LAYERS: Final = 4
_HASH: Final = 32
_PACKET: Final = 2**18
_BEAT: Final = 0.01
_STALL: Final = 0.03

SHAPES: Final = {
    "mha": KVGeometry.mha(_LAYERS, kv_heads=4, head_dim=64, dtype="bfloat16", head_group=1, layer_partition=2),
    "mla": KVGeometry.mla(_LAYERS, latent_dim=128, rope_dim=64, dtype="bfloat16", layer_partition=2),
}
"""Geometries: heads that the ranks divide, and latents that all of them hold alike."""


def rank_namespace(shape: str) -> Namespace:
    """The namespace of a shape."""
    return Namespace(f"testing/{shape}", geometry=SHAPES[shape], page_size=_PAGE_SIZE, hash="sha256")


class RankProcess(WorkerProcess):
    """A rank as a process of its own. Not waited for: call `started`."""

    def __init__(self, address: str, *, seed: int, options: Sequence[str] = ()) -> None:
        super().__init__(address, seed=seed, options=options, module="hicache.testing.ranks", wait=False)


class Work(msgspec.Struct, array_like=True):
    """What a scheduler asks of a rank.

    Attributes:
        number: of the request; comes back with the answer.
        ticket: of the request.
        names: hashes of all its pages, glued together.
        found: leading pages to read; the others are to be written.
    """

    number: int
    ticket: bytes
    names: bytes
    found: int


class Pulse:
    """Counts the seconds in which this process did not run, stopped or for want of a core: no call is to blame."""

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop
        self.stalled = 0.0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        before = time.monotonic()
        while not self._stop.wait(_BEAT):
            now = time.monotonic()
            if now - before > _STALL:
                self.stalled += now - before
            before = now


class Rank:
    """One rank, or a process that only schedules."""

    def __init__(self, options: argparse.Namespace, stop: threading.Event) -> None:
        from hicache.rpc.client.cache import connect

        self.counts: Counter[str] = Counter()
        self.longest = 0.0
        self._options = options
        self._stop = stop
        self._pulse = Pulse(stop)
        self._random = np.random.default_rng(options.seed)
        self._namespace = rank_namespace(options.shape)
        self.cache = connect(
            options.address,
            self._namespace,
            group=options.group,
            tp_rank=options.tp_rank,
            tp_size=options.tp_size,
            pp_rank=options.stage,
            pp_first_layers=(0, 2) if options.stages == 2 else (),
            worker=not options.schedules,
            deadline=options.deadline,
        )
        # Ranks that hold the same bytes write the same bytes.
        self._part = bytes((options.stage, options.tp_rank if options.shape == "mha" else 0))

    def timed(self, call: Callable[[], T]) -> T:
        """Call, and note how long it took while this process ran."""
        stalled, began = self._pulse.stalled, time.monotonic()
        try:
            return call()
        finally:
            took = time.monotonic() - began
            if took > self.longest:  # the pulse may be behind by one beat
                self._stop.wait(2 * _BEAT)
                self.longest = max(self.longest, took - (self._pulse.stalled - stalled))

    def dawdle(self) -> None:
        """Be slow, now and then."""
        if self._random.random() < self._options.slow:
            self._stop.wait(float(self._random.random()) * 0.2)

    def contents(self, names: bytes, first: int, end: int) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
        """This rank's part of pages."""
        size = self.cache.host.page_bytes
        marked = (names[page * _HASH : (page + 1) * _HASH - 2] + self._part for page in range(first, end))
        return np.array([page_content(name, size) for name in marked], np.uint8).reshape(-1, size)

    def check(self, names: bytes, buffers: np.ndarray[tuple[int, int], np.dtype[np.uint8]], read: int) -> None:
        """Compare every byte that was read."""
        self.counts["read"] += read
        wrong = np.flatnonzero((buffers[:read] != self.contents(names, 0, read)).any(axis=1))
        self.counts["wrong"] += len(wrong)
        if len(wrong):  # told at once: this process may be killed before its end
            with open(self._options.report, "a", encoding="ascii") as report:
                report.write(f"rank {self._options.tp_rank} of {self._options.group}: pages {wrong.tolist()}\n")

    # ---- a rank

    def sit(self) -> None:
        """Do what comes in at the seat until told to stop."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._options.seat)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener, contextlib.ExitStack() as stack:
            listener.bind(self._options.seat)
            listener.listen()
            scheduler: socket.socket | None = None
            while not self._stop.is_set():
                ready, _, _ = select.select([listener] if scheduler is None else [listener, scheduler], [], [], 0.1)
                if listener in ready:
                    scheduler = stack.enter_context(listener.accept()[0])
                elif scheduler is not None and ready:
                    scheduler = self._serve(scheduler)

    def _serve(self, scheduler: socket.socket) -> socket.socket | None:
        try:
            packet = scheduler.recv(_PACKET)
            if packet:
                work = msgspec.msgpack.decode(packet, type=Work)
                self._take_part(work)
                scheduler.send(msgspec.msgpack.encode(work.number))
                return scheduler
        except OSError:
            self.counts["scheduler_gone"] += 1
        scheduler.close()
        return None

    def _take_part(self, work: Work) -> None:
        with contextlib.suppress(CacheClosed), self.cache.join(work.ticket) as joined:
            if joined.lost:
                self.counts["lost"] += 1
                return
            self.dawdle()
            buffers = np.empty((work.found, self.cache.host.page_bytes), np.uint8)
            self.check(work.names, buffers, self.timed(lambda: joined.read_into(buffers)))
            self.dawdle()
            self._write(joined, work)
            self.timed(joined.commit)

    def _write(self, joined: JoinedRequest, work: Work) -> None:
        pages = len(work.names) // _HASH
        contents = self.contents(work.names, work.found, pages)
        if self._options.shape == "mha" and self._random.random() < 0.3:
            with contextlib.suppress(LeaseExpired):
                views = [joined.page(work.found + number) for number in range(len(contents))]
                self.dawdle()
                for view, content in zip(views, contents, strict=True):
                    view[:] = content  # also where the lease is lost by now: until the close the slot is nobody else's
                self.counts["in_place"] += len(contents)
                return
        self.counts["written"] += self.timed(lambda: joined.write_from(contents, first=work.found))

    # ---- the scheduler

    def schedule(self) -> None:
        """Make requests until told to stop."""
        seats = Seats(self._options.seats, self.counts)
        number = 0
        while not self._stop.is_set():
            number += 1
            try:
                self._request(number, seats)
            except OutOfSlots:
                self.counts["out_of_slots"] += 1
            except GivenUpError:
                self.counts["aborted"] += 1
        seats.close()

    def _request(self, number: int, seats: Seats) -> None:
        random, counts = self._random, self.counts
        family, branch, pages = (
            int(random.integers(self._options.families)),
            int(random.integers(4)),
            int(random.integers(1, 24)),
        )
        tokens = np.arange(pages * _PAGE_SIZE, dtype=np.uint32) + np.uint32(family * 1_000_000)
        tokens[pages * _PAGE_SIZE // 2 :] += np.uint32(branch * 100_000)
        names = self._namespace.derive().hasher().extend(None, tokens.tobytes(), pages)
        with self.timed(lambda: self.cache.request(tokens, logits=False)) as request:
            counts["requests"] += 1
            found = len(self.timed(request.load))
            counts["found"] += found
            self.timed(request.allocate)
            ticket = request.ticket()
            if ticket is None:
                counts["without_cache"] += 1
                self._stop.wait(_BEAT)
                return
            seats.tell(Work(number, ticket.encode(), names, found))
            if random.random() < 0.1:  # what an engine does when a client hangs up
                raise GivenUpError
            if not self._options.schedules:
                buffers = np.empty((found, self.cache.host.page_bytes), np.uint8)
                self.check(names, buffers, self.timed(lambda: request.read_into(buffers)))
                contents = self.contents(names, found, pages)
                counts["written"] += self.timed(lambda: request.write_from(contents, first=found))
                self.timed(request.commit)
            counts["complete" if seats.wait(number, self._options.patience) else "incomplete"] += 1


class GivenUpError(Exception):
    """A request that is given up in the middle."""


class Seats:
    """The other ranks, as the scheduler sees them. It never waits for one that is away."""

    def __init__(self, paths: Sequence[str], counts: Counter[str]) -> None:
        self._ranks: dict[str, socket.socket | None] = dict.fromkeys(paths)
        self._counts = counts
        self._asked = 0

    def tell(self, work: Work) -> None:
        """Hand work to all that are there."""
        packet = msgspec.msgpack.encode(work)
        self._asked = 0
        for path in self._ranks:
            try:
                rank = self._ranks[path] = self._ranks[path] or _sitting(path)
                rank.send(packet)
                self._asked += 1
            except BlockingIOError:
                self._counts["busy"] += 1
            except OSError:
                self._counts["away"] += 1
                self._forget(path)

    def wait(self, number: int, seconds: float) -> bool:
        """Whether every rank has answered in time."""
        until, answered = time.monotonic() + seconds, 0
        while answered < self._asked and (left := until - time.monotonic()) > 0:
            there = {rank: path for path, rank in self._ranks.items() if rank is not None}
            for rank in select.select(list(there), [], [], left)[0]:
                try:
                    packet = rank.recv(_PACKET)
                except OSError:
                    packet = b""
                if not packet:
                    self._forget(there[rank])
                    return False
                answered += msgspec.msgpack.decode(packet, type=int) == number
        return answered == len(self._ranks)

    def _forget(self, path: str) -> None:
        rank = self._ranks[path]
        if rank is not None:
            rank.close()
        self._ranks[path] = None

    def close(self) -> None:
        """Leave all of them."""
        for path in self._ranks:
            self._forget(path)


def _sitting(path: str) -> socket.socket:
    rank = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    rank.setblocking(False)
    try:
        rank.connect(path)
    except OSError:
        rank.close()
        raise
    return rank


def main() -> int:
    """A rank, or the scheduler."""
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--group", default="")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="mha")
    parser.add_argument("--tp-size", type=int, default=1)
    parser.add_argument("--tp-rank", type=int, default=0)
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--stage", type=int, default=0)
    parser.add_argument("--report", help="file that tells of pages with wrong bytes")
    parser.add_argument("--seat")
    parser.add_argument("--seats", nargs="+", default=[])
    parser.add_argument("--schedules", action="store_true", help="only that")
    parser.add_argument("--families", type=int, default=6)
    parser.add_argument("--slow", type=float, default=0.05)
    parser.add_argument("--deadline", type=float, default=1.0)
    parser.add_argument("--patience", type=float, default=0.2)
    options = parser.parse_args()
    stop = threading.Event()
    rank = Rank(options, stop)
    sys.stdout.write("working\n")
    sys.stdout.flush()
    thread = threading.Thread(target=lambda: _caught(rank, rank.schedule if options.seats else rank.sit))
    thread.start()
    sys.stdin.readline()
    stop.set()
    thread.join()
    client = asdict(rank.cache.statistics())
    rank.cache.close()
    sys.stdout.write(json.dumps({"counts": rank.counts, "longest": rank.longest, "client": client}) + "\n")
    return 0


def _caught(rank: Rank, work: Callable[[], None]) -> None:
    try:
        work()
    except HicacheError as error:
        rank.counts[f"error: {type(error).__name__}: {error}"[:200]] += 1


if __name__ == "__main__":
    sys.exit(main())
