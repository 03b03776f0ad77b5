"""Which pages are resident in which tier, as far as events have told, and what describes each.

Pages lie in buckets. A view of all of them at one moment costs no copy: from then on a bucket is copied
before it changes for the first time, so the price is spread over the changes that follow. A page costs about 230 bytes,
and 4 bytes a token and some 50 more where its tokens are known.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Final

from hicache.core.identity import DerivedNamespace
from hicache.core.symbols import TOKEN_SIZE
from hicache.events import Stored
from hicache.records import Tier

BUCKETS: Final = 16_384
"""So many that copying those which a slice of changes touches takes about a millisecond at a million pages."""

KEY_BYTES: Final = 4
_PAUSE: Final = 1000
_SPARED: Final = 40  # low bits of a hash, by which a dictionary places keys inside a bucket
EVENT_BYTES: Final = 256 * 1024
"""Most bytes of hashes and tokens in one event; longer runs are several events."""

_TIERS: Final = {mask: tuple(tier for tier in Tier if mask >> tier & 1) for mask in range(8)}


Page = tuple[bytes | None, int, bytes, int]
"""What is known of a page of a scope: the key of the page before it, or None at the start of a prompt; its index in the
prompt; its tokens as u32 little endian, empty where nobody has told them; the tiers it is in, as bits `1 << tier`.

A plain tuple, since the garbage collector looks at nothing else once and never again."""


class Scope:
    """Pages of one namespace's generation that one source has told of.

    Attributes:
        key: begins the keys of its pages.
        source: who tells.
        namespace: digest of the derived namespace.
        generation: of its content.
        derived: the namespace, where the source knows it.
        token_bytes: bytes of a page's tokens; 0 where that is not known.
        counts: pages by tier.
        twins: scopes of the same namespace and generation, itself included; they share one entry in the stream.
        kin: scopes whose page hashes may be equal, itself included: those with the same chain of hashes.
    """

    __slots__ = ("counts", "derived", "generation", "key", "kin", "namespace", "source", "token_bytes", "twins")

    def __init__(
        self, number: int, source: Hashable, namespace: bytes, generation: int, derived: DerivedNamespace | None
    ) -> None:
        self.key = (number % 2 ** (8 * KEY_BYTES)).to_bytes(KEY_BYTES, "little")
        self.source = source
        self.namespace = namespace
        self.generation = generation
        self.derived = derived
        self.token_bytes = 0 if derived is None else TOKEN_SIZE * derived.base.page_size
        self.counts = [0] * len(Tier)
        self.twins: list[Scope] = []
        self.kin: list[Scope] = []

    @property
    def empty(self) -> bool:
        """Whether it holds no page in any tier."""
        return not any(self.counts)

    @property
    def chain(self) -> Hashable:
        """What page hashes depend on beside tokens; namespaces that nobody knows are chains of their own."""
        return self.namespace if self.derived is None else (self.derived.seed, self.derived.base.page_size)


Bucket = dict[bytes, Page]


class View:
    """All pages at one moment. Immutable, safe in any thread.

    Attributes:
        scopes: the scopes that hold pages.
    """

    def __init__(self, buckets: Sequence[Bucket], scopes: Iterable[Scope]) -> None:
        self._buckets = tuple(buckets)
        self.scopes = tuple(scopes)
        # Copied: the lists of a scope go on changing.
        self._twins = {scope.key: tuple(scope.twins) for scope in self.scopes if len(scope.twins) > 1}

    def holds(self, scopes: Iterable[Scope], page_hash: bytes, tier: Tier) -> bool:
        """Whether one of the scopes holds a page in a tier."""
        return any((page := self._page(scope, page_hash)) and page[3] >> tier & 1 for scope in scopes)

    def _page(self, scope: Scope, page_hash: bytes) -> Page | None:
        key = scope.key + page_hash
        return self._buckets[_place(key, len(self._buckets))].get(key)

    def by_depth(self, scopes: Iterable[Scope]) -> Iterator[dict[int, list[tuple[Scope, bytes, Page]]] | None]:
        """Pages of scopes by their index in the prompt: the last item; None before it is a good moment to pause."""
        wanted = {scope.key: scope for scope in scopes}
        found: dict[int, list[tuple[Scope, bytes, Page]]] = {}
        seen = 0
        for bucket in self._buckets:
            for key, page in bucket.items():
                scope = wanted.get(key[:KEY_BYTES])
                if scope is not None:
                    found.setdefault(page[1], []).append((scope, key[KEY_BYTES:], page))
            seen += 1 + len(bucket)
            if seen >= _PAUSE:
                seen = 0
                yield None
        yield found

    def stored(self, accept: Callable[[Scope], bool] | None = None) -> Iterator[tuple[Scope, Stored] | None]:
        """Everything as events, parents before children, in long runs. None is a good moment to pause."""
        pages: dict[int, list[tuple[Scope, bytes, Page]]] = {}
        for found in self.by_depth(scope for scope in self.scopes if accept is None or accept(scope)):
            if found is None:
                yield None
            else:
                pages = found
        runs: list[_Run] = []
        tails: dict[bytes, _Run] = {}
        for index in sorted(pages):
            for scope, page_hash, page in pages.pop(index):
                parent, tiers = page[0], self._told_here(scope, page_hash, page[3])
                if not tiers:
                    continue
                run = None if parent is None else tails.get(parent)
                if run is not None and parent is not None and run.tiers == tiers and run.takes(page):
                    del tails[parent]
                else:
                    run = _Run(scope, page, tiers)
                    runs.append(run)
                run.add(page_hash, page)
                tails[scope.key + page_hash] = run
            yield None
        for run in runs:
            for tier in _TIERS[run.tiers]:
                yield run.scope, run.event(tier)

    def _told_here(self, scope: Scope, page_hash: bytes, tiers: int) -> int:
        """The tiers of a page without those that an earlier twin has it in: each is told once."""
        twins = self._twins.get(scope.key)
        if twins is not None:
            for twin in twins[: twins.index(scope)]:
                if (other := self._page(twin, page_hash)) is not None:
                    tiers &= ~other[3]
        return tiers


class _Run:
    """Pages that follow each other, in the same tiers."""

    __slots__ = ("bytes", "first", "hashes", "scope", "tiers", "tokens")

    def __init__(self, scope: Scope, first: Page, tiers: int) -> None:
        self.scope = scope
        self.first = first
        self.tiers = tiers
        self.hashes: list[bytes] = []
        self.tokens: list[bytes] = []
        self.bytes = 0

    def takes(self, page: Page) -> bool:
        return bool(page[2]) == bool(self.first[2]) and self.bytes < EVENT_BYTES

    def add(self, page_hash: bytes, page: Page) -> None:
        self.hashes.append(page_hash)
        self.tokens.append(page[2])
        self.bytes += len(page_hash) + len(page[2])

    def event(self, tier: Tier) -> Stored:
        scope, first = self.scope, self.first
        hashes, tokens = tuple(self.hashes), b"".join(self.tokens)
        parent = None if first[0] is None else first[0][KEY_BYTES:]
        return Stored(scope.namespace, scope.generation, tier, hashes, parent, first[1], symbols=b"", tokens=tokens)


class ResidencyTable:
    """The pages of all scopes. Not thread-safe: its owner has the lock.

    Args:
        buckets: a power of two.
    """

    def __init__(self, buckets: int = BUCKETS) -> None:
        self._buckets: list[Bucket] = [{} for _ in range(buckets)]
        self._seen = bytearray(buckets)  # 1: a view has this bucket
        self._purged = 0
        self._dead: dict[bytes, int] = {}

    def get(self, scope: Scope, page_hash: bytes) -> Page | None:
        """A page, if any tier has it."""
        key = scope.key + page_hash
        return self._buckets[_place(key, len(self._buckets))].get(key)

    def store(self, scope: Scope, event: Stored, told: list[bytes]) -> tuple[list[int], list[bytes]]:
        """Pages came into a tier.

        Args:
            scope: whose.
            event: which.
            told: the tokens of each; empty where they are not told.

        Returns:
            Positions in the event of the pages that were not in that tier of the scope, and the tokens of each page.
        """
        buckets, seen, start, mask = self._buckets, self._seen, scope.key, len(self._buckets) - 1
        bit, index = 1 << event.tier, event.first_page
        parent = None if event.parent_hash is None else start + event.parent_hash
        fresh: list[int] = []
        known: list[bytes] = []
        for position, page_hash in enumerate(event.page_hashes):
            key = start + page_hash
            at = hash(key) >> _SPARED & mask  # _place, written out: this loop is the hot one
            page = buckets[at].get(key)
            if page is None:
                tiers, tokens = 0, told[position] if told else self._tokens(scope.twins, page_hash)
            else:
                tiers, tokens = page[3], page[2] or (told[position] if told else b"")
            if not tiers & bit or (page is not None and tokens and not page[2]):
                if seen[at]:
                    self._own(at)
                # What is known already is kept: its objects are shared with the keys of others.
                buckets[at][key] = (parent, index, tokens, bit) if page is None else (*page[:2], tokens, tiers | bit)
                if not tiers & bit:
                    fresh.append(position)
            known.append(tokens)
            parent = key
            index += 1
        scope.counts[event.tier] += len(fresh)
        return fresh, known

    def remove(self, scope: Scope, tier: Tier, page_hashes: Iterable[bytes]) -> list[bytes]:
        """Pages left a tier. Returns those that were there."""
        bit = 1 << tier
        gone: list[bytes] = []
        for page_hash in page_hashes:
            key = scope.key + page_hash
            at = _place(key, len(self._buckets))
            page = self._buckets[at].get(key)
            if page is None or not page[3] & bit:
                continue
            bucket = self._own(at)
            if page[3] == bit:
                del bucket[key]
            else:
                bucket[key] = (*page[:3], page[3] & ~bit)
            gone.append(page_hash)
        scope.counts[tier] -= len(gone)
        return gone

    def holds(self, scopes: Iterable[Scope], page_hash: bytes, tier: Tier, *, but: Scope) -> bool:
        """Whether a scope other than `but` holds a page in a tier."""
        for scope in scopes:
            if scope is not but and scope.counts[tier]:
                page = self.get(scope, page_hash)
                if page is not None and page[3] >> tier & 1:
                    return True
        return False

    def _tokens(self, scopes: Iterable[Scope], page_hash: bytes) -> bytes:
        for scope in scopes:
            page = self.get(scope, page_hash)
            if page is not None and page[2]:
                return page[2]
        return b""

    def view(self, scopes: Iterable[Scope]) -> View:
        """Everything as it is now."""
        self._seen = bytearray(b"\1" * len(self._buckets))
        return View(self._buckets, scopes)

    def bury(self, scope: Scope) -> None:
        """A scope is over: its pages are forgotten in slices, by `purge`. It must not be used any more."""
        self._dead[scope.key] = self._purged + len(self._buckets)

    def purge(self, buckets: int) -> bool:
        """Forget pages of buried scopes in so many buckets. Returns whether any are left."""
        for _ in range(min(buckets, len(self._buckets))):
            if not self._dead:
                return False
            at = self._purged % len(self._buckets)
            bucket, dead = self._buckets[at], self._dead
            left = {key: page for key, page in bucket.items() if key[:KEY_BYTES] not in dead}
            if len(left) < len(bucket):
                self._buckets[at] = left
                self._seen[at] = 0
            self._purged += 1
            self._dead = {key: until for key, until in dead.items() if until > self._purged}
        return bool(self._dead)

    def _own(self, at: int) -> Bucket:
        """A bucket that may be changed."""
        if self._seen[at]:
            self._buckets[at] = dict(self._buckets[at])
            self._seen[at] = 0
        return self._buckets[at]


def _place(key: bytes, buckets: int) -> int:
    # Python's own hash is at hand, since a dictionary needs it too, and nobody outside can choose keys of one bucket.
    return hash(key) >> _SPARED & (buckets - 1)
