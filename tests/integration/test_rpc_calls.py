"""Calls over sockets: how they end, administration, who calls."""

from __future__ import annotations

import json
from pathlib import Path

import grpc
import pytest
from grpc import aio

from hicache.errors import ConfigError, InvalidInput, LimitExceeded, NotFound, PermissionDenied, Unauthenticated
from hicache.rpc.server import Listener, ServerTls
from hicache.rpc.service import Caller, EventBatch, Peer
from hicache.rpc.transport import CHANNEL_OPTIONS
from hicache.rpc.v1 import admin_pb2, admin_pb2_grpc, session_pb2_grpc
from hicache.rpc.v1 import session_pb2 as pb
from hicache.testing.certificates import make_certificates
from hicache.testing.rpcservice import FakeService
from hicache.testing.rpcserving import TCP, Client, client, failure, run, serving, until
from hicache.testing.rpcstream import HASHES

MIB = 2**20


# ---- ends of calls


@pytest.mark.case("GRPC-2")
def test_a_hundred_deadlines_leave_nothing_behind() -> None:
    """Requests of 200 ms against storage that does not answer, while others are answered at once."""

    async def main() -> None:
        service = FakeService()
        async with serving(service) as server, client(server) as one, client(server) as other:
            service.blocked.add("prefetch")
            prefetch = pb.Prefetch(attachment=1, page_hashes=HASHES)
            await one.send(*(pb.Request(id=100 + at, prefetch=prefetch, deadline_ms=200) for at in range(100)))
            await until(lambda: service.waiting == 100)
            match = pb.MatchPages(attachment=1, page_hashes=HASHES)
            assert (await other.ask(pb.Request(id=30, match=match))).HasField("matched")
            assert service.waiting == 100
            for at in range(100):
                assert (await one.answer(100 + at)).HasField("prefetching")
            assert not service.waiting

    run(main())


@pytest.mark.slow
@pytest.mark.case("GRPC-2")
@pytest.mark.parametrize("how", ["cancel", "channel", "deadline"])
def test_a_call_that_ends_early_ends_its_session(how: str) -> None:
    """Cancelled, cut off, or past a deadline that the client has set for the whole call."""

    async def main() -> None:
        service = FakeService()
        async with serving(service) as server:
            channel = aio.insecure_channel(server.addresses[0].target, CHANNEL_OPTIONS)
            one = Client(channel)
            if how == "deadline":
                one.call = session_pb2_grpc.SessionServiceStub(channel).Open(timeout=0.5)
            await one.begin()
            lease = await one.lease(10)
            await one.ask(pb.Request(id=11, reserve=pb.Reserve(lease=lease, pages=2)))
            service.blocked |= {"load"}
            await one.send(pb.Request(id=30, load=pb.Load(lease=lease), deadline_ms=600_000))
            await until(lambda: service.waiting == 1)
            if how == "cancel":
                one.call.cancel()
            elif how == "channel":
                await channel.close(None)
            await until(lambda: not service.sessions)
            assert [orderly for _, orderly in service.ended] == [False]
            assert not service.waiting
            assert len(service.free) == service.slots
            await channel.close(None)

    run(main())


def test_stopping_ends_every_session() -> None:
    async def main() -> None:
        service = FakeService()
        async with serving(service) as server, client(server) as one, client(server) as other:
            service.blocked.add("load")
            lease = await one.lease(10)
            await one.send(pb.Request(id=30, load=pb.Load(lease=lease), deadline_ms=600_000))
            await until(lambda: service.waiting == 1)
            await server.stop(0.05)
            assert len(service.ended) == 2
            assert not service.waiting
            assert await other.call.code() is grpc.StatusCode.UNAVAILABLE

    run(main())


# ---- administration


def test_administration_goes_through() -> None:
    """Every unary call and every stream of AdminService, with what the service has said."""

    async def main() -> None:
        service = FakeService()
        service.batches = [EventBatch(1, 10), EventBatch(2, 20, lost=3)]
        target = admin_pb2.Target(model="org/tiny")
        async with serving(service) as server, aio.insecure_channel(server.addresses[0].target) as channel:
            admin = admin_pb2_grpc.AdminServiceStub(channel)
            ping = await admin.Ping(admin_pb2.PingRequest())
            assert (ping.server, ping.protocol_max, list(ping.degraded)) == ("fake", 1, ["storage: none"])
            assert (await admin.GetStatistics(admin_pb2.GetStatisticsRequest())).json == '{"sessions": 0}'
            assert list((await admin.Clear(admin_pb2.ClearRequest(target=target))).unconfirmed)
            assert (await admin.Clear(admin_pb2.ClearRequest())).namespaces == 1
            pinned = await admin.Pin(admin_pb2.PinRequest(target=target, tokens=bytes(128), name="mine"))
            assert (pinned.name, pinned.pages) == ("mine", 2)
            assert (await admin.ListPins(admin_pb2.ListPinsRequest())).pins[0].seconds_left == 9.5
            assert (await admin.Unpin(admin_pb2.UnpinRequest())).pins == 0
            assert (await admin.Diagnose(admin_pb2.DiagnoseRequest())).findings[0].good
            request = admin_pb2.ExplainRequest(target=target, tokens=bytes(8), storage_seconds=0.5)
            asked = {"explanations": [], "model": "org/tiny", "bytes": 8, "seconds": 0.5}
            assert json.loads((await admin.Explain(request)).json) == asked
            warmed = [step async for step in admin.Warm(admin_pb2.WarmRequest(target=target, prompts=[bytes(4)] * 3))]
            assert [step.prompts for step in warmed] == [1, 2, 3]
            batches = [batch async for batch in admin.WatchEvents(admin_pb2.WatchEventsRequest(from_sequence=2))]
            assert [(batch.sequence, batch.lost) for batch in batches] == [(2, 3)]

    run(main())


def test_what_an_administrator_has_wrong_comes_back_as_our_error() -> None:
    async def main() -> None:
        def reader(peer: Peer) -> Caller:
            return Caller(admin=False)

        async with (
            serving(FakeService(), authenticate=reader) as server,
            aio.insecure_channel(server.addresses[0].target, CHANNEL_OPTIONS) as channel,
        ):
            admin = admin_pb2_grpc.AdminServiceStub(channel)
            assert type(await failure(admin.Clear(admin_pb2.ClearRequest()))) is PermissionDenied
            error = await failure(admin.Unpin(admin_pb2.UnpinRequest(name="mine")))
            assert type(error) is NotFound
            assert str(error) == "no pin 'mine': see `hicache pins`"
            error = await failure(admin.Pin(admin_pb2.PinRequest()))
            assert type(error) is InvalidInput
            assert "no target" in str(error)
            error = await failure(anext(aiter(admin.Warm(admin_pb2.WarmRequest()))))
            assert "no target" in str(error)
            target = admin_pb2.Target(model="m")
            error = await failure(admin.Pin(admin_pb2.PinRequest(target=target, tokens=bytes(16 * MIB))))
            assert type(error) is LimitExceeded
            raw = channel.unary_unary("/hicache.rpc.v1.AdminService/Pin")
            error = await failure(raw(b"\xff\xff\xff"))
            assert type(error) is InvalidInput
            assert "no PinRequest" in str(error)

    run(main())


@pytest.mark.case("GRPC-2")
def test_administration_that_its_client_gives_up_ends() -> None:
    async def main() -> None:
        service = FakeService()
        service.blocked |= {"clear", "warm"}
        async with serving(service) as server, aio.insecure_channel(server.addresses[0].target) as channel:
            admin = admin_pb2_grpc.AdminServiceStub(channel)
            with pytest.raises(aio.AioRpcError, match="DEADLINE_EXCEEDED"):
                await admin.Clear(admin_pb2.ClearRequest(), timeout=0.2)
            await until(lambda: not service.waiting)
            warming = admin.Warm(admin_pb2.WarmRequest(target=admin_pb2.Target(model="m"), prompts=[b""]))
            await warming.read()
            assert service.reading == 1
            warming.cancel()
            await until(lambda: not service.reading)

    run(main())


# ---- who calls


def test_what_the_transport_knows_of_a_caller_is_told() -> None:
    """The token of the metadata, and the lifeline's key of a unary call."""
    peers: list[Peer] = []

    def remember(peer: Peer) -> Caller:
        peers.append(peer)
        raise Unauthenticated("not known here: give another token")

    async def main() -> None:
        async with (
            serving(FakeService(), authenticate=remember) as server,
            aio.insecure_channel(server.addresses[0].target) as channel,
        ):
            admin = admin_pb2_grpc.AdminServiceStub(channel)
            metadata = (("authorization", "Bearer s3cret"), ("hicache-lifeline-bin", b"k" * 16))
            assert type(await failure(admin.Ping(admin_pb2.PingRequest(), metadata=metadata))) is Unauthenticated
            await failure(admin.Ping(admin_pb2.PingRequest(), metadata=(("authorization", "Basic s3cret"),)))
            await failure(anext(aiter(admin.WatchEvents(admin_pb2.WatchEventsRequest()))))
            stream = session_pb2_grpc.SessionServiceStub(channel).Open(metadata=metadata[:1])
            await stream.write(pb.OpenRequest(requests=[pb.Request(id=1)]))
            assert type(await failure(stream.read())) is Unauthenticated, "over TCP before anything is looked at"
        assert [peer.token for peer in peers] == ["s3cret", None, None, "s3cret"]
        assert [peer.lifeline_key for peer in peers] == [b"k" * 16, b"", b"", b""]
        assert "s3cret" not in repr(peers)
        assert peers[0].address.startswith("ipv4:127.0.0.1:")

    run(main())


@pytest.mark.parametrize("mutual", [False, True])
def test_tls_and_the_certificates_of_clients(tmp_path: Path, mutual: bool) -> None:
    """A client that trusts nobody, or shows no certificate where one is asked for, does not come in."""
    files = make_certificates(tmp_path)
    peers: list[Peer] = []

    def remember(peer: Peer) -> Caller:
        peers.append(peer)
        return Caller()

    ca = files.ca.read_bytes()
    tls = ServerTls(files.server.read_bytes(), files.server_key.read_bytes(), client_ca=ca if mutual else None)
    listener = Listener(TCP, tls)

    async def main() -> None:
        async with serving(FakeService(), listener, authenticate=remember) as server:
            target = server.addresses[0].target
            good = grpc.ssl_channel_credentials(ca, files.client_key.read_bytes(), files.client.read_bytes())
            async with aio.secure_channel(target, good) as channel:
                await admin_pb2_grpc.AdminServiceStub(channel).Ping(admin_pb2.PingRequest())
            refused = [aio.insecure_channel(target), aio.secure_channel(target, grpc.ssl_channel_credentials())]
            if mutual:
                refused.append(aio.secure_channel(target, grpc.ssl_channel_credentials(ca)))
            for channel in refused:
                async with channel:
                    with pytest.raises(aio.AioRpcError, match="UNAVAILABLE"):
                        await admin_pb2_grpc.AdminServiceStub(channel).Ping(admin_pb2.PingRequest())
        assert [peer.certificate for peer in peers] == ["client" if mutual else None]

    run(main())


def test_certificates_are_exchanged_while_it_listens(tmp_path: Path) -> None:
    """Handshakes from then on show the new one, a stream that is open stays; what clients must show cannot change."""
    old, new = make_certificates(tmp_path / "old"), make_certificates(tmp_path / "new")
    tls = ServerTls(old.server.read_bytes(), old.server_key.read_bytes())

    async def main() -> None:
        async with serving(FakeService(), Listener(TCP, tls)) as server:

            def channel(ca: Path) -> aio.Channel:
                return aio.secure_channel(server.addresses[0].target, grpc.ssl_channel_credentials(ca.read_bytes()))

            async with channel(old.ca) as before, channel(new.ca) as after:
                await admin_pb2_grpc.AdminServiceStub(before).Ping(admin_pb2.PingRequest())
                with pytest.raises(ConfigError, match="is settled when a service starts"):
                    tls.replace(new.server.read_bytes(), new.server_key.read_bytes(), new.ca.read_bytes())
                tls.replace(new.server.read_bytes(), new.server_key.read_bytes())
                for each in (after, before):
                    await admin_pb2_grpc.AdminServiceStub(each).Ping(admin_pb2.PingRequest())
            async with channel(old.ca) as late:
                with pytest.raises(aio.AioRpcError, match="UNAVAILABLE"):
                    await admin_pb2_grpc.AdminServiceStub(late).Ping(admin_pb2.PingRequest())

    run(main())
