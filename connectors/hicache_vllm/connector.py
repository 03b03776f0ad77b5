"""The class that vLLM loads. It translates, and it never raises into the engine: what does not work is no cache."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, SupportsHMA

from hicache.errors import HicacheError
from hicache.rpc.client.cache import ConnectedCache
from hicache_vllm.absent import AbsentScheduler, AbsentWorker
from hicache_vllm.compat import RANGE, Forward, engine_event, forward, hit_sources, wants_events
from hicache_vllm.counters import Counters
from hicache_vllm.events import PageFeed
from hicache_vllm.fitting import fit
from hicache_vllm.guard import complain, guarded
from hicache_vllm.logs import adopt_logs
from hicache_vllm.metrics import HiCacheMetrics, HiCacheStats
from hicache_vllm.plans import Report, StepPlan
from hicache_vllm.scheduler import SchedulerSide
from hicache_vllm.start import Start, begin, make_feed, make_worker, reach
from hicache_vllm.wire import PlanMetadata, ReportMetadata
from hicache_vllm.worker import WorkerSide

__all__ = ["HiCacheConnector"]

_log = logging.getLogger("vllm.hicache")

CLOSE_SECONDS: Final = 2.0


class HiCacheConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # no vLLM where types are checked
    """vLLM's prefixes in hicache. One instance schedules, and each worker has one.

    A configuration that cannot work is one line in the log, and the engine runs without a cache.

    Args:
        vllm_config, role, kv_cache_config: as vLLM passes them.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._counters = Counters()
        self._start: Start | None = None
        self._cache: ConnectedCache | None = None
        self._scheduler: SchedulerSide | None = None
        self._absent = AbsentScheduler(self._counters)
        self._worker: WorkerSide | AbsentWorker = AbsentWorker("its KV tensors are not known")
        self._plan = StepPlan()
        self._connected: bool | None = None
        self._feed: PageFeed | None = None
        worker = role is KVConnectorRole.WORKER
        adopt_logs()
        if MISFITS:
            self._disable(
                f"the connector interface of this vLLM has changed: {'; '.join(MISFITS)}: upgrade hicache, or use vLLM "
                f"{RANGE}",
                told=worker,
            )
            return
        try:
            self._start = begin(vllm_config, kv_cache_config, worker=worker)
            if worker:
                self._start.start_service()
            else:
                self._schedule(self._start)
        except HicacheError as error:
            self._disable(str(error), told=worker)
        except Exception as error:  # another release, or an installation that lacks something
            self._disable(f"{type(error).__name__}: {error}", told=worker)

    def _schedule(self, start: Start) -> None:
        self._cache = reach(start, worker=False)
        self._scheduler = SchedulerSide(
            self._cache,
            start.identity,
            start.settings,
            workers=start.facts.tp * start.facts.pp,
            reads=start.facts.reads,
            writes=start.facts.writes,
            early=start.early,
            counters=self._counters,
        )
        if wants_events(self._vllm_config):
            self._feed = make_feed(start, self._scheduler)

    def _disable(self, why: str, *, told: bool) -> None:
        """Run without a cache. Where a worker finds the reason, its scheduler says it."""
        self._worker = AbsentWorker(why)
        _log.log(logging.DEBUG if told else logging.ERROR, "hicache: runs without a cache: %s", why)

    # ---- workers

    @guarded(lambda *_: None)
    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Learn where blocks are, and join the engine's group at the service."""
        start = self._start
        if start is None:
            return
        try:
            self._cache = reach(start, worker=True)
            self._worker = make_worker(start, self._cache, kv_caches, self._counters, self._vllm_config)
        except HicacheError as error:
            self._disable(str(error), told=True)
        except Exception as error:  # tensors of another release
            self._disable(f"{type(error).__name__}: {error}", told=True)

    def unregister_kv_caches(self) -> None:
        """The engine goes to sleep and gives the memory of its blocks away: nothing is copied from then on.

        Called since vLLM 0.33. Blocks come back at the same addresses, so nothing has to be registered again.
        """
        self._do("drain")

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Wait until what is about to be overwritten has been read."""
        self._do("fence", kv_connector_metadata.plan)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """A step begins; what former steps have computed is stored meanwhile."""
        super().bind_connector_metadata(connector_metadata)
        self._plan = connector_metadata.plan
        self._do("begin_stores", self._plan, _forward())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin to bring pages."""
        del forward_context, kwargs
        self._do("begin_loads", self._plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait until what this step needs of a layer has come."""
        self._do("wait_for_layer", layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """A layer is computed: what this step makes whole may be copied out of it."""
        del kv_layer, attn_metadata, kwargs
        self._do("layer_computed", layer_name)

    def wait_for_save(self) -> None:
        """See that nothing that this step needed is still coming; blocks keep until they have been read."""
        self._do("end_step")

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose blocks are read, and requests whose pages have come or will not."""
        del finished_req_ids
        sent, received = self._do("take_finished", idle=not self._plan.tokens)
        return sent or None, received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that did not come, so that the engine computes them."""
        bad: set[int] = self._do("take_bad_blocks")
        return bad

    def build_connector_worker_meta(self) -> Any:
        """What has ended."""
        report: Report = self._do("take_report")
        return ReportMetadata(report) if report else None

    def _do(self, verb: str, *arguments: Any, **named: Any) -> Any:
        """A verb of the worker. One that fails leaves: what it has promised is answered by one that only says no."""
        try:
            return getattr(self._worker, verb)(*arguments, **named)
        except Exception as error:
            complain(verb, error)
            self._worker = self._left(self._worker, f"{verb} failed: {type(error).__name__}: {error}")
            return getattr(self._worker, verb)(*arguments, **named)

    def _left(self, worker: WorkerSide | AbsentWorker, why: str) -> AbsentWorker:
        if isinstance(worker, AbsentWorker):
            return AbsentWorker(why)
        loads, stores, kept = worker.leave()
        return AbsentWorker(why, loads=loads, stores=stores, kept=kept)

    # ---- the scheduler

    @guarded(lambda *_: (0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens that the cache brings behind those that the engine has."""
        if self._scheduler is None:
            return self._absent.matched(request, num_computed_tokens)
        return self._scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The engine has blocks for them."""
        try:
            if self._scheduler is None:
                self._absent.allocated(request)
                return
            self._scheduler.allocated(request, blocks, num_external_tokens)
        except Exception as error:
            complain("update_state_after_alloc", error)
            if (
                num_external_tokens and self._scheduler is not None
            ):  # the engine waits for it, and has to hear that it failed
                self._scheduler.fail(request, blocks)

    @guarded(lambda *_: {})
    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        """From which tier they come."""
        if self._scheduler is None or not num_external_tokens:
            return {}
        return hit_sources(self._scheduler.sources(request, num_external_tokens))

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """What the workers do with this step."""
        plan = StepPlan(tokens=int(scheduler_output.total_num_scheduled_tokens))
        if self._scheduler is not None:
            try:
                self._scheduler.plan(scheduler_output, plan)
            except Exception as error:
                complain("build_connector_meta", error)
                self._scheduler.rescue(plan, f"a step could not be planned: {type(error).__name__}: {error}")
        return PlanMetadata(plan)

    @guarded(lambda *_: None)
    def update_connector_output(self, connector_output: Any) -> None:
        """A step has ended, and workers have done something."""
        if self._scheduler is None:
            return
        metadata = getattr(connector_output, "kv_connector_worker_meta", None)
        report = metadata.report if isinstance(metadata, ReportMetadata) else None
        bad = getattr(connector_output, "invalid_block_ids", None) or ()
        self._scheduler.reported(report, frozenset(bad))

    @guarded(lambda *_: (False, None))
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended; whether its blocks stay until they are read."""
        if self._scheduler is None:
            self._absent.finished(request)
            return False, None
        return self._scheduler.finished(request, block_ids[0]), None

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """See `request_finished_all_groups`."""
        keeps, parameters = self.request_finished_all_groups(request, (block_ids,))
        return bool(keeps), parameters

    @guarded(lambda *_: None)
    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """The engine's own table of cached blocks."""
        if self._scheduler is not None:
            self._scheduler.bind(gpu_block_pool)

    @guarded(lambda *_: False)
    def reset_cache(self) -> bool | None:
        """Forget all pages of this model, as after a change of weights; whether that is done."""
        return None if self._scheduler is None else self._scheduler.reset()

    @guarded(lambda *_: ())
    def take_events(self) -> Iterable[Any]:
        """Which pages of this model came to the service, or left it, as vLLM's own events."""
        if self._feed is None or self._start is None:
            return ()
        page_size = self._start.identity.namespace.page_size
        return [engine_event(change, page_size) for change in self._feed.take()]

    # ---- both

    @property
    def requires_kv_delivery(self) -> bool:
        """A store that is dropped is a miss later."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Whether each layer waits for its pages, which no layer does in a graph of the whole model.

        Stores do without: where layers do not call, they begin with the next step.
        """
        return extra_config.get("load") == "sync"

    @guarded(lambda *_: None)
    def get_kv_connector_stats(self) -> Any:
        """What was counted since this was asked last."""
        counts = self._counters.take()
        if self._scheduler is not None and self._cache is not None:
            connected = self._cache.connected
            if connected is not self._connected:
                counts["connected"] = self._connected = connected
        return HiCacheStats(data=counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        """Counts that come from another process."""
        return HiCacheStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> Any:
        """Prometheus metrics of them."""
        return HiCacheMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @guarded(lambda *_: None)
    def shutdown(self) -> None:
        """Let go of the service; idempotent."""
        self._worker.close()
        if self._feed is not None:
            self._feed.close()
        if self._scheduler is not None:
            self._scheduler.close(CLOSE_SECONDS)
        if self._cache is not None:
            self._cache.close(CLOSE_SECONDS)
        if self._start is not None and self._start.service is not None:
            self._start.service.close()


def _forward() -> Forward:
    """What vLLM says of the step that begins; where it says it otherwise than is known, layers are not relied on."""
    try:
        return forward()
    except Exception as error:
        complain("bind_connector_metadata", error)
        return Forward()


MISFITS: Final = fit(HiCacheConnector, KVConnectorBase_V1, SupportsHMA)
"""What the installed vLLM asks for otherwise than this module has it."""
