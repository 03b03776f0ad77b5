"""The gRPC server itself, over sockets: listeners, sizes, keepalive, health, reflection."""

from __future__ import annotations

import asyncio
import socket
import statistics
import time
from contextlib import suppress
from pathlib import Path

import pytest
from grpc import aio

from hicache.errors import ConfigError, LimitExceeded
from hicache.rpc.address import Address
from hicache.rpc.server import Listener, RpcServer
from hicache.rpc.service import Caller, Limits, Peer
from hicache.rpc.transport import CHANNEL_OPTIONS, SERVER_OPTIONS, TRANSPORT_BYTES
from hicache.rpc.v1 import session_pb2 as pb
from hicache.testing.rpcservice import FakeService
from hicache.testing.rpcserving import PATIENCE, TCP, Client, anybody, client, failure, run, serving, until
from hicache.testing.rpcstream import RAW_TOKENS

MIB = 2**20
SERVER = dict(SERVER_OPTIONS)


# ---- listeners


def test_clients_come_in_where_the_listeners_are(tmp_path: Path) -> None:
    """A Unix socket and TCP at once; each peer is told by the listener that it came to."""
    path = tmp_path / "hicache.sock"
    peers: list[Peer] = []

    def remember(peer: Peer) -> Caller:
        peers.append(peer)
        return Caller()

    async def main() -> None:
        async with serving(
            FakeService(), Listener(Address(path=str(path))), Listener(TCP), authenticate=remember
        ) as server:
            assert path.stat().st_mode & 0o777 == 0o600
            assert server.addresses[1].port > 0
            for at in range(2):
                async with client(server, at=at):
                    pass
        assert [peer.listener for peer in peers] == [f"unix://{path}", *2 * ["127.0.0.1:0"]], (
            "over TCP before the hello too"
        )
        assert not path.exists()

    run(main())


def test_the_rights_of_a_socket_are_those_that_are_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "hicache.sock"

    async def main() -> None:
        async with serving(FakeService(), Listener(Address(path=str(path)), socket_mode=0o660)):
            assert path.stat().st_mode & 0o777 == 0o660

    run(main())


def test_a_port_that_is_taken_is_an_error_and_nothing_is_half_started(tmp_path: Path) -> None:
    """It is never shared: the first server goes on to answer, the second one leaves no socket behind."""
    path = tmp_path / "other.sock"

    async def main() -> None:
        async with serving(FakeService()) as first:
            taken = Listener(first.addresses[0])
            second = RpcServer(FakeService(), [Listener(Address(path=str(path))), taken], authenticate=anybody)
            with pytest.raises(ConfigError, match=f"cannot listen on {first.addresses[0]}: Address already in use"):
                await second.start()
            assert not path.exists()
            for _ in range(5):
                async with client(first):
                    pass

    run(main())


def test_an_address_of_another_machine_is_an_error() -> None:
    async def main() -> None:
        server = RpcServer(FakeService(), [Listener(Address(host="192.0.2.7", port=7420))], authenticate=anybody)
        with pytest.raises(ConfigError, match="Cannot assign requested address"):
            await server.start()

    run(main())


def test_garbage_on_the_port_harms_nobody() -> None:
    async def main() -> None:
        async with serving(FakeService()) as server, client(server) as one:
            for data in (
                b"GET / HTTP/1.1\r\n\r\n",
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(range(256)) * 40,
                b"\xff" * 9,
            ):
                with socket.create_connection(("127.0.0.1", server.addresses[0].port), PATIENCE) as raw:
                    raw.sendall(data)
            assert (await one.ask(pb.Request(id=30, echo=pb.Echo()))).HasField("echoed")

    run(main())


# ---- sizes


@pytest.mark.case("GRPC-1")
@pytest.mark.parametrize("size", [4 * MIB - 1, 4 * MIB, 4 * MIB + 1, 16 * MIB - 100])
def test_messages_above_the_default_of_grpc_pass_both_ways(size: int) -> None:
    async def main() -> None:
        async with serving(FakeService()) as server, client(server) as one:
            data = bytes(size)
            assert (await one.ask(pb.Request(id=30, echo=pb.Echo(data=data)))).echoed.data == data

    run(main())


@pytest.mark.case("GRPC-1")
def test_a_message_above_the_limit_is_refused_with_the_number_and_the_session_goes_on() -> None:
    async def main() -> None:
        async with serving(FakeService()) as server, client(server) as one:
            reply = await one.ask(pb.Request(id=30, echo=pb.Echo(data=bytes(16 * MIB + 1000))))
            assert "the limit is 16777216" in reply.error.message
            assert (await one.ask(pb.Request(id=31, echo=pb.Echo()))).HasField("echoed")

    run(main())


@pytest.mark.slow
@pytest.mark.case("GRPC-1")
def test_a_message_that_the_transport_does_not_carry_ends_the_session_with_one_clear_code() -> None:
    """Nothing of the session is left; what it meant to move goes in chunks."""

    async def main() -> None:
        service = FakeService()
        options = (("grpc.max_send_message_length", -1),)
        async with serving(service) as server, client(server, options) as one:
            await one.lease(10)
            with suppress(aio.AioRpcError):  # the end may be seen while it is still being written
                await one.send(pb.Request(id=30, echo=pb.Echo(data=bytes(TRANSPORT_BYTES))))
            error = await failure(one.answer(30))
            assert type(error) is LimitExceeded
            assert str(17 * MIB) in str(error)
            await until(lambda: not service.sessions)

    run(main())


@pytest.mark.slow
def test_streams_that_never_say_hello_are_few() -> None:
    """Above the limit new ones are refused, until some have ended; sessions go on."""

    async def main() -> None:
        async with (
            serving(FakeService()) as server,
            client(server) as one,
            aio.insecure_channel(server.addresses[0].target, CHANNEL_OPTIONS) as channel,
        ):
            silent = [Client(channel) for _ in range(256)]
            for stream in silent:
                await stream.ask(pb.Request(id=1))  # refused, but it has arrived
            error = await failure(Client(channel).begin())
            assert type(error) is LimitExceeded
            assert "256 streams wait for their hello" in str(error)
            assert (await one.ask(pb.Request(id=30, echo=pb.Echo()))).HasField("echoed")
            silent.pop().call.cancel()
            await until(lambda: len(server._streams) == 256)
            await Client(channel).begin()
            for stream in silent:
                stream.call.cancel()
            await until(lambda: len(server._streams) == 2)

    run(main())


@pytest.mark.slow
@pytest.mark.case("GRPC-1")
@pytest.mark.parametrize("options", [CHANNEL_OPTIONS, ()], ids=["ours", "defaults"])
def test_a_page_of_64_mib_goes_in_chunks(options: tuple[tuple[str, int], ...]) -> None:
    """Also for a client that leaves all of gRPC's defaults as they are."""
    size = 64 * MIB

    async def main() -> None:
        limits = Limits()
        service = FakeService(limits, slots=1, page_bytes=size)
        async with serving(service) as server, client(server, options) as one:
            lease = await one.lease(10)
            await one.ask(pb.Request(id=11, reserve=pb.Reserve(lease=lease, pages=1)))
            content = bytes(range(256)) * (size // 256)
            chunk = limits.chunk_bytes
            for at in range(0, size, chunk):
                put = pb.PutBytes(lease=lease, offset=at, data=content[at : at + chunk])
                assert (await one.ask(pb.Request(id=100 + at // chunk, put_bytes=put))).HasField("bytes_put")
            commit = pb.Commit(lease=lease, upto=1, tokens=RAW_TOKENS[:16])
            assert (await one.ask(pb.Request(id=12, commit=commit))).committed.visible == 1
            again = await one.lease(13)
            await one.ask(pb.Request(id=14, get_bytes=pb.GetBytes(lease=again, end_page=1)))
            pieces = [reply.bytes for reply in one.replies if reply.id == 14]
            assert max(len(piece.data) for piece in pieces) <= chunk
            assert b"".join(piece.data for piece in pieces) == content

    run(main())


def test_a_limit_that_the_transport_cannot_carry_is_an_error_at_once() -> None:
    limits = Limits(message_bytes=TRANSPORT_BYTES + 1)
    with pytest.raises(ConfigError, match=str(TRANSPORT_BYTES)):
        RpcServer(FakeService(limits), [Listener(TCP)], authenticate=anybody)


# ---- around it


def frame(kind: int, payload: bytes = b"") -> bytes:
    """A frame of HTTP/2 on stream 0."""
    return len(payload).to_bytes(3, "big") + bytes([kind, 0]) + bytes(4) + payload


async def frames(reader: asyncio.StreamReader, wanted: int, seconds: float) -> list[bytes]:
    """Payloads of the frames of one kind that come within so many seconds."""
    found = []
    with suppress(TimeoutError, asyncio.IncompleteReadError):
        async with asyncio.timeout(seconds):
            while True:
                header = await reader.readexactly(9)
                payload = await reader.readexactly(int.from_bytes(header[:3], "big"))
                if header[3] == wanted:
                    found.append(payload)
    return found


@pytest.mark.slow
@pytest.mark.case("GRPC-4")
@pytest.mark.parametrize("tolerant", [True, False])
def test_clients_that_ping_while_nothing_happens_are_tolerated(tolerant: bool) -> None:
    """Twenty pings without a call. The same pings end a connection to a server with gRPC's own setting."""
    ping, goaway = 6, 7
    # The interval of clients, and what this server allows, both a hundredth, so that it takes two seconds.
    interval, least = 0.1, SERVER["grpc.http2.min_ping_interval_without_data_ms"] // 100
    options = (("grpc.http2.min_ping_interval_without_data_ms", least if tolerant else 300_000),)

    async def main() -> None:
        async with serving(FakeService(), options=options) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.addresses[0].port)
            writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4))
            ended = asyncio.ensure_future(frames(reader, goaway, 21 * interval))
            for number in range(20):
                writer.write(frame(ping, number.to_bytes(8, "big")))
                await asyncio.wait((ended,), timeout=interval)
            assert [b"too_many_pings" in payload for payload in await ended] == ([] if tolerant else [True])
            writer.close()

    run(main())


@pytest.mark.case("GRPC-4")
def test_the_settings_of_both_sides_fit() -> None:
    """What the client pings is no oftener than what the server allows."""
    server, channel = SERVER, dict(CHANNEL_OPTIONS)
    assert channel["grpc.keepalive_time_ms"] == 10_000
    assert server["grpc.http2.min_ping_interval_without_data_ms"] <= channel["grpc.keepalive_time_ms"] // 2
    assert server["grpc.keepalive_permit_without_calls"] == 1


def test_health_says_whether_it_is_ready() -> None:
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    async def main() -> None:
        async with serving(FakeService()) as server, aio.insecure_channel(server.addresses[0].target) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            watching = health.Watch(health_pb2.HealthCheckRequest())
            assert (await watching.read()).status == health_pb2.HealthCheckResponse.SERVING
            for name in ("hicache.rpc.v1.SessionService", "hicache.rpc.v1.AdminService"):
                found = await health.Check(health_pb2.HealthCheckRequest(service=name))
                assert found.status == health_pb2.HealthCheckResponse.SERVING
            server.set_ready(False)
            assert (await watching.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            watching.cancel()

    run(main())


def test_reflection_tells_what_is_served() -> None:
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    async def main() -> None:
        async with serving(FakeService()) as server, aio.insecure_channel(server.addresses[0].target) as channel:
            call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
            await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
            services = {service.name for service in (await call.read()).list_services_response.service}
            assert {"hicache.rpc.v1.SessionService", "hicache.rpc.v1.AdminService"} <= services
            await call.write(
                reflection_pb2.ServerReflectionRequest(file_containing_symbol="hicache.rpc.v1.AdminService")
            )
            assert (await call.read()).file_descriptor_response.file_descriptor_proto
            await call.done_writing()

    run(main())


def test_without_the_packages_of_health_and_reflection_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are generated code of their own, that may be missing or refuse an older runtime."""

    def missing(name: str) -> None:
        raise RuntimeError(f"{name} was made for a newer runtime")

    monkeypatch.setattr("hicache.rpc.surroundings.import_module", missing)

    async def main() -> None:
        async with serving(FakeService()) as server, client(server) as one:
            server.set_ready(False)
            assert (await one.ask(pb.Request(id=30, echo=pb.Echo()))).HasField("echoed")

    run(main())


@pytest.mark.alone
def test_a_match_of_8k_tokens_costs_little_more_than_an_echo() -> None:
    """125 page hashes through the same client: the median is within half of an empty message's."""
    matching = pb.Request(id=30, match=pb.MatchPages(attachment=1, page_hashes=bytes(125 * 32)))
    echoing = pb.Request(id=30, echo=pb.Echo())

    async def main() -> None:
        async with serving(FakeService()) as server, client(server) as one:

            async def took(request: pb.Request) -> float:
                one.replies.clear()
                began = time.perf_counter()
                await one.ask(request)
                return time.perf_counter() - began

            ratios = []
            for _ in range(3):
                pairs = [(await took(matching), await took(echoing)) for _ in range(400)]
                match, echo = (statistics.median(column) for column in zip(*pairs, strict=True))
                ratios.append(match / echo)
            assert min(ratios) < 1.5, ratios

    run(main())
