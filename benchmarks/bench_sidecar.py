"""The service and its clients, each in a process of its own.

A match beside an empty message of the same stream; pages in batches of 32 MiB over shared memory beside a plain copy in
the same process, batch by batch in turns, of as many bytes that lie as far apart; pages over TCP beside a gRPC stream
of as many bytes in pieces of the same size, from a server that does nothing else. Last, a Redis that is stopped now and
then, and what is in HOST meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from grpc import aio

import hicache
from benchmarks.measure import Row, row
from hicache.rpc.address import Address
from hicache.rpc.client.admin import AdminClient
from hicache.rpc.client.cache import ConnectedCache
from hicache.rpc.transport import CHANNEL_OPTIONS, SERVER_OPTIONS
from hicache.rpc.v1 import session_pb2 as pb
from hicache.testing.servers import Server, binaries
from hicache.testing.sidecars import ServiceProcess

NAMESPACE = hicache.Namespace(
    model="benchmark/model",
    geometry=hicache.KVGeometry.mha(layers=4, kv_heads=4, head_dim=64, dtype="float16"),
    page_size=64,
    hash="sha256",
)
PAGE_BYTES = NAMESPACE.geometry.page_bytes(NAMESPACE.page_size)
BATCH = 32 * 2**20 // PAGE_BYTES  # pages
BATCHES = 6
ROUNDS = 5
CALLS = 2000
STREAM_BYTES = 64 * 2**20
STREAM = "/benchmark/Stream"
STOPPED_ROUNDS = 5
STOPPED_CALLS = 300


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def prompt(seed: int, pages: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 2**32, pages * NAMESPACE.page_size, dtype=np.uint32)


def gigabytes(pages: int, seconds: list[float]) -> float:
    """Of the tenth of the times in which others disturbed least; the same for both sides."""
    return pages * PAGE_BYTES / float(np.percentile(seconds, 10)) / 1e9


# ---- a match


def match(cache: ConnectedCache) -> Row:
    tokens = prompt(1, 8192 // NAMESPACE.page_size)
    with cache.request(tokens, logits=False) as request:
        request.write_from([bytes(PAGE_BYTES)] * len(request.allocate()))
        request.commit()
    connection = cache.state.link.connection
    assert connection is not None
    echoes, matches = [], []
    for _ in range(CALLS):
        empty = pb.Request(echo=pb.Echo())
        echoes.append(timed(lambda empty=empty: connection.call(empty, seconds=60.0, grace=0.0).result()))  # type: ignore[misc]
        matches.append(timed(lambda: cache.match(tokens, logits=False)))
    assert cache.match(tokens, logits=False).host == 128
    echo = statistics.median(echoes) * 1e6
    return row("match_stream_8k", statistics.median(matches) * 1e6, "us", bar=1.5 * echo, reference=echo)


# ---- pages over shared memory: a process that stores, and one that loads


def moving(address: str, what: str) -> Row:
    """GB/s of a process of its own, beside a plain copy there."""
    program = f"from benchmarks.bench_sidecar import worker; worker({address!r}, {what!r})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    ours, plain, whole = json.loads(done.stdout)
    said = f"a request of {BATCHES} batches with all its verbs: {whole:.3g} GB/s"
    return row(f"sidecar_{what}", ours, "GB/s", bar=0.7 * plain, reference=plain, at_least=True, reason=said)


def worker(address: str, what: str) -> None:
    """Rounds of a request with several batches, each beside a plain copy; prints GB/s of both, and of whole requests.

    A batch is copied, its words are looked at, or it is committed; the last commit is waited for. What a request
    costs beside its batches is in the third figure.
    """
    here = np.ones((BATCH, PAGE_BYTES), np.uint8)
    there = np.ones((BATCHES, BATCH, PAGE_BYTES), np.uint8)  # as large as what a request moves: no cache holds it
    ours: list[float] = []
    plain: list[float] = []
    whole: list[float] = []
    with hicache.connect(address, NAMESPACE, required=True, deadline=60.0) as cache:
        connection = cache.state.link.connection
        assert connection is not None
        assert connection.memory is not None
        connection.memory.wait_populated()
        move = store if what == "store" else load
        for number in range(ROUNDS + 1):
            tokens = prompt(2 + number % 2, BATCH * BATCHES)
            if what == "store":
                cache.clear()
            start = time.perf_counter()
            batches, copies = move(cache, tokens, here, there)
            if number:
                ours += batches
                plain += copies
                whole.append(time.perf_counter() - start - sum(copies))
    print(json.dumps([gigabytes(BATCH, ours), gigabytes(BATCH, plain), gigabytes(BATCH * BATCHES, whole)]))


def store(cache: ConnectedCache, tokens: Any, here: Any, there: Any) -> tuple[list[float], list[float]]:
    batches, copies = [], []
    with cache.request(tokens, logits=False) as request:
        request.allocate()
        for batch in range(BATCHES):
            copies.append(timed(lambda batch=batch: np.copyto(there[batch], here)))  # type: ignore[misc]
            start = time.perf_counter()
            assert request.write_from(here, first=batch * BATCH) == BATCH
            request.commit(upto=(batch + 1) * BATCH * NAMESPACE.page_size, wait=batch == BATCHES - 1)
            batches.append(time.perf_counter() - start)
    return batches, copies


def load(cache: ConnectedCache, tokens: Any, here: Any, there: Any) -> tuple[list[float], list[float]]:
    batches, copies = [], []
    with cache.request(tokens, logits=False) as request:
        if len(request.load()) < BATCH * BATCHES:
            request.close()
            store(cache, tokens, here, there)
            return load(cache, tokens, here, there)
        for batch in range(BATCHES):
            copies.append(timed(lambda batch=batch: np.copyto(here, there[batch])))  # type: ignore[misc]
            start = time.perf_counter()
            assert request.read_into(here, first=batch * BATCH) == BATCH
            batches.append(time.perf_counter() - start)
    return batches, copies


# ---- pages over TCP


def raw_server() -> None:
    """Streams pieces of a page's size to whoever asks; prints its port."""

    async def stream(*_: Any) -> Any:
        piece = bytes(PAGE_BYTES)
        for _ in range(STREAM_BYTES // PAGE_BYTES):
            yield piece

    async def main() -> None:
        import grpc

        server = aio.server(options=SERVER_OPTIONS)
        handlers = {"Stream": grpc.unary_stream_rpc_method_handler(stream)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("benchmark", handlers),))
        print(server.add_insecure_port("127.0.0.1:0"), flush=True)
        await server.start()
        await server.wait_for_termination()

    asyncio.run(main())


async def raw_get(port: int, times: int) -> list[float]:
    seconds = []
    async with aio.insecure_channel(f"127.0.0.1:{port}", CHANNEL_OPTIONS) as channel:
        call = channel.unary_stream(STREAM)
        for _ in range(times):
            start = time.perf_counter()
            received = 0
            async for piece in call(b""):
                received += len(piece)
            assert received == STREAM_BYTES
            seconds.append(time.perf_counter() - start)
    return seconds


def remote_get(address: str) -> Row:
    pages = STREAM_BYTES // PAGE_BYTES
    tokens = prompt(9, pages)
    buffer = np.ones((pages, PAGE_BYTES), np.uint8)
    server = subprocess.Popen(
        [sys.executable, "-c", "from benchmarks.bench_sidecar import raw_server; raw_server()"],
        stdout=subprocess.PIPE,
        text=True,
    )
    ours: list[float] = []
    raw: list[float] = []
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        with hicache.connect(address, NAMESPACE, insecure=True, required=True, deadline=60.0) as cache:
            with cache.request(tokens, logits=False) as request:
                request.load()
                request.allocate()
                request.write_from(buffer, first=0)
                request.commit()
            for _ in range(ROUNDS + 1):
                raw += asyncio.run(raw_get(port, 1))
                with cache.request(tokens, logits=False) as request:
                    request.load()
                    ours.append(timed(lambda request=request: request.read_into(buffer)))  # type: ignore[misc]
    finally:
        server.kill()
        server.wait()
        if server.stdout is not None:
            server.stdout.close()
    reference = gigabytes(pages, raw[1:])
    value = gigabytes(pages, ours[1:])
    return row("remote_get", value, "GB/s", bar=0.5 * reference, reference=reference, at_least=True)


# ---- storage that has stopped


def stopped_storage() -> list[Row]:
    """p99 of match and lease of pages in HOST while Redis is stopped, beside the same calls while it runs, in turns.

    Another client asks for pages that only the storage could have, all the time.
    """
    known = prompt(20, 64)
    calm: dict[str, list[float]] = {"match": [], "lease": []}
    stopped: dict[str, list[float]] = {"match": [], "lease": []}
    with (
        tempfile.TemporaryDirectory(prefix="hc") as folder,
        Server(next(iter(binaries().values())), Path(folder) / "redis") as server,
        ServiceProcess(
            Path(folder), "--storage", f"redis://127.0.0.1:{server.port}/0", "--drain", "1", "--log-level", "error"
        ) as service,
        hicache.connect(service.address, NAMESPACE, required=True) as cache,
        hicache.connect(service.address, NAMESPACE, required=True) as other,
    ):
        with cache.request(known, logits=False) as request:
            request.write_from([bytes(PAGE_BYTES)] * len(request.allocate()))
            request.commit()

        def lease() -> None:
            with cache.request(known, logits=False) as request:
                assert len(request.load()) == 64

        def ask(stop: threading.Event) -> None:
            seed = 1000
            while not stop.is_set():
                with other.request(prompt(seed := seed + 1, 8), logits=False, deadline=0.1) as request:
                    request.load()

        for _ in range(STOPPED_ROUNDS):
            for seconds in (calm, stopped):
                if seconds is stopped:
                    server.pause()
                stop = threading.Event()
                asking = threading.Thread(target=ask, args=(stop,))
                asking.start()
                for _ in range(STOPPED_CALLS):
                    seconds["match"].append(timed(lambda: cache.match(known, logits=False)))
                    seconds["lease"].append(timed(lease))
                stop.set()
                asking.join()
                server.resume()
    found = []
    for verb, taken in stopped.items():
        reference = float(np.percentile(calm[verb], 99)) * 1e6
        value = float(np.percentile(taken, 99)) * 1e6
        found.append(row(f"{verb}_p99_storage_stopped", value, "us", bar=1.5 * reference, reference=reference))
    return found


def rows() -> list[Row]:
    with (
        tempfile.TemporaryDirectory(prefix="hc") as folder,
        ServiceProcess(
            Path(folder), "--listen", "127.0.0.1:0", "--insecure", "--log-level", "warning", host="900MiB"
        ) as service,
    ):
        remote = next(address for address in service.ready["addresses"] if not address.startswith("unix:"))
        with hicache.connect(service.address, NAMESPACE, required=True) as cache:
            found = [match(cache)]
        found += [moving(service.address, what) for what in ("store", "load")]
        with AdminClient(Address.parse(service.address)) as admin:
            admin.clear()
        found.append(remote_get(remote))
    return [*found, *(stopped_storage() if binaries() else [])]
