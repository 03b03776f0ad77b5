"""Stand-ins for SGLang: modules with the signatures that releases were recorded with, and small host pools.

The pools keep bytes in the orders of axes of SGLang's own; what the real ones do is tried by `make engines`.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, make_dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from hicache.storage.base import StorageBackend
from hicache.storage.memory import MemoryBackend

CONFIG_FIELDS = {
    "0.5.12": {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": True,
        "is_page_first_layout": True,
        "model_name": "example/tiny",
        "tp_lcm_size": None,
        "should_split_heads": False,
        "extra_config": None,
    }
}
CONFIG_FIELDS["0.5.23"] = CONFIG_FIELDS["0.5.12"] | {
    "dp_rank": 0,
    "dcp_size": 1,
    "dcp_rank": 0,
    "logical_page_size": None,
}


class RecordedStorage(ABC):
    """The base class of 0.5.12: what is abstract in it, and what has a default."""

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        self.registered_pools = {**getattr(self, "registered_pools", {}), host_pool_name: host_pool}

    def batch_exists_v2(self, keys: Any, pool_transfers: Any = None, extra_info: Any = None) -> Any:
        raise NotImplementedError

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> Any:
        raise NotImplementedError

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> Any:
        raise NotImplementedError

    def batch_get_v1(self, keys: Any, host_indices: Any, extra_info: Any = None) -> Any:
        return None

    def batch_set_v1(self, keys: Any, host_indices: Any, extra_info: Any = None) -> Any:
        return None

    @abstractmethod
    def get(self, key: Any, target_location: Any = None, target_sizes: Any = None) -> Any: ...

    @abstractmethod
    def batch_get(self, keys: Any, target_locations: Any = None, target_sizes: Any = None) -> Any: ...

    @abstractmethod
    def set(self, key: Any, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> Any: ...

    @abstractmethod
    def batch_set(
        self, keys: Any, values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> Any: ...

    @abstractmethod
    def exists(self, key: Any) -> Any: ...

    def batch_exists(self, keys: Any, extra_info: Any = None) -> Any:
        return None

    def clear(self) -> Any:
        return None

    def get_stats(self) -> Any:
        return None


class RecordedStorage0523(RecordedStorage):
    """The base class of 0.5.23."""

    def on_host_pools_registered(self) -> None:
        return


@dataclass
class ExtraInfo:
    """What a call may say of the chain before its keys."""

    prefix_keys: list[str] | None = None
    extra_info: dict[str, Any] | None = None


@dataclass
class PoolTransferResult:
    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int]


@dataclass
class PoolTransferResult0523(PoolTransferResult):
    restorable_prefix_pages: list[int] | None = None


@dataclass
class StorageMetrics:
    """What the scheduler insists on."""

    def __post_init__(self) -> None:
        self.prefetch_pgs: list[int] = []
        self.backup_pgs: list[int] = []
        self.prefetch_bandwidth: list[float] = []
        self.backup_bandwidth: list[float] = []


_MHA_SHAPES: dict[str, Callable[..., tuple[int, ...]]] = {
    "layer_first": lambda l, n, p, h, d: (2, l, n * p, h, d),  # noqa: E741
    "page_first": lambda l, n, p, h, d: (2, n * p, l, h, d),  # noqa: E741
    "page_first_direct": lambda l, n, p, h, d: (2, n, l, p, h, d),  # noqa: E741
    "page_head": lambda l, n, p, h, d: (2, n, h, p, l, d),  # noqa: E741
}
_MLA_SHAPES: dict[str, Callable[..., tuple[int, ...]]] = {
    "layer_first": lambda l, n, p, d: (l, n * p, 1, d),  # noqa: E741
    "page_first": lambda l, n, p, d: (n * p, l, 1, d),  # noqa: E741
    "page_first_direct": lambda l, n, p, d: (n, l, p, 1, d),  # noqa: E741
}


class MHATokenToKVPoolHost:
    """Four token pages more than the largest test needs; bytes that differ everywhere."""

    def __init__(self, layout: str = "page_first", **options: Any) -> None:
        self.layout = layout
        self.dtype = options.get("dtype", torch.bfloat16)
        self.layer_num = self.target_layer_num = options.get("layers", 3)
        self.head_num = options.get("heads", 4)
        self.head_dim = self.v_head_dim = options.get("dim", 8)
        self.page_size = options.get("page", 4)
        self.start_layer = options.get("first_layer", 0)
        self.page_num = 8
        self.size = self.page_num * self.page_size
        self._allocate(
            _MHA_SHAPES.get(layout, _MHA_SHAPES["page_first"])(
                self.layer_num, self.page_num, self.page_size, self.head_num, self.head_dim
            )
        )

    def _allocate(self, shape: tuple[int, ...]) -> None:
        raw = torch.arange(torch.Size(shape).numel() * self.dtype.itemsize, dtype=torch.int64)
        self.kv_buffer = (raw * 7919 % 251).to(torch.uint8).view(self.dtype).reshape(shape).clone()

    def _page(self, slot: int) -> torch.Tensor:
        if self.layout == "layer_first":
            return self.kv_buffer[:, :, slot : slot + self.page_size]
        if self.layout == "page_first":
            return self.kv_buffer[:, slot : slot + self.page_size]
        return self.kv_buffer[:, slot // self.page_size : slot // self.page_size + 1]

    def get_data_page(self, slot: int) -> torch.Tensor:
        return self._page(slot).flatten()

    def set_from_flat_data_page(self, slot: int, data: torch.Tensor) -> None:
        self._page(slot).copy_(data.reshape(self._page(slot).shape))

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros_like(self._page(0)).flatten()

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        (slot,) = indices[:: self.page_size].tolist()
        page = self._page(slot)
        if self.layout == "layer_first":
            parts = [page[plane, layer] for layer in range(self.layer_num) for plane in range(2)]
        else:
            parts = [page[0], page[1]]
        return [part.data_ptr() for part in parts], [part.nbytes for part in parts]


class MLATokenToKVPoolHost(MHATokenToKVPoolHost):
    """Latents: one row a token and layer."""

    def __init__(self, layout: str = "page_first", **options: Any) -> None:
        self.kv_lora_rank, self.qk_rope_head_dim = 12, 4
        self.kv_cache_dim = 16
        super().__init__(layout, **options)
        del self.head_num, self.head_dim, self.v_head_dim
        self._allocate(_MLA_SHAPES[layout](self.layer_num, self.page_num, self.page_size, self.kv_cache_dim))

    def _page(self, slot: int) -> torch.Tensor:
        if self.layout == "layer_first":
            return self.kv_buffer[:, slot : slot + self.page_size]
        if self.layout == "page_first":
            return self.kv_buffer[slot : slot + self.page_size]
        return self.kv_buffer[slot // self.page_size : slot // self.page_size + 1]

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        (slot,) = indices[:: self.page_size].tolist()
        page = self._page(slot)
        parts = [page[layer] for layer in range(self.layer_num)] if self.layout == "layer_first" else [page]
        return [part.data_ptr() for part in parts], [part.nbytes for part in parts]


OVERRIDES: list[tuple[str, dict[str, Any]]] = []
"""What SGLang notes when a running engine's settings change."""

POOLS = SimpleNamespace(mha=MHATokenToKVPoolHost, mla=MLATokenToKVPoolHost)


@pytest.fixture
def pools() -> SimpleNamespace:
    """`mha(layout, ...)` and `mla(layout, ...)` make host pools."""
    return POOLS


@pytest.fixture
def changed() -> Iterator[Callable[..., None]]:
    """Lets the engine note that settings of its have changed, as when its weights are exchanged."""
    yield lambda **fields: OVERRIDES.append(("an update", fields))
    OVERRIDES.clear()


@pytest.fixture
def extra_info() -> type[ExtraInfo]:
    return ExtraInfo


@pytest.fixture(params=["0.5.12", "0.5.23"])
def release(request: pytest.FixtureRequest) -> str:
    """A release whose interface was recorded."""
    return str(request.param)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ModuleType]]:
    """Puts the recorded modules of a release in SGLang's place; gives the plug-in's module, loaded anew."""

    def install(
        release: str = "0.5.23", *, base: type | None = None, arguments: Any = None, seeds: bool = True
    ) -> ModuleType:
        storage = ModuleType("sglang.srt.mem_cache.hicache_storage")
        base = base or (RecordedStorage if release == "0.5.12" else RecordedStorage0523)
        storage.__dict__.update(
            HiCacheStorage=base,
            HiCacheStorageExtraInfo=ExtraInfo,
            PoolTransferResult=PoolTransferResult if release == "0.5.12" else PoolTransferResult0523,
            HiCacheStorageConfig=make_dataclass("HiCacheStorageConfig", list(CONFIG_FIELDS[release])),
        )
        utils = ModuleType("sglang.srt.mem_cache.utils")
        if seeds:
            utils.__dict__["storage_namespace_seed"] = lambda *_: None
        metrics = ModuleType("sglang.srt.observability.metrics_collector")
        metrics.__dict__["StorageMetrics"] = StorageMetrics
        context = ModuleType("sglang.srt.runtime_context")
        context.__dict__["get_server_args"] = lambda: arguments
        context.__dict__["get_context"] = lambda: SimpleNamespace(overrides_log=lambda: list(OVERRIDES))
        modules = [storage, utils, metrics, context]
        for name in ("sglang", "sglang.srt", "sglang.srt.mem_cache", "sglang.srt.observability"):
            package = ModuleType(name)
            package.__path__ = []
            modules.append(package)
        for module in modules:
            monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.delitem(sys.modules, "hicache_sglang.engine", raising=False)
        import hicache_sglang.engine

        return sys.modules[hicache_sglang.engine.__name__]

    yield install
    sys.modules.pop("hicache_sglang.engine", None)


@pytest.fixture
def plugin(install: Callable[..., ModuleType], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Makes plug-ins over one backend, registered with a host pool.

    `backend` is what it opens, by default one that all of a test share; `extra` is the extra configuration; other
    names are fields of the engine's configuration.
    """
    shared = MemoryBackend(capacity=2**26)
    made: list[Any] = []

    def make(
        pool: Any,
        *,
        release: str = "0.5.23",
        backend: StorageBackend | None = None,
        extra: dict[str, Any] | None = None,
        arguments: Any = None,
        seeds: bool = True,
        **config: Any,
    ) -> Any:
        from hicache.storage.registry import configured

        module = install(release, arguments=arguments, seeds=seeds)
        monkeypatch.setattr(
            "hicache_sglang.opening.open_storage", lambda _url, **options: configured(backend or shared, **options)
        )
        monkeypatch.setattr(shared, "close", lambda: None)
        fields = CONFIG_FIELDS[release] | {"is_mla_model": type(pool) is MLATokenToKVPoolHost}
        fields["extra_config"] = ({} if "address" in (extra or {}) else {"storage": "memory://"}) | (extra or {})
        one = module.HiCacheStorageBackend(SimpleNamespace(**fields | config), {})
        one.register_mem_pool_host(pool)
        made.append(one)
        return one

    yield make
    for one in made:
        one.close()
