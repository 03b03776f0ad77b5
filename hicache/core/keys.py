"""Names of stored objects: what an object holds, in absolute coordinates, never who wrote it.

A name is text from explicit constants only, so that it is the same on every machine, in every Python version:

    {namespace digest}/{generation}/{page hash}_{geometry digest}_L{start}-{end}[_H{head group}]

Digests and hashes are lower-case hex, numbers are decimal without leading zeros. Each name has exactly one spelling;
`ObjectKey.parse` refuses every other text, so a name from outside never reaches a file system uninterpreted.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from hicache.errors import GeometryError, InvalidInput

__all__ = ["GEOMETRY_DIGEST_LENGTH", "HASH_SIZES", "NAMESPACE_SIZE", "ObjectKey", "Shard"]

NAMESPACE_SIZE: Final = 16
"""Bytes of a namespace digest."""
HASH_SIZES: Final = (16, 32)
"""Bytes of a page hash: xxh3_128, sha256."""
GEOMETRY_DIGEST_LENGTH: Final = 20
"""Characters of a geometry digest: "hg1-" and 16 hex digits."""
MAX_LAYERS: Final = 65_535
MAX_HEAD_GROUPS: Final = 65_535
MAX_GENERATION: Final = 2**64 - 1

_GEOMETRY = re.compile(r"hg1-[0-9a-f]{16}")
_NAME = re.compile(
    r"([0-9a-f]{32})/(0|[1-9][0-9]{0,19})/([0-9a-f]{32}|[0-9a-f]{64})"
    r"_(hg1-[0-9a-f]{16})_L(0|[1-9][0-9]{0,4})-([1-9][0-9]{0,4})(?:_H(0|[1-9][0-9]{0,4}))?"
)


def _is_count(value: object, limit: int) -> bool:
    # bool is an int by inheritance only; as a coordinate it is a mistake.
    return type(value) is int and 0 <= value <= limit


@dataclass(frozen=True, slots=True)
class Shard:
    """The rectangle of a page that one object holds.

    Attributes:
        geometry: digest text of the geometry, `hg1-` and 16 lower-case hex digits.
        layers: absolute layer range, (first, behind the last).
        head_group: absolute index of the head group; None where the state has no head axis (MLA, opaque).

    Raises:
        GeometryError: a digest, range or index out of its form.
    """

    geometry: str
    layers: tuple[int, int]
    head_group: int | None = None

    def __post_init__(self) -> None:
        if type(self.geometry) is not str or _GEOMETRY.fullmatch(self.geometry) is None:
            raise GeometryError(
                f"shard geometry {self.geometry!r:.60} is not a digest: use KVGeometry.digest(page_size)"
            )
        layers: object = self.layers
        if type(layers) is not tuple or len(layers) != 2 or not all(_is_count(layer, MAX_LAYERS) for layer in layers):
            raise GeometryError(f"shard layers {self.layers!r:.60} are not (start, end) of 0 to {MAX_LAYERS}")
        if self.layers[0] >= self.layers[1]:
            raise GeometryError(f"shard layers {self.layers!r} are empty: end must be above start")
        if self.head_group is not None and not _is_count(self.head_group, MAX_HEAD_GROUPS - 1):
            raise GeometryError(f"shard head_group {self.head_group!r:.60} is not None or 0 to {MAX_HEAD_GROUPS - 1}")

    @property
    def suffix(self) -> str:
        """The shard's part of a name: `_{geometry digest}_L{start}-{end}[_H{head group}]`."""
        head = "" if self.head_group is None else f"_H{self.head_group}"
        return f"_{self.geometry}_L{self.layers[0]}-{self.layers[1]}{head}"


@dataclass(frozen=True, slots=True)
class ObjectKey:
    """The identity of one stored object. Hashable, compared by value.

    Attributes:
        namespace: digest of the derived namespace, 16 bytes.
        generation: life of the namespace's content, 0 to 2^64-1; clearing raises it.
        page_hash: hash that names the page and all before it, 16 bytes (xxh3_128) or 32 (sha256).
        shard: which part of the page.

    Raises:
        InvalidInput: a field of another type, length or range.
    """

    namespace: bytes
    generation: int
    page_hash: bytes
    shard: Shard

    def __post_init__(self) -> None:
        if type(self.namespace) is not bytes or len(self.namespace) != NAMESPACE_SIZE:
            raise InvalidInput(f"object key: namespace must be the {NAMESPACE_SIZE} bytes of a namespace digest")
        if not _is_count(self.generation, MAX_GENERATION):
            raise InvalidInput(f"object key: generation {self.generation!r:.60} is not an integer of 0 to 2^64-1")
        if type(self.page_hash) is not bytes or len(self.page_hash) not in HASH_SIZES:
            raise InvalidInput("object key: page_hash must be 16 bytes (xxh3_128) or 32 bytes (sha256)")
        if type(self.shard) is not Shard:
            raise InvalidInput(f"object key: shard must be a Shard, not {type(self.shard).__name__}")

    @property
    def name(self) -> str:
        """The object's name, relative, at most 159 ASCII characters with two slashes."""
        return f"{self.namespace.hex()}/{self.generation}/{self.page_hash.hex()}{self.shard.suffix}"

    @classmethod
    def parse(cls, name: str) -> ObjectKey:
        """The key that has exactly this name: `ObjectKey.parse(key.name) == key`.

        Raises:
            InvalidInput: the text is not the one spelling of any key.
        """
        found = _NAME.fullmatch(name) if type(name) is str else None
        if found is None:
            raise InvalidInput(f"{name!r:.80} is not an object name")
        namespace, generation, page_hash, geometry, start, end, head_group = found.groups()
        shard = Shard(geometry, (int(start), int(end)), None if head_group is None else int(head_group))
        return cls(bytes.fromhex(namespace), int(generation), bytes.fromhex(page_hash), shard)
