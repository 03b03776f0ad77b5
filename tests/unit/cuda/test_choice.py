"""Executors are proven, measured and chosen when pools are attached, in bounded time, and can be named instead."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hicache.cuda.choice import Choice, ChosenExecutors, choose
from hicache.cuda.executors import Executor, Executors, open_executors
from hicache.cuda.runs import RunTable
from hicache.errors import ConfigError
from hicache.testing.clock import ManualClock
from hicache.testing.cuda import FakeCuda
from hicache.testing.cudacopy import KERNELS, copy_runs

LENGTHS = (1024, 8192, 65536)


class Timed(Executor):
    """Another executor, and so many seconds a copy as a rule says, as the fake cannot tell what a kernel moves."""

    def __init__(self, inner: Executor, clock: ManualClock, rule: Callable[[str, int, int], float]) -> None:
        self.name = inner.name
        self.inner, self.clock, self.rule = inner, clock, rule

    def run(self, table: RunTable, stream: Any) -> None:
        self.inner.run(table, stream)
        self.clock.advance(self.rule(self.name, len(table), table.total))

    def close(self) -> None:
        self.inner.close()


class Wristwatch(FakeCuda):
    """A fake whose events are stamped by the test's clock."""

    def __init__(self, clock: ManualClock, **options: Any) -> None:
        super().__init__(memory=1 << 24, **options)
        self.clock = clock
        self.stamps: dict[int, float] = {}

    def record(self, event: Any, stream: Any) -> None:
        super().record(event, stream)
        self.stamps[event.ptr] = self.clock.now()

    def elapsed(self, start: Any, end: Any) -> float:
        return self.stamps[end.ptr] - self.stamps[start.ptr]


def chosen(rule: Callable[[str, int, int], float], asked: str = "auto", seconds: float = 1e9, **options: Any) -> Choice:
    clock = ManualClock()
    cuda = Wristwatch(clock, **{"kernels": KERNELS} | options)
    made = open_executors(cuda, cuda.facts(), pinned=True)
    timed = Executors({name: Timed(one, clock, rule) for name, one in made.usable.items()}, made.absent)
    found = choose(cuda, timed, clock, asked=asked, seconds=seconds, lengths=LENGTHS)
    found.close()
    assert cuda.allocated == {}
    assert cuda.registered == {}
    return found.choice


def crossing(name: str, runs: int, total: int) -> float:
    """The kernel for short runs, batches for long ones."""
    return {"plain": 1e-5 * runs, "batch": 1e-6 * runs, "kernel": 1e-5}[name] + total / (
        2e10 if name == "kernel" else 5e10
    )


def test_each_length_gets_what_was_fastest_for_it() -> None:
    choice = chosen(crossing)
    assert [name for _, name in choice.up] == ["kernel", "batch"]
    assert choice.down == choice.up
    assert choice.up[0][0] == 0
    assert 1024 < choice.up[1][0] <= 65536
    assert choice.method(1, to_device=True) == "kernel"
    assert choice.method(1 << 30, to_device=False) == "batch"
    assert len(choice.rates) == 3 * 3 * 2
    assert choice.notes == ()
    best = max((rate for rate in choice.rates if rate.run_bytes == 1024), key=lambda rate: rate.bytes_per_second)
    assert best.method == "kernel"


def test_directions_are_measured_apart() -> None:
    clock = ManualClock()
    cuda = Wristwatch(clock, kernels=KERNELS)
    made = open_executors(cuda, cuda.facts(), pinned=True)
    up: list[bool] = []

    class Lopsided(Timed):
        def run(self, table: RunTable, stream: Any) -> None:
            self.inner.run(table, stream)
            to_device = int(table.destination[0]) in cuda.allocated or any(
                start <= int(table.destination[0]) < start + size for start, size in cuda.allocated.items()
            )
            up.append(to_device)
            fast = {"plain": 0.0, "batch": 1e-3, "kernel": 1e-2}
            slow = {"plain": 1e-2, "batch": 1e-3, "kernel": 1e-2}
            clock.advance(1e-6 + (fast if to_device else slow)[self.name])

    timed = Executors({name: Lopsided(one, clock, crossing) for name, one in made.usable.items()}, {})
    choice = choose(cuda, timed, clock, lengths=LENGTHS, seconds=1e9).choice
    assert choice.up == ((0, "plain"),)
    assert choice.down == ((0, "batch"),)
    assert {True, False} == set(up)
    timed.close()


def test_the_kernel_must_be_clearly_faster_as_it_takes_multiprocessors() -> None:
    barely = {"plain": 1.0, "batch": 1.0, "kernel": 0.95}
    assert chosen(lambda name, _runs, _total: barely[name]).up == ((0, "plain"),)
    clearly = {"plain": 1.0, "batch": 0.99, "kernel": 0.5}
    assert chosen(lambda name, _runs, _total: clearly[name]).up == ((0, "kernel"),)


def test_measuring_ends_in_time_and_the_nearest_length_decides_the_rest() -> None:
    choice = chosen(lambda name, _runs, _total: {"plain": 2.0, "batch": 1.0, "kernel": 3.0}[name], seconds=1.0)
    assert {rate.run_bytes for rate in choice.rates} == {1024}
    assert {rate.to_device for rate in choice.rates} == {True}
    assert choice.up == ((0, "batch"),)
    assert choice.down == ((0, "batch"),)


@pytest.mark.parametrize("name", ["plain", "batch", "kernel"])
def test_one_that_is_asked_for_moves_everything(name: str) -> None:
    choice = chosen(crossing, asked=name)
    assert choice.up == choice.down == ((0, name),)
    assert choice.rates == ()
    assert choice.notes == ()


def test_one_that_is_asked_for_and_absent_is_replaced_with_the_cause(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        choice = chosen(crossing, asked="kernel", kernels={})
    assert choice.up == choice.down == ((0, "batch"),)
    expected = "copies by kernel were asked for, but compiling hicache_copy_runs: CompileException (-1): no model of it"
    assert choice.notes == (f"{expected}: batch used instead",)
    assert expected in caplog.text


def test_a_method_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown way to copy 'teleport': use one of \"auto\", plain, batch, kernel"):
        chosen(crossing, asked="teleport")


@pytest.mark.parametrize("wrong", ["nothing", "one byte short", "elsewhere"])
def test_a_kernel_that_moves_wrong_bytes_is_never_used(wrong: str) -> None:
    def broken(cuda: FakeCuda, arguments: Any) -> Any:
        runs = copy_runs(cuda, arguments)
        if wrong == "nothing":
            return []
        if wrong == "one byte short":
            return [(target, source, size - 1) for target, source, size in runs if size > 1]
        return [(target, source + 1, size) for target, source, size in runs[:-1]]

    choice = chosen(
        lambda name, _runs, _total: 1.0 if name != "kernel" else 1e-9, kernels={"hicache_copy_runs": broken}
    )
    assert "kernel" not in {rate.method for rate in choice.rates}
    assert "bytes wrongly here" in dict(choice.absent)["kernel"]


def test_one_whose_first_copy_fails_is_not_used() -> None:
    clock = ManualClock()
    cuda = Wristwatch(clock, kernels=KERNELS)
    made = open_executors(cuda, cuda.facts(), pinned=True)
    cuda.fail("memcpy_batch_async", "cudaErrorNotSupported", 801)
    choice = choose(cuda, made, clock, asked="batch").choice
    assert choice.method(100, to_device=True) == "plain"
    assert "its first copy failed: memcpy_batch_async: cudaErrorNotSupported (801)" in dict(choice.absent)["batch"]
    made.close()


def test_without_memory_to_measure_in_nothing_unproven_is_used(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    cuda = Wristwatch(clock, kernels=KERNELS)
    made = open_executors(cuda, cuda.facts(), pinned=True)
    cuda.fail("malloc", "cudaErrorMemoryAllocation", 2)
    found: ChosenExecutors = choose(cuda, made, clock)
    assert found.choice.up == ((0, "plain"),)
    assert "could not be proven" in dict(found.choice.absent)["kernel"]
    assert "plain is used for all runs" in caplog.text
    found.close()
    assert cuda.allocated == {}
    assert cuda.registered == {}


def test_tables_go_the_way_that_was_chosen_for_their_mean_run() -> None:
    cuda = FakeCuda(kernels=KERNELS)
    made = open_executors(cuda, cuda.facts(), pinned=True)
    steps = ((0, "kernel"), (1000, "batch"))
    executors = ChosenExecutors(made, Choice("auto", steps, ((0, "plain"),)))
    host, device, stream = cuda.host_alloc(8192), cuda.malloc(8192), cuda.stream()

    def runs(length: int, count: int) -> RunTable:
        at = np.arange(count, dtype=np.int64) * length
        return RunTable(host + at, device + at, at * 0 + length)

    assert executors.run(runs(100, 9), stream, to_device=True) == "kernel"
    assert executors.run(runs(1000, 2), stream, to_device=True) == "batch"
    assert executors.run(runs(1000, 2), stream, to_device=False) == "plain"
    assert executors.run(runs(1000, 0), stream, to_device=False) == ""
    cuda.finish()
    executors.close()


def test_a_choice_describes_itself_in_plain_types() -> None:
    described = chosen(crossing, batches=False).describe()
    assert described["asked"] == "auto"
    assert described["absent"] == {"batch": "this fake has none"}
    assert described["to_device"][0] == [0, "kernel"]
    assert set(described["measured"][0]) == {"method", "to_device", "run_bytes", "runs", "bytes_per_second"}
