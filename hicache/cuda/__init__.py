"""HBM and pinned host memory. Nothing of it is loaded unless it is asked for, and no CUDA package before it is used.

import hicache.cuda

pool = hicache.cuda.CudaDevicePool.attach(kv_tensors, geometry, page_size=64, layout="layer_first")
with hicache.open(namespace, device=pool, host="64GiB") as cache:
    with cache.request(tokens) as request:
        usable, fresh = request.load(), request.allocate()
        ...  # kernels on the engine's stream
        request.commit(ready=pool.record())
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hicache.cuda.driver import CudaError
    from hicache.cuda.events import CudaEvent
    from hicache.cuda.options import CudaOptions
    from hicache.cuda.pool import CudaDevicePool
    from hicache.cuda.regions import DEVICE_LAYOUTS

__all__ = ["DEVICE_LAYOUTS", "CudaDevicePool", "CudaError", "CudaEvent", "CudaOptions"]

_HOMES = {
    "CudaDevicePool": "hicache.cuda.pool",
    "CudaError": "hicache.cuda.driver",
    "CudaEvent": "hicache.cuda.events",
    "CudaOptions": "hicache.cuda.options",
    "DEVICE_LAYOUTS": "hicache.cuda.regions",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'hicache.cuda' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
