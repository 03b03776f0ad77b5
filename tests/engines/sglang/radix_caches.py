"""SGLang's real radix cache and hybrid controller on a CPU, device pool and storage threads included. Not a test.

What needs a GPU is replaced: the copies between device and host pool by plain torch, and the pinning of memory by
nothing. `python radix_caches.py URL LAYOUT KIND TOKENS` reads a prompt from storage in a process of its own. URL may be
the address of a service; KIND is "full", or "window" or "recurrent" for a model whose every second layer is that.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from typing import Any
from unittest import mock

if importlib.util.find_spec("sglang_cpu") is not None:
    import sglang_cpu  # noqa: F401

import sglang.test.kits.unified_radix_cache.fixtures as fixtures
import torch
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.pool_host import base, common, mha
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from sglang.test.kits.unified_radix_cache.config import CacheConfig

LAYERS, PAGE, SLOTS = 4, 4, 128
BESIDE = {"window": (ComponentType.SWA,), "recurrent": (ComponentType.MAMBA,)}
PATIENCE = 60.0  # seconds of the engine's own threads


def _backup(pool: Any, _device: Any, host: torch.Tensor, device: torch.Tensor, _io: str) -> None:
    for layer in range(pool.layer_num):
        pool.k_data_refs[layer][host] = pool.device_k_buffers[layer][device]
        pool.v_data_refs[layer][host] = pool.device_v_buffers[layer][device]


def _load(
    pool: Any, _device: Any, host: torch.Tensor, device: torch.Tensor, layer: int, _io: str, *, is_draft: bool = False
) -> None:
    assert not is_draft
    pool.device_k_buffers[layer][device] = pool.k_data_refs[layer][host]
    pool.device_v_buffers[layer][device] = pool.v_data_refs[layer][host]


class RadixCache:
    """One engine's cache: what an engine computes is put in, what it needs is brought up."""

    def __init__(self, storage: str, layout: str, kind: str) -> None:
        self._window = kind == "window"
        page = 1 if kind == "recurrent" else PAGE  # a state stands at the end of a sequence, wherever that is
        self.cache, self._allocator, _ = fixtures.build_fixture(
            CacheConfig(
                page_size=page,
                num_layers=LAYERS,
                kv_size=SLOTS,
                components=(ComponentType.FULL, *BESIDE.get(kind, ())),
                full_attention_layer_ids=tuple(range(1, LAYERS, 2)),
                sliding_window_size=PAGE if self._window else None,
            )
        )
        extra = {
            ("address" if storage.startswith("unix:") else "storage"): storage,
            "backend_name": "hicache",
            "module_path": "hicache_sglang",
            "class_name": "HiCacheStorageBackend",
            "interface_v1": 1,
            "hicache_storage_pass_prefix_keys": True,
            "prefetch_threshold": 1,
            "model": "example/tiny",
        }
        arguments = ServerArgs(
            model_path="dummy",
            page_size=page,
            hicache_io_backend="kernel",
            hicache_mem_layout=layout,
            hicache_write_policy="write_through",
            hicache_storage_backend="dynamic",
            hicache_storage_backend_extra_config=json.dumps(extra),
            hicache_storage_prefetch_policy="wait_complete",
        )
        set_global_server_args_for_scheduler(arguments)
        self.cache.init_hicache(arguments, self.cache.cache_init_params)
        fixtures.drop_hicache_atexit_pin(self.cache)
        self.cache.write_through_threshold = 1 << 30  # the test says what is written back, and when
        self.cache.load_back_threshold = 0
        self.cache.cache_controller.prefetch_capacity_limit = SLOTS
        self.backend = self.cache.cache_controller.storage_backend

    def compute(self, tokens: list[int]) -> str:
        """Put a prompt's pages in device memory and bring them down to storage. A digest of their bytes."""
        slots = self._slots(len(tokens))
        for pool in self._pools():
            for buffer in (*pool.k_buffer, *pool.v_buffer):
                buffer.copy_(torch.randn_like(buffer))
        evicted = {}
        if self._window:  # as an engine does with what its window has left behind
            evicted = {ComponentType.SWA: len(tokens) - PAGE}
            self._allocator.free_swa(slots[:-PAGE])
        self.cache.insert(InsertParams(key=_key(tokens), value=slots, component_evicted_seqlens=evicted))
        node = self._match(tokens).last_device_node
        chain = []
        while node != self.cache.root_node_handle():
            chain.append(node)
            node = fixtures.node_parent(self.cache, node)
        for node in reversed(chain):
            fixtures.write_backup(self.cache, node, write_back=True)
        self.cache.writing_check(write_back=True)
        for node in reversed(chain):
            self.cache.write_backup_storage(node)
        self._until(lambda: not self.cache.ongoing_backup, self.cache.drain_storage_control_queues)
        return self.digest(tokens)

    def fetch(self, tokens: list[int]) -> int:
        """Bring a prompt up from storage to device memory. Tokens that are there then."""
        request = CacheRequestHandle("r", 0)
        self.cache.prefetch_from_storage(request, self.cache.root_node_handle(), array("q", tokens), None, None)
        self._until(lambda: self.cache.check_prefetch_progress(request), self.cache.check_hicache_events)
        if self._match(tokens).host_hit_length:
            self.cache.load_back(self._match(tokens).best_match_node, req=None)
            self.cache.ready_to_load_host_cache()
            self.cache.loading_check()
        return int(self._match(tokens).device_prefix_len)

    def digest(self, tokens: list[int]) -> str:
        """Of all keys and values in device memory that the prompt's next token needs, in the prompt's order."""
        slots = self.cache.path_device_indices(self._match(tokens).last_device_node)
        needed = [slots, self._allocator.full_to_swa_index_mapping[slots[-PAGE:]]] if self._window else [slots]
        found = sha256()
        for pool, places in zip(self._pools(), needed, strict=True):
            assert bool((places > 0).all())  # slot 0 is nobody's
            for buffer in (*pool.k_buffer, *pool.v_buffer):
                found.update(buffer[places].contiguous().view(torch.uint8).numpy())
        return found.hexdigest()

    def _pools(self) -> list[Any]:
        pool = self._allocator.get_kvcache()
        return [pool.full_kv_pool, pool.swa_kv_pool] if self._window else [pool]

    def _slots(self, count: int) -> torch.Tensor:
        """Slots of so many tokens; in the pool of the window too, where there is one."""
        if not self._window:
            slots: torch.Tensor = self._allocator.alloc(count)
            return slots
        full, window = (
            one.alloc(count) for one in (self._allocator.full_attn_allocator, self._allocator.swa_attn_allocator)
        )
        self._allocator.full_to_swa_index_mapping[full] = window
        return full

    def close(self) -> None:
        self.cache.cache_controller.detach_storage_backend()
        self.cache.release_host_resources()

    def _match(self, tokens: list[int]) -> Any:
        return self.cache.match_prefix(MatchPrefixParams(key=_key(tokens)))

    def _until(self, met: Callable[[], bool], step: Callable[[], object]) -> None:
        end = time.monotonic() + PATIENCE
        pause = threading.Event()
        while not met():
            assert time.monotonic() < end, "the engine's threads did not come to an end"
            step()
            pause.wait(0.005)


@contextmanager
def radix_cache(storage: str, layout: str, kind: str = "full") -> Iterator[RadixCache]:
    """A cache in a process of one rank, without what needs a GPU."""
    with (
        mock.patch.object(fixtures, "get_device", return_value="cpu"),
        mock.patch.object(common, "_cuda_host_register"),
        mock.patch.object(mha, "_cuda_host_unregister"),
        mock.patch.object(base, "_cuda_host_unregister"),
        mock.patch.object(mha.MHATokenToKVPoolHost, "backup_from_device_all_layer", _backup),
        mock.patch.object(mha.MHATokenToKVPoolHost, "load_to_device_per_layer", _load),
        get_parallel().override(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1),
    ):
        one = RadixCache(storage, layout, kind)
        try:
            yield one
        finally:
            one.close()


def _key(tokens: list[int]) -> RadixKey:
    return RadixKey(array("q", tokens))


if __name__ == "__main__":
    prompt = [int(token) for token in sys.argv[4].split(",")]
    with radix_cache(*sys.argv[1:4]) as reader:
        print(reader.fetch(prompt), reader.digest(prompt))
