"""The cache of a service in another process, for asyncio. The verbs are those of `hicache.rpc.client.cache`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import TracebackType
from typing import Any

from hicache.clock import Clock
from hicache.core.identity import Adapter, Namespace
from hicache.core.reasons import RequestCounts
from hicache.core.residency import Slots
from hicache.core.symbols import Span, Tokens
from hicache.memory.writer import WriterEvent
from hicache.records import Match
from hicache.rpc.client.core import ClientCore, prepared
from hicache.rpc.client.flow import drive, run
from hicache.rpc.client.pages import Buffers
from hicache.rpc.client.request import RequestView
from hicache.runtime.arguments import number_of_seconds

__all__ = ["AsyncConnectedCache", "AsyncConnectedRequest", "connect_async"]


class AsyncConnectedRequest(RequestView):
    """Made by `AsyncConnectedCache.request`; an async context manager. For one task at a time.

    Its verbs are those of `ConnectedRequest`; a task that is cancelled while it waits leaves nothing behind that
    closing the request does not give back.
    """

    __slots__ = ()

    async def load(self) -> Slots:
        """See `ConnectedRequest.load`."""
        return await drive(self._verbs.load())

    async def allocate(self, pages: int | None = None, *, deadline: float | None = None) -> Slots:
        """See `ConnectedRequest.allocate`."""
        return await drive(self._verbs.allocate(pages, deadline))

    async def read_into(self, buffers: Buffers, *, first: int = 0) -> int:
        """See `ConnectedRequest.read_into`. Copies in a thread, so that the loop goes on."""
        return await asyncio.to_thread(lambda: run(self._verbs.read_into(buffers, first)))

    async def write_from(self, buffers: Buffers, *, first: int | None = None) -> int:
        """See `ConnectedRequest.write_from`. Copies in a thread, so that the loop goes on."""
        return await asyncio.to_thread(lambda: run(self._verbs.write_from(buffers, first)))

    async def commit(self, upto: int | None = None, *, ready: WriterEvent | None = None, wait: bool = True) -> None:
        """See `ConnectedRequest.commit`."""
        await drive(self._verbs.commit(upto, ready, wait=wait))

    async def close(self, *, aborted: bool = False) -> RequestCounts:
        """See `ConnectedRequest.close`."""
        return await drive(self._verbs.close(aborted=aborted))

    async def __aenter__(self) -> AsyncConnectedRequest:
        self._verbs.check_open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close(aborted=kind is not None)


class AsyncConnectedCache(ClientCore):
    """Made by `hicache.connect_async`; an async context manager. See `ConnectedCache`.

    It may be used from any event loop: its own is in a thread of its own.
    """

    async def request(
        self,
        tokens: Tokens,
        *,
        deadline: float | None = None,
        logits: bool = True,
        priority: int = 0,
        adapter: Adapter | None = None,
        salt: str | None = None,
        extras: Iterable[Span] = (),
    ) -> AsyncConnectedRequest:
        """See `ConnectedCache.request`."""
        return await drive(
            self._request(
                AsyncConnectedRequest,
                tokens,
                deadline=deadline,
                logits=logits,
                priority=priority,
                adapter=adapter,
                salt=salt,
                extras=extras,
            )
        )

    async def request_by_hash(
        self, page_hashes: bytes, *, deadline: float | None = None, priority: int = 0
    ) -> AsyncConnectedRequest:
        """See `ConnectedCache.request_by_hash`."""
        return await drive(
            self._request_by_hash(AsyncConnectedRequest, page_hashes, deadline=deadline, priority=priority)
        )

    async def match(
        self,
        tokens: Tokens,
        *,
        logits: bool = True,
        adapter: Adapter | None = None,
        salt: str | None = None,
        extras: Iterable[Span] = (),
    ) -> Match:
        """See `ConnectedCache.match`."""
        return await drive(self._match(tokens, logits=logits, adapter=adapter, salt=salt, extras=extras))

    async def prefetch(
        self,
        tokens: Tokens,
        *,
        logits: bool = True,
        adapter: Adapter | None = None,
        salt: str | None = None,
        extras: Iterable[Span] = (),
    ) -> Match:
        """See `ConnectedCache.prefetch`."""
        return await drive(self._prefetch(tokens, logits=logits, adapter=adapter, salt=salt, extras=extras))

    async def report_prefill(self, tokens: int, seconds: float) -> None:
        """See `ConnectedCache.report_prefill`."""
        await drive(self._report_prefill(tokens, seconds))

    async def report_device(
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
        """See `ConnectedCache.report_device`."""
        await drive(self._report_device(stored, parent_hash, first_page, removed, cleared, adapter, salt))

    async def clear(self, *, adapter: Adapter | None = None, salt: str | None = None, deadline: float = 5.0) -> None:
        """See `ConnectedCache.clear`."""
        await drive(self._clear(adapter, salt, deadline))

    async def close(self, deadline: float = 5.0) -> bool:
        """See `ConnectedCache.close`."""
        return await asyncio.to_thread(self._end, number_of_seconds("deadline", deadline))

    async def __aenter__(self) -> AsyncConnectedCache:
        self.state.check_open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


async def connect_async(
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
) -> AsyncConnectedCache:
    """As `hicache.connect`, for asyncio: same arguments, same errors."""
    secrets = {"token": token, "token_file": token_file, "ca": ca, "cert": cert, "key": key, "insecure": insecure}
    cache: AsyncConnectedCache = prepared(
        AsyncConnectedCache,
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
    await asyncio.to_thread(cache.start)
    return cache
