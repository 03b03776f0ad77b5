"""Residency changes as a stream. Replayed from the start it equals the residency of owned tiers.

An event names its tier: a page is gone only when the last tier has removed it. Within a tier a page is stored before
it is removed, and a parent before its child; removals come child first, before the bytes are freed. STORAGE events
are this process's belief.
"""

from __future__ import annotations

from dataclasses import dataclass

from hicache.records import Tier


@dataclass(frozen=True, slots=True)
class Stored:
    """Pages became visible in a tier.

    Attributes:
        namespace: digest of the derived namespace, 16 bytes.
        generation: generation of the namespace's content.
        tier: the tier.
        page_hashes: the pages, in chain order.
        parent_hash: hash of the page before the first, or None at the root.
        first_page: depth of the first page, 0 at the root.
        symbols: the pages' symbols glued together (token bytes, or hashes): `len(page_hashes)` times one width. Empty
            in the stream of a service, where they would be the hashes once more.
        tokens: where symbols are hashes, the pages' tokens as u32 little endian, if all of them are known; else empty.
    """

    namespace: bytes
    generation: int
    tier: Tier
    page_hashes: tuple[bytes, ...]
    parent_hash: bytes | None
    first_page: int
    symbols: bytes
    tokens: bytes = b""


@dataclass(frozen=True, slots=True)
class Removed:
    """Pages left a tier: `page_hashes` deepest first."""

    namespace: bytes
    generation: int
    tier: Tier
    page_hashes: tuple[bytes, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Cleared:
    """Everything of one namespace's generation left all tiers at once."""

    namespace: bytes
    generation: int


Event = Stored | Removed | Cleared
