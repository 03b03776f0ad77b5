"""The gRPC server: listeners, authentication, health and reflection around a `hicache.rpc.service.Service`.

Bodies of calls are bytes here. They are decoded by us, so that what cannot be decoded is a typed error too, and the
size of a message is known before anything is done about it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NoReturn, TypeAlias

import grpc
from google.protobuf.message import DecodeError, Message
from grpc import aio

from hicache.errors import ConfigError, HicacheError, InvalidInput, LimitExceeded, PermissionDenied, Unauthenticated
from hicache.rpc.address import Address
from hicache.rpc.administration import CALLS, Streamed, Unary
from hicache.rpc.latency import LatencyMeter, VerbStatistics
from hicache.rpc.service import Authenticate, Peer, Service
from hicache.rpc.status import DETAILS_KEY, encode_error, row_of
from hicache.rpc.stream import HELLO_SECONDS, SessionStream
from hicache.rpc.surroundings import Health, add_reflection
from hicache.rpc.transport import SERVER_OPTIONS, TRANSPORT_BYTES
from hicache.rpc.verbs import closing

__all__ = ["Listener", "RpcServer", "ServerTls"]

_log = logging.getLogger("hicache.rpc")

SESSION_SERVICE: Final = "hicache.rpc.v1.SessionService"
ADMIN_SERVICE: Final = "hicache.rpc.v1.AdminService"

_LIFELINE_KEY: Final = "hicache-lifeline-bin"
_BEARER: Final = "bearer "
_OPENING: Final = 256
"""Streams that may be open at once without a session."""

_REFUSING: Final = 16
"""Streams of callers without a right to be here whose first message is waited for."""

_OVER: Final = 2**20
"""Bytes above the limit on messages up to which one is refused in words; what is longer gRPC itself ends."""

_END_SECONDS: Final = 10.0

Context: TypeAlias = "aio.ServicerContext[Any, Any]"


class ServerTls:
    """What listeners show and ask for under TLS. It may be exchanged while they listen: handshakes from then on use it.

    Thread-safe: gRPC asks from threads of its own.

    Args:
        certificate, key: PEM, of the server.
        client_ca: PEM of the authorities by which clients must show a certificate; None: they need none.
    """

    def __init__(self, certificate: bytes, key: bytes, client_ca: bytes | None = None) -> None:
        self.mutual: Final = client_ca is not None
        self._current = grpc.ssl_server_certificate_configuration([(key, certificate)], client_ca)

    def replace(self, certificate: bytes, key: bytes, client_ca: bytes | None = None) -> None:
        """Use these from the next handshake on; sessions that are open stay.

        Raises:
            ConfigError: whether clients must show a certificate cannot change while it listens.
        """
        if (client_ca is not None) != self.mutual:
            raise ConfigError(
                "whether clients must show a certificate (tls.client_ca) is settled when a service starts"
            )
        self._current = grpc.ssl_server_certificate_configuration([(key, certificate)], client_ca)

    def credentials(self) -> grpc.ServerCredentials:
        """For one listener."""
        known = self._current

        def newer() -> Any:
            nonlocal known
            if self._current is known:
                return None
            known = self._current
            return known

        return grpc.dynamic_ssl_server_credentials(known, newer, require_client_authentication=self.mutual)


@dataclass(frozen=True, slots=True)
class Listener:
    """Where clients come in.

    Attributes:
        address: what to listen on. Whoever owns the path of a Unix socket claims it before: gRPC takes over a path
            that is in use, and removes it at the end.
        tls: None: none. Not for Unix sockets.
        socket_mode: rights of a Unix socket's file.
    """

    address: Address
    tls: ServerTls | None = None
    socket_mode: int = 0o600


class RpcServer:
    """Serves a service on listeners. Used on the loop's thread; made, started and stopped once.

    Each listener is a server of its own, as a Unix socket does not tell on which path a client came in.

    Args:
        service: what is served; stays its owner's.
        listeners: where.
        authenticate: says who a client is.
        options: of gRPC, over those of `hicache.rpc.transport`; for tests.

    Raises:
        ConfigError: a limit on messages that the transport cannot carry.
    """

    def __init__(
        self,
        service: Service,
        listeners: Sequence[Listener],
        *,
        authenticate: Authenticate,
        options: Sequence[tuple[str, int]] = (),
    ) -> None:
        longest = service.limits.message_bytes
        if longest > TRANSPORT_BYTES:
            raise ConfigError(
                f"message_bytes {longest} is above {TRANSPORT_BYTES}, what the transport carries: set it lower"
            )
        self._service = service
        self._listeners = tuple(listeners)
        self._authenticate = authenticate
        received = {"grpc.max_receive_message_length": longest + _OVER}
        self._options = dict(SERVER_OPTIONS) | received | dict(options)
        self._meter = LatencyMeter()
        self._health = Health((SESSION_SERVICE, ADMIN_SERVICE))
        self._servers: list[aio.Server] = []
        self._streams: dict[asyncio.Task[Any], SessionStream] = {}
        self._refusing = 0
        self.addresses: tuple[Address, ...] = ()

    async def start(self) -> None:
        """Listen everywhere, or nowhere. `addresses` then has the ports that were chosen for port 0.

        Raises:
            ConfigError: an address that is taken or cannot be bound, or certificates that gRPC refuses.
        """
        addresses: list[Address] = []
        try:
            for listener in self._listeners:
                server = self._server(listener)
                self._servers.append(server)
                addresses.append(_bind(server, listener))
            for server in self._servers:
                await server.start()
        except BaseException:
            await self.stop(0.0)
            for address in addresses:
                if address.is_unix:  # gRPC removes only the socket of a server that was started
                    Path(address.path).unlink(missing_ok=True)
            raise
        self.addresses = tuple(addresses)
        self.set_ready(True)

    def set_ready(self, ready: bool) -> None:
        """What the health service says from now on."""
        self._health.set(ready)

    def statistics(self) -> tuple[VerbStatistics, ...]:
        """Latencies by verb."""
        return self._meter.statistics()

    async def stop(self, grace: float) -> None:
        """Take no new calls, let those that run go on for `grace` seconds, then cancel them. Idempotent.

        When it returns every session has ended.
        """
        self.set_ready(False)
        servers, self._servers = self._servers, []
        await asyncio.gather(*(server.stop(grace) for server in servers))
        if self._streams:  # cancelled; they end their sessions
            await asyncio.wait(tuple(self._streams), timeout=_END_SECONDS)

    def _server(self, listener: Listener) -> aio.Server:
        server = aio.server(options=tuple(self._options.items()))
        calls = {name: self._handler(listener, name, call) for name, call in CALLS.items()}
        server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(
                    SESSION_SERVICE, {"Open": grpc.stream_stream_rpc_method_handler(self._open(listener))}
                ),
                grpc.method_handlers_generic_handler(ADMIN_SERVICE, calls),
            )
        )
        self._health.add(server)
        add_reflection(server, (SESSION_SERVICE, ADMIN_SERVICE))
        return server

    def _open(self, listener: Listener) -> Callable[[AsyncIterator[bytes], Context], Any]:
        async def handle(messages: AsyncIterator[bytes], context: Context) -> None:
            task = asyncio.current_task()
            assert task is not None
            try:
                peer = await self._admit(listener, messages, context)
                stream = self._streams[task] = SessionStream(
                    self._service,
                    lambda key: self._authenticate(replace(peer, lifeline_key=key)),
                    context.write,
                    self._meter,
                )
                await stream.run(messages)
            except Exception as error:
                await _abort(context, error)
            finally:
                self._streams.pop(task, None)

        return handle

    async def _admit(self, listener: Listener, messages: AsyncIterator[bytes], context: Context) -> Peer:
        """The peer of a new stream. Nothing of it is looked at before this is known."""
        opening = sum(not stream.begun for stream in self._streams.values())
        if opening >= _OPENING:
            raise LimitExceeded(f"{opening} streams wait for their hello, and that is the limit: try again later")
        peer = _peer(listener, context)
        if not listener.address.is_unix:  # a local caller may be known only by the lifeline that its hello names
            try:
                self._authenticate(peer)
            except HicacheError:
                await self._first_message(messages)
                raise
        return peer

    async def _first_message(self, messages: AsyncIterator[bytes]) -> None:
        """Let a client finish its first write: grpc.aio loses the reason of a call that ends while it writes."""
        if self._refusing >= _REFUSING:
            return
        self._refusing += 1
        try:
            with suppress(TimeoutError, StopAsyncIteration):
                async with asyncio.timeout(HELLO_SECONDS):
                    await anext(messages)
        finally:
            self._refusing -= 1

    def _handler(self, listener: Listener, name: str, call: Unary | Streamed) -> grpc.RpcMethodHandler[Any, Any]:
        loop_time = asyncio.get_running_loop().time

        async def unary(data: bytes, context: Context) -> bytes:
            began = loop_time()
            failed = True
            try:
                assert isinstance(call, Unary)
                caller = self._authenticate(_peer(listener, context))
                reply = await call.run(self._service, caller, self._decode(call, name, data))
                failed = False
                return reply.SerializeToString()
            except Exception as error:
                await _abort(context, error)
            finally:
                self._meter.answered(name, loop_time() - began, failed=failed)

        async def streamed(data: bytes, context: Context) -> None:
            try:
                assert isinstance(call, Streamed)
                caller = self._authenticate(_peer(listener, context))
                async with closing(call.run(self._service, caller, self._decode(call, name, data))) as replies:
                    async for reply in replies:
                        await context.write(reply.SerializeToString())
            except Exception as error:
                await _abort(context, error)

        if isinstance(call, Unary):
            return grpc.unary_unary_rpc_method_handler(unary)
        return grpc.unary_stream_rpc_method_handler(streamed)

    def _decode(self, call: Unary | Streamed, name: str, data: bytes) -> Message:
        limit = self._service.limits.message_bytes
        if len(data) > limit:
            raise LimitExceeded(f"{name}: a message of {len(data)} bytes, and the limit is {limit}")
        try:
            return call.request.FromString(data)
        except DecodeError:
            raise InvalidInput(f"{name}: a message that is no {call.request.__name__}: see admin.proto") from None


async def _abort(context: Context, error: Exception) -> NoReturn:
    message = encode_error(error)
    if isinstance(error, Unauthenticated | PermissionDenied):
        _log.warning("a caller was refused: %s", message.message, extra={"address": context.peer()})
    details = ((DETAILS_KEY, message.SerializeToString()),)
    await context.abort(row_of(error).code, message.message, details)


def _peer(listener: Listener, context: Context) -> Peer:
    metadata: dict[str, str | bytes] = dict(context.invocation_metadata() or ())
    authorization = metadata.get("authorization", "")
    token = None
    if isinstance(authorization, str) and authorization[: len(_BEARER)].lower() == _BEARER:
        token = authorization[len(_BEARER) :]
    key = metadata.get(_LIFELINE_KEY, b"")
    names = tuple(context.auth_context().get("x509_common_name", ()))
    return Peer(
        listener=str(listener.address),
        address=context.peer(),
        token=token,
        certificate=names[0].decode("utf-8", "replace") if names and names[0] is not None else None,
        lifeline_key=key if isinstance(key, bytes) else b"",
    )


def _bind(server: aio.Server, listener: Listener) -> Address:
    address = listener.address
    credentials = None if listener.tls is None else listener.tls.credentials()
    target = address.target
    _check_free(address)
    before = os.umask(~listener.socket_mode & 0o777) if address.is_unix else None
    try:
        port = server.add_insecure_port(target) if credentials is None else server.add_secure_port(target, credentials)
    except RuntimeError:
        port = 0  # so did older versions tell it
    finally:
        if before is not None:
            os.umask(before)
    if not port:
        wrong = "gRPC refuses it" if credentials is None else "gRPC refuses it: are certificate and key a pair?"
        raise ConfigError(f"cannot listen on {address}: {wrong}")
    if address.is_unix:
        Path(address.path).chmod(listener.socket_mode)
        return address
    return replace(address, port=port)


def _check_free(address: Address) -> None:
    """See whether a TCP address can be bound, as gRPC does not tell why it cannot."""
    if address.is_unix:
        return
    try:
        family, _, _, _, where = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
        socket.create_server(where[:2], family=family).close()
    except OSError as error:
        raise ConfigError(f"cannot listen on {address}: {error.strerror or error}") from None
