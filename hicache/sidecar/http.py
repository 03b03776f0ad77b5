"""A small HTTP server for scrapers and probes: GET and HEAD of a few fixed paths, everything bounded.

It knows nothing of what it serves: each path has a function that gives a `Page`.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from hicache.errors import ConfigError
from hicache.rpc.address import Address

__all__ = ["HttpServer", "Page", "json_page"]

_log = logging.getLogger("hicache.sidecar")

_HEAD: Final = 8192
"""Bytes of a request's head: what common servers allow."""

_SECONDS: Final = 5.0
"""For a request to arrive and its answer to leave; scrapers on the way time out after ten."""

_MOST: Final = 64
"""Connections at once; a scraper uses one."""

_PHRASES: Final = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
}


@dataclass(frozen=True, slots=True)
class Page:
    """An answer.

    Attributes:
        body: its bytes.
        content_type: what they are.
        status: HTTP status code.
    """

    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    status: int = 200


def json_page(document: Mapping[str, Any], *, status: int = 200) -> Page:
    """A JSON document; numbers must be finite."""
    return Page(json.dumps(document, allow_nan=False).encode() + b"\n", "application/json", status)


class HttpServer:
    """Serves pages until it is closed. Made and used on the loop's thread.

    Args:
        pages: path -> what gives its page, at once or when awaited; called on the loop's thread, so it must be quick.
            If it raises, that is logged and answered with 500.
        seconds: for a request and its answer.
    """

    def __init__(self, pages: Mapping[str, Callable[[], Page | Awaitable[Page]]], *, seconds: float = _SECONDS) -> None:
        self._pages = dict(pages)
        self._seconds = seconds
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, address: Address) -> Address:
        """Listen; returns the address with its real port.

        Raises:
            ConfigError: the address cannot be had; a port in use is never shared.
        """
        try:
            self._server = await asyncio.start_server(
                self._accept, address.host, address.port, limit=_HEAD, backlog=_MOST, reuse_port=False
            )
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError(f"metrics.address {address} cannot be listened on: {reason}; use another one") from None
        name: tuple[Any, ...] = self._server.sockets[0].getsockname()
        return Address(host=address.host, port=int(name[1]))

    async def close(self) -> None:
        """Stop listening and end what is open. Idempotent."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None or len(self._tasks) >= _MOST:
            writer.transport.abort()
            return
        self._tasks.add(task)
        try:
            async with asyncio.timeout(self._seconds):
                await self._serve(reader, writer)
        except (TimeoutError, OSError):
            pass  # the peer is too slow, or gone
        except asyncio.CancelledError:
            pass  # by `close`: nobody awaits this task but `close` itself
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_head, page = False, None
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            page = _plain(431)
        except asyncio.IncompleteReadError:
            return
        else:
            is_head, page = await self._answer(head)
        length = f"Content-Length: {len(page.body)}\r\nContent-Type: {page.content_type}\r\n"
        allow = "Allow: GET, HEAD\r\n" if page.status == 405 else ""
        first = f"HTTP/1.1 {page.status} {_PHRASES[page.status]}\r\n"
        writer.transport.set_write_buffer_limits(high=0)  # so that `drain` waits for all of it
        writer.write(f"{first}{length}{allow}Cache-Control: no-store\r\nConnection: close\r\n\r\n".encode("latin-1"))
        if not is_head:
            writer.write(page.body)
        await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
        # Closing with unread bytes would reset the connection, and the answer might be lost on the way.
        while await reader.read(_HEAD):
            pass

    async def _answer(self, head: bytes) -> tuple[bool, Page]:
        """Whether only the head is wanted, and the page."""
        parts = head.split(b"\r\n", 1)[0].split(b" ")
        if len(parts) != 3 or not parts[2].startswith(b"HTTP/1."):
            return False, _plain(400)
        method, target = parts[0].decode("latin-1"), parts[1].decode("latin-1")
        if method not in ("GET", "HEAD"):
            return False, _plain(405)
        give = self._pages.get(target.split("?", 1)[0])
        if give is None:
            return method == "HEAD", _plain(404, f"known are: {', '.join(sorted(self._pages))}")
        try:
            page = give()
            return method == "HEAD", await page if inspect.isawaitable(page) else page
        except Exception:
            # A page that fails must not end the server, and its reader learns that it failed.
            _log.exception("a page of the HTTP server failed")
            return method == "HEAD", _plain(500)


def _plain(status: int, text: str = "") -> Page:
    return Page(f"{text or _PHRASES[status]}\n".encode(), status=status)
