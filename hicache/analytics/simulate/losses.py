"""Why pages that were had are gone: which tier let go of the last copy, and what kept the next one from having it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Final, Protocol

from hicache.runtime.executor import COPY_QUEUE_FULL
from hicache.runtime.storage_io import QUEUE_FULL

TIERS: Final = ("device", "host", "storage")
BUSY: Final = 0.5
"""Share of the time that a link writes, from which it is what holds writes up, and not the bound of its queue."""
TURNED_AWAY: Final = 0.01
"""Of the pages that a tier lost, how many must have been turned away to be blamed; each keeps back those behind it."""


class Cause(StrEnum):
    """What would keep pages that are evicted now."""

    DEVICE = "device"
    HOST = "host"
    STORAGE = "storage"
    COPIES = "copies"
    WRITE_QUEUE = "write_queue"
    WRITE_RATE = "write_rate"
    ADMISSION = "admission"


class Lossy(Protocol):
    """What is judged of a simulation: its result, or a document of it."""

    @property
    def pages_lost(self) -> Mapping[str, int]:
        """See `SimulationResult`, as for all."""
        ...

    @property
    def pages_put(self) -> int:
        """To storage."""
        ...

    @property
    def shed_by_reason(self) -> Mapping[str, int]:
        """Pages."""
        ...

    @property
    def traffic(self) -> Sequence[Any]:
        """Of each tier."""
        ...

    @property
    def simulated_seconds(self) -> float:
        """From the first request to the end of all."""
        ...

    @property
    def settings(self) -> Any:
        """With the names of `SimulationSettings`."""
        ...


def cause_of_losses(result: Lossy) -> Cause | None:
    """What most of the lost pages call for; None where no tier has lost any.

    A tier's size is named only where that tier itself let pages go that no tier below could have had. Where one could,
    it is why that one had not got them.
    """
    lost, settings = result.pages_lost, result.settings
    tier = max(TIERS, key=lambda name: lost.get(name, 0))
    if not lost.get(tier):  # a document of an earlier version does not tell
        return None
    selective = (settings.admission or 1) > 1 or (
        settings.admission is None and settings.write_policy == "write_through_selective"
    )
    if tier == "device" and settings.host:
        if result.shed_by_reason.get(COPY_QUEUE_FULL, 0) >= TURNED_AWAY * lost[tier]:
            return Cause.COPIES
        return Cause.ADMISSION if selective else Cause.DEVICE
    if tier == "host" and settings.storage != 0:
        if selective and result.shed_by_reason.get(QUEUE_FULL, 0) < TURNED_AWAY * lost[tier]:
            return Cause.ADMISSION
        return Cause.WRITE_RATE if busy_writing(result) >= BUSY else Cause.WRITE_QUEUE
    return Cause(tier)


def too_small(result: Lossy, cause: Cause) -> str:
    """The tier below that could not keep all that it would be given if the cause were mended; empty where it could."""
    lost, settings = result.pages_lost, result.settings
    if cause in (Cause.DEVICE, Cause.HOST, Cause.STORAGE):
        return ""
    if max(TIERS, key=lambda name: lost[name]) == "device":
        return "host" if lost["device"] > settings.host * settings.instances else ""
    given = result.pages_put + lost["host"]
    return "storage" if settings.storage is not None and given > settings.storage else ""


def busy_writing(result: Lossy) -> float:
    """Share of the time that the links to storage wrote, in the mean of all instances."""
    settings = result.settings
    could = settings.costs.storage_write * settings.instances * result.simulated_seconds
    written = sum(part.bytes_written for part in result.traffic if part.tier == "storage")
    return written / could if could > 0 else 0.0
