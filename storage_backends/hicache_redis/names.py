"""Names of keys: one key an object, all behind one prefix.

    {prefix}:{namespace digest}/{generation}/{page hash}_{shard}     an object, header and payload in one value
    {prefix}:generation/{namespace digest}                           a number
    {prefix}:manifest/{namespace digest}                             a JSON document
    {prefix}:scratch/{random}                                        bytes of a benchmark, for a moment

No name has braces, so that the keys of a chain spread over the slots of a cluster.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from hicache.errors import InvalidInput
from hicache.storage.base import ObjectKey

__all__ = ["Names", "escape_glob"]

_SPECIAL: Final = frozenset(b"*?[]^\\-!")


def escape_glob(text: bytes) -> bytes:
    """A pattern of `SCAN ... MATCH` that matches exactly these bytes."""
    return b"".join(b"\\" + bytes([byte]) if byte in _SPECIAL else bytes([byte]) for byte in text)


class Names:
    """Maps keys to names of the server and back. Immutable.

    Args:
        prefix: begins every name.
    """

    def __init__(self, prefix: str) -> None:
        self._start: Final = prefix.encode("ascii") + b":"

    def object(self, key: ObjectKey) -> bytes:
        """The name of an object."""
        return self._start + key.name.encode("ascii")

    def objects(self, keys: Sequence[ObjectKey]) -> list[bytes]:
        """The names of several objects, which mostly differ in their page hash alone."""
        found: list[bytes] = []
        start, suffix = "", ""
        last: ObjectKey | None = None
        for key in keys:
            if last is None or key.namespace != last.namespace or key.generation != last.generation:
                start = f"{self._start.decode()}{key.namespace.hex()}/{key.generation}/"
            if last is None or key.shard is not last.shard:
                suffix = key.shard.suffix
            found.append(f"{start}{key.page_hash.hex()}{suffix}".encode("ascii"))
            last = key
        return found

    def generation(self, namespace: bytes) -> bytes:
        """The name of a namespace's generation."""
        return self._start + b"generation/" + namespace.hex().encode()

    def manifest(self, namespace: bytes) -> bytes:
        """The name of a namespace's manifest."""
        return self._start + b"manifest/" + namespace.hex().encode()

    def scratch(self, token: bytes) -> bytes:
        """A name for bytes that are no object and are removed at once."""
        return self._start + b"scratch/" + token.hex().encode()

    def label(self, name: bytes, kind: str) -> bytes | None:
        """The namespace whose generation or manifest has this name, or None."""
        start = self._start + kind.encode() + b"/"
        digits = name[len(start) :]
        if not name.startswith(start) or len(digits) != 32 or digits.strip(b"0123456789abcdef"):
            return None
        return bytes.fromhex(digits.decode("ascii"))

    def parse(self, name: bytes) -> ObjectKey | None:
        """The key whose object has exactly this name, or None."""
        if not name.startswith(self._start):
            return None
        try:
            return ObjectKey.parse(name[len(self._start) :].decode("ascii"))
        except (InvalidInput, UnicodeDecodeError):
            return None

    def owns(self, name: bytes) -> bool:
        """Whether the name begins as ours do; the pattern of a scan is checked by this, not trusted."""
        return name.startswith(self._start)

    def everything(self) -> bytes:
        """The pattern of all our names."""
        return escape_glob(self._start) + b"*"

    def of_namespace(self, namespace: bytes) -> bytes:
        """The pattern of a namespace's objects."""
        return escape_glob(self._start) + namespace.hex().encode() + b"/*"

    def manifests(self) -> bytes:
        """The pattern of all manifests."""
        return escape_glob(self._start) + b"manifest/*"
