"""vLLM's prefixes in hicache: a KV connector that vLLM loads by name, unmodified.

    vllm serve MODEL --kv-transfer-config '{
        "kv_connector": "HiCacheConnector", "kv_connector_module_path": "hicache_vllm", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"address": "unix:///run/hicache/hicache.sock"}}'

Importing this package needs no vLLM; the class itself does, and is made when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hicache_vllm.connector import HiCacheConnector

__all__ = ["HiCacheConnector"]


def __getattr__(name: str) -> Any:
    if name == "HiCacheConnector":
        from hicache_vllm.connector import HiCacheConnector

        return HiCacheConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
