"""What both sides do at start: read the configuration, name the pages, reach the service."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Final

import msgspec

from hicache.errors import ConfigError
from hicache.rpc.address import Address
from hicache.rpc.client.admin import AdminClient
from hicache.rpc.client.cache import ConnectedCache, connect
from hicache.rpc.client.options import Secrets
from hicache.rpc.service import EventBatch
from hicache_vllm.comparing import Comparison
from hicache_vllm.compat import Facts, cpu_write, facts_of, layer_write, version_warning
from hicache_vllm.counters import Counters
from hicache_vllm.devices import like
from hicache_vllm.events import PageFeed
from hicache_vllm.identity import Identity, block_shape, identify, tensor_layout
from hicache_vllm.layouts import Layout
from hicache_vllm.proof import proven
from hicache_vllm.scheduler import SchedulerSide
from hicache_vllm.service import PrivateService, private_address, refuses
from hicache_vllm.settings import Settings, read_settings
from hicache_vllm.tensors import made_of, ordered
from hicache_vllm.worker import WorkerSide

__all__ = ["Start", "begin", "make_feed", "make_worker", "reach"]

_log = logging.getLogger("vllm.hicache")

START_SECONDS: Final = 20.0
"""For which an engine waits at its start for the service that it has started itself."""

FIRST_SECONDS: Final = 1.0
"""For which it waits for one that runs already, before it says that none answers."""

_LOOK_SECONDS: Final = 0.1

ATTACH_SECONDS: Final = 2.0
"""For which a worker with a GPU waits at its start for a service, to pin its memory before there are requests."""


class Start:
    """What one process of the engine knows when it begins.

    Attributes:
        facts: of the engine.
        settings: the user's.
        identity: of its pages.
        address: of the service.
        service: the private one, in the process that has started it.
    """

    def __init__(self, facts: Facts, settings: Settings, identity: Identity) -> None:
        self.facts = facts
        self.settings = settings
        self.identity = identity
        self.private = settings.address is None
        self.address = settings.address or private_address(facts.engine)
        self.service: PrivateService | None = None

    @property
    def early(self) -> bool:
        """Whether a prompt's pages are stored by the step that completes them."""
        asked = self.settings.layerwise_stores
        return not self.facts.split and (asked == "on" or (asked == "auto" and self.facts.device == "cuda"))

    def start_service(self) -> None:
        """Start the private service, in the one process whose part that is."""
        if self.private and self.facts.tp_rank == 0 and self.facts.pp_rank == 0:
            self.service = PrivateService(self.address, self.settings)
            _log.info("hicache: the private service is at %s, as hicache stats, top and explain take it", self.address)


def begin(config: Any, cache_config: Any, *, worker: bool) -> Start:
    """Read and check everything.

    Raises:
        HicacheError: what cannot work; says what to change.
    """
    settings = read_settings(config.kv_transfer_config.kv_connector_extra_config)
    facts = facts_of(config, cache_config, worker=worker)
    if not facts.recompute:
        raise ConfigError(
            'kv_load_failure_policy is "fail", by which a page that is lost fails its request: add '
            '"kv_load_failure_policy": "recompute" to --kv-transfer-config'
        )
    if settings.load == "sync" and facts.ahead:
        settings = msgspec.structs.replace(settings, load="async")
        if not worker:
            _log.warning(
                'hicache: "load": "sync" is "async" here: this engine schedules a step before the last one has ended, '
                "and would keep what that one made of pages that did not come. Use --no-async-scheduling, and one "
                "pipeline stage"
            )
    identity = identify(facts, settings, lambda layout: _proves(layout, facts))
    if not worker:
        _tell(facts, identity)
        if settings.audit_probability and not identity.canonical:
            _log.warning("hicache: pages whose layout is not understood cannot be compared: nothing is audited")
    return Start(facts, settings, identity)


def _proves(layout: Layout, facts: Facts) -> bool:
    """Whether the backend's kernel writes as described. Other backends than the CPU's are asked by the workers."""
    if facts.backend != "CPU_ATTN":
        return True
    import torch

    dtype = getattr(torch, facts.kv_dtype)
    shape = block_shape(facts, canonical=True)
    size = (shape.heads, shape.tokens, 2 * shape.width)
    return proven(
        layout,
        shape,
        dtype=dtype,
        cache=lambda blocks: torch.zeros((blocks, *size), dtype=dtype),
        write=cpu_write(facts),
    )


def _tell(facts: Facts, identity: Identity) -> None:
    warning = version_warning(facts.version)
    for text in (*([warning] if warning else []), *identity.warnings):
        _log.warning("hicache: %s", text)
    document = identity.namespace.describe()
    _log.info(
        "hicache: namespace %s, pages of %d tokens (%d blocks) and %d bytes a rank, geometry %s, %s, numerics %s",
        document["digest"],
        identity.namespace.page_size,
        identity.blocks,
        identity.page_bytes,
        document["geometry_digest"],
        document["geometry"]["format"],
        document["numerics"],
    )


def reach(start: Start, *, worker: bool) -> ConnectedCache:
    """Connect this process to the service; where it is away, that goes on in the background.

    Raises:
        HicacheError: the service refuses this client, or the settings do not fit.
    """
    facts, settings = start.facts, start.settings
    cache = connect(
        start.address,
        start.identity.namespace,
        group=facts.engine,
        tp_rank=facts.tp_rank,
        tp_size=facts.tp,
        pp_rank=facts.pp_rank,
        pp_first_layers=facts.stages,
        worker=worker,
        token_file=settings.token_file,
        ca=settings.ca,
        cert=settings.cert,
        key=settings.key,
        insecure=settings.insecure,
        name=f"vllm-{'worker' if worker else 'scheduler'}-{facts.tp_rank}.{facts.pp_rank}",
        extras=facts.multimodal,
        pool_size=settings.pool_size,
        deadline=settings.deadline,
    )
    if start.private:
        _wait_for_service(cache, start.address)
    elif not worker and not cache.wait_connected(FIRST_SECONDS):
        _log.warning(
            "hicache: no service answers at %s yet (%r): going on without a cache until one does; if none will, change "
            "address in kv_connector_extra_config",
            start.address,
            cache,
        )
    return cache


def _wait_for_service(cache: ConnectedCache, address: str) -> None:
    end = time.monotonic() + START_SECONDS
    while not cache.wait_connected(_LOOK_SECONDS):
        if refuses(address):
            cache.close(0)
            raise ConfigError(
                "the private service cannot start with what it was given, as its own line says: change host, storage "
                "or serve in kv_connector_extra_config"
            )
        if time.monotonic() >= end:
            _log.warning("hicache: the private service does not answer yet: going on without a cache until it does")
            return


def make_feed(start: Start, scheduler: SchedulerSide) -> PageFeed:
    """What follows the service's events, for vLLM's publisher."""
    settings = start.settings
    secrets = Secrets(None, settings.token_file, settings.ca, settings.cert, settings.key, settings.insecure)

    def watch() -> Iterator[EventBatch]:
        with AdminClient(Address.parse(start.address), secrets) as client:
            yield from client.watch_events()

    return PageFeed(watch, scheduler.whose)


def make_worker(
    start: Start, cache: ConnectedCache, kv_caches: Mapping[str, Any], counters: Counters, config: Any
) -> WorkerSide:
    """What moves this rank's pages.

    Raises:
        HicacheError: tensors that are not understood.
    """
    facts, identity = start.facts, start.identity
    layers = ordered(kv_caches)
    name, first = next(iter(layers.items()))
    shape = identity.form.shape

    def proves(layout: Layout) -> bool:
        if facts.backend == "CPU_ATTN":
            return True  # proven when the pages were named
        made = partial(like, first, layout.axes.index("b"))
        return proven(layout, shape, dtype=first.dtype, cache=made, write=layer_write(config, name))

    layout = tensor_layout(first, facts, identity, proves)
    made = WorkerSide(
        cache,
        made_of(list(layers.values()), layout, identity.form),
        layers={name: number for number, name in enumerate(layers)},
        per_page=identity.blocks,
        comparison=Comparison(facts.kv_dtype, start.settings.audit_tolerance) if identity.canonical else None,
        counters=counters,
    )
    made.attach(ATTACH_SECONDS)
    return made
