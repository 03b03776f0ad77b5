"""The HTTP server answers scrapers, and nothing that a peer does costs more than its own connection."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.errors import ConfigError
from hicache.rpc.address import Address
from hicache.sidecar.http import HttpServer, Page, json_page


def failing() -> Page:
    raise ZeroDivisionError


PAGES: dict[str, Callable[[], Page]] = {
    "/metrics": lambda: Page(b"m" * 1_000_000),
    "/healthz": lambda: json_page({"status": "ok"}),
    "/readyz": lambda: json_page({"ready": False}, status=503),
    "/broken": failing,
}


def serving(work: Callable[[Address], Awaitable[None]], *, seconds: float = 5.0) -> None:
    async def run() -> None:
        server = HttpServer(PAGES, seconds=seconds)
        address = await server.start(Address(host="127.0.0.1"))
        try:
            await work(address)
        finally:
            await server.close()
            await server.close()

    asyncio.run(run())


async def ask(address: Address, data: bytes, *, end: bool = False) -> bytes:
    reader, writer = await asyncio.open_connection(address.host, address.port)
    try:
        writer.write(data)
        if end:
            writer.write_eof()
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.transport.abort()


def parsed(answer: bytes) -> tuple[int, dict[str, str], bytes]:
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    return int(first.split()[1]), dict(line.split(": ", 1) for line in lines), body


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        ("GET /healthz HTTP/1.1", 200),
        ("GET /healthz?verbose=1 HTTP/1.0", 200),
        ("HEAD /healthz HTTP/1.1", 200),
        ("GET /readyz HTTP/1.1", 503),
        ("GET /nothing HTTP/1.1", 404),
        ("GET /../metrics HTTP/1.1", 404),
        ("POST /metrics HTTP/1.1", 405),
        ("GET /broken HTTP/1.1", 500),
        ("GET /healthz", 400),
        ("nonsense", 400),
        ("GET /healthz SPDY/3", 400),
    ],
)
def test_answers(request_line: str, status: int) -> None:
    """Each request has one answer with its length and kind, and the connection ends."""

    async def work(address: Address) -> None:
        got, headers, body = parsed(await ask(address, f"{request_line}\r\nHost: x\r\n\r\n".encode()))
        assert got == status
        assert headers["Connection"] == "close"
        if request_line.startswith("HEAD"):
            assert body == b""
            assert int(headers["Content-Length"]) > 0
        else:
            assert len(body) == int(headers["Content-Length"])
        if status == 200 and body:
            assert headers["Content-Type"] == "application/json"
            assert json.loads(body) == {"status": "ok"}

    serving(work)


@pytest.mark.parametrize("end", [True, False])
def test_a_large_page_arrives_whole(end: bool) -> None:
    """Also at a peer that has closed its own side already, or sent more than was asked for."""

    async def work(address: Address) -> None:
        answer = await ask(address, b"GET /metrics HTTP/1.1\r\n\r\n" + b"GET / HTTP/1.1\r\n\r\n" * 10, end=end)
        assert parsed(answer)[2] == b"m" * 1_000_000

    serving(work)


def test_a_head_that_is_too_large() -> None:
    """Is refused after 8 KiB, however long it goes on."""

    async def work(address: Address) -> None:
        answer = await ask(address, b"GET /healthz HTTP/1.1\r\nX: " + b"x" * 100_000)
        assert parsed(answer)[0] == 431

    serving(work)


def test_silent_peers_are_ended() -> None:
    """One that says nothing, or begins and stops, loses its connection; others are served meanwhile."""

    async def work(address: Address) -> None:
        silent = asyncio.create_task(ask(address, b""))
        halting = asyncio.create_task(ask(address, b"GET /heal"))
        assert parsed(await ask(address, b"GET /healthz HTTP/1.1\r\n\r\n"))[0] == 200
        async with asyncio.timeout(10):
            assert await silent == await halting == b""

    serving(work, seconds=0.1)


def test_too_many_connections() -> None:
    """Those above the bound are dropped at once, and room comes back with the end of others."""

    async def work(address: Address) -> None:
        held = [await asyncio.open_connection(address.host, address.port) for _ in range(64)]
        async with asyncio.timeout(10):
            while await ask(address, b"GET /healthz HTTP/1.1\r\n\r\n"):
                pass  # the last of those held were not accepted yet
            for _, writer in held:
                writer.transport.abort()
            while not await ask(address, b"GET /healthz HTTP/1.1\r\n\r\n"):
                pass

    serving(work)


def test_a_port_in_use() -> None:
    """Is an error with its name, never shared."""

    async def work(address: Address) -> None:
        with pytest.raises(ConfigError, match=f"metrics.address {address} cannot be listened on"):
            await HttpServer(PAGES).start(address)

    serving(work)


@settings(max_examples=20)
@given(st.lists(st.binary(max_size=300), min_size=1, max_size=20))
def test_any_bytes(requests: list[bytes]) -> None:
    """Whatever arrives, the server goes on."""

    async def work(address: Address) -> None:
        for data in requests:
            await ask(address, data, end=True)
        assert parsed(await ask(address, b"GET /healthz HTTP/1.1\r\n\r\n"))[0] == 200

    serving(work)


def test_documents_have_finite_numbers() -> None:
    """NaN is no JSON."""
    with pytest.raises(ValueError, match="not JSON compliant"):
        json_page({"rate": float("nan")})
