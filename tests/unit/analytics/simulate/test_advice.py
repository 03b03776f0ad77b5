"""What a simulation suggests, followed: it must change what it says it changes."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hicache.analytics.analysis.columns import Columns, read_columns
from hicache.analytics.analysis.curves import exact_distances
from hicache.analytics.analysis.larger import Larger
from hicache.analytics.simulate.advice import advice
from hicache.analytics.simulate.losses import Cause, cause_of_losses, too_small
from hicache.analytics.simulate.pages import PromptPages
from hicache.analytics.simulate.result import SimulationResult
from hicache.analytics.simulate.run import Simulation
from hicache.analytics.simulate.settings import Costs, SimulationSettings
from hicache.analytics.simulate.worth import TRUSTED, WITHIN, larger
from hicache.analytics.traces import open_trace

TRACE = Path(__file__).parents[4] / "benchmarks" / "traces" / "conversation_1000.jsonl"
SIZES = ("device", "host", "storage")
STEPS = 3


@pytest.fixture(scope="module")
def columns() -> Columns:
    return read_columns(itertools.islice(iter(open_trace([TRACE])), 200))


@pytest.fixture(scope="module")
def many() -> Columns:
    """Requests of which more come again."""
    return read_columns(itertools.islice(iter(open_trace([TRACE])), 500))


def simulated(columns: Columns, settings: SimulationSettings) -> SimulationResult:
    return Simulation(columns, settings).run()


def followed(settings: SimulationSettings, cause: Cause, below: str) -> SimulationSettings:
    """What the advice says, eight times of it."""
    costs = settings.costs
    changed: dict[str, Any] = {name: 8 * getattr(settings, name) for name in {cause.value, below} & set(SIZES)}
    if cause is Cause.COPIES:
        changed["costs"] = replace(costs, device_link=8 * costs.device_link)
    elif cause is Cause.WRITE_RATE:
        changed["costs"] = replace(costs, storage_write=8 * costs.storage_write)
    elif cause is Cause.WRITE_QUEUE:
        changed["write_bound"] = 8 * settings.write_bound
    elif cause is Cause.ADMISSION:
        changed["admission"] = 1
    return replace(settings, **changed)


def hits_what_is_named(columns: Columns, result: SimulationResult, size: Larger) -> None:
    """The advice names a size and what it hits, and a simulation at this size hits that."""
    cause = cause_of_losses(result)
    assert cause is not None
    [line] = [line for line in advice(result, columns) if "missed as evicted" in line]
    assert f"--{cause} {size.told(result.page_bytes)}" in line
    assert size.hit_rate_now == result.hit_rate_pages
    assert size.gain > 0
    changed: dict[str, Any] = {cause.value: size.pages}
    now = simulated(columns, replace(result.settings, **changed))
    assert now.hit_rate_pages == pytest.approx(size.hit_rate, abs=WITHIN)
    assert now.hit_rate_pages > result.hit_rate_pages


def settings_of(chance: random.Random) -> SimulationSettings:
    device = chance.choice([100, 300, 1000])
    if chance.random() < 0.2:
        return SimulationSettings(device=device)
    return SimulationSettings(
        device=device,
        host=chance.choice([300, 1000]),
        storage=chance.choice([0, 500, 2000, 30_000, None]),
        write_bound=chance.choice([2**28, 2**30]),
        admission=chance.choice([None, None, 2]),
        costs=Costs(
            storage_write=chance.choice([2.5e8, 2.5e9, 5e10]),
            device_link=chance.choice([5e9, 5e10]),
        ),
    )


@pytest.mark.parametrize("seed", range(12))
def test_advice_that_is_followed_helps(columns: Columns, seed: int) -> None:
    settings = settings_of(random.Random(seed))
    result = simulated(columns, settings)
    cause = cause_of_losses(result)
    assert cause is not None, "each of these tiers is too small for the trace"
    below = too_small(result, cause)
    option = {
        Cause.COPIES: "--device-link",
        Cause.WRITE_QUEUE: "--write-bound",
        Cause.WRITE_RATE: "--storage-write",
        Cause.ADMISSION: "--admission 1",
    }.get(cause, f"--{cause}")
    [line] = [line for line in advice(result) if "missed as evicted" in line]
    assert option in line
    for name in {f"--{size} " for size in SIZES if size not in (cause, below)}:
        assert f"a larger {name}" not in f"{line} "
    if (size := larger(result, columns)) is not None:
        hits_what_is_named(columns, result, size)
    for _ in range(STEPS):
        settings = followed(settings, cause, below)
        now = simulated(columns, settings)
        if now.hit_rate_pages > result.hit_rate_pages:
            return
        if now.misses_by_reason["evicted"] < result.misses_by_reason["evicted"]:
            return
    pytest.fail(f"{line} changed nothing")


def test_a_storage_that_is_not_full_is_not_to_be_larger(columns: Columns) -> None:
    """What is turned away at the queue to storage is, and a larger storage changes nothing."""
    settings = SimulationSettings(device=100, host=300, storage=30_000)
    result = simulated(columns, settings)
    assert result.pages_lost["storage"] == 0 < result.pages_lost["host"]
    assert result.shed_by_reason["queue_full"] > 0
    assert cause_of_losses(result) is Cause.WRITE_QUEUE
    told = "\n".join(advice(result))
    assert "were turned away as the queue to storage was full (room for 4 pages)" in told
    assert "larger --storage " not in told
    larger = simulated(columns, replace(settings, storage=None))
    assert larger.misses_by_reason == result.misses_by_reason
    assert list(advice(larger))[1] == list(advice(result))[1], "the same cause without a limit of storage"
    assert simulated(columns, replace(settings, write_bound=2**33)).hit_rate_pages > result.hit_rate_pages


def test_a_storage_that_is_full_is(columns: Columns) -> None:
    result = simulated(columns, SimulationSettings(device=300, host=300, storage=500, instant=True))
    assert result.pages_lost["storage"] == result.pages_evicted["storage"] > 0 == result.pages_lost["host"]
    assert cause_of_losses(result) is Cause.STORAGE
    assert "a larger --storage would keep them" in "".join(advice(result))


def test_nothing_lost_has_no_cause(columns: Columns) -> None:
    result = simulated(columns, SimulationSettings(device=None))
    assert (result.pages_lost, cause_of_losses(result)) == ({"device": 0, "host": 0, "storage": 0}, None)


@pytest.mark.parametrize(
    "settings",
    [
        SimulationSettings(device=1000),
        SimulationSettings(device=1000, host=3000),
        SimulationSettings(device=300, host=3000, instant=True),
        SimulationSettings(device=300, host=300, storage=500, instant=True),
        SimulationSettings(device=2000, page_size=128),
        SimulationSettings(device=500, page_size=1024, instant=True),
    ],
)
def test_a_size_is_named_with_what_it_hits(many: Columns, settings: SimulationSettings) -> None:
    result = simulated(many, settings)
    size = larger(result, many)
    assert size is not None
    assert size.pages > size.pages_now
    hits_what_is_named(many, result, size)


@pytest.mark.parametrize("page_size", [None, 128, 512, 1024])
def test_the_curve_is_of_the_pages_that_are_simulated(many: Columns, page_size: int | None) -> None:
    """Where nothing takes time, one pool hits just what their distances say."""
    pages = PromptPages(many, page_size).cut()
    distances = exact_distances(pages)
    for device in (int(pages.length.max()), 3000):
        result = simulated(many, SimulationSettings(device=device, page_size=page_size, instant=True))
        assert (result.pages_asked, result.requests_refused) == (pages.references, 0)
        assert result.pages_device == np.searchsorted(distances, device)
    above = np.where(pages.index > 0, np.roll(pages.page, 1), -1)
    assert (pages.parent[pages.page] == above).all()
    assert (pages.depth[pages.page] == pages.index).all()


@pytest.mark.parametrize(
    "settings",
    [
        SimulationSettings(device=300, instances=2),
        SimulationSettings(device=300, eviction="lfu"),
        SimulationSettings(device=300, host=300, write_policy="write_back"),
        SimulationSettings(device=300, host=300, admission=2),
        SimulationSettings(device=300, host=300, storage=500, decide=True),
    ],
)
def test_no_size_is_made_up(columns: Columns, settings: SimulationSettings) -> None:
    """Where the tiers are not one LRU pool the curve says nothing of them."""
    result = simulated(columns, settings)
    assert cause_of_losses(result) is not None
    assert larger(result, columns) is None
    assert "->" not in "".join(advice(result, columns))


def test_a_curve_that_does_not_tell_the_present_tells_nothing(columns: Columns) -> None:
    """As where time and queues decide what is hit."""
    result = simulated(columns, SimulationSettings(device=300))
    assert larger(replace(result, hit_rate_pages=result.hit_rate_pages + TRUSTED / 2), columns) is not None
    for off in (2 * TRUSTED, -2 * TRUSTED):
        assert larger(replace(result, hit_rate_pages=result.hit_rate_pages + off), columns) is None


def test_a_simulation_of_a_part_of_the_trace_names_no_size(columns: Columns) -> None:
    stops = iter([False, True])
    result = Simulation(columns, SimulationSettings(device=300)).run(stopped=lambda: next(stops))
    assert result.requests < columns.requests
    assert larger(result, columns) is None


def test_more_memory_that_does_not_pay_is_said_to(columns: Columns) -> None:
    """Pages are lost, and no doubling of the tier would hit a hundredth more of them."""
    ideal = int(exact_distances(columns)[-1]) + 1
    result = simulated(columns, SimulationSettings(device=ideal - 1))
    assert result.misses_by_reason["evicted"] > 0
    assert larger(result, columns) == Larger(ideal - 1, ideal - 1, result.hit_rate_pages, result.hit_rate_pages)
    lost = replace(result, misses_by_reason=result.misses_by_reason | {"evicted": result.pages_asked // 10})
    [line] = [line for line in advice(lost, columns) if "missed as evicted" in line]
    assert line.endswith("a larger --device would keep them, but no doubling of it adds 1 point.")
