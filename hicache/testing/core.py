"""A small stage for tests of the core: prompts as letters, one page a letter, transfers completed by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hicache.core.cache import Core
from hicache.core.config import CoreConfig
from hicache.core.prompt import Prompt
from hicache.core.transfers import Lease, Transfer, TransferKind
from hicache.core.tree import HiRadixTree
from hicache.records import Match, PageResult
from hicache.testing.choices import CountingHasher


class Stage:
    """A core whose prompts are strings: "ABC" is three pages. The hash of a page depends on all before it.

    Attributes:
        core: the core.
        hasher: its page hashes; shared by all namespaces, as in the product.
    """

    def __init__(self, *, device: int | None = 64, host: int = 0, storage: bool = False, **settings: Any) -> None:
        self.core = Core(CoreConfig(device_pages=device, host_pages=host, storage=storage, **settings))
        self.hasher = CountingHasher()

    def tree(self, namespace: str = "n") -> HiRadixTree:
        """The live tree of a namespace named by one letter."""
        return self.core.tree(namespace.encode() * 16, width=2, hasher=self.hasher)

    def prompt(self, letters: str) -> Prompt:
        """A prompt of one page a letter."""
        return Prompt(letters.encode("utf-16-le"), 2, self.hasher)

    def match(self, letters: str, namespace: str = "n") -> Match:
        """What is usable now."""
        return self.core.match(self.tree(namespace), self.prompt(letters))

    def lease(self, letters: str, namespace: str = "n", **options: Any) -> Lease:
        """An open request."""
        return self.core.lease(self.tree(namespace), self.prompt(letters), **options)

    def commit(self, letters: str, namespace: str = "n", *, close: bool = True, **options: Any) -> Lease:
        """A request that computes and commits all that it does not find."""
        lease = self.lease(letters, namespace, **options)
        self.core.allocate(lease, len(letters) - lease.usable)
        self.core.commit(lease, len(letters), ready=True)
        if close:
            self.core.release(lease)
        return lease

    def take(self, kind: TransferKind | None = None) -> list[Transfer]:
        """The transfers that are to be executed now, taken away; with `kind`, all must be of it."""
        taken = list(self.core.actions)
        self.core.actions.clear()
        assert kind is None or all(transfer.kind is kind for transfer in taken), taken
        return taken

    def end(self, transfer: Transfer, results: Sequence[PageResult] | PageResult = PageResult.OK) -> None:
        """Complete a transfer; one result stands for all pages."""
        if isinstance(results, PageResult):
            results = [results] * transfer.count
        self.core.complete(transfer.id, results)

    def settle(self) -> list[Transfer]:
        """Complete everything well, also what follows from it. Returns the transfers."""
        done = []
        while self.core.actions:
            transfer = self.core.actions.popleft()
            self.end(transfer)
            done.append(transfer)
        return done

    @classmethod
    def filled(cls, **settings: Any) -> Stage:
        """Three tiers of 8 pages, with all of ABCD in each of them."""
        stage = cls(device=8, host=8, storage=True, **settings)
        stage.commit("ABCD")
        stage.settle()
        assert stage.tree().believed_pages(stage.tree().walk(stage.prompt("ABCD"))) == 4
        return stage

    def at_rest(self) -> None:
        """Every invariant holds, and nothing is pinned, filling, private or quarantined."""
        self.core.check()
        statistics = self.core.statistics()
        for tier in (statistics.device, statistics.host):
            assert tier.pinned == tier.private == tier.filling == tier.quarantined == 0
        assert not statistics.transfers

    def shape(self, namespace: str = "n") -> dict[str, Any]:
        """The tree's form: spans as letters, each with its children."""

        def below(children: Any) -> dict[str, Any]:
            return {node.span.decode("utf-16-le"): below(node.children) for node in children.values()}

        return below(self.tree(namespace).root.children)
