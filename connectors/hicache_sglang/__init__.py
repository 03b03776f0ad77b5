"""SGLang's hierarchical cache on hicache: a storage backend that SGLang loads by name, unmodified.

    --hicache-storage-backend dynamic
    --hicache-storage-backend-extra-config '{"backend_name": "hicache", "module_path": "hicache_sglang",
        "class_name": "HiCacheStorageBackend", "interface_v1": 1, "hicache_storage_pass_prefix_keys": true,
        "storage": "file:///var/cache/hicache?capacity=100GiB"}'

Importing this package needs no SGLang; the class itself does, and is made when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hicache_sglang.engine import HiCacheStorageBackend

__all__ = ["HiCacheStorageBackend"]


def __getattr__(name: str) -> Any:
    if name == "HiCacheStorageBackend":
        from hicache_sglang.engine import HiCacheStorageBackend

        return HiCacheStorageBackend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
