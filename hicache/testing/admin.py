"""A look at a service from outside, for tests that wait for something to happen there."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from hicache.rpc.address import Address
from hicache.rpc.client.admin import AdminClient
from hicache.rpc.client.options import Secrets
from hicache.testing.sidecars import ServiceProcess

__all__ = ["Admin", "within"]


class Admin:
    """Looks at a service; a context manager."""

    def __init__(self, service: ServiceProcess) -> None:
        self._client = AdminClient(Address.parse(service.address), Secrets())

    def statistics(self) -> dict[str, Any]:
        """Everything that it counts."""
        return self._client.statistics()

    def leases(self) -> dict[str, int]:
        """Its leases, by state."""
        found: dict[str, int] = self.statistics()["service"]["leases"]
        return found

    def host(self) -> dict[str, int]:
        """Pages of HOST by state."""
        (pool,) = self.statistics()["pools"]
        found: dict[str, int] = pool["statistics"]["core"]["host"]
        return found

    def wait(self, seconds: float) -> None:
        """Let the service live on for so long."""
        until = self.statistics()["service"]["uptime_seconds"] + seconds
        within(seconds + 10.0, lambda: self.statistics()["service"]["uptime_seconds"] >= until)

    def at_rest(self) -> bool:
        """Nothing is pinned, private, filling or in quarantine, and the states add up."""
        found = self.host()
        states = ("free", "private", "filling", "resident", "quarantined")
        assert sum(found[state] for state in states) == found["capacity"]
        busy = found["private"] or found["filling"] or found["quarantined"] or found["pinned"]
        return not (busy or self.leases()["ended"])

    def __enter__(self) -> Admin:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()


def within(seconds: float, condition: Callable[[], bool]) -> float:
    """Look until a condition holds; returns after how long it did."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, f"not within {seconds} seconds"
    return time.monotonic() - began
