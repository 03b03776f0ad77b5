"""The namespaces that requests of one cache fall into, each with its tree."""

from __future__ import annotations

import json
import threading

from hicache.clock import Clock
from hicache.core.hashing import PageHasher
from hicache.core.identity import Adapter, DerivedNamespace, Namespace, can_cache
from hicache.core.tree import HiRadixTree
from hicache.runtime.reducer import Reducer
from hicache.runtime.storage_io import StorageIO
from hicache.storage.base import StorageBackend


class Scope:
    """One derived namespace.

    Attributes:
        namespace: its identity.
        hasher: its page hasher.
        tree: its live tree; None until the generation is known. Replaced by `clear`, under the reducer's lock.
        asking: whether storage is being asked for the generation.
        slow: storage did not answer in time once; nobody waits for it again, until it has answered.
    """

    __slots__ = ("asking", "hasher", "namespace", "slow", "tree")

    def __init__(self, namespace: DerivedNamespace) -> None:
        self.namespace = namespace
        self.hasher: PageHasher = namespace.hasher()
        self.tree: HiRadixTree | None = None
        self.asking = False
        self.slow = False


class Scopes:
    """Finds the scope of a request. Thread-safe.

    The generation of a namespace's content lies in storage. It is asked for once, on a storage thread; a request that
    cannot wait for the answer goes past the cache, since pages of an unknown generation have no name.
    """

    def __init__(
        self,
        base: Namespace,
        *,
        reducer: Reducer,
        backend: StorageBackend | None,
        storage: StorageIO | None,
        clock: Clock,
        width: int,
    ) -> None:
        self._base = base
        self._reducer = reducer
        self._backend = backend
        self._storage = storage
        self._now = clock.now
        self._width = width
        self._lock = threading.Lock()
        self._scopes: dict[tuple[Adapter | None, str | None, str | None], Scope] = {}
        self._by_digest: dict[bytes, Scope] = {}

    def open(self) -> Scope:
        """The scope of requests without adapter, tenant and salt; asks storage here and now.

        Raises:
            StorageError: storage cannot be asked.
        """
        scope = self._scope(None, None, None)
        generation = self._backend.generation(scope.namespace.digest) if self._backend is not None else 0
        with self._reducer.lock:
            self._resolved(scope, generation)
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

    def known(self, adapter: Adapter | None, tenant: str | None, salt: str | None) -> Scope | None:
        """The scope if a request used it before. Changes nothing.

        Raises:
            NamespaceError: an adapter, tenant or salt that names nothing.
        """
        if isinstance(adapter, Adapter) and not can_cache(adapter):
            return None
        return self._by_digest.get(self._base.derive(adapter=adapter, tenant=tenant, salt=salt).digest)

    def manifest(self, digest: bytes) -> bytes | None:
        """The description of a namespace that is kept beside its objects, as JSON."""
        scope = self._by_digest.get(digest)
        if scope is None:
            return None
        return json.dumps(scope.namespace.describe(), sort_keys=True, indent=1).encode()

    def _scope(self, adapter: Adapter | None, tenant: str | None, salt: str | None) -> Scope:
        key = (adapter, tenant, salt)
        try:
            found = self._scopes.get(key)
        except TypeError:
            found = None  # not hashable, so not what it should be: `derive` says so
        if found is not None:
            return found
        scope = Scope(self._base.derive(adapter=adapter, tenant=tenant, salt=salt))
        with self._lock:
            # Two spellings may mean one namespace; it has one tree.
            scope = self._by_digest.setdefault(scope.namespace.digest, scope)
            return self._scopes.setdefault(key, scope)

    def _resolve(self, scope: Scope, deadline: float | None) -> None:
        reducer = self._reducer
        with reducer.lock:
            if self._backend is None:
                self._resolved(scope, 0)
                return
            if not scope.asking:
                scope.asking = self._ask(scope)
            if deadline is None or scope.slow:
                return
            while scope.tree is None and scope.asking and (left := deadline - self._now()) > 0:
                reducer.wait(left)
            scope.slow = scope.tree is None

    def _ask(self, scope: Scope) -> bool:
        backend, storage, post = self._backend, self._storage, self._reducer.post
        assert backend is not None
        assert storage is not None

        def ask() -> None:
            post(self._resolved, scope, backend.generation(scope.namespace.digest))

        return storage.call(ask, fail=lambda: post(self._unresolved, scope))

    def _resolved(self, scope: Scope, generation: int) -> None:
        if scope.tree is None:
            scope.tree = self._reducer.core.tree(
                scope.namespace.digest, width=self._width, hasher=scope.hasher, generation=generation
            )
        scope.asking = scope.slow = False
        self._reducer.notify()

    def _unresolved(self, scope: Scope) -> None:
        scope.asking = False
        self._reducer.notify()
