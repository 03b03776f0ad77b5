"""SGLang's real host pools and controller on a CPU, made small. Not a test."""

from __future__ import annotations

import importlib.util
from queue import Queue
from types import SimpleNamespace
from typing import Any

if importlib.util.find_spec("sglang_cpu") is not None:
    import sglang_cpu  # noqa: F401  a stand-in for what SGLang imports and a CPU does not have; before all of SGLang

import torch
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache import device_pool_info as info
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.storage import StorageBackendFactory

LAYERS, HEADS, DIM, PAGE, TOKENS = 3, 4, 16, 8, 128


def _pointers(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.uint64)


def make_mha(
    layout: str = "page_first",
    *,
    layers: int = LAYERS,
    heads: int = HEADS,
    dim: int = DIM,
    page: int = PAGE,
    dtype: torch.dtype = torch.bfloat16,
    first_layer: int = 0,
    tokens: int = TOKENS,
) -> MHATokenToKVPoolHost:
    """A real host pool of so many tokens and a page, filled with bytes that differ everywhere."""
    k, v = ([torch.zeros(tokens, heads, dim, dtype=dtype) for _ in range(layers)] for _ in "kv")
    buffers = info.KVBuffers(
        k=tuple(k), v=tuple(v), k_data_ptrs=_pointers(k), v_data_ptrs=_pointers(v), layout=info.KVBufferLayout.NHD
    )
    described = info.MHABufferInfo(
        buffers=buffers,
        page_size=page,
        head_num=heads,
        head_dim=dim,
        v_head_dim=dim,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    pool = MHATokenToKVPoolHost(
        described,
        1.0,
        0,
        page,
        layout,
        pin_memory=False,
        device="cpu",
        device_capacity_tokens=tokens,
        start_layer=first_layer,
        end_layer=first_layer + layers,
    )
    return fill(pool)


def make_mla(layout: str = "page_first", *, latent: int = 24, rope: int = 8, page: int = PAGE) -> MLATokenToKVPoolHost:
    """A real host pool of latents."""
    rows = [torch.zeros(TOKENS, 1, latent + rope, dtype=torch.bfloat16) for _ in range(LAYERS)]
    described = info.MLABufferInfo(
        buffers=tuple(rows),
        data_ptrs=_pointers(rows),
        layer_indices=tuple(range(LAYERS)),
        device_layer_num=LAYERS,
        page_size=page,
        kv_lora_rank=latent,
        qk_rope_head_dim=rope,
        kv_cache_dim=latent + rope,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    pool = MLATokenToKVPoolHost(
        described,
        1.0,
        0,
        page,
        layout,
        pin_memory=False,
        device="cpu",
        device_capacity_tokens=TOKENS,
        start_layer=0,
        end_layer=LAYERS,
        target_layer_num=LAYERS,
    )
    return fill(pool)


def fill(pool: Any) -> Any:
    """Random bytes in the whole pool; some of them are NaNs, which a copy must keep too."""
    raw = pool.kv_buffer.view(torch.uint8)
    raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(7)))
    return pool


def bytes_at(pool: Any, slot: int) -> torch.Tensor:
    """A page's bytes in the pool's own order of axes, by SGLang's own function."""
    return pool.get_data_page(slot).clone().view(torch.uint8)


class Engine:
    """The real controller's page functions over a host pool and the plug-in that the real factory made."""

    def __init__(self, pool: Any, extra: dict[str, Any], **config: Any) -> None:
        self.pool = pool
        mla = isinstance(pool, MLATokenToKVPoolHost)
        settings = HiCacheStorageConfig(
            **{
                "tp_rank": 0,
                "tp_size": 1,
                "pp_rank": 0,
                "pp_size": 1,
                "attn_cp_rank": 0,
                "attn_cp_size": 1,
                "is_mla_model": mla,
                "enable_storage_metrics": True,
                "is_page_first_layout": pool.layout == "page_first",
                "model_name": "example/tiny",
                "extra_config": {
                    "backend_name": "hicache",
                    "module_path": "hicache_sglang",
                    "class_name": "HiCacheStorageBackend",
                    "interface_v1": 1,
                    **extra,
                },
            }
            | config
        )
        controller = HiCacheController.__new__(HiCacheController)  # its threads and device pools are of no use here
        controller.storage_host_pool = controller.mem_pool_host = pool
        controller.page_size = pool.page_size
        controller.prefetch_sync_queue = Queue()
        controller.storage_config = settings
        self.backend = StorageBackendFactory.create_backend("dynamic", settings, pool)
        controller.storage_backend = self.backend
        controller.page_get_func, controller.page_set_func = (
            controller._page_get_zero_copy,
            controller._page_set_zero_copy,
        )
        self.backend.register_mem_pool_host(pool)
        self.backend.on_host_pools_registered()
        self.controller = controller
        self.operation = SimpleNamespace(request_id="r", is_terminated=lambda: False)

    def store(self, keys: list[str], slots: torch.Tensor, *, zero_copy: bool, extra_info: Any = None) -> bool:
        function = self.controller._page_set_zero_copy if zero_copy else self.controller._generic_page_set
        return function(keys, slots, extra_info)

    def load(self, keys: list[str], slots: torch.Tensor, *, zero_copy: bool, extra_info: Any = None) -> int:
        function = self.controller._page_get_zero_copy if zero_copy else self.controller._generic_page_get
        return function(self.operation, keys, slots, extra_info)
