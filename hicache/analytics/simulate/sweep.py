"""Many simulations of one trace, in parallel, each kept in a file as soon as it is done."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import multiprocessing
import os
import signal
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any, Final

from hicache.analytics.analysis.columns import Columns
from hicache.analytics.analysis.spread import Spread
from hicache.analytics.simulate.result import InstanceResult, SimulationResult, TierTraffic
from hicache.analytics.simulate.run import Simulation
from hicache.analytics.simulate.settings import Costs, SimulationSettings
from hicache.errors import ConfigError

MOST_POINTS: Final = 100_000
_VERSION: Final = 2
_TICK: Final = 0.2  # seconds between looks whether somebody asked to stop

Show = Callable[[int, int], None]


def grid(choices: Mapping[str, Sequence[Any]], costs: Costs) -> list[SimulationSettings]:
    """All combinations that can be, in order; a storage without a host tier is left out where others are not.

    Args:
        choices: values of each setting by its name.
        costs: of all points.

    Raises:
        ConfigError: none can be, one is wrong by itself, or there are too many.
    """
    count = 1
    for values in choices.values():
        count *= len(values)
    if count > MOST_POINTS:
        raise ConfigError(f"{count:,} combinations: more than {MOST_POINTS:,}; give fewer values")
    points = []
    for values in itertools.product(*choices.values()):
        given = dict(zip(choices, values, strict=True))
        if given.get("storage", 0) != 0 and not given.get("host", 0) and len(choices["host"]) > 1:
            continue
        points.append(SimulationSettings(**given, costs=costs))
    return list(dict.fromkeys(points))


def sweep(
    columns: Columns,
    points: Sequence[SimulationSettings],
    *,
    jobs: int = 1,
    kept: Path | None = None,
    stopped: Callable[[], bool] | None = None,
    progress: Show | None = None,
) -> list[SimulationResult]:
    """Simulate each point.

    Args:
        columns: the trace.
        points: what to simulate.
        jobs: processes.
        kept: a file to which each result is added when it is done, and from which those of an earlier run are taken.
        stopped: whether to end now; what is done is kept.
        progress: called with (points done, points).

    Returns:
        Results of the points that were done, in the order of the points.

    Raises:
        ConfigError: the file is of another trace, no such file, or another sweep's just now; or a point does not go
            with the trace.
    """
    wanted = {_key(point): point for point in points}
    show = progress or (lambda _done, _all: None)
    with contextlib.nullcontext() if kept is None else _Kept(kept, columns) as store:
        found: dict[str, SimulationResult] = {} if store is None else store.read()
        todo = {key: point for key, point in wanted.items() if key not in found}
        done = len(wanted) - len(todo)
        show(done, len(wanted))
        for key, result in _simulate(columns, todo, min(jobs, len(todo)), stopped or (lambda: False)):
            found[key] = result
            done += 1
            if store is not None:
                store.add(key, result)
            show(done, len(wanted))
    return [found[key] for key in wanted if key in found]


def _simulate(
    columns: Columns, todo: Mapping[str, SimulationSettings], jobs: int, stopped: Callable[[], bool]
) -> Iterator[tuple[str, SimulationResult]]:
    """Results as they come."""
    if jobs <= 1:
        for key, point in todo.items():
            if stopped():
                return
            result = Simulation(columns, point).run(stopped=stopped)
            if result.interrupted:
                return
            yield key, result
        return
    # Spawned: forks of a process with threads, such as that of a progress bar, may hang.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_prepare, initargs=(columns,)) as pool:
        # What takes longest begins first, so that no process ends long after the others.
        longest_first = sorted(todo.items(), key=lambda entry: _work(entry[1]), reverse=True)
        keys = {pool.submit(_one, point): key for key, point in longest_first}
        left = set(keys)
        while left:
            ended, left = wait(left, timeout=_TICK, return_when=FIRST_COMPLETED)
            for future in ended:
                yield keys[future], future.result()
            if stopped():
                pool.shutdown(wait=False, cancel_futures=True)
                for process in list((pool._processes or {}).values()):  # no public way to end what is under way
                    process.terminate()
                return


_columns: Columns | None = None


def _prepare(columns: Columns) -> None:
    """In each worker: take the trace, and leave Ctrl-C to the process that asked."""
    global _columns  # noqa: PLW0603  a worker has one trace for its life
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _columns = columns


def _work(point: SimulationSettings) -> tuple[bool, bool, int]:
    """Grows with the time that a point takes: by its tiers, then by the transfers that small pages need."""
    return point.storage != 0, point.host > 0, -(point.page_size or 0)


def _one(point: SimulationSettings) -> SimulationResult:
    assert _columns is not None
    return Simulation(_columns, point).run()


def _key(point: SimulationSettings) -> str:
    text = json.dumps(point.document(), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


class _Kept:
    """Results in a file, one JSON object a line; the first says of which trace. Locked while it is entered.

    The kernel holds the lock for this process alone, so a killed one leaves none.
    """

    def __init__(self, path: Path, columns: Columns) -> None:
        self._path = path
        digest = hashlib.sha256()
        for part in (columns.page, columns.start, columns.input_tokens, columns.time):
            digest.update(part.tobytes())
        self._head = {"hicache_sweep": _VERSION, "trace": digest.hexdigest()[:24]}
        self._file = -1

    def __enter__(self) -> _Kept:
        try:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        except (OSError, ValueError) as error:
            raise self._unwritable(error) from None
        try:
            self._lock()
        except BaseException:
            os.close(self._file)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def _lock(self) -> None:
        if not stat.S_ISREG(os.fstat(self._file).st_mode):
            raise ConfigError(f"--out {self._path}: results are read back from it, so name a regular file")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ours = os.path.samestat(os.fstat(self._file), os.stat(self._path))
        except (BlockingIOError, FileNotFoundError):
            ours = False
        except OSError as error:
            raise self._unwritable(error) from None
        if not ours:
            raise ConfigError(f"--out {self._path}: another sweep is writing there; let it end, or name another file")

    def _unwritable(self, error: Exception) -> ConfigError:
        why = getattr(error, "strerror", None) or error
        return ConfigError(f"--out {self._path}: {why}; name a file that can be written")

    def read(self) -> dict[str, SimulationResult]:
        """What is there; a last line that was cut off is removed."""
        try:
            data = self._path.read_bytes()
            whole = data[: data.rfind(b"\n") + 1]
            if len(whole) < len(data):
                os.truncate(self._file, len(whole))
            if not whole:
                self._begin()
                return {}
        except OSError as error:
            raise self._unwritable(error) from None
        head, *lines = whole.splitlines()
        try:
            if json.loads(head) != self._head:
                raise ConfigError(
                    f"--out {self._path}: holds the results of another trace, or of another version; name another file"
                )
            entries = [json.loads(line) for line in lines]
            return {entry["key"]: _result(entry["result"]) for entry in entries}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"--out {self._path}: is no file of a sweep ({error}); name another file") from None

    def add(self, key: str, result: SimulationResult) -> None:
        """Keep one."""
        self._append({"key": key, "result": result.document(definitions=False)})

    def _begin(self) -> None:
        try:
            self._append(self._head)
        except ConfigError:
            os.unlink(self._path)  # nothing was in it, and nothing can be
            raise

    def _append(self, entry: dict[str, Any]) -> None:
        line = memoryview(json.dumps(entry).encode() + b"\n")
        try:
            while line:
                line = line[os.write(self._file, line) :]
        except OSError as error:
            raise ConfigError(f"--out {self._path}: {error.strerror}; make room, or name another file") from None


def _result(plain: dict[str, Any]) -> SimulationResult:
    """Back from its document."""
    settings = dict(plain["settings"])
    settings["costs"] = Costs(**settings["costs"])
    return SimulationResult(
        **plain
        | {
            "settings": SimulationSettings(**settings),
            "traffic": tuple(TierTraffic(**part) for part in plain["traffic"]),
            "instances": tuple(InstanceResult(**part) for part in plain["instances"]),
            "first_token_seconds": Spread.parse(plain["first_token_seconds"]),
            "first_token_seconds_without": Spread.parse(plain["first_token_seconds_without"]),
            "problems": tuple(plain["problems"]),
        }
    )
