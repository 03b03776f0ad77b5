"""Which executor carries out which runs: measured when pools are attached, in bounded time, recorded, overridable."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from hicache.clock import Clock
from hicache.cuda.driver import CudaDriver, CudaError, Stream
from hicache.cuda.executors import METHODS, BatchExecutor, Executor, Executors, PlainExecutor
from hicache.cuda.runs import RunTable
from hicache.errors import ConfigError

__all__ = ["AUTO", "Choice", "ChosenExecutors", "Rate", "choose"]

_LOG = logging.getLogger(__name__)

AUTO: Final = "auto"

_LENGTHS: Final = tuple(1 << bits for bits in range(8, 23))
"""Lengths of runs that are measured, 256 bytes to 4 MiB."""
_SCRATCH: Final = 32 << 20
"""Bytes on each side, for as long as it is measured: far above what caches hold of a link's traffic."""
_SCRATCH_SHARE: Final = 64
"""At most one part in so many of the device's free memory is taken for it; but what a proof needs is."""
_LEAST_SCRATCH: Final = 512 << 10
_MOST_RUNS: Final = 1024
_REPEATS: Final = 3
_KERNEL_GAIN: Final = 1.1
"""How much faster than the copy engines the kernel must be, as it takes multiprocessors from the model."""
_PROOF: Final = (1, 3, 15, 16, 17, 31, 64, 100, 511, 512, 513, 4096, 4099, 20_000)
"""Lengths of the runs that an executor has to move rightly before it is used at all."""


_FEW: Final = 5
"""Runs of one table of the proof, as few runs may go another way than many."""


@dataclass(frozen=True, slots=True)
class Rate:
    """One measurement.

    Attributes:
        method: one of `METHODS`.
        to_device: the direction.
        run_bytes: length of each run.
        runs: of the copy.
        bytes_per_second: the median's.
    """

    method: str
    to_device: bool
    run_bytes: int
    runs: int
    bytes_per_second: float


@dataclass(frozen=True, slots=True)
class Choice:
    """What was decided, and why.

    Attributes:
        asked: "auto" or the method that the settings name.
        up, down: to the device, and from it: (length of runs from which on it holds, method), from 0 on.
        rates: all that was measured.
        absent: why methods are not used, by name.
        notes: one line for each thing that went otherwise than asked.
    """

    asked: str
    up: tuple[tuple[int, str], ...]
    down: tuple[tuple[int, str], ...]
    rates: tuple[Rate, ...] = ()
    absent: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()

    def method(self, run_bytes: int, *, to_device: bool) -> str:
        """What moves runs of that length."""
        found = ""
        for least, name in self.up if to_device else self.down:
            if run_bytes >= least:
                found = name
        return found

    def describe(self) -> dict[str, Any]:
        """For statistics; JSON types only."""
        return {
            "asked": self.asked,
            "to_device": [list(step) for step in self.up],
            "to_host": [list(step) for step in self.down],
            "absent": dict(self.absent),
            "notes": list(self.notes),
            "measured": [
                {
                    "method": rate.method,
                    "to_device": rate.to_device,
                    "run_bytes": rate.run_bytes,
                    "runs": rate.runs,
                    "bytes_per_second": round(rate.bytes_per_second),
                }
                for rate in self.rates
            ],
        }


class ChosenExecutors:
    """Carries out tables by what was chosen for the mean length of their runs. Any thread may call it.

    Attributes:
        choice: what was decided.
        executors: those that are left.
    """

    def __init__(self, executors: Executors, choice: Choice) -> None:
        self.choice = choice
        self.executors = executors

    def run(self, table: RunTable, stream: Stream, *, to_device: bool) -> str:
        """Put the copies of a table into a stream; the method that carries them out.

        Raises:
            CudaError: a call failed. Some of the copies may be in the stream.
        """
        if not len(table):
            return ""
        name = self.choice.method(table.total // len(table), to_device=to_device)
        self.executors.usable[name].run(table, stream)
        return name

    def close(self) -> None:
        """Give back what the executors hold, once their work has passed. Idempotent."""
        self.executors.close()


def choose(
    driver: CudaDriver,
    executors: Executors,
    clock: Clock,
    *,
    asked: str = AUTO,
    seconds: float = 1.0,
    lengths: Sequence[int] = _LENGTHS,
) -> ChosenExecutors:
    """Prove the executors, measure them, and decide. Called once, when pools are attached.

    An executor that is asked for by name and cannot be used is replaced by the best of the others, with a note; one
    that moves a wrong byte, or none, is never used.

    Args:
        driver: the device.
        executors: those that could be made. Those that fail the proof are closed and taken out.
        clock: for the time that measuring takes.
        asked: "auto", or one of `METHODS`, which then moves everything and is not measured.
        seconds: time for measuring; what is not reached is decided by the nearest length that was.
        lengths: of runs, ascending.

    Raises:
        ConfigError: an unknown method.
    """
    if asked not in (AUTO, *METHODS):
        raise ConfigError(f'unknown way to copy {asked!r:.40}: use one of "{AUTO}", {", ".join(METHODS)}')
    absent, notes = dict(executors.absent), []
    rates: list[Rate] = []
    unproven = [name for name in executors.usable if name != PlainExecutor.name]
    try:
        with _scratch(driver) as scratch:
            while unproven:
                if wrong := _wrong(scratch, executors.usable[unproven[0]]):
                    absent[unproven[0]] = wrong
                    _drop(executors, unproven[0])
                unproven.pop(0)
            if asked == AUTO and len(executors.usable) > 1:
                rates = _measured(scratch, executors, clock, seconds, lengths)
    except CudaError as error:
        for name in unproven:
            absent[name] = f"it could not be proven ({error})"
            _drop(executors, name)
        notes.append(f"nothing could be measured ({error}): {_unmeasured(executors)} is used for all runs")
    up = down = _only(asked)
    if asked not in executors.usable:
        up, down = (_steps(rates, executors, to_device=to_device) for to_device in (True, False))
        if asked != AUTO:
            notes.append(f"copies by {asked} were asked for, but {absent[asked]}: {_named(up, down)} used instead")
    for note in notes:
        _LOG.warning("CUDA copies: %s", note)
    return ChosenExecutors(
        executors, Choice(asked, up, down, tuple(rates), tuple(sorted(absent.items())), tuple(notes))
    )


def _drop(executors: Executors, name: str) -> None:
    with suppress(CudaError):  # a device that is lost gives nothing back, and says so elsewhere
        executors.usable.pop(name).close()


def _only(name: str) -> tuple[tuple[int, str], ...]:
    return ((0, name),)


def _unmeasured(executors: Executors) -> str:
    """Batches cost least where nothing is known."""
    return BatchExecutor.name if BatchExecutor.name in executors.usable else PlainExecutor.name


def _named(*steps: tuple[tuple[int, str], ...]) -> str:
    return " and ".join(dict.fromkeys(name for one in steps for _, name in one))


def _steps(rates: Sequence[Rate], executors: Executors, *, to_device: bool) -> tuple[tuple[int, str], ...]:
    """The best method from each measured length on; lengths of one method in a row are one step."""
    by_length: dict[int, dict[str, float]] = {}
    for rate in rates:
        if rate.to_device == to_device:
            by_length.setdefault(rate.run_bytes, {})[rate.method] = rate.bytes_per_second
    if not by_length:
        return _only(_unmeasured(executors))
    steps: list[tuple[int, str]] = []
    before = 0
    for length, measured in sorted(by_length.items()):
        best = _best(measured)
        if not steps or steps[-1][1] != best:
            # Half-way to the length before, as lengths grow by factors.
            steps.append((int((before * length) ** 0.5) if steps else 0, best))
        before = length
    return tuple(steps)


def _best(measured: dict[str, float]) -> str:
    found = PlainExecutor.name
    for name in METHODS[1:]:
        gain = _KERNEL_GAIN if name == METHODS[-1] else 1.0
        if measured.get(name, 0.0) > measured[found] * gain:
            found = name
    return found


@dataclass(frozen=True, slots=True)
class _Scratch:
    """Memory on both sides, and a stream."""

    driver: CudaDriver
    stream: Stream
    device: int
    host: int
    size: int


@contextmanager
def _scratch(driver: CudaDriver) -> Iterator[_Scratch]:
    size = max(min(_SCRATCH, driver.memory()[0] // _SCRATCH_SHARE), _LEAST_SCRATCH)
    device = driver.malloc(size)
    try:
        host = driver.host_alloc(size)
        try:
            yield _Scratch(driver, driver.stream(), device, host, size)
        finally:
            driver.host_free(host)
    finally:
        driver.free(device)


def _passed(scratch: _Scratch) -> None:
    event = scratch.driver.event()
    scratch.driver.record(event, scratch.stream)
    scratch.driver.synchronize(event)


def _wrong(scratch: _Scratch, executor: Executor) -> str:
    """What is wrong with it: it has to bring odd runs up, and down again to another place, byte by byte."""
    length = np.array(_PROOF * 3, np.int64)
    at = np.cumsum(length) - length + np.arange(len(length))  # a byte between them, so that all alignments come up
    room = int(length.sum()) + len(length)
    back_at = scratch.host + 2 * room
    random = np.random.default_rng(room).integers(0, 256, room, np.uint8)
    sent, back = _bytes(scratch.host, room), _bytes(back_at, room)
    sent[:], back[:] = random, 0
    there = np.zeros_like(at)
    order = np.argsort(length % 7, kind="stable")
    there[order] = scratch.device + np.cumsum(length[order]) - length[order]
    down = RunTable(there, back_at + at, length)
    try:
        executor.run(RunTable(scratch.host + at, there, length), scratch.stream)
        for part in (down[:_FEW], down[_FEW:]):
            executor.run(part, scratch.stream)
        _passed(scratch)
    except CudaError as error:
        return f"its first copy failed: {error}"
    moved = np.zeros(room, bool)
    for start, size in zip(at.tolist(), length.tolist(), strict=True):
        moved[start : start + size] = True
    wrong = int(np.count_nonzero(back != np.where(moved, random, 0)))
    return f"it moved {wrong} of {room} bytes wrongly here" if wrong else ""


def _measured(
    scratch: _Scratch, executors: Executors, clock: Clock, seconds: float, lengths: Sequence[int]
) -> list[Rate]:
    """Rates of all usable executors; for each length and direction of all of them or of none.

    Every other length comes first, those between them while there is time.
    """
    end = clock.now() + seconds
    rates: list[Rate] = []
    for length in (*lengths[::2], *lengths[1::2]):
        for to_device in (True, False):
            if clock.now() >= end:
                return rates
            if length > scratch.size:
                continue
            table = _scattered(scratch, length, to_device=to_device)
            rates.extend(
                Rate(name, to_device, length, len(table), table.total / _median_seconds(scratch, executor.run, table))
                for name, executor in executors.usable.items()
            )
    return rates


def _scattered(scratch: _Scratch, length: int, *, to_device: bool) -> RunTable:
    """Runs side by side on one side and in disorder on the other, as slots of a pool that has been in use."""
    count = min(_MOST_RUNS, scratch.size // length)
    at = np.arange(count, dtype=np.int64) * length
    mixed = np.random.default_rng(count).permutation(at)
    device, host = scratch.device + mixed, scratch.host + at
    sizes = np.full(count, length, np.int64)
    return RunTable(host, device, sizes) if to_device else RunTable(device, host, sizes)


def _median_seconds(scratch: _Scratch, run: Callable[[RunTable, Stream], None], table: RunTable) -> float:
    """Of a copy, between events; the time that putting it into the stream takes counts where the device waits."""
    driver = scratch.driver
    run(table, scratch.stream)  # the first one pays for what is made once
    times = []
    for _ in range(_REPEATS):
        start, end = driver.event(timing=True), driver.event(timing=True)
        driver.record(start, scratch.stream)
        run(table, scratch.stream)
        driver.record(end, scratch.stream)
        driver.synchronize(end)
        times.append(driver.elapsed(start, end))
    return max(sorted(times)[_REPEATS // 2], 1e-9)


def _bytes(address: int, size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
