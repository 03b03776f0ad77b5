"""Services and clients that die, stop and come back at any moment: no wrong byte, no leaked page, nobody waits long."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hicache.testing.admin import Admin, within
from hicache.testing.sidecars import ServiceProcess, WorkerProcess

pytestmark = [pytest.mark.chaos, pytest.mark.slow]

ROUNDS = int(os.environ.get("HICACHE_CHAOS_ROUNDS", "12"))
"""Deaths and stops of clients; the soak makes it more."""

RECLAIM_SECONDS = 1.0
"""Within which everything of a dead client is free."""


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A short path: sockets have at most 107 bytes."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="hc") as name:
        yield Path(name)


def seen(results: list[dict[str, Any]]) -> dict[str, int]:
    """What workers counted, together; none has read a wrong byte."""
    total: dict[str, int] = {}
    for result in results:
        for name, count in result["counts"].items():
            total[name] = total.get(name, 0) + count
    assert total.get("wrong", 0) == 0, total
    assert not [name for name in total if name.startswith("error")], total
    return total


def test_clients_die_and_stop_under_load(folder: Path) -> None:
    """Killed ones leave nothing behind within a second; stopped ones keep their slots, and go on rightly afterwards."""
    chance = random.Random(7)
    with ServiceProcess(folder, "--set", "leases.seconds=0.2") as service, Admin(service) as admin:
        options = ["--hold", "0.02", "--report", str(folder / "wrong")]
        workers = [WorkerProcess(service.address, seed=seed, options=options) for seed in range(4)]
        try:
            before: tuple[int, int] | None = None
            longest = 0.0

            def dead_is_free() -> bool:
                service = admin.statistics()["service"]
                return service["sessions"] == len(workers) - 1 and not service["leases"]["ended"]

            for number in range(ROUNDS):
                victim = chance.randrange(len(workers))
                if number % 2:
                    workers[victim].signal(signal.SIGSTOP)
                    admin.wait(chance.random() * 0.4)  # past the end of its leases, in some rounds
                    workers[victim].signal(signal.SIGCONT)
                else:
                    workers[victim].kill()
                    longest = max(longest, within(RECLAIM_SECONDS, dead_is_free))
                    workers[victim] = WorkerProcess(service.address, seed=100 + number, options=options)
                if before is None:
                    before = service.memory, service.descriptors
            total = seen([worker.stop() for worker in workers])
            assert total["requests"] > 0
            assert not (folder / "wrong").exists(), "one that was killed has read wrong bytes"
            print(f"{ROUNDS} deaths and stops, at most {longest:.3f} s from death to free: {total}")
            within(RECLAIM_SECONDS, admin.at_rest)
            assert before is not None
            events = admin.statistics()["service"]["events"]["kept"]  # at most 65,536: a ring for who watches
            assert service.memory < before[0] + 16 * 2**20 + 2048 * events
            assert service.descriptors <= before[1]
        finally:
            for worker in workers:
                worker.kill()
        assert service.stop() == {"dropped": {}}


@pytest.mark.case("LEAK-2")
def test_dead_clients_pages_are_free_within_a_second(folder: Path) -> None:
    """Every page that a killed client held, read or reserved, is free at once, and nothing else was touched."""
    with ServiceProcess(folder) as service, Admin(service) as admin:
        for seed in range(3):
            with WorkerProcess(service.address, seed=seed, options=["--hold", "5", "--pages", "200"]) as worker:
                within(10.0, lambda: len(admin.statistics()["pools"]) > 0 and admin.host()["pinned"] > 0)
                worker.kill()
                assert within(RECLAIM_SECONDS, admin.at_rest) < RECLAIM_SECONDS


@pytest.mark.case("LEAK-2")
def test_stopped_clients_slots_are_nobody_elses(folder: Path) -> None:
    """While a stopped client might still write, its slots stay in quarantine, long after its leases have ended."""
    options = ["--hold", "30", "--pages", "200"]
    with (
        ServiceProcess(folder, "--set", "leases.seconds=0.1") as service,
        Admin(service) as admin,
        WorkerProcess(service.address, seed=1, options=options) as worker,
    ):
        within(10.0, lambda: len(admin.statistics()["pools"]) > 0 and admin.host()["pinned"] > 0)
        worker.signal(signal.SIGSTOP)
        within(10.0, lambda: admin.statistics()["service"]["leases"]["ended"] == 1)
        kept = admin.statistics()["service"]["leases"]["quarantined_slots"]
        assert kept > 0
        with WorkerProcess(service.address, seed=2) as other:
            admin.wait(0.5)
            assert admin.statistics()["service"]["leases"]["quarantined_slots"] == kept
            seen([other.stop()])
        worker.kill()
        within(RECLAIM_SECONDS, admin.at_rest)


def test_service_dies_under_load_and_comes_back(folder: Path) -> None:
    """Clients hear at once that there is no cache, and connect again within two seconds; old leases mean nothing."""
    with ServiceProcess(folder) as first:
        workers = [WorkerProcess(first.address, seed=seed) for seed in range(4)]
        try:
            with Admin(first) as admin:
                within(10.0, lambda: admin.statistics()["service"]["leases"]["opened"] > 20)
            first.kill()
            with ServiceProcess(folder) as second, Admin(second) as admin:
                within(2.0, lambda: admin.statistics()["service"]["sessions"] == 4)
                within(10.0, lambda: admin.statistics()["service"]["leases"]["opened"] > 20)
                admin.wait(0.5)  # the last one has a session, and may still be mapping its memory
                results = [worker.stop() for worker in workers]
                seen(results)
                for result in results:
                    assert result["client"]["connections"] == 2
                    assert result["away"]["calls"] > 100
                    assert result["away"]["p99"] < 0.005, result["away"]
                    assert result["away"]["most"] < 0.1, result["away"]
                within(RECLAIM_SECONDS, admin.at_rest)
                assert second.stop() == {"dropped": {}}
        finally:
            for worker in workers:
                worker.kill()


def test_next_service_takes_the_pages_over_under_load(folder: Path, tmp_path: Path) -> None:
    """A planned restart loses no page that was resident; every byte is right, and nobody has to do anything."""
    storage = f"file://{tmp_path}?capacity=1GiB"
    with ServiceProcess(folder, "--storage", storage, "--drain", "1") as first:
        workers = [WorkerProcess(first.address, seed=seed) for seed in range(3)]
        try:
            with Admin(first) as admin:
                within(10.0, lambda: admin.statistics()["service"]["leases"]["opened"] > 50)
            with ServiceProcess(folder, "--storage", storage, "--drain", "1", takeover=True) as second:
                first.ended()
                with Admin(second) as admin:
                    resident = admin.host()["resident"]
                    assert resident > 50
                    within(2.0, lambda: admin.statistics()["service"]["sessions"] == 3)
                    within(10.0, lambda: admin.statistics()["service"]["leases"]["opened"] > 50)
                    seen([worker.stop() for worker in workers])
                    within(RECLAIM_SECONDS, admin.at_rest)
                    assert second.stop()["dropped"] == {}
        finally:
            for worker in workers:
                worker.kill()
