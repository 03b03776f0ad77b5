"""How much host memory a service may take for all its pools together."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from hicache.errors import ConfigError
from hicache.units import format_size

__all__ = ["HostBudget", "Share"]


@dataclass(frozen=True, eq=False, slots=True)
class Share:
    """Part of a budget that somebody has.

    Attributes:
        size: bytes.
        what: who has it, for messages.
    """

    size: int
    what: str


class HostBudget:
    """Bytes of host memory that pools share. Thread-safe.

    Args:
        total: bytes in all.

    Attributes:
        total: as given.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._lock = threading.Lock()
        self._shares: list[Share] = []

    @property
    def free(self) -> int:
        """Bytes that are left."""
        with self._lock:
            return self._left()

    def reserve(self, size: int, what: str) -> Share:
        """Take a share, or nothing.

        Args:
            size: bytes.
            what: who takes it, such as the model's name, for messages.

        Raises:
            ConfigError: less than that is left; the text says who has the rest.
        """
        share = Share(size, what)
        with self._lock:
            if size > self._left():
                raise ConfigError(self._refusal(size, what))
            self._shares.append(share)
        return share

    def release(self, share: Share) -> None:
        """Give a share back. Idempotent."""
        with self._lock:
            self._shares = [other for other in self._shares if other is not share]

    def _left(self) -> int:
        return self.total - sum(share.size for share in self._shares)

    def _refusal(self, size: int, what: str) -> str:
        users = ", ".join(f"{share.what} {format_size(share.size)}" for share in self._shares) or "nobody"
        return (
            f"a pool of {format_size(size)} for {what} does not fit into the {format_size(self.total)} of host memory "
            f"that the service may take: {format_size(self._left())} are left, the rest has {users}; ask for less, "
            "or give it more"
        )
