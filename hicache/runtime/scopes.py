"""The namespaces that requests of one cache fall into, each with its tree.

The generation of a namespace's content lies in storage: a clear raises it, in this process or in another. It is asked
for at the first use, and again when it was last known `generation_seconds` ago, on a storage thread. So after another
process has cleared a namespace, a request that begins `generation_seconds` later, plus the time in which the backend
itself may still tell the old one, hits nothing old any more. The exception is storage that does not answer: then this
process goes on with what it knows, since its own tiers must not stop because of storage.
"""

from __future__ import annotations

import itertools
import json
import logging
import threading
from math import inf
from typing import Final

from hicache.clock import Clock
from hicache.core.hashing import PageHasher
from hicache.core.identity import Adapter, DerivedNamespace, Namespace, can_cache
from hicache.core.prompt import Hasher, SymbolsAreHashes
from hicache.core.tree import HiRadixTree
from hicache.runtime.port import StoragePort
from hicache.runtime.reducer import Reducer
from hicache.runtime.storage_io import StorageIO

MANY: Final = 4096
"""Namespaces from which on those that hold nothing are forgotten."""

LOOKED_AT: Final = 64
"""Namespaces that are looked at, when a new one comes, for one to forget."""

_log = logging.getLogger("hicache.runtime")

PATIENCE: Final = 0.02
"""Seconds that a request waits at most for a generation to be confirmed, if storage is not known to be slow."""


class Scope:
    """One derived namespace.

    Attributes:
        namespace: its identity.
        chain: hashes pages of tokens.
        hasher: hashes its tree's symbols: `chain`, or symbols that are hashes already.
        tree: its live tree; None until the generation is known. Replaced by `clear`, under the reducer's lock.
        asking: whether storage is being asked for the generation.
        failing: the last question was answered by an error.
        keys: how requests have called it.
        slow: storage did not answer in time once; nobody waits for it again, until it has answered.
        asked: when storage was asked last, of what it has answered; None: never.
        ask_at: when the generation is to be asked for again.
        current_until: until when it counts as known.
    """

    __slots__ = (
        "ask_at", "asking", "chain", "current_until", "failing", "hasher", "keys", "namespace", "slow", "tree",
    )  # fmt: skip

    def __init__(self, namespace: DerivedNamespace, *, hashes: bool) -> None:
        self.namespace = namespace
        self.chain: PageHasher = namespace.hasher()
        self.hasher: Hasher = SymbolsAreHashes(self.chain.size, self.chain) if hashes else self.chain
        self.tree: HiRadixTree | None = None
        self.asking = False
        self.slow = False
        self.failing = False
        self.keys: list[tuple[Adapter | None, str | None, str | None]] = []
        self.ask_at = self.current_until = inf


class Scopes:
    """Finds the scope of a request. Thread-safe.

    A request that cannot wait for the first answer about a generation goes past the cache, since pages of an unknown
    generation have no name.

    Args:
        base: the model as served.
        reducer: the lock around the core.
        port: where the backend is, or None.
        storage: its threads, or None.
        clock: time.
        width: bytes of a page's symbol.
        generation_seconds: how long a generation counts as known; None is for ever.
        hashes: whether pages' symbols are their hashes.
    """

    def __init__(
        self,
        base: Namespace,
        *,
        reducer: Reducer,
        port: StoragePort | None,
        storage: StorageIO | None,
        clock: Clock,
        width: int,
        generation_seconds: float | None,
        hashes: bool = False,
    ) -> None:
        self._base = base
        self._reducer = reducer
        self._port = port
        self._storage = storage
        self._now = clock.now
        self._width = width
        self._hashes = hashes
        self._seconds = inf if generation_seconds is None else generation_seconds
        self._lock = threading.Lock()
        self._scopes: dict[tuple[Adapter | None, str | None, str | None], Scope] = {}
        self._by_digest: dict[bytes, Scope] = {}
        self._base_digest = base.derive().digest

    def open(self) -> Scope:
        """The scope of requests without adapter, tenant and salt; asks storage here and now.

        Raises:
            StorageError: storage cannot be asked.
        """
        scope = self._scope(None, None, None)
        asked = self._now()
        generation = self._port.generation(scope.namespace.digest) if self._port is not None and self._attached else 0
        with self._reducer.lock:
            self._resolved(scope, generation, asked)
        return scope

    def find(
        self, adapter: Adapter | None, tenant: str | None, salt: str | None, *, deadline: float | None
    ) -> Scope | None:
        """The scope of a request, ready for use; None if it must go past the cache.

        Waits for storage at most until `deadline` (a time of the clock), and only the first time.

        Raises:
            NamespaceError: an adapter, tenant or salt that names nothing.
        """
        if isinstance(adapter, Adapter) and not can_cache(adapter):
            return None
        scope = self._scope(adapter, tenant, salt)
        if scope.tree is None:
            self._resolve(scope, deadline)
        return scope if scope.tree is not None else None

    def begin(self, adapter: Adapter | None, tenant: str | None, salt: str | None) -> Scope | None:
        """As `find`, but never waits: its tree is None while the generation is being asked for (`asking`).

        A generation that is to be confirmed is asked for in the background (see `unconfirmed`).

        Raises:
            NamespaceError: an adapter, tenant or salt that names nothing.
        """
        if isinstance(adapter, Adapter) and not can_cache(adapter):
            return None
        scope = self._scope(adapter, tenant, salt)
        if scope.tree is None:
            self._resolve(scope, None)
        elif self._now() >= scope.ask_at and self._attached:
            with self._reducer.lock:
                scope.asking = scope.asking or self._ask(scope)
        return scope

    def unconfirmed(self, scope: Scope) -> bool:
        """Whether a request should wait a moment (`PATIENCE`) for storage to confirm the generation.

        Not where storage is slow: whoever has waited in vain sets `scope.slow`.
        """
        late = scope.tree is not None and self._now() >= scope.current_until
        return late and scope.asking and not scope.slow and self._attached

    def known(self, adapter: Adapter | None, tenant: str | None, salt: str | None) -> Scope | None:
        """The scope if a request used it before. Changes nothing.

        Raises:
            NamespaceError: an adapter, tenant or salt that names nothing.
        """
        if isinstance(adapter, Adapter) and not can_cache(adapter):
            return None
        return self._by_digest.get(self._base.derive(adapter=adapter, tenant=tenant, salt=salt).digest)

    def of_digest(self, digest: bytes) -> Scope | None:
        """The scope of a derived namespace's digest if a request used it before. Changes nothing."""
        return self._by_digest.get(digest)

    def resolved(self) -> list[Scope]:
        """All scopes whose generation is known."""
        with self._lock:
            return [scope for scope in self._by_digest.values() if scope.tree is not None]

    def refresh(self, scope: Scope, now: float, deadline: float) -> None:
        """Ask again for a generation that has not been confirmed for half of its time; it changes under the lock.

        When all of its time is over the answer is waited for, but only for a moment, not behind other storage work,
        and not where storage was slow before.

        Args:
            scope: a scope with a tree.
            now: the time.
            deadline: until when the request may wait.
        """
        if not self._attached:
            return
        storage, reducer = self._storage, self._reducer
        assert storage is not None
        with reducer.lock:
            quick = not scope.slow and storage.free_to_ask()
            if not scope.asking:
                scope.asking = self._ask(scope)
            if now < scope.current_until or not quick:
                return
            until = min(deadline, now + PATIENCE)
            while scope.asking and (left := until - self._now()) > 0:
                reducer.wait(left)
            scope.slow = scope.asking

    def agreed(self, scope: Scope, generation: int) -> None:
        """Storage says that this is a namespace's generation. The reducer's lock is held."""
        self._resolved(scope, generation, self._now())

    def manifest(self, digest: bytes) -> bytes | None:
        """The description of a namespace that is kept beside its objects, as JSON."""
        scope = self._by_digest.get(digest)
        if scope is None:
            return None
        return json.dumps(scope.namespace.describe(), sort_keys=True, indent=1).encode()

    @property
    def _attached(self) -> bool:
        return self._storage is not None and self._storage.attached

    def _scope(self, adapter: Adapter | None, tenant: str | None, salt: str | None) -> Scope:
        key = (adapter, tenant, salt)
        try:
            found = self._scopes.get(key)
        except TypeError:
            found = None  # not hashable, so not what it should be: `derive` says so
        if found is not None:
            return found
        scope = Scope(self._base.derive(adapter=adapter, tenant=tenant, salt=salt), hashes=self._hashes)
        if len(self._by_digest) >= MANY:
            self._make_room()
        with self._lock:
            # Two spellings may mean one namespace; it has one tree.
            scope = self._by_digest.setdefault(scope.namespace.digest, scope)
            scope.keys.append(key)
            return self._scopes.setdefault(key, scope)

    def _make_room(self) -> None:
        """Forget some namespaces that hold nothing any more, those met first. Who finds one now makes it anew."""
        with self._reducer.lock, self._lock:
            for digest, scope in list(itertools.islice(self._by_digest.items(), LOOKED_AT)):
                del self._by_digest[digest]
                if scope.namespace.digest != self._base_digest and not scope.asking and self._dropped(scope):
                    for key in scope.keys:
                        self._scopes.pop(key, None)
                else:
                    self._by_digest[digest] = scope  # to the end, so that all get their turn

    def _dropped(self, scope: Scope) -> bool:
        return scope.tree is None or self._reducer.core.drop(scope.tree)

    def _resolve(self, scope: Scope, deadline: float | None) -> None:
        reducer = self._reducer
        with reducer.lock:
            if not self._attached:
                self._resolved(scope, 0, self._now())
                return
            if not scope.asking:
                scope.asking = self._ask(scope)
            if deadline is None or scope.slow:
                return
            while scope.tree is None and scope.asking and (left := deadline - self._now()) > 0:
                reducer.wait(left)
            scope.slow = scope.tree is None

    def _ask(self, scope: Scope) -> bool:
        port, storage, post = self._port, self._storage, self._reducer.post
        assert port is not None
        assert storage is not None
        attachment = storage.attachment

        def ask() -> None:
            asked = self._now()
            try:
                generation = port.generation(scope.namespace.digest)
            except Exception as error:  # asked again soon; said once, as that may go on for long
                _log.log(logging.DEBUG if scope.failing else logging.WARNING, "no generation can be had: %r", error)
                scope.failing = True
                post(self._unresolved, scope)
                return
            scope.failing = False
            post(self._answered, scope, generation, asked, attachment)

        return storage.call(ask, fail=lambda: post(self._unresolved, scope))

    def _answered(self, scope: Scope, generation: int, asked: float, attachment: int) -> None:
        assert self._storage is not None
        if self._storage.attached and self._storage.attachment == attachment:
            self._resolved(scope, generation, asked)
        else:
            self._unresolved(scope)

    def _resolved(self, scope: Scope, generation: int, asked: float) -> None:
        core, tree = self._reducer.core, scope.tree
        if tree is None:  # or one that was inherited from another process, with the generation of then
            tree = scope.tree = core.tree(
                scope.namespace.digest, width=self._width, hasher=scope.hasher, generation=generation
            )
        if generation > tree.generation:
            scope.tree = core.clear(tree, generation)  # by another process
            self._reducer.sweeping = True
        scope.asking = scope.slow = False
        scope.ask_at = asked + self._seconds / 2
        scope.current_until = asked + self._seconds
        self._reducer.notify()

    def _unresolved(self, scope: Scope) -> None:
        scope.asking = False
        scope.ask_at = self._now() + self._seconds / 2
        self._reducer.notify()
