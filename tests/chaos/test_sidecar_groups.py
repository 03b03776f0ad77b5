"""Groups of ranks that are slow, stop and die: no page that lacks a part is ever a hit, and nobody waits long."""

from __future__ import annotations

import os
import random
import signal
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from hicache.core.arenas import ArenaPlan
from hicache.testing.admin import Admin, within
from hicache.testing.ranks import RankProcess, rank_namespace
from hicache.testing.sidecars import ServiceProcess

pytestmark = [pytest.mark.chaos, pytest.mark.slow]

ROUNDS = int(os.environ.get("HICACHE_CHAOS_ROUNDS", "6"))
"""Deaths and stops of ranks in each test."""

RECLAIM_SECONDS = 1.0
DEADLINE = 1.0
"""Of everything that a rank asks of the service; beyond it come 0.25 s in which an answer may still arrive."""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: sockets have at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="hc") as name:
        yield Path(name)


class Instance:
    """One instance of a model: its ranks as processes, the scheduler first.

    Args:
        service: where they attach.
        folder: for their seats.
        name: of the group.
        places: (place among those that share the heads, stage) of each rank.
        shape: of the model.
        schedules: whether the scheduler is a process that only schedules, beside the ranks; else the first rank is it.
        options: more flags of each.
    """

    def __init__(
        self,
        service: ServiceProcess,
        folder: Path,
        name: str,
        places: list[tuple[int, int]],
        *,
        shape: str = "mha",
        schedules: bool = False,
        options: tuple[str, ...] = (),
    ) -> None:
        tp_size, stages = (1 + max(place[index] for place in places) for index in range(2))
        common = ["--group", name, "--shape", shape, "--tp-size", str(tp_size), "--stages", str(stages), *options]
        self.report = folder / "wrong"
        common += ["--report", str(self.report)]
        seats = [str(folder / f"{name}{number}") for number in range(len(places))]
        self._options = [
            [*common, "--tp-rank", str(rank), "--stage", str(stage), "--seat", seat]
            for (rank, stage), seat in zip(places, seats, strict=True)
        ]
        if schedules:
            self._options.insert(0, [*common, "--schedules", "--seats", *seats])
        else:
            self._options[0] += ["--seats", *seats[1:]]
        self._address = service.address
        self._seeds = iter(range(1000 * ord(name[0]), 10**6))
        self.processes = [self._start(number) for number in range(len(self._options))]

    def _start(self, number: int) -> RankProcess:
        return RankProcess(self._address, seed=next(self._seeds), options=self._options[number])

    def started(self) -> None:
        for process in self.processes:
            process.started()

    def kill(self, number: int) -> None:
        self.processes[number].kill()

    def again(self, number: int) -> None:
        """A new process in the place of one that was killed."""
        self.processes[number] = self._start(number)
        self.processes[number].started()

    def stop(self) -> list[dict[str, Any]]:
        return [process.stop() for process in self.processes]

    def close(self) -> None:
        for process in self.processes:
            process.kill()


@contextmanager
def instances(*made: Instance) -> Iterator[tuple[Instance, ...]]:
    """They work when the block begins, and are gone behind it."""
    with ExitStack() as stack:
        for instance in made:
            stack.callback(instance.close)
        for instance in made:
            instance.started()
        yield made


def total(results: list[dict[str, Any]]) -> dict[str, int]:
    """What ranks counted, together; none has read a wrong byte, and none has waited beyond its deadline."""
    found: dict[str, int] = {}
    for result in results:
        for name, count in result["counts"].items():
            found[name] = found.get(name, 0) + count
    assert found.get("wrong", 0) == 0, found
    assert not [name for name in found if name.startswith("error")], found
    assert max(result["longest"] for result in results) < DEADLINE + 0.75, results
    return found


def trouble(admin: Admin, all_of_them: tuple[Instance, ...], seed: int, *, reclaim: bool = True) -> None:
    """Ranks and schedulers stop beyond the end of their leases, and die; what dead ones held is free at once."""
    chance = random.Random(seed)
    for turn in range(ROUNDS):
        instance = chance.choice(all_of_them)
        victim = chance.randrange(len(instance.processes))
        if turn % 2:
            instance.processes[victim].signal(signal.SIGSTOP)
            admin.wait(chance.random() * 0.6)
            instance.processes[victim].signal(signal.SIGCONT)
        else:
            instance.kill(victim)
            if reclaim:
                within(RECLAIM_SECONDS, lambda: admin.leases()["ended"] == 0)
            instance.again(victim)


def hits(admin: Admin) -> int:
    """Pages that requests got from HOST."""
    (pool,) = admin.statistics()["pools"]
    found: int = pool["statistics"]["pages"]["host"]
    return found


def finish(admin: Admin, service: ServiceProcess, all_of_them: tuple[Instance, ...]) -> dict[str, int]:
    """All are well again: they complete requests, and then leave nothing behind."""
    before = hits(admin), admin.leases()["opened"]
    within(20.0, lambda: hits(admin) > before[0] + 50 and admin.leases()["opened"] > before[1] + 30)
    found = total([result for instance in all_of_them for result in instance.stop()])
    for instance in all_of_them:
        assert not instance.report.exists(), instance.report.read_text()
    within(RECLAIM_SECONDS, admin.at_rest)
    assert service.stop()["dropped"] == {}
    return found


def test_replicas_of_two_ranks(folder: Path) -> None:
    """Two instances share pages: each finds what the other computed, and no half of it."""
    # Schedulers give up while ranks are in the middle, and slots soon are another page's.
    slow = ("--slow", "0.3", "--patience", "0.05", "--families", "2")
    with ServiceProcess(folder, "--set", "leases.seconds=0.3", host="4MiB") as service, Admin(service) as admin:
        made = [Instance(service, folder, name, [(0, 0), (1, 0)], options=slow) for name in "ab"]
        with instances(*made) as both:
            within(20.0, lambda: len(admin.statistics()["pools"]) == 1 and hits(admin) > 50)
            trouble(admin, both, seed=1, reclaim=False)  # at any time some slots wait for a slow one
            found = finish(admin, service, both)
            assert found["complete"] > 0
            assert found["read"] > 0


def test_latents_of_four_ranks_are_stored_once(folder: Path) -> None:
    """What all ranks hold alike takes the memory of one, is written by one of them, and read by all."""
    plan = ArenaPlan.of(rank_namespace("mla").geometry, 16, tp_size=4)
    places = [(rank, 0) for rank in range(4)]
    with (
        ServiceProcess(folder, "--set", "leases.seconds=0.3", host="8MiB") as service,
        Admin(service) as admin,
        instances(Instance(service, folder, "a", places, shape="mla", schedules=True)) as one,
    ):
        within(20.0, lambda: len(admin.statistics()["pools"]) == 1 and hits(admin) > 50)
        (pool,) = admin.statistics()["pools"]
        assert pool["page_bytes"] == plan.page_bytes == 4 * (128 + 64) * 2 * 16
        assert [arena["holders"] for arena in pool["arenas"]] == [4]
        assert pool["bytes"] == pool["slots"] * 24576  # a page's latents, once
        assert service.shared_memory("hicache-arena") == pool["bytes"]
        trouble(admin, one, seed=2)
        found = finish(admin, service, one)
        assert found["complete"] > 0
        assert found["read"] > found["found"] > 0


def test_stages_and_ranks(folder: Path) -> None:
    """Two stages of two ranks: a page is there when all four have written their part."""
    places = [(rank, stage) for stage in range(2) for rank in range(2)]
    with (
        ServiceProcess(folder, "--set", "leases.seconds=0.3", host="16MiB") as service,
        Admin(service) as admin,
        instances(Instance(service, folder, "a", places)) as one,
    ):
        within(20.0, lambda: len(admin.statistics()["pools"]) == 1 and hits(admin) > 50)
        assert len(admin.statistics()["pools"][0]["arenas"]) == 4
        trouble(admin, one, seed=3)
        found = finish(admin, service, one)
        assert found["complete"] > 0
