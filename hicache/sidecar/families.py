"""Which metrics there are, and where in the statistics' document each value stands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, Final, Literal

__all__ = ["FAMILIES", "Document", "Family", "is_number"]

Document = Mapping[str, Any]
"""`{"service": {...}, "pools": [{..., "statistics": {...}}, ...]}`."""

Values = Iterator[tuple[tuple[Any, ...], Any]]
"""(values of the labels, value)"""

_POOL: Final = ("model", "namespace", "tenant", "ranks")


@dataclass(frozen=True, slots=True)
class Family:
    """Metrics of one name.

    Attributes:
        name: with `_total` at its end for counters.
        kind: what it is.
        help: what it says, in a line.
        labels: their names.
        values: reads them from the document; what is no number is left out.
    """

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    labels: tuple[str, ...]
    values: Callable[[Document], Values]


def is_number(value: object) -> bool:
    """Whether a value may be exported: finite; None is what is not known."""
    return isinstance(value, int | float) and isfinite(value)


def _at(document: Any, path: str) -> Any:
    for name in path.split("."):
        document = document.get(name) if isinstance(document, Mapping) else None
    return document


def _service(path: str) -> Callable[[Document], Values]:
    def values(document: Document) -> Values:
        yield (), _at(document, f"service.{path}")

    return values


def _one_of(path: str, names: Iterable[str], root: str = "service") -> Callable[[Document], Values]:
    """One value for each of some names below a path; the name is the label."""

    def values(document: Document) -> Values:
        for name in names:
            yield (name,), _at(document, f"{root}.{path}.{name}")

    return values


def _labels(pool: Document) -> tuple[Any, ...]:
    return tuple("" if pool.get(name) is None else pool[name] for name in _POOL)


def _pool(path: str) -> Callable[[Document], Values]:
    def values(document: Document) -> Values:
        for pool in document.get("pools", ()):
            yield _labels(pool), _at(pool, path)

    return values


def _pool_each(path: str, names: Iterable[str] | None = None) -> Callable[[Document], Values]:
    """For each pool, one value for each of some names below a path, or for all that are there."""

    def values(document: Document) -> Values:
        for pool in document.get("pools", ()):
            table = _at(pool, path) or {}
            for name in table if names is None else names:
                yield (*_labels(pool), name), table.get(name)

    return values


def _pool_fields(path: str, fields: Mapping[str, str]) -> Callable[[Document], Values]:
    """For each pool, fields of one record, under labels of their own."""

    def values(document: Document) -> Values:
        for pool in document.get("pools", ()):
            for field, label in fields.items():
                yield (*_labels(pool), label), _at(pool, f"{path}.{field}")

    return values


def _queues(field: str) -> Callable[[Document], Values]:
    return _pool_fields("statistics", {f"{queue}.{field}": queue for queue in ("reads", "writes")})


def _what_if(field: str) -> Callable[[Document], Values]:
    """For each pool and tier, one value."""

    def values(document: Document) -> Values:
        for pool in document.get("pools", ()):
            for ghost in pool.get("what_if") or ():
                yield (*_labels(pool), ghost["tier"]), ghost[field]

    return values


def _what_if_sizes(field: str) -> Callable[[Document], Values]:
    """For each pool, tier and size, one value; the label is a multiple of the tier's own size."""

    def values(document: Document) -> Values:
        for pool in document.get("pools", ()):
            for ghost in pool.get("what_if") or ():
                for point in ghost["points"]:
                    yield (*_labels(pool), ghost["tier"], f"{point['factor']:g}"), point[field]

    return values


def _storage(path: str) -> Callable[[Document], Values]:
    """All pools share one store, so it is told once."""

    def values(document: Document) -> Values:
        for store in _stores(document):
            yield (), _at(store, path)

    return values


def _storage_each(path: str) -> Callable[[Document], Values]:
    def values(document: Document) -> Values:
        for store in _stores(document):
            for name, value in (_at(store, path) or {}).items():
                yield (name,), value

    return values


def _breakers(read: Callable[[Document], Any]) -> Callable[[Document], Values]:
    def values(document: Document) -> Values:
        for store in _stores(document):
            for breaker in store.get("breakers") or ():
                yield (breaker["name"],), read(breaker)

    return values


def _stores(document: Document) -> list[Document]:
    found = [_at(pool, "statistics.storage") for pool in document.get("pools", ())]
    return [store for store in found if isinstance(store, Mapping)][:1]


def _is_closed(breaker: Document) -> int:
    return int(breaker["state"] == "closed")


def _times_opened(breaker: Document) -> Any:
    return breaker["opened"]


def _tenants(column: str) -> Callable[[Document], Values]:
    def values(document: Document) -> Values:
        for row in _at(document, "service.quotas") or ():
            yield (row.get("tenant") or "", row["tier"]), row.get(column)

    return values


def _verbs(field: str) -> Callable[[Document], Values]:
    def values(document: Document) -> Values:
        for verb in _at(document, "service.verbs") or ():
            yield (verb["verb"],), verb.get(field)

    return values


def _degraded(document: Document) -> Values:
    yield (), len(_at(document, "service.degraded") or ())


_STATES: Final = ("free", "private", "filling", "resident", "quarantined")
_TIERS: Final = {"device": "device", "host": "host", "storage": "storage"}
_EDGES: Final = {
    "bytes_device_to_host": "device_to_host",
    "bytes_host_to_device": "host_to_device",
    "bytes_to_storage": "host_to_storage",
    "bytes_from_storage": "storage_to_host",
}


def _gauge(name: str, text: str, values: Callable[[Document], Values], *labels: str) -> Family:
    return Family(f"hicache_{name}", "gauge", text, labels, values)


def _counter(name: str, text: str, values: Callable[[Document], Values], *labels: str) -> Family:
    return Family(f"hicache_{name}_total", "counter", text, labels, values)


FAMILIES: Final[tuple[Family, ...]] = (
    # ---- the service
    _gauge("uptime_seconds", "Seconds since the start", _service("uptime_seconds")),
    _gauge("degraded", "Reasons why the service is not all that it should be; /healthz has their words", _degraded),
    _gauge("sessions", "Sessions open now", _service("sessions")),
    _counter("sessions_opened", "Sessions since the start", _service("sessions_opened")),
    _gauge("groups", "Groups of ranks that have members", _service("groups")),
    _gauge(
        "leases",
        "Leases: open, and ended ones whose slots are in quarantine",
        _one_of("leases", ("open", "ended")),
        "state",
    ),
    _counter(
        "lease_events",
        "Leases that were opened, have expired or were revoked",
        _one_of("leases", ("opened", "expired", "revoked")),
        "event",
    ),
    _gauge(
        "quarantined_slots",
        "Slots of ended leases that a process may still touch",
        _service("leases.quarantined_slots"),
    ),
    _gauge("pins", "Prefixes pinned by administrators", _service("pins.pins")),
    _gauge("pinned_slots", "Slots that those hold", _service("pins.slots")),
    _counter("pins_given_up", "Soft pins that made room for requests", _service("pins.given_up")),
    _gauge("tenant_bytes", "Bytes that a tenant holds", _tenants("bytes"), "tenant", "tier"),
    _gauge("tenant_quota_bytes", "Bytes that a tenant may hold", _tenants("quota"), "tenant", "tier"),
    _counter(
        "verb_failures",
        "Requests that were answered by an error; hicache_verb_seconds has all of them",
        _verbs("failed"),
        "verb",
    ),
    # ---- pools
    _gauge("pool_bytes", "Shared memory of a pool", _pool("bytes"), *_POOL),
    _gauge("pool_sessions", "Sessions attached to a pool", _pool("sessions"), *_POOL),
    _gauge("page_bytes", "Bytes of one page of all ranks", _pool("page_bytes"), *_POOL),
    _gauge(
        "host_pages",
        "Pages of HOST by state; their sum is the capacity",
        _pool_each("statistics.core.host", _STATES),
        *_POOL,
        "state",
    ),
    _gauge(
        "host_pages_pinned", "Resident pages of HOST that something holds", _pool("statistics.core.host.pinned"), *_POOL
    ),
    _gauge("device_pages", "Pages that engines report in their own memory", _pool("device_pages"), *_POOL),
    _counter("evicted_pages", "Pages evicted from HOST", _pool("statistics.core.host.evicted"), *_POOL),
    _counter(
        "dropped_dirty_pages",
        "Of those, pages that storage did not have",
        _pool("statistics.core.host.dropped_dirty"),
        *_POOL,
    ),
    _gauge("stub_pages", "Pages that only storage is believed to have", _pool("statistics.core.stub_pages"), *_POOL),
    _gauge("transfers", "Transfers under way", _pool("statistics.core.transfers"), *_POOL),
    # ---- requests: the token hit rate is sum(tokens_hit) / tokens_asked, and asked = hit + missed, always
    _counter("requests", "Requests that have ended", _pool("statistics.requests"), *_POOL),
    _counter("requests_aborted", "Of those, requests without success", _pool("statistics.aborted"), *_POOL),
    _counter("requests_bypassed", "Of those, requests that went past the cache", _pool("statistics.bypassed"), *_POOL),
    _gauge("requests_open", "Requests open now", _pool("statistics.open_requests"), *_POOL),
    _counter(
        "tokens_asked",
        "Tokens of all prompts: the denominator of the hit rate",
        _pool("statistics.tokens.asked"),
        *_POOL,
    ),
    _counter("tokens_hit", "Tokens that came from a tier", _pool_fields("statistics.tokens", _TIERS), *_POOL, "tier"),
    _counter(
        "tokens_missed",
        "Tokens that did not come from the cache",
        _pool_each("statistics.tokens.missed"),
        *_POOL,
        "reason",
    ),
    _counter("pages_asked", "Whole pages that requests might have taken", _pool("statistics.pages.asked"), *_POOL),
    _counter("pages_hit", "Pages that came from a tier", _pool_fields("statistics.pages", _TIERS), *_POOL, "tier"),
    _counter(
        "pages_missed",
        "Pages that did not come from the cache",
        _pool_each("statistics.pages.missed"),
        *_POOL,
        "reason",
    ),
    _counter("moved_bytes", "Page bytes moved from tier to tier", _pool_fields("statistics", _EDGES), *_POOL, "edge"),
    _counter(
        "failed_pages", "Pages whose transfer did not end well", _pool_each("statistics.failed_pages"), *_POOL, "kind"
    ),
    _counter(
        "shed_pages",
        "Pages turned away because a queue was full",
        _pool_each("statistics.shed_by_reason"),
        *_POOL,
        "reason",
    ),
    _counter("probes_refused", "Probes of storage that were turned away", _pool("statistics.probes_refused"), *_POOL),
    _counter(
        "planned_pages",
        "Pages worth loading, when the engine's speed is known",
        _pool("statistics.planning.planned"),
        *_POOL,
    ),
    _counter("declined_pages", "Pages cheaper to compute than to load", _pool("statistics.planning.declined"), *_POOL),
    _counter(
        "internal_errors",
        "Exceptions that point to a bug; please report them",
        _pool("statistics.internal_errors"),
        *_POOL,
    ),
    # ---- what if: a tier of `size` times its own would have hit 1 - what_if_missed_pages / what_if_asked_pages
    _counter(
        "what_if_asked_pages",
        "Pages asked, of the requests by which other sizes are judged: the denominator of their hit rates",
        _what_if("asked_pages"),
        *_POOL,
        "tier",
    ),
    _counter(
        "what_if_missed_pages",
        "Of those, pages that this tier and those above would have missed at `size` times its own size; an estimate",
        _what_if_sizes("missed_pages"),
        *_POOL,
        "tier",
        "size",
    ),
    _gauge(
        "what_if_error",
        "By how much that hit rate, since the start, may be wrong: four standard deviations of the sample",
        _what_if_sizes("error_bound"),
        *_POOL,
        "tier",
        "size",
    ),
    # ---- residency events
    _counter("events", "Residency events numbered", _service("events.events")),
    _gauge("events_waiting", "Residency events that have no number yet", _service("events.waiting")),
    _gauge("events_watchers", "Clients that watch events", _service("events.watchers")),
    _counter("events_lost", "Times that a watcher had fallen behind", _service("events.lost")),
    _counter("kv_messages", "Messages published for routers", _service("kv_events.messages")),
    _counter("kv_dropped_events", "Events never published; a reset followed", _service("kv_events.dropped_events")),
    _counter("kv_resets", "Times that routers were told everything anew", _service("kv_events.resets")),
    _counter("kv_replays", "Replays that routers asked for", _service("kv_events.replays")),
    _counter("kv_replays_cut", "Of those, not answered to the end", _service("kv_events.replays_cut")),
    # ---- the access log: requests = written + left out + dropped, but for those that wait to be written
    _counter(
        "access_log_requests",
        "Requests that are in the access log, were left out by sampling, or were lost",
        _one_of("access_log", ("written", "left_out", "dropped")),
        "outcome",
    ),
    _counter("access_log_bytes", "Bytes written to the access log", _service("access_log.bytes")),
    # ---- queues of storage work
    _gauge("queue_waiting", "Jobs that nobody has begun", _queues("waiting"), *_POOL, "queue"),
    _gauge("queue_running", "Jobs that a thread works on", _queues("running"), *_POOL, "queue"),
    _gauge("queue_bytes", "Payload bytes of both", _queues("bytes"), *_POOL, "queue"),
    _gauge("queue_hung", "Jobs inside a call that counts as hung", _queues("hung"), *_POOL, "queue"),
    _counter("queue_refused", "Jobs turned away at the bound", _queues("refused"), *_POOL, "queue"),
    _counter("queue_abandoned", "Calls that have counted as hung", _queues("abandoned"), *_POOL, "queue"),
    # ---- the store: its hit rate is storage_hits / storage_gets
    _gauge("storage_objects", "Objects held, as far as known", _storage("objects")),
    _gauge("storage_bytes", "Bytes held, as far as known", _storage("bytes_used")),
    _gauge("storage_capacity_bytes", "Byte limit of the store, where it has one", _storage("capacity")),
    _gauge("storage_ready", "0 while an index is still being rebuilt", _storage("ready")),
    _counter("storage_puts", "Objects asked to be stored", _storage("puts")),
    _counter("storage_gets", "Objects asked for", _storage("gets")),
    _counter("storage_hits", "Of those, objects found and verified", _storage("hits")),
    _counter("storage_written_bytes", "Payload bytes written", _storage("bytes_written")),
    _counter("storage_read_bytes", "Payload bytes read", _storage("bytes_read")),
    _counter("storage_evicted", "Objects that the store removed to keep its limit", _storage("evicted")),
    _counter("storage_not_ok", "Results that were not OK", _storage_each("by_reason"), "reason"),
    _counter("storage_retried", "Transfers repeated after a passing fault", _storage("retried")),
    _gauge(
        "storage_breaker_closed",
        "1 while the store is used, 0 while it is left alone",
        _breakers(_is_closed),
        "breaker",
    ),
    _counter("storage_breaker_opened", "Times that the store was left alone", _breakers(_times_opened), "breaker"),
)
