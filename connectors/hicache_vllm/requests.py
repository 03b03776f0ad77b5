"""What the scheduler's side remembers of one of vLLM's requests."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from hashlib import sha256
from typing import Any

import numpy as np

from hicache_vllm.accounts import Account
from hicache_vllm.adapters import Adapters
from hicache_vllm.ahead import Ahead
from hicache_vllm.lookups import Lookup, Scope, Tokens

__all__ = ["Tracked"]


class Tracked:
    """One request. Used on the scheduler's thread only.

    Attributes:
        id: vLLM's.
        scope: whose pages it may use; None: it goes past the cache.
        lookup: what the service has of it, or is being asked.
        account: what is to be counted when the engine takes it up, as it was answered last; or None.
        local: tokens that the engine itself had when it asked last.
        loading: whether a load of its pages is under way.
        brought: hashes of pages that a load has brought, until the engine has its blocks under their names.
        shared: key by which others wait for what it loads, or None.
        waited: when it began to wait for another's load, or None.
        planned: leading pages that are in host memory, or on their way there.
        refused: whether a load of it has failed, so that nothing more is brought.
        works: numbers of its stores and audits that are not over, and read blocks that are its own.
        audited: whether the last page of its hit is computed all the same; `audit`: index of that page, once known.
        rest: once it has ended, whole pages that it has computed, and its blocks.
        ahead: slots for pages that it has not computed yet; or None.
    """

    def __init__(self, request: Any, adapters: Adapters, *, audited: bool = False) -> None:
        self.id = str(request.request_id)
        self.scope = _scope(request, adapters)
        self.lookup: Lookup | None = None
        self.account: Account | None = None
        self.local = 0
        self.loading = False
        self.brought = b""
        self.shared: bytes | None = None
        self.waited: float | None = None
        self.planned = 0
        self.works: set[int] = set()
        self.refused = False
        self.audited = audited
        self.audit: int | None = None
        self.rest: tuple[int, list[int]] = (0, [])
        self.ahead: Ahead | None = None
        self._request = request
        self._preemptions = int(getattr(request, "num_preemptions", 0))
        self._tokens = np.empty(0, np.uint32)

    def tokens(self, count: int) -> Tokens:
        """The first so many of its tokens. Never changed afterwards: other threads may keep it."""
        have = len(self._tokens)
        if have < count:
            more = np.asarray(self._request.all_token_ids[have:count], dtype=np.uint32)
            self._tokens = np.concatenate((self._tokens, more))
        return self._tokens[:count]

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """What vLLM calls its whole blocks."""
        return getattr(self._request, "block_hashes", ())

    @property
    def length(self) -> int:
        """Tokens that are known."""
        return int(self._request.num_tokens)

    def whole_after(self, count: int) -> int:
        """Tokens whose keys and values are there once the engine has computed so many more."""
        return min(int(self._request.num_computed_tokens) + count, self.length)

    def preempted(self) -> bool:
        """Whether its blocks were taken away since this was asked last."""
        before, self._preemptions = self._preemptions, int(getattr(self._request, "num_preemptions", 0))
        return self._preemptions != before

    def bypass(self) -> None:
        """From now on it goes past the cache, if it has been computed in part already."""
        if self._request.num_computed_tokens:
            self.scope = None

    def reserve(self, lookup: Lookup) -> None:
        """Its lookup has slots for what it did not find."""
        if self.ahead is None or self.ahead.lookup is not lookup:
            self.drop_ahead()
            self.ahead = Ahead(lookup)

    def drop_ahead(self) -> None:
        """Nothing more is stored by the step that computes it."""
        ahead, self.ahead = self.ahead, None
        if ahead is not None:
            ahead.drop()

    def drop_lookup(self) -> None:
        """What was found is not needed, or not any more."""
        self.audit = None
        lookup, self.lookup = self.lookup, None
        if lookup is not None:
            lookup.close()


def _scope(request: Any, adapters: Adapters) -> Scope | None:
    if getattr(request, "prompt_embeds", None) is not None:
        return None  # what was computed from is not in the tokens
    lora = request.lora_request
    extras = tuple(
        (
            sha256(str(feature.identifier).encode()).digest(),
            int(feature.mm_position.offset),
            int(feature.mm_position.length),
        )
        for feature in request.mm_features or ()
    )
    adapter = None if lora is None else partial(adapters.adapter, lora)
    return Scope(adapter, request.cache_salt or None, extras)
