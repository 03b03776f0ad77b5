"""Where an object lies, and the compact id under which the index knows it.

    {root}/{namespace[:2]}/{namespace}/{generation}/{fan}/{fan}/{page hash}_{shard}

Every part is hex, decimal or a constant, so no text of a user reaches the file system, and names differ exactly where
keys differ. A name has at most 120 bytes. The two fan-out levels come from the CRC-32 of the file's name.
"""

from __future__ import annotations

import re
import struct
import threading
from typing import Final, NamedTuple
from zlib import crc32

from hicache.errors import InvalidInput
from hicache.storage.base import ObjectKey, Shard

__all__ = ["TEMP_SUFFIX", "Names", "Place", "temp_writer"]

TEMP_SUFFIX: Final = ".hicache-tmp"

_ID = struct.Struct(">16sQI")
_REMEMBERED: Final = 4096  # folders
_TEMP = re.compile(r"([0-9a-f]{16})-[0-9a-f]{1,16}\.hicache-tmp")


class Place(NamedTuple):
    """One object's place.

    Attributes:
        id: compact identity for the index.
        folder: directory of the namespace's generation.
        leaf: number of the fan-out directory in it.
        path: the file.
    """

    id: bytes
    folder: str
    leaf: int
    path: str


def temp_writer(name: str) -> str | None:
    """The token of the writer that a temporary file belongs to; None if it is no temporary file of ours."""
    found = _TEMP.fullmatch(name)
    return found[1] if found else None


class Names:
    """Maps keys to places and ids back to places. Thread-safe.

    Args:
        root: resolved path of the root.
        fan_out: directories per level, 1 to 256.
    """

    def __init__(self, root: str, fan_out: int) -> None:
        self.root: Final = root
        self.fan_out: Final = fan_out
        self._lock = threading.Lock()
        self._numbers: dict[Shard, int] = {}
        self._suffixes: list[str] = []
        self._folders: dict[tuple[bytes, int], str] = {}
        self._leaves: Final = [f"/{leaf // fan_out:02x}/{leaf % fan_out:02x}" for leaf in range(fan_out * fan_out)]

    def place(self, key: ObjectKey) -> Place:
        """Where the key's object lies."""
        shard = key.shard
        number = self._numbers.get(shard)
        if number is None:
            number = self._register(shard)
        return self._place(key.namespace, key.generation, number, key.page_hash)

    def place_of(self, identity: bytes) -> Place:
        """Where the object of an id lies."""
        namespace, generation, number = _ID.unpack_from(identity)
        return self._place(namespace, generation, number, identity[_ID.size :])

    def namespace_path(self, namespace: bytes) -> str:
        """Directory of all generations of a namespace."""
        digits = namespace.hex()
        return f"{self.root}/{digits[:2]}/{digits}"

    def folder(self, namespace: bytes, generation: int) -> str:
        """Directory of one generation."""
        return f"{self.namespace_path(namespace)}/{generation}"

    def parse(self, namespace: str, generation: str, leaf: int, name: str) -> ObjectKey | None:
        """The key whose object has exactly this place, or None for a file that is none of ours."""
        try:
            key = ObjectKey.parse(f"{namespace}/{generation}/{name}")
        except InvalidInput:
            return None
        return key if self._leaf(name) == leaf else None

    def _place(self, namespace: bytes, generation: int, number: int, page_hash: bytes) -> Place:
        name = page_hash.hex() + self._suffixes[number]
        leaf = self._leaf(name)
        folder = self._folders.get((namespace, generation))  # one look at a dict needs no lock
        if folder is None:
            folder = self._remember(namespace, generation)
        path = f"{folder}{self._leaves[leaf]}/{name}"
        return Place(_ID.pack(namespace, generation, number) + page_hash, folder, leaf, path)

    def _remember(self, namespace: bytes, generation: int) -> str:
        folder = self.folder(namespace, generation)
        with self._lock:
            if len(self._folders) >= _REMEMBERED:
                self._folders.clear()
            self._folders[namespace, generation] = folder
        return folder

    def _leaf(self, name: str) -> int:
        return crc32(name.encode("ascii", "replace")) % (self.fan_out * self.fan_out)

    def _register(self, shard: Shard) -> int:
        with self._lock:
            number = self._numbers.get(shard)
            if number is None:
                number = len(self._suffixes)
                self._suffixes.append(shard.suffix)
                self._numbers[shard] = number
            return number
