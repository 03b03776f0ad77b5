"""Prefix reuse for transformers: `generate` that computes only what no earlier prompt had, with the same result.

    cache = hicache_transformers.PrefixCache(model, storage="file:///var/cache/hicache?capacity=100GiB")
    output = cache.generate(input_ids, attention_mask=mask, max_new_tokens=32)

Importing this package loads neither torch nor transformers; `PrefixCache` does when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hicache_transformers.cache import PrefixCache
    from hicache_transformers.counters import Statistics
    from hicache_transformers.prefix import Prefix

__all__ = ["Prefix", "PrefixCache", "Statistics"]

_HOMES = {"PrefixCache": "cache", "Prefix": "prefix", "Statistics": "counters"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(f"hicache_transformers.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
