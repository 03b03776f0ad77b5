"""A bound on what one cache may keep in storage.

Bytes are charged when a put begins, and given back when it fails, when storage says that a page is not there any more,
and when the namespace was cleared: objects of old generations go by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from hicache.core.transfers import Transfer, TransferKind
from hicache.records import PageResult

__all__ = ["Account", "StorageQuota"]


class Account(Protocol):
    """Where bytes are charged. Thread-safe, never waits."""

    def charge(self, size: int) -> bool:
        """Take bytes, all or none; whether there were as many."""
        ...

    def refund(self, size: int) -> None:
        """Give bytes back that were taken."""
        ...


class StorageQuota:
    """Watches the transfers of one cache. Used under the reducer's lock.

    Args:
        account: of whoever the pages belong to.
        page_bytes: bytes of a page; headers are not counted.
    """

    def __init__(self, account: Account, *, page_bytes: int) -> None:
        self._account = account
        self._page_bytes = page_bytes
        self._put: dict[bytes, tuple[int, int]] = {}  # (generation, pages) by namespace
        self._charged: set[int] = set()

    def begin(self, transfer: Transfer) -> bool:
        """Whether these pages may be put."""
        if not self._account.charge(transfer.count * self._page_bytes):
            return False
        self._charged.add(transfer.id)
        return True

    def turned_away(self, transfer: Transfer) -> None:
        """A put that was to begin did not."""
        self._charged.discard(transfer.id)
        self._account.refund(transfer.count * self._page_bytes)

    def ended(self, transfer: Transfer, results: Sequence[PageResult]) -> None:
        """A transfer has ended."""
        kind = transfer.kind
        if kind is TransferKind.PUT and transfer.id in self._charged:
            self._charged.discard(transfer.id)
            good = sum(result is PageResult.OK for result in results)
            self._account.refund((transfer.count - good) * self._page_bytes)
            self._count(transfer, good)
        elif kind in (TransferKind.FETCH, TransferKind.TOUCH):
            self._count(transfer, -sum(result is PageResult.SOURCE_GONE for result in results))

    def _count(self, transfer: Transfer, pages: int) -> None:
        """So many pages more (or fewer) are there; those of an older generation are not any more."""
        namespace, generation = transfer.tree.namespace, transfer.tree.generation
        before, held = self._put.get(namespace, (generation, 0))
        if generation < before:
            self._account.refund(max(pages, 0) * self._page_bytes)  # too late: it was cleared
            return
        if generation > before:
            self._account.refund(held * self._page_bytes)
            held = 0
        gone = min(max(-pages, 0), held)  # what others have put was not charged here
        self._account.refund(gone * self._page_bytes)
        self._put[namespace] = (generation, held - gone + max(pages, 0))
