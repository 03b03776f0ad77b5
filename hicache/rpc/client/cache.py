"""The cache of a service in another process, for callers that block."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any

from hicache.clock import Clock
from hicache.core.identity import Adapter, Namespace
from hicache.core.symbols import Span, Tokens
from hicache.records import Match
from hicache.rpc.client.core import ClientCore, prepared
from hicache.rpc.client.flow import run
from hicache.rpc.client.request import ConnectedRequest
from hicache.runtime.arguments import number_of_seconds

__all__ = ["ConnectedCache", "connect"]


class ConnectedCache(ClientCore):
    """Made by `hicache.connect`; a context manager. Thread-safe; a forked child must not use it.

    It has the verbs of `hicache.EmbeddedCache`, over the HOST tier of the service; DEVICE is the engine's own. While
    the service is away every call answers at once that there is nothing, the client connects again in the background,
    and requests that were open go on without a cache. The tenant is not given here: the service knows it.
    """

    def request(
        self,
        tokens: Tokens,
        *,
        deadline: float | None = None,
        logits: bool = True,
        priority: int = 0,
        adapter: Adapter | None = None,
        salt: str | None = None,
        extras: Iterable[Span] = (),
    ) -> ConnectedRequest:
        """Begin a request: pin what is usable of its prompt, and begin to fetch the rest. One round trip.

        Args:
            tokens: the prompt, token ids of 0 to 2^32-1, as an integer array or a sequence; uint32 is fastest.
            deadline: seconds from now for probing, prefetching and loading together; None leaves it to the options.
            logits: whether the engine must compute at least the prompt's last token, so that never all of it may come
                from the cache.
            priority: of the pages it uses, -2^31 to 2^31-1, for the policy `priority`: the smallest go first.
            adapter: LoRA; one without a digest goes past the cache.
            salt: a further separation, as an engine's cache_salt.
            extras: non-text input as (content hash, first token, tokens); needs `extras=True` at `connect`.

        Returns:
            The request; close it, best by `with`. Where the service is away it is one that goes past the cache.

        Raises:
            InvalidInput: what is no token id; a negative deadline; a priority that is no integer of 32 bits; an
                adapter or salt that names nothing; extras that overlap or end behind the prompt. Nothing was taken.
            PermissionDenied: this client may not read.
            CacheClosed: the cache is closed.
        """
        return run(
            self._request(
                ConnectedRequest,
                tokens,
                deadline=deadline,
                logits=logits,
                priority=priority,
                adapter=adapter,
                salt=salt,
                extras=extras,
            )
        )

    def request_by_hash(
        self, page_hashes: bytes, *, deadline: float | None = None, priority: int = 0
    ) -> ConnectedRequest:
        """Begin a request for whoever knows the hashes of pages and no tokens, as a storage plug-in of an engine.

        What it commits is published by these hashes as they are: the service cannot check them, and has no tokens to
        put into events and stored objects. All of the pages may come from the cache. Adapter and salt have no place
        here: they are in the hashes, whose chain begins with them.

        Args:
            page_hashes: of all pages from the first of the prompt on, glued together, 32 bytes each.
            deadline: as in `request`.
            priority: as in `request`.

        Returns:
            The request, as `request` gives it; it cannot be extended.

        Raises:
            InvalidInput: bytes that are no whole hashes; a negative deadline; a priority that is no integer of 32 bits.
            PermissionDenied: this client may not read.
            CacheClosed: the cache is closed.
        """
        return run(self._request_by_hash(ConnectedRequest, page_hashes, deadline=deadline, priority=priority))

    def match(
        self,
        tokens: Tokens,
        *,
        logits: bool = True,
        adapter: Adapter | None = None,
        salt: str | None = None,
        extras: Iterable[Span] = (),
    ) -> Match:
        """How much of a prompt is usable now, by tier. Only looks: pins, moves, asks and counts nothing.

        Args and errors are those of `request`.
        """
        return run(self._match(tokens, logits=logits, adapter=adapter, salt=salt, extras=extras))

    def prefetch(
        self,
        tokens: Tokens,
        *,
        logits: bool = True,
        adapter: Adapter | None = None,
        salt: str | None = None,
        extras: Iterable[Span] = (),
    ) -> Match:
        """Bring up what storage has of a prompt that will come soon, without holding it. Does not wait for it.

        Args and errors are those of `request`.

        Returns:
            What is in HOST already, and what is believed to be on its way.
        """
        return run(self._prefetch(tokens, logits=logits, adapter=adapter, salt=salt, extras=extras))

    def report_prefill(self, tokens: int, seconds: float) -> None:
        """The engine has computed so many tokens in so many seconds; see `EmbeddedCache.report_prefill`.

        Raises:
            ConfigError: not a number above 0 of both.
            CacheClosed: the cache is closed.
        """
        run(self._report_prefill(tokens, seconds))

    def report_device(
        self,
        *,
        stored: bytes = b"",
        parent_hash: bytes | None = None,
        first_page: int = 0,
        removed: bytes = b"",
        cleared: bool = False,
        adapter: Adapter | None = None,
        salt: str | None = None,
    ) -> None:
        """Pages came to the engine's own memory, or left it: news for events, statistics and `match`, never more.

        Args:
            stored: hashes of pages that came, 32 bytes each, in the order of their prompt.
            parent_hash: of the page before the first of them; None at the start of a prompt.
            first_page: index of the first of them.
            removed: hashes of pages that left, deepest first.
            cleared: everything of this namespace left, before what is stored here.
            adapter: whose pages, as in `request`.
            salt: as in `request`.

        Raises:
            InvalidInput: what are no whole hashes.
            NamespaceError: an adapter or salt that names nothing.
            CacheClosed: the cache is closed.
        """
        run(self._report_device(stored, parent_hash, first_page, removed, cleared, adapter, salt))

    def clear(self, *, adapter: Adapter | None = None, salt: str | None = None, deadline: float = 5.0) -> None:
        """Forget all pages of one namespace, in every tier of the service, as after a change of weights.

        Args:
            adapter: whose pages, as in `request`.
            salt: as in `request`.
            deadline: seconds to wait for the service and its storage.

        Raises:
            ServiceUnavailable: the service is away: nothing was cleared.
            PermissionDenied: this client may not administer.
            StorageError: storage did not confirm: after a restart old pages may be found again. Call it again.
            CacheClosed: the cache is closed.
        """
        run(self._clear(adapter, salt, deadline))

    def close(self, deadline: float = 5.0) -> bool:
        """Release open requests, say goodbye, end the thread, unmap the memory. Idempotent; safe from any thread.

        Args:
            deadline: seconds for all of it.

        Returns:
            Whether it was done in time.
        """
        return self._end(number_of_seconds("deadline", deadline))

    def __enter__(self) -> ConnectedCache:
        self.state.check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def connect(
    address: str,
    namespace: Namespace,
    *,
    group: str = "",
    tp_rank: int = 0,
    tp_size: int = 1,
    pp_rank: int = 0,
    pp_first_layers: Iterable[int] = (),
    worker: bool = True,
    token: str | None = None,
    token_file: str | None = None,
    ca: str | None = None,
    cert: str | None = None,
    key: str | None = None,
    insecure: bool = False,
    clock: Clock | None = None,
    **options: Any,
) -> ConnectedCache:
    """Connect to a service (`hicache serve`) and attach to one model's pages.

    Where no service is there yet, the cache that is returned is empty, and connects in the background; see the option
    `required`.

    Args:
        address: `unix:///run/hicache/hicache.sock`, or `host:port`.
        namespace: the model as served; its hash must be "sha256".
        group: name of the ranks that serve one instance of the model together; empty: this process alone is one.
        tp_rank: this process among those that share the heads.
        tp_size: how many share them.
        pp_rank: its pipeline stage.
        pp_first_layers: first layer of each pipeline stage; empty: there is one.
        worker: whether it reads and writes pages; False for a process that only schedules.
        token: says who calls, where the service asks for it.
        token_file: a file that has it instead, read again at each connection.
        ca: file in PEM form, for TLS over TCP: who signed the service's certificate.
        cert: file in PEM form: this client's own certificate, where the service asks for one.
        key: file in PEM form: its private key.
        insecure: needed for TCP without TLS.
        clock: for tests.
        options: fields of `hicache.ClientOptions`; `help(hicache.ClientOptions)` describes each.

    Returns:
        The cache; close it, best by `with`.

    Raises:
        ConfigError: an address, file or option that cannot work.
        NamespaceError: a namespace that names its pages in another way.
        GeometryError: a topology that does not fit, or that the service or the group disagrees about.
        ProtocolMismatch: the service speaks no version of the protocol that this client does.
        Unauthenticated, PermissionDenied: the service does not want this client.
        ServiceUnavailable: it is away, and `required` is set.
    """
    secrets = {"token": token, "token_file": token_file, "ca": ca, "cert": cert, "key": key, "insecure": insecure}
    cache: ConnectedCache = prepared(
        ConnectedCache,
        address,
        namespace,
        group=group,
        tp_rank=tp_rank,
        tp_size=tp_size,
        pp_rank=pp_rank,
        pp_first_layers=pp_first_layers,
        worker=worker,
        secrets=secrets,
        clock=clock,
        options=options,
    )
    cache.start()
    return cache
