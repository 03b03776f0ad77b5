"""What waits for the publisher's thread, and the message that it is writing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from hicache.errors import HicacheError
from hicache.events import Removed, Stored
from hicache.sidecar.kv_wire import Fields
from hicache.sidecar.residency import Scope, View

__all__ = ["ClearedScopes", "Item", "Reset", "Snapshot", "Told", "Writing"]


@dataclass(frozen=True, slots=True)
class Told:
    """A change of a few pages."""

    event: Stored | Removed
    scope: Scope
    pages: int


@dataclass(frozen=True, slots=True)
class ClearedScopes:
    """All pages of scopes went; `kin` may still have some of them."""

    scopes: tuple[Scope, ...]
    kin: tuple[Scope, ...]
    view: View
    everything: bool
    pages: int = 1


@dataclass(frozen=True, slots=True)
class Reset:
    """Tell everything anew."""

    view: View
    pages: int = 1


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Somebody wants everything, and the number that follows it."""

    view: View
    deliver: Callable[[bytes | HicacheError], None]
    pages: int = 0


Item: TypeAlias = Told | ClearedScopes | Reset | Snapshot


class Writing:
    """The events of the next message: removals, then what came.

    Attributes:
        events: as they are written.
        bytes: of their hashes and tokens, about.
        stores: whether pages came in it.
    """

    def __init__(self) -> None:
        self.events: list[Fields] = []
        self.bytes = 0
        self.stores = False

    def store(self, fields: Fields, size: int) -> None:
        """Pages came."""
        self.events.append(fields)
        self.bytes += size
        self.stores = True

    def remove(self, fields: Fields, size: int) -> None:
        """Pages went; before any came."""
        self.events.append(fields)
        self.bytes += size
