"""A storage plug-in for tests: a folder, as `file://` has it, whose reads hang while there is a FIFO, FROZEN_GATE."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from hicache.core.keys import ObjectKey
from hicache.storage.base import ObjectResult
from hicache_file import FileBackend

GATE = Path(os.environ["FROZEN_GATE"])


class FrozenBackend(FileBackend):
    """Reads wait in the kernel, as on a disk that does not answer, until somebody writes to the FIFO."""

    def get_into(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[ObjectResult]:
        """See `StorageBackend`."""
        wait()
        return super().get_into(keys, buffers)

    def contains(self, keys: Sequence[ObjectKey], *, stop_at_first_miss: bool = False) -> list[bool]:
        """See `StorageBackend`."""
        wait()
        return super().contains(keys, stop_at_first_miss=stop_at_first_miss)


def wait() -> None:
    """Until the gate is open: it is gone, or was written to."""
    try:
        GATE.read_bytes()
    except FileNotFoundError:
        return
