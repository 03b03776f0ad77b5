"""Prometheus metrics of a service, made of the same document that `hicache stats --json` prints.

`FAMILIES` is the list of all of them: `deploy/metrics.md` is generated from it. Counters come as they are; a rate is a
quotient of two of them, so its denominator is always there, and nothing is ever NaN.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, Protocol

from hicache.errors import ConfigError
from hicache.rpc.latency import BOUNDS
from hicache.sidecar.families import FAMILIES, Document, Family, is_number
from hicache.sidecar.http import Page
from hicache.storage.wrappers import CALL_BOUNDS

__all__ = ["FAMILIES", "LATENCY", "LATENCY_HELP", "Histogram", "Metrics", "metrics_table"]

LATENCY: Final = "hicache_verb_seconds"
LATENCY_HELP: Final = (
    "Seconds from a request's arrival to its answer: tier=host is what clients ask of the service, "
    "tier=storage its own calls into the store"
)


class _Timed(Protocol):
    @property
    def seconds(self) -> float: ...
    @property
    def buckets(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class Histogram:
    """Latencies of one verb in one tier.

    Attributes:
        verb, tier: whose.
        bounds: upper bounds of the buckets in seconds; one more bucket has none.
        buckets: counts, not cumulative.
        seconds: of all together.
    """

    verb: str
    tier: str
    bounds: Sequence[float]
    buckets: Sequence[int]
    seconds: float


class _ServiceVerb(_Timed, Protocol):
    @property
    def verb(self) -> str: ...


def histograms(service: Iterable[_ServiceVerb], storage: Mapping[str, _Timed] | None = None) -> Iterator[Histogram]:
    """Latencies of both tiers.

    Args:
        service: `RpcServer.statistics()`.
        storage: `MeteredBackend.verbs()`.
    """
    for seen in service:
        yield Histogram(seen.verb, "host", BOUNDS, seen.buckets, seen.seconds)
    for verb, timed in sorted((storage or {}).items()):
        yield Histogram(verb, "storage", CALL_BOUNDS, timed.buckets, timed.seconds)


class Metrics:
    """Renders the page `/metrics`. Used on the loop's thread, but for `render`.

    Args:
        document: gives the statistics, as `statistics_json` has them for a caller who may see everything.
        latencies: gives the histograms.

    Raises:
        ConfigError: `prometheus-client` is not installed.
    """

    def __init__(self, document: Callable[[], Document], latencies: Callable[[], Iterable[Histogram]] = tuple) -> None:
        try:
            from prometheus_client import CollectorRegistry, ProcessCollector
        except ImportError:
            raise ConfigError("metrics.address needs prometheus-client: pip install 'hicache[server]'") from None
        self._document = document
        self._latencies = latencies
        self._lock = threading.Lock()
        self._seen: tuple[Document, tuple[Histogram, ...]] = ({}, ())
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def describe(self) -> Iterator[Any]:
        """What will be collected, for the registry's check of names; without it, registering would collect."""
        from prometheus_client.core import HistogramMetricFamily

        yield from (_family(family) for family in FAMILIES)
        yield HistogramMetricFamily(LATENCY, LATENCY_HELP, labels=["verb", "tier"])

    def collect(self) -> Iterator[Any]:
        """One snapshot, as Prometheus' families."""
        from prometheus_client.core import HistogramMetricFamily

        document, latencies = self._seen
        for family in FAMILIES:
            metric = _family(family)
            for labels, value in family.values(document):
                if is_number(value):
                    metric.add_metric([str(label) for label in labels], value)
            yield metric
        timed = HistogramMetricFamily(LATENCY, LATENCY_HELP, labels=["verb", "tier"])
        for seen in latencies:
            bounds = [str(bound) for bound in seen.bounds] + ["+Inf"]
            cumulative = list(zip(bounds, map(float, accumulate(seen.buckets)), strict=True))
            timed.add_metric([seen.verb, seen.tier], cumulative, seen.seconds)
        yield timed

    async def page(self) -> Page:
        """The page, in Prometheus' text format.

        Only the snapshot is taken on the loop: the text of many pools takes milliseconds, for which no request waits.
        """
        return await asyncio.to_thread(self.render, self._document(), tuple(self._latencies()))

    def render(self, document: Document, latencies: tuple[Histogram, ...]) -> Page:
        """The page of one snapshot. Thread-safe."""
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        with self._lock:
            self._seen = (document, latencies)
            return Page(generate_latest(self._registry), CONTENT_TYPE_LATEST)


def _family(family: Family) -> Any:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    return kind(family.name, family.help, labels=list(family.labels))


def metrics_table() -> str:
    """All families as a table in Markdown."""
    lines = ["| name | kind | labels | what |", "|---|---|---|---|"]
    lines += [
        f"| `{family.name}` | {family.kind} | {', '.join(family.labels)} | {family.help} |" for family in FAMILIES
    ]
    lines.append(f"| `{LATENCY}` | histogram | verb, tier | {LATENCY_HELP} |")
    return "\n".join(lines) + "\n"
