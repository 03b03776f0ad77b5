"""The embedded cache: one model's KV in device memory, host memory and storage, used in the engine's own process."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from types import TracebackType

from hicache.core.identity import Adapter
from hicache.core.prompt import Prompt
from hicache.core.symbols import Span, Tokens, page_extras, symbols
from hicache.memory.base import DevicePool
from hicache.records import Match
from hicache.runtime.arguments import deadline_of, flag, length_of, no_spans, priority_of, spans_of, tail_of
from hicache.runtime.forks import watch
from hicache.runtime.leasing import LeasingCache
from hicache.runtime.parts import Parts
from hicache.runtime.reducer import Pump
from hicache.runtime.request import Request, usable_pages
from hicache.runtime.scopes import Scope


class EmbeddedCache(LeasingCache):
    """Made by `hicache.open`; a context manager. Thread-safe; a forked child must not use it.

    Attributes:
        namespace: the model as served.
        page_size: tokens a page.
        device, host: the pools; `host` is None without a host tier.
        warnings: what works with these settings but will cost, in words.
        parts: the machinery behind it; for requests and for tests.
    """

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        pools = parts.pools
        assert pools.device is not None
        assert pools.copies is not None
        self.device: DevicePool = pools.device
        self._hashes = self._stores or parts.flight is not None  # recordings have hashes, no tokens
        self._extras = parts.options.extras
        self._base = parts.scopes.open()
        if parts.options.background and (self._stores or not pools.copies.inline):
            self._pump = Pump(parts.reducer)
            if parts.storage is not None:
                parts.storage.begun = self._pump.watch
        self._report = None
        self._start_canary()
        watch(self)

    @property
    def device_pages(self) -> int:
        """Slots of the device tier; a very large number where it has no limit."""
        pages = self._core.config.device_pages
        return 2**62 if pages is None else pages

    # ---- requests

    def request(
        self,
        tokens: Tokens,
        *,
        deadline: float | None = None,
        logits: bool = True,
        priority: int = 0,
        adapter: Adapter | None = None,
        tenant: str | None = None,
        salt: str | None = None,
        extras: Iterable[Span] = (),
    ) -> Request:
        """Begin a request: pin what is usable of its prompt, and begin to fetch the rest. Returns at once.

        Args:
            tokens: the prompt, token ids of 0 to 2^32-1, as an integer array or a sequence; uint32 is fastest.
            deadline: seconds from now for probing, prefetching and loading together; None leaves it to the options.
            logits: whether the engine must compute at least the prompt's last token, so that never all of it may come
                from the cache.
            priority: of the pages it uses, -2^31 to 2^31-1, for the policy `priority`: the smallest go first.
            adapter: LoRA; one without a digest goes past the cache.
            tenant: who may share the pages.
            salt: a further separation, as an engine's cache_salt.
            extras: non-text input as (content hash, first token, tokens); needs `extras=True` at `open`.

        Returns:
            The request; close it, best by `with`.

        Raises:
            InvalidInput: what is no token id; a negative deadline; a priority that is no integer of 32 bits; an
                adapter, tenant or salt that names nothing; extras that overlap or end behind the prompt. Nothing was
                taken then.
            CacheClosed: the cache is closed.
        """
        self.check_open()
        deadline = deadline_of(deadline)
        priority = priority_of(priority)
        started = self._now()
        page_size = self.page_size
        prompt_bytes, spans = self._symbols(tokens, extras)
        count = len(tokens)
        pages = len(prompt_bytes) // self._width
        limit = usable_pages(count, page_size) if flag("logits", logits) else pages
        tail = symbols(tail_of(tokens, pages * page_size), 1) if count != pages * page_size else b""
        if adapter is None and tenant is None and salt is None:
            scope: Scope | None = self._base
        else:
            scope = self._scope(adapter, tenant, salt, started, deadline)
        if scope is not None and started >= scope.ask_at:
            until = started + (self.parts.options.longest_wait if deadline is None else deadline)
            self.parts.scopes.refresh(scope, started, until)
        reducer = self._reducer
        prefetch = None
        if scope is None:
            lease = self._past_the_cache(count, limit, priority, self._base.hasher)
        else:
            prompt = Prompt(prompt_bytes, self._width, scope.hasher)
            self.prepare(prompt)
            with reducer.lock:
                self.check_open()  # again: from here on closing would find the lease
                self._catch_up()
                assert scope.tree is not None
                lease, prefetch = self._leased(scope.tree, prompt, count, limit, priority, started)
                reducer.settle()
        return Request(
            self, lease, tokens=count, tail=tail, spans=spans, prefetch=prefetch, started=started, deadline=deadline
        )

    def match(
        self,
        tokens: Tokens,
        *,
        logits: bool = True,
        adapter: Adapter | None = None,
        tenant: str | None = None,
        salt: str | None = None,
        extras: Iterable[Span] = (),
    ) -> Match:
        """How much of a prompt is usable now, by tier. Only looks: pins, moves, asks and counts nothing.

        Args and errors are those of `request`.
        """
        self.check_open()
        prompt_bytes, _ = self._symbols(tokens, extras)
        pages = len(prompt_bytes) // self._width
        limit = usable_pages(len(tokens), self.page_size) if flag("logits", logits) else pages
        scope = self.parts.scopes.known(adapter, tenant, salt)
        if scope is None:
            return Match()
        prompt = Prompt(prompt_bytes, self._width, scope.hasher)
        with self._reducer.lock:
            self._catch_up()
            return Match() if scope.tree is None else self._core.match(scope.tree, prompt, limit)

    def _catch_up(self) -> None:
        """What has happened by now is seen by the request that begins. The lock is held."""
        executor, reducer = self.parts.executor, self._reducer
        if executor.writing:
            executor.catch_up()
            reducer.settle()
        elif not reducer.idle:
            reducer.settle()

    # ---- for requests

    def prepare(self, prompt: Prompt) -> None:
        """Hash a prompt where storage or the flight recorder will ask for it, before the lock is taken."""
        if self._hashes:
            prompt.hashes(0, prompt.pages)

    def __repr__(self) -> str:
        held = [f"device={self.device.slots}", f"host={self.host.slots if self.host is not None else 0}"]
        storage = "storage" if self._attached else "no storage"
        state = self._refusal or "open"
        return f"<hicache.EmbeddedCache {self.namespace.model!r} {' '.join(held)} pages, {storage}: {state}>"

    def __del__(self) -> None:
        if getattr(self, "_report", True) is None and self._refusal is None:
            warnings.warn("a cache was never closed: its threads go on", ResourceWarning, stacklevel=1)

    def __enter__(self) -> EmbeddedCache:
        self.check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- inside

    def _symbols(self, tokens: Tokens, extras: Iterable[Span]) -> tuple[bytes, tuple[Span, ...] | None]:
        """The prompt's whole pages as symbols, and its non-text input; None where the cache takes none."""
        if not self._extras:
            no_spans(extras)
            return symbols(tokens, self.page_size), None
        count = length_of(tokens)
        spans = spans_of(extras, tokens=count)
        pages = count // self.page_size
        return symbols(tokens, self.page_size, page_extras(spans, self.page_size, pages)), spans
