"""What the core's driver remembers of requests and transfers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from hicache.core.cache import Core
from hicache.core.prompt import Hasher, Prompt, SymbolsAreHashes
from hicache.core.reasons import RequestCounts
from hicache.core.residency import FREE, Slots, SlotTable
from hicache.core.transfers import Lease, Transfer, TransferKind
from hicache.core.tree import HiRadixTree
from hicache.records import MissReason, PageResult, Tier
from hicache.testing.choices import Choices, CountingHasher, tag


@dataclass(eq=False)
class ModelEngine:
    """A request as its engine sees it."""

    lease: Lease
    number: int
    mark: int  # tag of its private slots, which it may write at any time; a transfer's tag is -1 - its id
    reads: list[tuple[int, Slots, list[int]]] = field(default_factory=list)  # tier, slots, tags expected there
    declined: int | None = None  # page index from which on bringing up did not pay
    untold: int | None = None  # page index from which on storage did not tell

    def decline(self, core: Core, choices: Choices) -> bool:
        """Bringing up does not pay, or (False) storage does not tell, from some page on."""
        page = choices.integer(0, self.lease.prompt.pages)
        if choices.integer(0, 1):
            self.declined = page if self.declined is None else min(self.declined, page)
            core.decline(self.lease, page)
            return True
        self.untold = page
        core.unanswered(self.lease, page, MissReason.FAILED)
        return False

    def check_reasons(self, counts: RequestCounts) -> None:
        """What was declined did not come too late, and what storage did not tell of was not called new."""
        got = counts.device + counts.host + counts.storage
        known = min(max(got, self.lease.match.pages), counts.asked)
        if self.declined is not None and self.declined <= got:
            gone = counts.asked - known  # of these an earlier load may have been given up as late
            assert counts.missed.get(MissReason.LATE, 0) <= gone, "pages that were declined count as late"
        if self.untold is not None:
            told = max(0, self.untold - known)
            new = counts.missed.get(MissReason.COLD, 0) + counts.missed.get(MissReason.OTHER_NAMESPACE, 0)
            assert new <= told, "pages that storage did not tell of count as new"


@dataclass
class RunningTransfer:
    """A transfer under way: whether its I/O has begun, and what a read of storage found then."""

    transfer: Transfer
    begun: bool = False
    got: list[bool] = field(default_factory=list)

    @property
    def copies(self) -> bool:
        """Whether it moves pages between owned tiers."""
        return self.transfer.kind in (TransferKind.LOAD, TransferKind.WRITE_BACK)


class Alphabet:
    """One namespace's prompts: rows of 2-byte symbols, which the core sees as they are or as their hashes.

    Args:
        hashes: whether it sees hashes.

    Attributes:
        width: bytes of what the core sees of a page.
        hasher: hashes that.
    """

    def __init__(self, *, hashes: bool) -> None:
        self._pages = CountingHasher()
        self._hashes = hashes
        self.width = self._pages.size if hashes else self._pages.width
        self.hasher: Hasher = SymbolsAreHashes(self._pages.size, self._pages) if hashes else self._pages

    def prompt(self, symbols: bytes, past: Prompt | None = None) -> Prompt:
        """The prompt of these symbols, behind another."""
        before = b"" if past is None else past.symbols
        if self._hashes:
            symbols = self._pages.extend(before[-self.width :] or None, symbols, len(symbols) // self._pages.width)
        return Prompt(before + symbols, self.width, self.hasher)


class Prompts:
    """Prompts of several namespaces: few different pages, so that they share much and part anywhere.

    Args:
        choices: where decisions come from.
        core: whose trees they are looked up in.
        namespaces: how many.
        alphabet: different pages.
        hashes: whether the core sees hashes.
    """

    def __init__(self, choices: Choices, core: Core, *, namespaces: int, alphabet: int, hashes: bool) -> None:
        self._choices = choices
        self._core = core
        self._most = alphabet - 1
        self._alphabets = [Alphabet(hashes=hashes) for _ in range(namespaces)]
        self._last: list[Prompt] = []

    def draw(self) -> tuple[HiRadixTree, Prompt]:
        """A prompt, often one of the last, and its namespace's tree."""
        choose = self._choices.integer
        if self._last and choose(1, 3) != 1:
            prompt = self._last[choose(0, len(self._last) - 1)]
        else:
            alphabet = self._alphabets[choose(0, len(self._alphabets) - 1)]
            symbols = [choose(0, self._most) if choose(1, 2) == 1 else 0 for _ in range(choose(0, 10))]
            prompt = alphabet.prompt(b"".join(symbol.to_bytes(2, "little") for symbol in symbols))
            self._last = [*self._last, prompt][-12:]
        return self._tree(self._which(prompt)), prompt

    def longer(self, prompt: Prompt) -> Prompt:
        """The prompt and one page more."""
        more = self._choices.integer(0, self._most).to_bytes(2, "little")
        return self._alphabets[self._which(prompt)].prompt(more, prompt)

    def any_tree(self) -> HiRadixTree:
        """The tree of any namespace."""
        return self._tree(self._choices.integer(0, len(self._alphabets) - 1))

    def _which(self, prompt: Prompt) -> int:
        return next(i for i, alphabet in enumerate(self._alphabets) if alphabet.hasher is prompt.hasher)

    def _tree(self, which: int) -> HiRadixTree:
        alphabet = self._alphabets[which]
        return self._core.tree(bytes([which]) * 16, width=alphabet.width, hasher=alphabet.hasher)


class WatchedWords:
    """Generation words of HOST slots, and whether they do what they promise to readers.

    Attributes:
        words: for the core.
    """

    def __init__(self, slots: int) -> None:
        self.words = np.zeros(slots, np.uint64)
        self._before = self.words.copy()
        self._free = np.ones(slots, np.bool_)

    def check(self, table: SlotTable) -> None:
        """Slots that were free at the last check and are not now have another word, and no word ever goes back."""
        if table.words is None:
            return
        free = table.state == FREE
        risen = self.words > self._before
        assert risen[self._free & ~free].all(), "a slot was given away under the word that it had before"
        assert (self.words >= self._before).all(), "a word went back"
        self._before, self._free = self.words.copy(), free


NOBODY = 1 << 40
"""Tag of bytes in a slot that no node holds."""


def written_tags(core: Core, transfer: Transfer) -> list[int]:
    """What the engine wrote: the pages of the lease that owns the slots, whoever it is by now."""
    assert transfer.target_slots is not None
    table = core.registry.tables[transfer.kind.target]
    tags = []
    for slot in transfer.target_slots.tolist():
        owner = core.registry.nodes[table.owner[slot]] if table.owner[slot] >= 0 else None
        if owner is None:
            tags.append(NOBODY)  # detached: its bytes are nobody's any more
        else:
            page = int(table.depth[slot]) - owner.first
            tags.append(tag(owner.tree.hashes(owner, page, page + 1)[0]))
    return tags


def some_fail(choices: Choices, count: int) -> list[PageResult]:
    """Results of a transfer: mostly all good, else some FAILED."""
    if choices.integer(1, 4) != 1:
        return [PageResult.OK] * count
    return [PageResult.FAILED if choices.integer(1, 4) == 1 else PageResult.OK for _ in range(count)]


def check_orphans(running: Iterable[RunningTransfer]) -> None:
    """A storage has just gone: all of its transfers, and no others, know that; copies may have been given up before."""
    for entry in running:
        if entry.copies:
            continue
        orphan = Tier.STORAGE in entry.transfer.kind.value
        assert entry.transfer.orphaned == orphan, f"{entry.transfer}: orphaned is {entry.transfer.orphaned}"
