"""Memory of pages that are gone, so that a miss can say why."""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from itertools import repeat

from hicache.records import MissReason

_FIRST_PAGES = 65_536
"""First pages of prompts that are remembered across namespaces: 24 bytes and a dict entry each."""

_REASONS = tuple(MissReason)
_NUMBERS = {reason: number for number, reason in enumerate(_REASONS)}


class Ghosts:
    """A bounded ring of page hashes with the reason of their going, and a sketch of first pages by namespace.

    Page hashes need not carry the namespace, so each is remembered together with it.
    """

    __slots__ = ("_first_pages", "_gone", "_limit")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        # One integer a page, which costs less than a pair: the tick of its going, and the number of its reason.
        self._gone: OrderedDict[tuple[bytes, bytes], int] = OrderedDict()
        self._first_pages: OrderedDict[bytes, bytes | None] = OrderedDict()

    @property
    def remembers(self) -> bool:
        """Whether anything can be answered but "cold"."""
        return bool(self._gone)

    @property
    def enabled(self) -> bool:
        """Whether pages are remembered at all."""
        return self._limit > 0

    def add(self, namespace: bytes, page_hashes: list[bytes], reason: MissReason, *, tick: int = 0) -> None:
        """These pages are nowhere any more, since a tick of the core's clock. The oldest are forgotten first."""
        gone = self._gone
        entry = tick * len(_REASONS) + _NUMBERS[reason]
        for key in zip(repeat(namespace), page_hashes):
            if key in gone:
                gone.move_to_end(key)
            gone[key] = entry
        while len(gone) > self._limit:
            gone.popitem(last=False)

    def reason(self, namespace: bytes, page_hash: bytes) -> MissReason | None:
        """Why this page went, or None if nothing is known of it."""
        entry = self._gone.get((namespace, page_hash))
        return None if entry is None else _REASONS[entry % len(_REASONS)]

    def reasons(self, namespace: bytes, page_hashes: list[bytes]) -> list[MissReason | None]:
        """`reason` of each of several pages."""
        entries = map(self._gone.get, zip(repeat(namespace), page_hashes))
        return [None if entry is None else _REASONS[entry % len(_REASONS)] for entry in entries]

    def going(self, namespace: bytes, page_hash: bytes) -> tuple[MissReason, int] | None:
        """Why this page went, and at which tick; None if nothing is known of it."""
        entry = self._gone.get((namespace, page_hash))
        if entry is None:
            return None
        tick, number = divmod(entry, len(_REASONS))
        return _REASONS[number], tick

    def met_first_page(self, namespace: bytes, symbol: bytes) -> None:
        """A prompt of this namespace begins with this page."""
        key = _sketch(symbol)
        known = self._first_pages.get(key, namespace)
        # None: more than one namespace begins so, and a miss in any of them may come from another one.
        self._first_pages[key] = namespace if known == namespace else None
        if len(self._first_pages) > _FIRST_PAGES:
            self._first_pages.popitem(last=False)

    def known_elsewhere(self, namespace: bytes, symbol: bytes) -> bool:
        """Whether a prompt that begins with this page was seen under another namespace."""
        return self._first_pages.get(_sketch(symbol), namespace) != namespace


def _sketch(symbol: bytes) -> bytes:
    return blake2b(symbol, digest_size=8).digest()
