"""A service under many sessions for long: `python tests/soak_sidecar.py [--sessions N] [--verbs N]`, or `make soak`.

Client processes with many sessions each lease, read and compare, reserve, write and commit pages of shared prompts,
over and over, and now and then one of them is killed. At the end nothing may be wrong, held or larger than before:
bytes read, leases, slots, files, memory. Exit code 1 if anything is.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from hicache.rpc.address import Address
from hicache.rpc.client.admin import AdminClient
from hicache.rpc.client.options import Secrets
from hicache.testing.sidecars import ServiceProcess, WorkerProcess

MEMORY_GROWTH = 32 * 2**20
LOOK_SECONDS = 5.0
START_SECONDS = 300.0  # for a process's sessions, beside all others on few cores


def main() -> int:
    """Run, print what was seen, and judge it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=200)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--verbs", type=int, default=2_000_000)
    parser.add_argument("--kill-seconds", type=float, default=30.0, help="seconds between two kills of a client")
    parser.add_argument("--host", default="256MiB")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hc") as name, ServiceProcess(Path(name), host=options.host) as service:
        troubles = soak(service, options)
    for trouble in troubles:
        sys.stdout.write(f"TROUBLE: {trouble}\n")
    sys.stdout.write("failed\n" if troubles else "all well\n")
    return bool(troubles)


def soak(service: ServiceProcess, options: argparse.Namespace) -> list[str]:
    """The run itself; returns what is not as it should be."""
    each = options.sessions // options.processes
    flags = ["--sessions", str(each), "--pages", "24", "--families", "32", "--deadline", "30"]

    def worker(seed: int) -> WorkerProcess:
        return WorkerProcess(service.address, seed=seed, options=flags, within=START_SECONDS)

    workers = [worker(seed * 1000) for seed in range(options.processes)]
    chance, began, killed = random.Random(1), time.monotonic(), 0
    admin = AdminClient(Address.parse(service.address), Secrets(), timeout=START_SECONDS)
    try:
        memory = descriptors = 0
        before = answered(admin.statistics())  # those of the first processes, while the last were started
        next_kill = began + options.kill_seconds
        while (seen := answered(admin.statistics()) - before) < options.verbs:
            if not memory and seen > options.verbs / 50:  # warm: code is loaded, buffers have grown
                memory, descriptors = service.memory, service.descriptors
            if time.monotonic() > next_kill:
                victim = chance.randrange(len(workers))
                workers[victim].kill()
                killed += 1
                workers[victim] = worker(chance.randrange(10**6))
                next_kill = time.monotonic() + options.kill_seconds
            time.sleep(min(LOOK_SECONDS, options.verbs / 50_000))
        seconds = time.monotonic() - began
        grown = service.memory - memory
        results = [worker.stop() for worker in workers]
        rate = seen / seconds
        return judge(service, admin, results, rate=rate, grown=grown, descriptors=descriptors, killed=killed)
    finally:
        admin.close()
        for worker in workers:
            worker.kill()


def answered(statistics: dict[str, Any]) -> int:
    """Verbs that the service has answered."""
    return sum(verb["answered"] for verb in statistics["service"]["verbs"])


def judge(
    service: ServiceProcess,
    admin: AdminClient,
    results: list[dict[str, Any]],
    *,
    rate: float,
    grown: int,
    descriptors: int,
    killed: int,
) -> list[str]:
    """Print what was seen; returns what is not as it should be."""
    total: dict[str, int] = {}
    for result in results:
        for name, count in result["counts"].items():
            total[name] = total.get(name, 0) + count
    statistics = admin.statistics()
    verbs, host = answered(statistics), statistics["pools"][0]["statistics"]["core"]["host"]
    sys.stdout.write(f"{verbs:,} verbs, {rate:,.0f}/s; {killed} clients killed\n")
    sys.stdout.write(f"clients that were not killed: {total}\n")
    for verb in statistics["service"]["verbs"]:
        sys.stdout.write(f"  {verb['verb']:<16}{verb['answered']:>10,}  failed {verb['failed']:,}\n")
    sys.stdout.write(f"service: memory grew by {grown / 2**20:.1f} MiB, {service.descriptors} descriptors\n")
    leases = statistics["service"]["leases"]
    held = host["private"] + host["filling"] + host["quarantined"] + host["pinned"] + leases["open"] + leases["ended"]
    states = sum(host[state] for state in ("free", "private", "filling", "resident", "quarantined"))
    checks = {
        f"{total.get('wrong', 0)} pages had wrong bytes": total.get("wrong", 0) == 0,
        f"errors: {[name for name in total if name.startswith('error')]}": not any(
            n.startswith("error") for n in total
        ),
        f"something is still held: {host}, {leases}": held == 0,
        "the states of slots do not add up": states == host["capacity"],
        f"memory grew by {grown} bytes": grown < MEMORY_GROWTH,
        f"{service.descriptors} descriptors are open, {descriptors} were": service.descriptors <= descriptors,
        "nothing was read": total.get("read", 0) > 0,
        f"it dropped something at its end: {(ended := service.stop())}": ended == {"dropped": {}},
    }
    return [text for text, good in checks.items() if not good]


if __name__ == "__main__":
    sys.exit(main())
