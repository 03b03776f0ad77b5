"""Tokens of a traced request: traces hold ids of token blocks, caches want tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hicache.analytics.trace import Ids, TraceRequest
from hicache.errors import ConfigError

Tokens = npt.NDArray[np.uint32]

# shift and odd multiplier: both steps can be undone, so different inputs stay different up to the cut to 32 bits
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a request asks of the cache.

    Attributes:
        tokens: shape (n,), uint32, whole pages only.
        page_ends: how many of the request's real tokens a number of its pages stands for: `min(k * step, limit)`.
        step: real tokens of a whole page.
        limit: real tokens of all its pages.
    """

    tokens: Tokens
    step: int
    limit: int

    def covered(self, pages: int) -> int:
        """Real tokens that the first `pages` pages stand for."""
        return min(pages * self.step, self.limit)


class IdPages:
    """Each id of the trace is one page, a partial last one too, as published figures count.

    To the cache a page is then one token, the id itself: a page costs it 4 bytes, however many tokens it stands for.
    """

    page_tokens = 1

    def prompt(self, request: TraceRequest) -> Prompt:
        """The request's ids as tokens, without a copy."""
        return Prompt(tokens=request.ids, step=request.unit, limit=request.known_tokens)


class TokenPages:
    """Ids are expanded to tokens, and tokens cut into pages of a size of one's own; what is left over is dropped.

    The tokens of an id are a fixed pseudo-random function of the id alone, so equal ids give equal tokens everywhere.
    """

    def __init__(self, page_tokens: int) -> None:
        self.page_tokens = page_tokens

    def prompt(self, request: TraceRequest) -> Prompt:
        """Expand and cut.

        Raises:
            ConfigError: the page size and the tokens of an id do not divide each other.
        """
        page, unit = self.page_tokens, request.unit
        if unit % page and page % unit:
            raise ConfigError(
                f"--page-size {page} does not divide the trace's blocks of {unit} tokens, nor they it: "
                f"use {_near(page, unit)}, or --page-size trace"
            )
        whole = request.known_tokens // page * page
        needed = -(-whole // unit)
        tokens = expand(request.ids[:needed], unit=unit)[:whole]
        return Prompt(tokens=tokens, step=page, limit=whole)


def expand(ids: Ids, *, unit: int) -> Tokens:
    """Tokens of ids, shape (len(ids) * unit,), uint32: a 64-bit mixing function of id and position, cut to 32 bits."""
    mixed: npt.NDArray[np.uint64] = np.add.outer(ids.astype(np.uint64) << 32, np.arange(1, unit + 1, dtype=np.uint64))
    for shift, multiplier in _ROUNDS:
        mixed ^= mixed >> shift
        mixed *= np.uint64(multiplier)
    mixed ^= mixed >> 31
    return mixed.astype(np.uint32).reshape(-1)


def _near(page: int, unit: int) -> int:
    """The divisor or multiple of `unit` nearest to `page`, from below where there are two."""
    if page > unit:
        return page // unit * unit
    return max(size for size in range(1, page + 1) if unit % size == 0)
