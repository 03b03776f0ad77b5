"""What `hicache top` shows, worked out of two looks at a service's statistics. Nothing here draws or waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hicache.analytics.analysis.knee import UNTOLD
from hicache.cli.output import Table
from hicache.units import format_size

__all__ = ["SORTS", "Look", "View", "view_of"]

Document = Mapping[str, Any]

SORTS: Final = {"r": "requests", "m": "missed", "h": "hit rate", "n": "name"}
"""Keys, and by what they sort prefixes and pools."""

_EDGES: Final = {
    "bytes_to_storage": "host to storage",
    "bytes_from_storage": "storage to host",
    "bytes_device_to_host": "device to host",
    "bytes_host_to_device": "host to device",
}

_TIERS: Final = ("device", "host", "storage")
_DIGITS: Final = 6
"""Of a namespace, to tell two apart."""


@dataclass(frozen=True, slots=True)
class Look:
    """The statistics of a service at one moment.

    Attributes:
        document: as `hicache stats --json` prints it.
        at: seconds, of one monotonic clock.
    """

    document: Document
    at: float

    @property
    def service(self) -> Document:
        """The service's own part."""
        part: Document = self.document["service"]
        return part

    @property
    def pools(self) -> Sequence[Document]:
        """Its pools."""
        part: Sequence[Document] = self.document["pools"]
        return part


@dataclass(frozen=True, slots=True)
class View:
    """What is shown.

    Attributes:
        title: one line.
        degraded: why the service is not all that it should be.
        tables: in order of importance.
        document: the figures behind them, of JSON's types.
    """

    title: str
    degraded: tuple[str, ...]
    tables: tuple[Table, ...]
    document: dict[str, Any]


def view_of(look: Look, before: Look | None, *, sort: str = "requests") -> View:
    """The view of a look.

    Args:
        look: the latest.
        before: an earlier one of the same life of the service, for rates; None: there are none yet.
        sort: a value of `SORTS`.
    """
    if before is not None and look.service["uptime_seconds"] < before.service["uptime_seconds"]:
        before = None  # another life of the service: its counts began anew
    facts = _Facts(look, before)
    tables = [
        facts.tokens(),
        facts.tiers(),
        facts.what_if(),
        facts.moved(),
        facts.prefixes(sort),
        facts.queues(),
        facts.pools(sort),
        facts.tenants(),
        facts.verbs(),
    ]
    shown = tuple(table for table in tables if table is not None and table.rows)
    return View(facts.title(), tuple(look.service["degraded"]), shown, facts.document())


class _Facts:
    def __init__(self, look: Look, before: Look | None) -> None:
        self._look = look
        self._before = before
        self._seconds = 0.0 if before is None else look.at - before.at
        self._names = _names(look.pools)
        self._statistics = [pool["statistics"] for pool in look.pools]
        self._earlier = {} if before is None else {_key(pool): pool["statistics"] for pool in before.pools}
        self._totals, self._latest = _tokens(self._statistics), Counter[str]()
        for pool in look.pools:
            earlier = self._earlier.get(_key(pool))
            if earlier is not None:
                self._latest += _tokens([pool["statistics"]]) - _tokens([earlier])

    def _name(self, pool: Document) -> str:
        return self._names[_key(pool)]

    # ---- the tables

    def title(self) -> str:
        service = self._look.service
        parts = [f"up {duration(service['uptime_seconds'])}"]
        if "sessions" in service:
            parts += [_count(service["sessions"], "session"), _count(service["leases"]["open"], "lease")]
        parts.append(_count(len(self._look.pools), "pool"))
        return ", ".join(parts)

    def tokens(self) -> Table:
        """Where prompts' tokens came from. Both shares are of the tokens asked in the same time.

        The ideal hits all that was seen before and is no page tail: what lies between is missed for the other reasons.
        """
        asked, latest = self._totals["asked"], self._latest["asked"]
        rows = [("asked", self._pace(latest), "", f"{asked:,}", "100.0 %" if asked else "-")]
        reasons = sorted((name for name in self._totals if " " in name), key=lambda name: -self._totals[name])
        shown = [
            ("hit", _hits(self._totals), _hits(self._latest)),
            *((f"  {tier}", self._totals[tier], self._latest[tier]) for tier in _TIERS),
            ("ideal", _ideal_hits(self._totals), _ideal_hits(self._latest)),
            *((name, self._totals[name], self._latest[name]) for name in reasons),
        ]
        for name, total, recent in shown:
            if name == "  device" and not total:
                continue  # engines own it: their hits there never reach a service
            rows.append((name, self._pace(recent), percent(recent, latest), f"{total:,}", percent(total, asked)))
        return Table("tokens", ("", "a second", "of asked", "since start", "of asked"), rows)

    def tiers(self) -> Table:
        rows = []
        for pool in self._look.pools:
            host, name = pool["statistics"]["core"]["host"], self._name(pool)
            held = host["resident"] + host["filling"]
            rows.append(
                (f"host {name}", _pages(held, pool), _pages(host["capacity"], pool), _of(held, host["capacity"]))
            )
            if pool["device_pages"]:
                rows.append((f"device {name}, reported", _pages(pool["device_pages"], pool), "-", "-"))
        store = self._store
        if store is not None:
            capacity = store["capacity"]
            whole = "no limit" if capacity is None else format_size(capacity)
            rows.append(("storage", format_size(store["bytes_used"]), whole, _of(store["bytes_used"], capacity)))
        return Table("tiers", ("", "holds", "of", "full"), rows)

    def what_if(self) -> Table | None:
        """Hit rates of pages, since the start, at other sizes; the ideal misses only what was never seen."""
        rows = []
        factors: tuple[str, ...] = ()
        for pool in self._look.pools:
            for ghost in pool.get("what_if", ()):
                factors = tuple(f"{point['factor']:g}x" for point in ghost["points"])
                cells = [_estimate(point["hit_rate"], point["error_bound"]) for point in ghost["points"]]
                rows.append((f"{ghost['tier']} {self._name(pool)}", *cells, _ideal(pool["statistics"]["pages"])))
        if not rows:
            return None
        return Table("what other sizes would hit, of pages asked (?: too few to tell)", ("", *factors, "ideal"), rows)

    def moved(self) -> Table:
        rows = []
        for edge, name in _EDGES.items():
            total = sum(statistics[edge] for statistics in self._statistics)
            if total:
                recent = self._since(lambda statistics, edge=edge: statistics[edge])  # type: ignore[misc]
                rows.append((name, self._pace(recent, format_size), format_size(total)))
        return Table("moved", ("", "a second", "since start"), rows)

    def prefixes(self, sort: str) -> Table:
        rows = []
        for pool in self._look.pools:
            for prefix in pool.get("prefixes", ()):
                asked, hit = prefix["asked_pages"], prefix["hit_pages"]
                marked = f"{prefix['requests']:,}" + ("+" if prefix["uncertain"] else "")
                cells = (
                    prefix["page_hash"][:12], self._name(pool), marked, f"{prefix['pages']:,}", percent(hit, asked),
                    f"{prefix['host_pages']:,}", f"{prefix['stored_pages']:,}",
                )  # fmt: skip
                rows.append((_order(sort, prefix["page_hash"], prefix["requests"], asked, hit), cells))
        rows.sort(key=lambda row: row[0])
        columns = ("prefix", "model", "requests", "pages", "hit", "in host", "stored")
        return Table(f"hottest prefixes, by {sort}", columns, [cells for _, cells in rows[:10]], texts=2)

    def queues(self) -> Table:
        rows = []
        for queue in ("reads", "writes"):
            found = [statistics[queue] for statistics in self._statistics if statistics[queue] is not None]
            if found:
                sums = {name: sum(each[name] for each in found) for name in _QUEUE}
                size = format_size(sums.pop("bytes"))
                rows.append((f"storage {queue}", size, *(f"{count:,}" for count in sums.values())))
        return Table("queues", ("", "bytes", *_QUEUE[1:]), rows)

    def pools(self, sort: str) -> Table:
        rows = []
        for pool in self._look.pools:
            statistics = pool["statistics"]
            tokens = statistics["tokens"]
            hits = sum(tokens[tier] for tier in _TIERS)
            cells = (
                self._name(pool), pool["tenant"] or "-", f"{pool['sessions']:,}", f"{statistics['open_requests']:,}",
                f"{statistics['requests']:,}", percent(hits, tokens["asked"]),
                f"{statistics['core']['host']['evicted']:,}",
            )  # fmt: skip
            rows.append((_order(sort, self._name(pool), statistics["requests"], tokens["asked"], hits), cells))
        rows.sort(key=lambda row: row[0])
        columns = ("model", "tenant", "sessions", "open", "requests", "tokens hit", "evicted")
        return Table(f"pools, by {sort}", columns, [cells for _, cells in rows], texts=2)

    def tenants(self) -> Table | None:
        quotas = self._look.service["quotas"]
        if all(row["tenant"] is None for row in quotas):
            return None
        rows = [
            (
                row["tenant"] or "-", row["tier"], format_size(row["bytes"]),
                "-" if row["quota"] is None else format_size(row["quota"]), _of(row["bytes"], row["quota"]),
            )
            for row in quotas
        ]  # fmt: skip
        return Table("tenants", ("tenant", "tier", "holds", "may hold", "full"), rows, texts=2)

    def verbs(self) -> Table:
        rows = []
        before = {} if self._before is None else {verb["verb"]: verb for verb in self._before.service.get("verbs", ())}
        for verb in sorted(self._look.service.get("verbs", ()), key=lambda verb: (-verb["answered"], verb["verb"])):
            if not verb["answered"]:
                continue
            old = before.get(verb["verb"], {"answered": 0, "seconds": 0.0})
            answered, seconds = verb["answered"] - old["answered"], verb["seconds"] - old["seconds"]
            mean = f"{1e6 * seconds / answered:,.0f}" if answered else "-"
            rows.append((verb["verb"], self._pace(answered if before else None), mean, f"{verb['failed']:,}"))
        return Table("verbs", ("", "a second", "mean µs", "failed"), rows)

    def document(self) -> dict[str, Any]:
        """The figures, of JSON's types."""
        reasons = {name.removeprefix("missed ") for name in self._totals if " " in name}
        return {
            "service": dict(self._look.service),
            "interval_seconds": self._seconds or None,
            "tokens": _split(self._totals, reasons),
            "tokens_in_interval": _split(self._latest, reasons) if self._earlier else None,
            "hit_rate_tokens": _rate(_hits(self._totals), self._totals["asked"]),
            "ideal_hit_rate_tokens": _rate(_ideal_hits(self._totals), self._totals["asked"]),
            "pools": [
                {
                    "model": pool["model"],
                    "namespace": pool["namespace"],
                    "tenant": pool["tenant"],
                    "what_if": pool.get("what_if", []),
                    "ideal_hit_rate_pages": _ideal_rate(pool["statistics"]["pages"]),
                    "prefixes": pool.get("prefixes", []),
                }
                for pool in self._look.pools
            ],
        }

    # ---- figures

    @property
    def _store(self) -> Document | None:
        """All pools share one."""
        return next((each["storage"] for each in self._statistics if each["storage"] is not None), None)

    def _since(self, figure: Callable[[Document], int]) -> int | None:
        """What a count has grown by since the look before, in pools that were there then; None without one."""
        if not self._earlier:
            return None
        pairs = ((pool["statistics"], self._earlier.get(_key(pool))) for pool in self._look.pools)
        return sum(figure(now) - figure(then) for now, then in pairs if then is not None)

    def _pace(self, recent: int | None, shown: Callable[[int], str] = "{:,}".format) -> str:
        """A growth, a second."""
        if recent is None or self._seconds <= 0:
            return "-"
        return shown(max(0, round(recent / self._seconds)))


_QUEUE: Final = ("bytes", "waiting", "running", "hung", "refused")


def _tokens(statistics: Iterable[Document]) -> Counter[str]:
    """Tokens asked, hit by tier, and missed by reason, of several caches."""
    found: Counter[str] = Counter()
    for each in statistics:
        tokens = each["tokens"]
        found["asked"] += tokens["asked"]
        for tier in _TIERS:
            found[tier] += tokens[tier]
        for reason, count in tokens["missed"].items():
            found[f"missed {reason}"] += count
    return found


def _hits(counts: Counter[str]) -> int:
    return sum(counts[tier] for tier in _TIERS)


def _ideal_hits(counts: Counter[str]) -> int:
    return counts["asked"] - counts["missed cold"] - counts["missed unaligned_tail"]


def _split(counts: Counter[str], reasons: Iterable[str]) -> dict[str, Any]:
    missed = {reason: counts[f"missed {reason}"] for reason in sorted(reasons)}
    return {name: counts[name] for name in ("asked", *_TIERS)} | {"missed": missed}


def _order(sort: str, name: str, requests: int, asked: int, hit: int) -> tuple[Any, ...]:
    keys: dict[str, float] = {"requests": -requests, "missed": hit - asked, "hit rate": -(hit / asked if asked else 0)}
    return (keys.get(sort, 0), name)


def _key(pool: Document) -> tuple[Any, ...]:
    return pool["namespace"], pool["tenant"], pool["ranks"]


def _names(pools: Sequence[Document]) -> dict[tuple[Any, ...], str]:
    """What pools are called: by the end of their model's name, and by their namespace where several have the same."""
    spaces: dict[str, set[str]] = {}
    for pool in pools:
        spaces.setdefault(_short(pool), set()).add(pool["namespace"])
    return {
        _key(pool): _short(pool) + (f" {pool['namespace'][:_DIGITS]}" if len(spaces[_short(pool)]) > 1 else "")
        for pool in pools
    }


def _short(pool: Document) -> str:
    name: str = pool["model"]
    return name.rstrip("/").rpartition("/")[2] or name


def _pages(count: int, pool: Document) -> str:
    return f"{count:,} pages, {format_size(count * pool['page_bytes'])}"


def _rate(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _ideal_rate(pages: Document) -> float | None:
    """What a cache without limits would have hit of the pages asked: all but those never seen."""
    return _rate(pages["asked"] - pages["missed"].get("cold", 0), pages["asked"])


def _ideal(pages: Document) -> str:
    rate = _ideal_rate(pages)
    return "-" if rate is None else f"{100 * rate:.1f} %"


def _estimate(rate: float | None, bound: float | None) -> str:
    if rate is None:
        return "-"
    if bound is not None and bound >= UNTOLD:
        return "?"  # a figure would look like one
    return f"{100 * rate:.1f} %" + (f" ±{100 * bound:.1f}" if bound else "")


def percent(part: int, whole: int) -> str:
    """A share; a dash without a denominator."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


def _of(part: int, whole: int | None) -> str:
    return "-" if not whole else f"{100 * part / whole:.0f} %"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """Seconds as people say them: two units at most."""
    for size, unit, smaller, step in ((86_400, "d", "h", 3600), (3600, "h", "min", 60), (60, "min", "s", 1)):
        if seconds >= size:
            return f"{int(seconds // size)} {unit} {int(seconds % size // step)} {smaller}"
    return f"{seconds:.0f} s"
