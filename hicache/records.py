"""Values that every layer shares. All are immutable."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum


class Tier(IntEnum):
    """Where a page's bytes are. The integer is also the index of the tier's slot table."""

    DEVICE = 0
    HOST = 1
    STORAGE = 2


class PageResult(IntEnum):
    """How a transfer ended for one page.

    Only SOURCE_BAD (corrupt where it was read) and SOURCE_GONE (not there any more) speak against the source. A
    time-out or a trouble at the destination is FAILED and leaves the source believed.
    """

    OK = 0
    FAILED = 1
    SOURCE_BAD = 2
    SOURCE_GONE = 3


class MissReason(StrEnum):
    """Why pages that a request asked for did not come from the cache. Each missed page has exactly one."""

    COLD = "cold"  # never seen here
    EVICTED = "evicted"  # was here, made room for others
    EXPIRED = "expired"  # was here, its time or its generation ended
    OTHER_NAMESPACE = "other_namespace"  # the same tokens are known under another namespace
    FAILED = "failed"  # a transfer of it failed, or storage could not be asked
    LATE = "late"  # it, or the answer whether storage has it, was on its way when the deadline came
    UNALIGNED_TAIL = "unaligned_tail"  # tokens behind the last whole page that may be used
    OVER_BUDGET = "over_budget"  # no slots for it, or not worth loading
    BYPASSED = "bypassed"  # the request went past the cache


@dataclass(frozen=True, slots=True)
class Match:
    """How many leading pages of a prompt are usable, by the tier they would come from.

    The three are disjoint and in order: the first `device` pages from DEVICE, the next `host` from HOST, the next
    `storage` from STORAGE (believed, not probed).
    """

    device: int = 0
    host: int = 0
    storage: int = 0

    @property
    def pages(self) -> int:
        """Usable pages in all tiers together."""
        return self.device + self.host + self.storage
