"""Sections on how a service fares: its tiers, store, queues, verbs and tenants; and the names of its pools."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from hicache.analytics.report.content import Axis, Bar, BarPlot, Part, Plot, Section, Table
from hicache.analytics.report.service_documents import Counts, Pool, ServiceDocument
from hicache.analytics.report.shapes import labelled, letters, side_by_side
from hicache.analytics.report.words import count, duration, share, visible
from hicache.units import format_size

__all__ = ["MOST_POOLS", "pool_name", "pools_of", "tiers", "work"]

Documents = Sequence[ServiceDocument]

MOST_POOLS: Final = 12
"""Of pools that are drawn; tables have all."""

_EDGES: Final = {
    "bytes_to_storage": "host to storage",
    "bytes_from_storage": "storage to host",
    "bytes_device_to_host": "device to host",
    "bytes_host_to_device": "host to device",
}


def pool_name(pool: Pool) -> str:
    """A pool by its model, and its tenant where it has one."""
    return visible(pool.model, 80) + (f" of {visible(pool.tenant, 40)}" if pool.tenant else "")


def pools_of(documents: Documents) -> list[tuple[str, Pool]]:
    """All pools with their names; namespaces tell those apart that have the same."""
    found = [
        (labelled(letter, pool_name(pool)), pool)
        for letter, document in zip(letters(documents), documents, strict=True)
        for pool in document.pools
    ]
    names = Counter(name for name, _ in found)
    return [
        (
            f"{name} ({visible(pool.namespace[:12])}{f', {pool.ranks} ranks' if pool.ranks > 1 else ''})"
            if names[name] > 1
            else name,
            pool,
        )
        for name, pool in found
    ]


def tiers(documents: Documents) -> Section:
    """What they hold, and what was moved."""
    bars, rows = [], []
    for name, pool in pools_of(documents)[:MOST_POOLS]:
        host = pool.statistics.core.host
        held = host.resident + host.filling
        bars.append(_full(f"host, {name}", held, host.capacity))
        rows.append(
            (
                f"host, {name}",
                *_sizes(held * pool.page_bytes, host.capacity * pool.page_bytes),
                count(host.pinned),
                count(host.evicted),
            )
        )
    for letter, document in zip(letters(documents), documents, strict=True):
        store = next((pool.statistics.storage for pool in document.pools if pool.statistics.storage), None)
        if store is not None:
            name = labelled(letter, "storage")
            if store.capacity:
                bars.append(_full(name, store.bytes_used, store.capacity))
            rows.append((name, *_sizes(store.bytes_used, store.capacity), "", count(store.evicted)))
    plots: list[Plot] = []
    if bars:
        title = "How full the tiers are"
        plots.append(
            BarPlot(
                "full",
                title,
                "Held / what the tier holds at most; storage is one for all pools.",
                Axis("held", "% of the tier", "percent", least=0, most=1),
                tuple(bars),
                Table(title, ("tier", "holds", "of", "full", "pinned", "evicted"), tuple(rows)),
            )
        )
    plots += _moved(documents)
    return Section("tiers", "The tiers", (), tuple(plots), tuple(_stores(documents)))


def _full(name: str, held: int, capacity: int) -> Bar:
    return Bar(name, (Part("held", "host", min(1.0, held / capacity) if capacity else 0.0),))


def _sizes(held: int, capacity: int | None) -> tuple[str, str, str]:
    return format_size(held), "no limit" if capacity is None else format_size(capacity), share(held, capacity or 0)


def _moved(documents: Documents) -> Iterator[BarPlot]:
    sums = [
        (name, {edge: sum(getattr(pool.statistics, edge) for pool in each.pools) for edge in _EDGES})
        for name, each in zip(letters(documents), documents, strict=True)
    ]
    edges = [edge for edge in _EDGES if any(moved[edge] for _, moved in sums)]
    bars = tuple(
        Bar(labelled(name, _EDGES[edge]), (Part("moved", "2", float(moved[edge])),))
        for edge in edges
        for name, moved in sums
    )
    if not bars:
        return
    rows = tuple((labelled(name, _EDGES[edge]), format_size(moved[edge])) for edge in edges for name, moved in sums)
    title = "Bytes moved between tiers since the start"
    axis = Axis("moved", "bytes since the start", "bytes", least=0)
    yield BarPlot("moved", title, "Of all pools.", axis, bars, Table(title, ("way", "moved"), rows))


def _stores(documents: Documents) -> Iterator[Table]:
    for name, document in zip(letters(documents), documents, strict=True):
        store = next((pool.statistics.storage for pool in document.pools if pool.statistics.storage), None)
        if store is None:
            continue
        rows = [
            ("objects", count(store.objects)),
            ("objects put", count(store.puts)),
            ("found / asked for", f"{count(store.hits)} / {count(store.gets)} ({share(store.hits, store.gets)})"),
            ("bytes written", format_size(store.bytes_written)),
            ("bytes read", format_size(store.bytes_read)),
            ("objects evicted", count(store.evicted)),
            *(
                (f"not OK: {visible(reason, 60)}", count(size))
                for reason, size in sorted(store.by_reason.items())
                if size
            ),
        ]
        yield Table(labelled(name, "The store, since the start"), ("what", "value"), tuple(rows))


def work(documents: Documents) -> Section:
    """Verbs, pools, queues and tenants."""
    bars, rows = [], []
    for name, document in zip(letters(documents), documents, strict=True):
        for verb in sorted(document.service.verbs, key=lambda verb: (-verb.answered, verb.verb)):
            if verb.answered:
                mean = verb.seconds / verb.answered
                label = labelled(name, visible(verb.verb, 40))
                bars.append(Bar(label, (Part("mean", "3", mean),)))
                rows.append((label, count(verb.answered), count(verb.failed), duration(mean)))
    plots: list[Plot] = []
    if bars:
        title = "How long verbs take"
        plots.append(
            BarPlot(
                "verbs",
                title,
                "Seconds of all calls / calls answered, since the start.",
                Axis("mean time", "of a call", "seconds", least=0),
                tuple(bars),
                Table(title, ("verb", "answered", "failed", "mean"), tuple(rows)),
            )
        )
    tables = [_pool_table(documents), *_queues(documents), *_tenants(documents)]
    state = side_by_side(
        "The service",
        letters(documents),
        documents,
        [
            ("up for", lambda each: duration(each.service.uptime_seconds)),
            ("pools", lambda each: count(len(each.pools))),
            ("sessions open", lambda each: count(each.service.sessions)),
            ("requests", lambda each: count(sum(pool.statistics.requests for pool in each.pools))),
            ("requests open", lambda each: count(sum(pool.statistics.open_requests for pool in each.pools))),
        ],
    )
    text = tuple(
        labelled(name, f"Degraded: {visible(reason, 1000)}")
        for name, each in zip(letters(documents), documents, strict=True)
        for reason in each.service.degraded
    )
    return Section(
        "service", "How the service fares", text, tuple(plots), (state, *(table for table in tables if table.rows))
    )


def _pool_table(documents: Documents) -> Table:
    rows = tuple(
        (
            name, count(pool.sessions), count(pool.statistics.requests), format_size(pool.bytes),
            count(pool.statistics.tokens.asked), _hit_share(pool.statistics.tokens),
            count(sum(pool.statistics.failed_pages.values())), count(sum(pool.statistics.shed_by_reason.values())),
        )
        for name, pool in pools_of(documents)
    )  # fmt: skip
    columns = ("pool", "sessions", "requests", "memory", "tokens asked", "hit, of tokens", "pages failed", "pages shed")
    return Table("Pools", columns, rows)


def _hit_share(counts: Counts) -> str:
    return share(counts.asked - sum(counts.missed.values()), counts.asked)


def _queues(documents: Documents) -> Iterator[Table]:
    rows = []
    for name, pool in pools_of(documents):
        for what, queue in (("reads", pool.statistics.reads), ("writes", pool.statistics.writes)):
            if queue is not None:
                figures = (queue.waiting, queue.running, queue.hung, queue.refused, queue.failed)
                rows.append((f"{what}, {name}", format_size(queue.bytes), *(count(figure) for figure in figures)))
    yield Table("Queues to storage", ("queue", "bytes", "waiting", "running", "hung", "refused", "failed"), tuple(rows))


def _tenants(documents: Documents) -> Iterator[Table]:
    rows = tuple(
        (
            labelled(name, visible(row.tenant or "-", 60)), visible(row.tier, 20), format_size(row.bytes),
            "-" if row.quota is None else format_size(row.quota), share(row.bytes, row.quota or 0),
        )
        for name, each in zip(letters(documents), documents, strict=True)
        for row in each.service.quotas
        if row.tenant is not None
    )  # fmt: skip
    yield Table("Tenants", ("tenant", "tier", "holds", "may hold", "full"), rows, texts=2)
