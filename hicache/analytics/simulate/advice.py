"""What a simulation suggests, in words with the reason."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, Protocol, TypeVar

from hicache.analytics.analysis.columns import Columns
from hicache.analytics.analysis.knee import WORTH_DOUBLING, knee
from hicache.analytics.result import rate
from hicache.analytics.simulate.flight import OTHER_INSTANCE
from hicache.analytics.simulate.losses import BUSY, Cause, busy_writing, cause_of_losses, too_small
from hicache.analytics.simulate.result import SimulationResult
from hicache.analytics.simulate.settings import SimulationSettings
from hicache.analytics.simulate.worth import larger
from hicache.records import MissReason
from hicache.runtime.executor import COPY_QUEUE_FULL
from hicache.runtime.storage_io import PREFETCH_REFUSED, QUEUE_FULL

WORTH_SAYING: Final = 0.01
"""Share of the pages asked below which a reason of misses is not worth a sentence."""
MOSTLY: Final = 0.5
SIZES: Final = ("device", "host", "storage")
_UNLIMITED: Final = float("inf")


class Point(Protocol):
    """What is judged of a simulation: its result, or a document of it."""

    @property
    def pages_asked(self) -> int:
        """See `SimulationResult`, as for all."""
        ...

    @property
    def hit_rate_pages(self) -> float:
        """Of the pages asked."""
        ...

    @property
    def page_bytes(self) -> int:
        """Of one page."""
        ...

    @property
    def problems(self) -> Sequence[str]:
        """What must not be."""
        ...

    @property
    def settings(self) -> Any:
        """With the names of `SimulationSettings`."""
        ...


P = TypeVar("P", bound=Point)


def advice(result: SimulationResult, columns: Columns | None = None) -> Iterator[str]:
    """What would help one simulated cache, the largest reason first.

    Args:
        result: of the simulation.
        columns: the trace that was simulated, from which it is told to which size a tier is worth enlarging, and what
            that hits, where `larger` tells; None: it is not told.
    """
    asked = result.pages_asked
    if not asked:
        yield "Nothing was asked, so nothing can be said."
        return
    found = sorted(((pages, reason) for reason, pages in result.misses_by_reason.items()), reverse=True)
    for pages, reason in found:
        share = rate(pages, asked)
        if share >= WORTH_SAYING:
            yield f"{100 * share:.1f} % of the pages asked were missed as {reason}: {_remedy(reason, result, columns)}."
    yield from _turned_away(result)
    admits = result.settings.admission or 1
    if admits == 1 and result.pages_put and result.pages_put_never_read > MOSTLY * result.pages_put:
        share = rate(result.pages_put_never_read, result.pages_put)
        yield (
            f"{100 * share:.0f} % of the pages put to storage were never read: --admission 2 writes down only what was "
            f"used again, which saves writes and costs hits, of the second use at least."
        )
    before, after = result.first_token_seconds_without.mean, result.first_token_seconds.mean
    if after > before:
        yield (
            f"The mean time to the first token is longer with these tiers ({after:.3f} s) than without any "
            f"({before:.3f} s): --decide brings up only what pays."
        )


def _turned_away(result: SimulationResult) -> Iterator[str]:
    """Pages that queues did not take, where they are many; those of the device only where no tier lost more."""
    settings, least = result.settings, WORTH_SAYING * result.pages_asked
    if (shed := result.shed_by_reason.get(QUEUE_FULL, 0)) >= least or shed > result.pages_put:
        pages = settings.options().write_bound.bytes // result.page_bytes
        yield (
            f"{shed:,} pages were turned away as the queue to storage was full (room for {pages:,} pages), "
            f"and what is behind them in their prompts was not put to storage either: {_write_more(result)} takes more."
        )
    lost = result.pages_lost
    shed = result.shed_by_reason.get(COPY_QUEUE_FULL, 0)
    if shed >= least and lost["device"] >= max(lost.values()):
        bound = settings.options().copies(result.page_bytes)
        yield (
            f"{shed:,} pages were not copied to host memory when they were computed, as the copies before them were "
            f"under way (at most {bound.bytes // result.page_bytes:,} pages; `copy_bound` of hicache.open): a faster "
            f"--device-link copies more."
        )


def _write_more(result: SimulationResult) -> str:
    """What lets more pages through to storage, what holds most up first."""
    bound, link = "a larger --write-bound (`write_bound` of hicache.open)", "a faster --storage-write"
    return f"{link} or {bound}" if busy_writing(result) >= BUSY else f"{bound} or {link}"


def _of_evicted(result: SimulationResult, columns: Columns | None) -> str:
    cause = cause_of_losses(result)
    if cause is None:
        return "the tiers that had them did not bring them up"
    told = _cause_told(cause, result)
    if columns is not None and (found := larger(result, columns)) is not None:
        told += (
            f", --{cause} {found.told(result.page_bytes)}"
            if found.pages > found.pages_now
            else f", but no doubling of it adds {100 * WORTH_DOUBLING:g} point"
        )
    if below := too_small(result, cause):
        told += f", with a larger --{below}, as that could not keep all of them"
    return told


def _cause_told(cause: Cause, result: SimulationResult) -> str:
    if cause in (Cause.WRITE_QUEUE, Cause.WRITE_RATE):
        # Whether storage is large enough is known only once it has been given all.
        return f"they had left host memory before storage had them: {_write_more(result)} would keep more"
    if cause is Cause.COPIES:
        return (
            "they had left device memory before host memory had them, as the copies before them were under way: a "
            "faster --device-link would keep more"
        )
    if cause is Cause.ADMISSION:
        used = result.settings.admission
        after = f"their use number {used}" if used else "their second use"
        return (
            f"they had made room for others before {after}, from which on they are written down: "
            "--admission 1 would keep more"
        )
    return f"they had made room for others: a larger --{cause} would keep them"


def _of_failed(result: SimulationResult) -> str:
    if result.shed_by_reason.get(PREFETCH_REFUSED, 0):
        return (
            "the queue from storage was full, or storage had lost them: a larger --read-bound (`read_bound` of "
            "hicache.open) or a faster --storage-read takes more"
        )
    if result.pages_lost["storage"]:
        return "storage had lost them when they were to be read: a larger --storage"
    return "storage did not give them: a faster --storage-read"


def _remedy(reason: str, result: SimulationResult, columns: Columns | None) -> str:
    if reason == MissReason.COLD:
        return "as far as is remembered nobody had asked for them before, so no cache would have them"
    if reason == MissReason.EVICTED:
        return _of_evicted(result, columns)
    if reason == OTHER_INSTANCE:
        return "another instance held them: --routing prefix_aware or a storage that all share would find them"
    if reason == MissReason.LATE:
        return "they came too late: --prefetch wait_complete, or a faster link"
    if reason == MissReason.OVER_BUDGET:
        return "there were no slots for them, or they did not pay: a larger --device, or a faster link"
    if reason == MissReason.FAILED:
        return _of_failed(result)
    return "see the reasons' own description"


def recommend(results: Sequence[SimulationResult]) -> Iterator[str]:
    """Which point of a sweep to take: the least memory that is as good as the best, the dearest counted first."""
    found = choose(results)
    if found is None:
        yield "No point of the sweep has an answer, so none can be recommended."
        return
    chosen, best, usable = found
    yield f"Take {named(chosen.settings, results)}: it hits {chosen.hit_rate_pages:.4f} of the pages asked."
    if chosen is not best:
        yield (
            f"The best point, {named(best.settings, results)}, hits {best.hit_rate_pages:.4f}: less than "
            f"{100 * WORTH_DOUBLING:g} point more, with more memory."
        )
    for name in SIZES:
        yield from _knee(name, chosen, usable)


def choose(results: Sequence[P]) -> tuple[P, P, list[P]] | None:
    """The point to take, the one that hits most, and all that have an answer; None where none has."""
    usable = [result for result in results if result.pages_asked and not result.problems]
    if not usable:
        return None
    best = max(usable, key=lambda result: (result.hit_rate_pages, -memory(result)[0]))
    near = [result for result in usable if best.hit_rate_pages - result.hit_rate_pages <= WORTH_DOUBLING]
    return min(near, key=lambda result: (memory(result), -result.hit_rate_pages)), best, usable


def _knee(name: str, chosen: SimulationResult, results: Sequence[SimulationResult]) -> Iterator[str]:
    """Where a tier's size stops paying, all else as chosen."""
    line = sorted(
        (result for result in results if _others(result.settings, name) == _others(chosen.settings, name)),
        key=lambda result: _size(result.settings, name),
    )
    line = [result for result in line if 0 < _size(result.settings, name) < _UNLIMITED]
    if len(line) < 2:
        return
    sizes = [_size(result.settings, name) for result in line]
    found = knee(sizes, [result.hit_rate_pages for result in line])
    if not found:  # that of the smallest size is none that was simulated
        yield f"No doubling of --{name} in the sweep adds {100 * WORTH_DOUBLING:g} point: its smallest size is enough."
    elif found == len(line) - 1:
        yield f"The knee of --{name} is at {sizes[found]:,.0f} pages or beyond the sweep: its last doubling still paid."
    else:
        yield (
            f"The knee of --{name} is at {sizes[found]:,.0f} pages: beyond it a doubling adds less than "
            f"{100 * WORTH_DOUBLING:g} point."
        )


def named(settings: SimulationSettings, among: Sequence[SimulationResult]) -> str:
    """A point by what it has of its own."""
    names = varied([result.settings for result in among]) or ["device"]
    return ", ".join(f"--{name.replace('_', '-')} {shown(getattr(settings, name), name)}" for name in names)


def varied(points: Sequence[Any]) -> list[str]:
    """Names of settings in which points differ; they have those of `SimulationSettings`."""
    names = [name for name in SimulationSettings.__dataclass_fields__ if name != "costs"]
    return [name for name in names if len({getattr(point, name) for point in points}) > 1]


def shown(value: object, name: str) -> str:
    """A setting's value as it is given."""
    if value is None:
        return {"page_size": "trace", "admission": "by policy"}.get(name, "unlimited")
    return str(value)


def _size(settings: Any, name: str) -> float:
    value = getattr(settings, name)
    return _UNLIMITED if value is None else float(value)


def memory(result: Point) -> tuple[float, float, float]:
    """Bytes of device, host and storage, all instances together; infinite without a limit."""
    settings = result.settings
    device, host, storage = (_size(settings, name) * result.page_bytes for name in SIZES)
    return device * settings.instances, host * settings.instances, storage


def _others(settings: SimulationSettings, name: str) -> tuple[object, ...]:
    return tuple(getattr(settings, other) for other in SimulationSettings.__dataclass_fields__ if other != name)
