"""From a call of SGLang's to names and places: its page hashes as a chain, its token slots and tensors as views."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from hicache.errors import ConfigError
from hicache_sglang.pool import Bytes, HostPages
from hicache_sglang.store import PageChain, PageName

__all__ = ["chain_of", "flat_places", "placed"]

_HASH: Final = re.compile(r"[0-9a-f]{64}")


def placed(
    pages: HostPages, keys: Sequence[str], host_indices: Any, extra_info: Any
) -> tuple[PageChain, list[Bytes | None]]:
    """Names, and the views of the pages whose token slots begin at each page's first index.

    Raises:
        ConfigError: not one slot a token, or a key that is no page hash.
    """
    size = pages.shape.page_size
    slots = host_indices.tolist()
    if len(slots) != len(keys) * size:
        raise ConfigError(f"{len(keys)} pages of {size} tokens came with {len(slots)} host indices")
    return chain_of(keys, extra_info), [_place(pages, slots[at : at + size]) for at in range(0, len(slots), size)]


def flat_places(pages: HostPages, keys: Sequence[str], tensors: Sequence[Any]) -> list[Bytes | None]:
    """Views of flat tensors, one a page; None for one that is no page of this pool.

    Raises:
        ConfigError: not one tensor a page.
    """
    if len(tensors) != len(keys):
        raise ConfigError(f"{len(keys)} pages came with {len(tensors)} tensors")
    return [pages.flat(tensor) for tensor in tensors]


def _place(pages: HostPages, slots: list[int]) -> Bytes | None:
    # A page's slots follow each other: a page at other places is no page of this pool.
    return pages.at(slots[0]) if slots[-1] - slots[0] == len(slots) - 1 else None


def chain_of(keys: Sequence[str], extra_info: Any) -> PageChain:
    """Pages by SGLang's hashes. Keys of one call are a chain; where the chain's beginning is known, so are parents.

    Raises:
        ConfigError: a key is no sha256 page hash.
    """
    prefix = getattr(extra_info, "prefix_keys", None)
    for key in (*(prefix or ()), *keys):
        if not isinstance(key, str) or _HASH.fullmatch(key) is None:
            raise ConfigError(f"page key {key!r:.80} is no sha256 page hash")
    hashes = [bytes.fromhex(key) for key in keys]
    if prefix is None:
        return PageChain([PageName(found) for found in hashes])
    before = [bytes.fromhex(key) for key in prefix]
    parents = [before[-1] if before else None, *hashes[:-1]]
    names = [PageName(page, parents[i], len(before) + i) for i, page in enumerate(hashes)]
    return PageChain(names, b"".join(before))
