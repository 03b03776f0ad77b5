"""How soon a service is ready, and what it takes: 1 GiB of HOST, and a folder whose index is rebuilt meanwhile.

The folder has 20,000 objects, or a million with --large (minutes, and 8 GiB of disk); they are put by the backend that
the service uses. The reference of the start is the start of an interpreter that imports the client alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

import hicache
from benchmarks.measure import Row, row
from hicache.rpc.address import Address
from hicache.rpc.client.admin import AdminClient
from hicache.storage import codec
from hicache.storage.base import ObjectStatus, StoredObject
from hicache.testing.objects import make_key
from hicache.testing.sidecars import ServiceProcess, namespace_of
from hicache_file import FileBackend

OBJECTS, LARGE = 20_000, 1_000_000
BATCH = 1_000
PAYLOAD = memoryview(bytes(4096))
READY_SECONDS = 1.0
IDLE_MEGABYTES = 120.0


def fill(folder: Path, objects: int) -> None:
    with closing(FileBackend(str(folder))) as backend:
        for first in range(0, objects, BATCH):
            keys = [make_key(number) for number in range(first, first + BATCH)]
            headers = [codec.encode_header(key, parent_hash=None, depth=0, tokens=b"", payload=PAYLOAD) for key in keys]
            batch = [StoredObject(key, header, PAYLOAD) for key, header in zip(keys, headers, strict=True)]
            assert all(result.status is ObjectStatus.OK for result in backend.put(batch))


def interpreter() -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import hicache.rpc.client.cache"], check=True)
    return time.perf_counter() - start


def rows() -> list[Row]:
    objects = LARGE if os.environ.get("BENCHMARKS_LARGE") else OBJECTS
    with tempfile.TemporaryDirectory(prefix="hc") as name:
        store = Path(name) / "store"
        fill(store, objects)
        bare = interpreter()
        start = time.perf_counter()
        with ServiceProcess(Path(name), "--storage", f"file://{store}", "--log-level", "error", host="1GiB") as service:
            ready = time.perf_counter() - start
            memory = service.memory / 1e6
            start = time.perf_counter()
            with hicache.connect(service.address, namespace_of(256 * 1024), required=True):
                attached = time.perf_counter() - start
                with AdminClient(Address.parse(service.address)) as admin:
                    storage = admin.statistics()["pools"][0]["statistics"]["storage"]
    state = "while it is read" if not storage["ready"] else "which was read by then"
    said = f"with an index of {objects:,} objects, {state}"
    return [
        row("service_ready", ready, "s", bar=READY_SECONDS, reference=bare, reason=said),
        row("service_attached", attached, "s", bar=READY_SECONDS, reason=f"{said}; the first client, with all of HOST"),
        row("service_memory", memory, "MB", bar=IDLE_MEGABYTES, reason=f"{said}; beside the pool"),
    ]
