"""What the connector counts as vLLM's own statistics: in its log, and as Prometheus metrics beside its others."""

from __future__ import annotations

from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

__all__ = ["HiCacheMetrics", "HiCacheStats"]

_LABELLED: Final = {
    "hit_tokens": ("tier", "Tokens of requests that hicache brought, by tier"),
    "missed_tokens": ("reason", "Tokens of requests that neither the engine nor hicache had, by why not"),
    "failed_pages": ("reason", "Pages that did not come from hicache, or were not stored in it"),
    "audited_pages": ("reason", "Pages of hicache that were computed again and compared, by outcome"),
}
_PLAIN: Final = {
    "asked_tokens": "Tokens of requests that the engine took up: local + hit + missed",
    "local_tokens": "Of them those in the engine's own blocks",
    "loads": "Requests for which hicache brought pages",
    "load_bytes": "Bytes that came from hicache into KV blocks",
    "load_seconds": "Seconds in which they were copied",
    "store_bytes": "Bytes that went from KV blocks into hicache",
    "store_seconds": "Seconds in which they were copied, but for early_pages",
    "early_pages": "Pages that were stored while the step that completed them went on",
}
_GAUGE: Final = "connected"


class HiCacheStats(KVConnectorStats):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """Counts since they were told last; `data` has them by name and label, "failed_pages/lost"."""

    data: dict[str, Any]

    def reset(self) -> None:
        """Begin anew."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Both together."""
        for name, count in other.data.items():
            self.data[name] = count if name == _GAUGE else self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        """For one line of the log."""
        return {name: round(count, 3) for name, count in sorted(self.data.items())}

    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return not self.data


class HiCacheMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The same as counters `vllm:hicache_...`, for each engine of a server."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics = {
            **{
                name: self._counter_cls(
                    name=f"vllm:hicache_{name}", documentation=text, labelnames=[*labelnames, label]
                )
                for name, (label, text) in _LABELLED.items()
            },
            **{
                name: self._counter_cls(name=f"vllm:hicache_{name}", documentation=text, labelnames=labelnames)
                for name, text in _PLAIN.items()
            },
            _GAUGE: self._gauge_cls(
                name=f"vllm:hicache_{_GAUGE}",
                documentation="Whether the engine's scheduler reaches hicache",
                labelnames=labelnames,
                multiprocess_mode="mostrecent",
            ),
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what happened."""
        values = self.per_engine_labelvalues[engine_idx]
        for key, count in transfer_stats_data.items():
            name, _, label = key.partition("/")
            metric = self._metrics.get(name)
            if metric is None:
                continue
            series = metric.labels(*values, *([label] if name in _LABELLED else []))
            if name == _GAUGE:
                series.set(count)
            else:
                series.inc(count)
