"""A look whether storage works at all: what is stored must be found and come back.

A store that takes everything and gives nothing looks like a cold cache. So when a storage is attached, one small
object of a namespace of its own is put, looked up, read and deleted, in the background. Later on, many pages stored
and none that ever came back is the same alarm, from the cache's own traffic.
"""

from __future__ import annotations

import hashlib
import logging
import os
from typing import Final

from hicache.core.keys import ObjectKey, Shard
from hicache.errors import HicacheError
from hicache.runtime.port import StoragePort
from hicache.runtime.storage_io import StorageIO
from hicache.storage.base import ObjectResult, ObjectStatus, StoredObject
from hicache.storage.breaker import HARMLESS
from hicache.storage.codec import encode_header

_log = logging.getLogger("hicache.runtime")

NAMESPACE: Final = hashlib.sha256(b"hicache canary").digest()[:16]
"""Nobody's namespace: no model's description has this digest."""

OFF: Final = "off"
RUNNING: Final = "running"
OK: Final = "ok"

MANY_PAGES: Final = 1000
MANY_REQUESTS: Final = 10
_LENGTH = 64


class Canary:
    """Thread-safe. Its work is done by the threads of storage.

    Args:
        port: where the backend is.
        storage: its threads.
        shard: any shard of the model's geometry.

    Attributes:
        state: "off", "running", "ok", "undecided: ...", or "failed: ...".
    """

    def __init__(self, port: StoragePort, storage: StorageIO, *, shard: Shard) -> None:
        self._port = port
        self._storage = storage
        self._shard = shard
        self.state = OFF

    @property
    def failed(self) -> bool:
        """Whether it showed that storage does not work."""
        return self.state.startswith("failed")

    def start(self) -> None:
        """Begin in the background."""
        self.state = RUNNING
        key = ObjectKey(NAMESPACE, 0, os.urandom(16), self._shard)
        payload = hashlib.shake_128(key.page_hash).digest(_LENGTH)
        if not self._storage.call_writing(lambda: self._put(key, payload), fail=self._broke_off):
            self._broke_off()

    def _put(self, key: ObjectKey, payload: bytes) -> None:
        header = encode_header(key, parent_hash=None, depth=0, tokens=b"", payload=payload)
        (result,) = self._port.put([StoredObject(key, header, memoryview(payload))])
        if result.status is not ObjectStatus.OK:
            self._end("was not stored", result)
        elif not self._storage.call(lambda: self._get(key, payload), fail=self._broke_off):
            self._broke_off()

    def _get(self, key: ObjectKey, payload: bytes) -> None:
        buffer = bytearray(_LENGTH)
        try:
            found = self._port.contains([key])
        except HicacheError as error:
            self._storage.call_writing(lambda: self._delete(key), fail=_nothing)
            self._end(f"was stored, and whether it is there is not told ({error})")
            return
        (result,) = self._port.get_into([key], [memoryview(buffer)])
        self._storage.call_writing(lambda: self._delete(key), fail=_nothing)
        if result.status is not ObjectStatus.OK:
            self._end("was stored and did not come back", result)
        elif not found[0]:
            self._end("was stored and can be read, but is not found")
        elif bytes(buffer) != payload:
            self._end("came back with other bytes")
        else:
            self.state = OK

    def _delete(self, key: ObjectKey) -> None:
        self._port.delete([key])

    def _end(self, what: str, result: ObjectResult | None = None) -> None:
        reason = "" if result is None else result.reason or result.status.value
        text = f"a small object {what}" + (f" ({reason})" if reason else "")
        if reason in HARMLESS:
            self.state = f"undecided: {text}"  # it tells about the moment: full, or still reading its index
            return
        self.state = f"failed: {text}"
        _log.error("storage does not work: %s; the cache goes on without hits from it", text)

    def _broke_off(self) -> None:
        self.state = "undecided: it could not be finished"


def _nothing() -> None:
    pass
