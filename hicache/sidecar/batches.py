"""Events cut and packed to bounded sizes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from hicache.events import Cleared, Event, Removed, Stored
from hicache.sidecar.residency import EVENT_BYTES

BATCH_BYTES: Final = 1024 * 1024
"""About the most bytes of hashes and tokens in one batch."""

BATCH_EVENTS: Final = 256
"""Most events in one batch."""


def split(event: Event, most: int) -> Iterator[Event]:
    """An event as several of at most so many pages each; none where it has no pages."""
    if isinstance(event, Cleared):
        yield event
        return
    hashes = event.page_hashes
    if 0 < len(hashes) <= most:
        yield event
        return
    for first in range(0, len(hashes), most):
        some = hashes[first : first + most]
        if isinstance(event, Removed):
            yield replace(event, page_hashes=some)
        else:
            width = len(event.tokens) // len(hashes)
            yield replace(
                event,
                page_hashes=some,
                parent_hash=hashes[first - 1] if first else event.parent_hash,
                first_page=event.first_page + first,
                symbols=b"",
                tokens=event.tokens[first * width : (first + most) * width],
            )


def news(event: Stored, new: list[int], tokens: list[bytes]) -> Iterator[Stored]:
    """The parts of an event that are news: contiguous, with tokens or without, and bounded.

    Args:
        event: what was told.
        new: positions of the pages that are news.
        tokens: those of each page.
    """
    hashes = event.page_hashes
    at = 0
    while at < len(new):
        first = new[at]
        most = max(1, EVENT_BYTES // (len(hashes[first]) + len(tokens[first])))
        kind = bool(tokens[first])
        end = at + 1
        while end < len(new) and end - at < most and new[end] == new[end - 1] + 1 and bool(tokens[new[end]]) is kind:
            end += 1
        behind = first + end - at
        yield Stored(
            event.namespace,
            event.generation,
            event.tier,
            hashes[first:behind],
            hashes[first - 1] if first else event.parent_hash,
            event.first_page + first,
            symbols=b"",
            tokens=b"".join(tokens[first:behind]),
        )
        at = end


def page_tokens(event: Stored, token_bytes: int) -> list[bytes]:
    """The tokens of each page, or nothing where they are not told, or a page's size is not known."""
    tokens = event.tokens
    if not token_bytes or len(tokens) != token_bytes * len(event.page_hashes):
        return []
    return [tokens[at : at + token_bytes] for at in range(0, len(tokens), token_bytes)]


def packed(events: list[Event]) -> Iterator[tuple[tuple[Event, ...], int]]:
    """Events in batches, with the bytes of each."""
    waiting: list[Event] = []
    size = 0
    for event in events:
        if waiting and (len(waiting) == BATCH_EVENTS or size >= BATCH_BYTES):
            yield tuple(waiting), size
            waiting, size = [], 0
        waiting.append(event)
        size += size_of(event)
    if waiting:
        yield tuple(waiting), size


def size_of(event: Event) -> int:
    """Bytes of its hashes and tokens."""
    if isinstance(event, Stored):
        return sum(map(len, event.page_hashes)) + len(event.tokens)
    return sum(map(len, event.page_hashes)) if isinstance(event, Removed) else 0
