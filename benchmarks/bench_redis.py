"""The Redis backend: moving large objects, beside a raw loop on the same kind of socket plus one checksum pass.

The raw loop sends prepared requests and reads replies of known lengths into prepared buffers: what no client can beat.
It hashes what it moves once, as every reader and writer of self-proving objects must. Both alternate in one run on one
server, with one connection, in batches.
"""

from __future__ import annotations

import socket
import statistics
import struct
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import xxhash
from redis.crc import key_slot

from benchmarks.measure import Row, row
from hicache.storage import codec
from hicache.storage.base import ObjectStatus, StorageUrl, StoredObject
from hicache.storage.registry import load_backend
from hicache.testing.objects import make_key
from hicache.testing.servers import Cluster, Server, binaries

BATCH_BYTES = 32 << 20
ROUNDS = 7
BAR = 0.8
ASKED = 512
PATIENCE = 60  # seconds
SETTINGS = {"maxmemory": "2gb", "maxmemory-policy": "allkeys-lru"}


def payloads(size: int) -> list[memoryview]:
    random = np.random.default_rng(7)
    return [memoryview(random.integers(0, 256, size, dtype=np.uint8)) for _ in range(BATCH_BYTES // size)]


def objects(size: int, first: int) -> list[StoredObject]:
    made = []
    for i, payload in enumerate(payloads(size)):
        key = make_key(first + i)
        header = codec.encode_header(key, parent_hash=None, depth=0, tokens=bytes(256), payload=payload)
        made.append(StoredObject(key, header, payload))
    return made


class Raw:
    """The loop that nobody can beat: requests of known bytes, replies of known lengths."""

    def __init__(self, address: tuple[str, int] | str, stored: list[StoredObject]) -> None:
        family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
        self.socket = socket.socket(family)
        # The system's own time-out: Python's would ask before each read whether there is something.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", PATIENCE, 0))
        self.socket.connect(address)
        if family == socket.AF_INET:
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.stored = stored
        self.names = [b"raw:" + item.key.name.encode() for item in stored]

    def receive(self, view: memoryview) -> None:
        at = 0
        while at < view.nbytes:
            count = self.socket.recv_into(view[at:])
            if not count:
                raise ConnectionResetError("the server closed the connection")
            at += count

    def put(self) -> None:
        for name, item in zip(self.names, self.stored, strict=True):
            xxhash.xxh3_64_intdigest(item.payload)
            size = len(item.header) + item.payload.nbytes
            head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(name), name, size)
            self.socket.sendall(head + item.header)
            self.socket.sendall(item.payload)
            self.socket.sendall(b"\r\n")
        self.receive(memoryview(bytearray(5 * len(self.names))))

    def get(self, buffers: list[memoryview]) -> None:
        window = max(1, (8 << 20) // buffers[0].nbytes)
        head = bytearray(
            len(self.stored[0].header) + len(b"$%d\r\n" % (len(self.stored[0].header) + buffers[0].nbytes))
        )
        end = memoryview(bytearray(2))
        requests = [b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(name), name) for name in self.names]
        self.socket.sendall(b"".join(requests[:window]))
        for i, buffer in enumerate(buffers):
            self.receive(memoryview(head))
            self.receive(buffer)
            self.receive(end)
            if i + window < len(requests):
                self.socket.sendall(requests[i + window])
            xxhash.xxh3_64_intdigest(buffer)


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def compare(server: Server, url: str, address: tuple[str, int] | str, size: int) -> tuple[float, float, float, float]:
    """GB/s of the backend's put and get, and of the raw loop's."""
    backend = load_backend("redis").from_url(StorageUrl.parse(url))
    stored = objects(size, 0)
    raw = Raw(address, stored)
    keys = [item.key for item in stored]
    buffers = [memoryview(bytearray(size)) for _ in keys]
    times: list[list[float]] = [[], [], [], []]

    def put() -> None:
        for item in stored:  # the checksum pass of a write is where headers are made
            codec.encode_header(item.key, parent_hash=None, depth=0, tokens=bytes(256), payload=item.payload)
        assert all(result.status is ObjectStatus.OK for result in backend.put(stored))

    def get() -> None:
        assert all(result.status is ObjectStatus.OK for result in backend.get_into(keys, buffers))

    try:
        sides = ((times[0], put, times[1], get), (times[2], raw.put, times[3], lambda: raw.get(buffers)))
        for number in range(2 * ROUNDS):
            server.call("FLUSHALL")  # both write into a server that is empty, and take turns at being first
            puts, write, gets, read = sides[number % 2]
            spent = seconds(write), seconds(read)
            if number > 1:  # the first of each warms up
                puts.append(spent[0])
                gets.append(spent[1])
    finally:
        backend.close()
        raw.socket.close()
    moved = len(keys) * size / 1e9
    a, b, c, d = (moved / statistics.median(series) for series in times)
    return a, b, c, d


def contains(url: str, addresses: Sequence[tuple[str, int] | str]) -> tuple[float, float]:
    """Milliseconds of the slowest of a hundred look-ups of many keys, and of the same requests sent and read raw.

    Where there are several servers, the raw loop sends to all before it reads from the first.
    """
    parsed = StorageUrl.parse(url)
    backend = load_backend(parsed.scheme).from_url(parsed)
    keys = [make_key(i) for i in range(ASKED)]
    names = [b"raw:" + key.name.encode() for key in keys]
    nodes = [
        (Raw(address, []), [name for name in names if _node(name, len(addresses)) == at])
        for at, address in enumerate(addresses)
    ]
    requests = [
        b"".join(b"*2\r\n$6\r\nEXISTS\r\n$%d\r\n%b\r\n" % (len(name), name) for name in mine) for _, mine in nodes
    ]
    answers = [memoryview(bytearray(len(b":0\r\n") * len(mine))) for _, mine in nodes]

    def ask() -> None:
        for (raw, _), request in zip(nodes, requests, strict=True):
            raw.socket.sendall(request)
        for (raw, _), answer in zip(nodes, answers, strict=True):
            raw.receive(answer)

    times: tuple[list[float], list[float]] = ([], [])
    try:
        for _ in range(200):
            times[0].append(seconds(lambda: backend.contains(keys)))
            times[1].append(seconds(ask))
    finally:
        backend.close()
        for raw, _ in nodes:
            raw.socket.close()
    ours, theirs = (1e3 * float(np.percentile(series, 99)) for series in times)
    return ours, theirs


def _node(name: bytes, count: int) -> int:
    """Which node of a cluster that shares its slots evenly serves a key."""
    slot = int(key_slot(name))
    return next(i for i in range(count) if slot < (i + 1) * Cluster.SLOTS // count)


def rows() -> list[Row]:
    found = binaries()
    if not found:
        return [row("redis_put_2m", 0.0, "ratio", bar=BAR, at_least=True, reason="no server of Redis or Valkey here")]
    name, binary = next(iter(found.items()))
    result = []
    with (
        tempfile.TemporaryDirectory(prefix="hicache-bench-") as folder,
        Server(binary, Path(folder), SETTINGS) as server,
    ):
        for kind, url, address in (
            ("", f"redis://127.0.0.1:{server.port}/0", server.address),
            ("_unix", f"redis:///0?socket={server.unix}", server.unix),
        ):
            for size in (1 << 20, 2 << 20, 8 << 20):
                put, get, raw_put, raw_get = compare(server, url, address, size)
                shown = f"GB/s beside a raw loop with checksum, {name}"
                figures = [(f"redis_get_{size >> 20}m{kind}", get, raw_get)]
                if size == 2 << 20:
                    figures.insert(0, (f"redis_put_2m{kind}", put, raw_put))
                for label, value, reference in figures:
                    result.append(
                        row(label, value, "GB/s", reference=reference, bar=BAR * reference, at_least=True, reason=shown)
                    )
            result.append(contains_row(kind, url, [address], f"in one round trip, {name}"))
    with (
        tempfile.TemporaryDirectory(prefix="hicache-bench-") as folder,
        Cluster(binary, Path(folder), options=SETTINGS) as cluster,
    ):
        url = f"redis+cluster://127.0.0.1:{cluster.servers[0].port}"
        addresses = [server.address for server in cluster.servers]
        result.append(contains_row("_cluster", url, addresses, f"in one round trip to each of 3 nodes, {name}"))
    return result


def contains_row(kind: str, url: str, addresses: Sequence[tuple[str, int] | str], shown: str) -> Row:
    value, reference = contains(url, addresses)
    reason = f"p99 of {ASKED} keys {shown}, beside the same requests raw"
    return row(f"redis_contains_{ASKED}{kind}", value, "ms", reference=reference, bar=2 * reference, reason=reason)
