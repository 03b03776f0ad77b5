"""The service behind its transport: sessions, groups, quotas and administration, on real shared memory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

import hicache
from hicache.config import Leases, Limits, Quota, Size
from hicache.errors import (
    ConfigError,
    GeometryError,
    HashMismatch,
    InvalidInput,
    LeaseExpired,
    LimitExceeded,
    NamespaceError,
    NotFound,
    OutOfSlots,
    PermissionDenied,
    ServiceUnavailable,
)
from hicache.records import Tier
from hicache.rpc.service import Caller, Piece, RequestScope, Revoked, Target
from hicache.sidecar.service import SidecarService
from hicache.sidecar.usage import stored_by_tenant
from hicache.storage.registry import open_storage
from hicache.testing.sessions import NAMESPACE, PAGE, PLAIN, Client, hashes, page_bytes, prompt, running


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(cast("Any", test()))


async def two_ranks(service: SidecarService, lifelines: Any) -> tuple[list[Client], list[Any]]:
    """Mapped ranks of one group, and the key and line of each."""
    lines = [lifelines.connect() for _ in range(2)]
    ranks = [
        await Client.attach(service, Caller(lifeline_key=key), group="g", tp_size=2, tp_rank=rank, streamed=False)
        for rank, (key, _) in enumerate(lines)
    ]
    return ranks, lines


def test_pages_of_one_session_are_hits_in_another() -> None:
    """What one client commits another reads, byte for byte; another tenant, salt or adapter sees nothing."""

    async def test() -> None:
        async with running() as (service, _):
            first = await Client.attach(service, host := Caller(tenant=None), pool_bytes=4 << 20)
            tokens = prompt(20)
            assert await first.store(tokens) == 0
            second = await Client.attach(service, host)
            assert await second.check(tokens) == 20
            assert await second.check(tokens, RequestScope(salt="s")) == 0
            adapter = hicache.Adapter("lora", b"d" * 16)
            assert await second.check(tokens, RequestScope(adapter=adapter)) == 0
            stranger = await Client.attach(service, Caller(tenant="other"), pool_bytes=4 << 20)
            assert await stranger.check(tokens) == 0
            assert stranger.session.match(1, PLAIN, hashes(tokens)).host == 0
            assert second.session.match(1, PLAIN, hashes(tokens)).host == 20

    run(test)


def test_adapter_without_digest_goes_past_the_cache() -> None:
    """Nothing is found and nothing published, and it is counted as bypassed."""

    async def test() -> None:
        async with running() as (service, _):
            client = await Client.attach(service)
            tokens = prompt(4)
            scope = RequestScope(adapter=hicache.Adapter("lora"))
            lease = await client.session.lease(
                1, scope, hashes(tokens), tokens=len(tokens), limit=4, priority=0, until=client.now() + 1
            )
            assert lease.bypassed
            counts = client.session.release(lease.lease, aborted=False)
            assert counts.missed == {hicache.MissReason.BYPASSED: 4}

    run(test)


def test_storage_outlives_the_service(tmp_path: Path) -> None:
    """A second service on the same folder has the pages, with their tokens in the headers."""
    tokens = prompt(12)
    url = f"file://{tmp_path}?capacity=1GiB"

    async def store() -> None:
        async with running(storage=url) as (service, _):
            assert await (await Client.attach(service)).store(tokens) == 0

    async def find() -> None:
        async with running(storage=url) as (service, _):
            client = await Client.attach(service)
            assert await client.check(tokens) == 12
            statistics = json.loads(service.statistics_json(Caller()))["pools"][0]["statistics"]
            assert statistics["pages"]["storage"] == 12

    run(store)
    run(find)


def test_wrong_tokens_publish_nothing() -> None:
    """The service hashes the tokens itself: a client cannot put pages under other prompts' names."""

    async def test() -> None:
        async with running() as (service, _):
            client = await Client.attach(service)
            tokens = prompt(3)
            lease = await client.lease(tokens)
            await client.session.reserve(lease.lease, 3, until=None)
            with pytest.raises(HashMismatch):
                client.session.commit(lease.lease, 3, tokens=prompt(3, 9).tobytes(), first_page=0, extras=b"")
            assert client.session.match(1, PLAIN, hashes(tokens)).host == 0
            assert client.session.commit(lease.lease, 3, tokens=tokens.tobytes(), first_page=0, extras=b"") == 3
            client.session.release(lease.lease, aborted=False)

    run(test)


def test_group_of_two_ranks_shares_leases() -> None:
    """Each rank writes its own heads; pages are visible when both have, and each reads back its own bytes."""

    async def test() -> None:
        async with running() as (service, _):
            ranks = [await Client.attach(service, group="instance", tp_size=2, tp_rank=rank) for rank in range(2)]
            assert [client.attached.rank_page_bytes * 2 for client in ranks] == [ranks[0].attached.page_bytes] * 2
            tokens = prompt(5)
            names = hashes(tokens)
            lease = await ranks[0].lease(tokens)
            await ranks[0].session.reserve(lease.lease, 5, until=None)
            for rank, client in enumerate(ranks):
                for page in range(5):
                    data = page_bytes(names[page * 32 :][:31] + bytes([rank]), client.attached.rank_page_bytes)
                    await client.session.put_bytes(lease.lease, Piece(page, 0, data))
            commit = {"first_page": 0, "extras": b""}
            assert ranks[1].session.commit(lease.lease, 5, tokens=b"", **commit) == 0
            assert ranks[0].session.match(1, PLAIN, names).host == 0
            assert ranks[0].session.commit(lease.lease, 4, tokens=tokens[: 4 * PAGE].tobytes(), **commit) == 4
            assert ranks[0].session.match(1, PLAIN, names).host == 4
            with pytest.raises(PermissionDenied):
                ranks[1].session.release(lease.lease, aborted=False)
            ranks[0].session.release(lease.lease, aborted=False)
            again = await ranks[0].lease(tokens)
            for rank, client in enumerate(ranks):
                async for piece in client.session.get_bytes(again.lease, 0, 4):
                    name = names[piece.page * 32 :][:31] + bytes([rank])
                    assert (
                        bytes(piece.data)
                        == page_bytes(name, client.attached.rank_page_bytes)[piece.offset :][: len(piece.data)]
                    )
            ranks[0].session.release(again.lease, aborted=False)

    run(test)


def test_latents_are_stored_once_for_all_ranks() -> None:
    """State that every rank holds alike takes one arena, which one elected rank writes."""
    geometry = hicache.KVGeometry.mla(4, latent_dim=512, rope_dim=64, dtype="bfloat16")
    namespace = hicache.Namespace("org/mla", geometry=geometry, page_size=PAGE, hash="sha256")

    async def test() -> None:
        async with running() as (service, _):
            for rank in range(4):
                client = await Client.attach(service, namespace=namespace, group="g", tp_size=4, tp_rank=rank)
                assert client.attached.rank_page_bytes == client.attached.page_bytes
            (pool,) = json.loads(service.statistics_json(Caller()))["pools"]
            assert pool["ranks"] == 4
            assert [arena["holders"] for arena in pool["arenas"]] == [4]
            assert pool["bytes"] == pool["slots"] * -(-pool["page_bytes"] // 4096) * 4096

    run(test)


def test_ranks_that_disagree_are_refused() -> None:
    """A group has one namespace and one topology, and each rank once."""

    async def test() -> None:
        async with running() as (service, _):
            await Client.attach(service, group="g", tp_size=2, tp_rank=0, pool_bytes=2 << 20)
            other = replace(NAMESPACE, revision="2")
            with pytest.raises(GeometryError, match="another namespace"):
                await Client.attach(service, group="g", tp_size=2, tp_rank=1, namespace=other, pool_bytes=2 << 20)
            with pytest.raises(GeometryError, match="another topology"):
                await Client.attach(service, group="g", tp_size=4, tp_rank=1, pool_bytes=2 << 20)
            with pytest.raises(GeometryError, match="is taken"):
                await Client.attach(service, group="g", tp_size=2, tp_rank=0)
            with pytest.raises(GeometryError):
                await Client.attach(service, group="h", tp_size=3, tp_rank=0)
            with pytest.raises(NamespaceError, match="sha256"):
                await Client.attach(service, namespace=replace(NAMESPACE, hash="xxh3_128"))
            with pytest.raises(InvalidInput, match="lifeline"):
                await Client.attach(service, streamed=False)

    run(test)


def test_lost_rank_aborts_and_keeps_its_slots_until_it_is_gone() -> None:
    """A mapped rank that vanishes may still write: the reservation ends, its slots come back when it is gone."""

    async def test() -> None:
        async with running() as (service, lifelines):
            ranks, lines = await two_ranks(service, lifelines)
            assert len(ranks[0].attached.arenas) == 1
            assert set(lines[0][1].grants) == {ranks[0].attached.arenas[0].id, ranks[0].attached.words_id}
            lease = await ranks[0].lease(prompt(5))
            await ranks[0].session.reserve(lease.lease, 5, until=None)
            ranks[1].session.end(orderly=False)
            notice = await ranks[0].session.next_notice()
            assert isinstance(notice, Revoked)
            assert notice.leases == (lease.lease,)
            with pytest.raises(LeaseExpired, match="was lost"):
                ranks[0].session.commit(lease.lease, 5, tokens=b"", first_page=0, extras=b"")
            ranks[0].session.acknowledge([lease.lease])
            (pool,) = service.pools
            assert pool.cache.statistics().core.host.private == 5
            lines[1][1].die()
            assert pool.cache.statistics().core.host.private == 0
            assert len(service.leases) == 0

    run(test)


def test_release_waits_for_ranks_that_may_still_write() -> None:
    """Whatever the owner says: a mapped rank that has not committed its part keeps the slots until it lets go."""

    async def test() -> None:
        async with running() as (service, lifelines):
            ranks, _ = await two_ranks(service, lifelines)
            tokens = prompt(5)
            (pool,) = service.pools
            for written in (5, 3):  # whole pages that the other rank has committed; the tail's slot does not count
                lease = await ranks[0].lease(tokens)
                assert lease.lease > ranks[1].attached.newest_lease
                await ranks[0].session.reserve(lease.lease, 6, until=None)
                ranks[1].session.commit(lease.lease, written, tokens=b"", first_page=0, extras=b"")
                ranks[0].session.release(lease.lease, aborted=True)
                assert pool.cache.statistics().core.host.private == (0 if written == 5 else 6)
            assert await ranks[1].session.next_notice() == Revoked((lease.lease,), "it was released")
            with pytest.raises(LeaseExpired):
                ranks[1].session.commit(lease.lease, 5, tokens=tokens.tobytes(), first_page=0, extras=b"")
            later = await Client.attach(service, group="g", tp_size=2, tp_rank=1, worker=False, streamed=False)
            assert later.attached.newest_lease == lease.lease
            ranks[1].session.acknowledge([lease.lease])
            assert pool.cache.statistics().core.host.private == 0

    run(test)


def test_slots_run_out_and_come_back() -> None:
    """All or nothing, with the numbers; a waiting reservation gets what another gives back."""

    async def test() -> None:
        async with running(size=64 * 4096 * 8) as (service, _):
            client = await Client.attach(service)
            slots = client.attached.slots
            first = await client.lease(prompt(slots, 1))
            await client.session.reserve(first.lease, slots, until=None)
            second = await client.lease(prompt(2, 2))
            with pytest.raises(OutOfSlots, match=f"of {slots}"):
                await client.session.reserve(second.lease, 1, until=None)
            waiting = asyncio.ensure_future(client.session.reserve(second.lease, 2, until=client.now() + 30))
            await asyncio.sleep(0)
            client.session.release(first.lease, aborted=True)
            assert len((await waiting).slots) == 8
            client.session.release(second.lease, aborted=True)

    run(test)


def test_limits_and_rights_are_kept() -> None:
    """What is above a limit or without a right is refused with a typed error."""

    async def test() -> None:
        async with running(limits=Limits(pages=8, leases=1, sessions=2), leases=Leases(seconds=60)) as (service, _):
            reader = await Client.attach(service, Caller(write=False, admin=False, name="reader"))
            with pytest.raises(LimitExceeded, match="limit of 8"):
                await reader.lease(prompt(9))
            lease = await reader.lease(prompt(2))
            with pytest.raises(LimitExceeded, match="the limit is 1"):
                await reader.lease(prompt(2))
            with pytest.raises(PermissionDenied, match="reader"):
                await reader.session.reserve(lease.lease, 2, until=None)
            with pytest.raises(PermissionDenied):
                await service.clear(reader.session.caller, None)
            with pytest.raises(NotFound):
                reader.session.release(lease.lease + 1, aborted=False)
            reader.session.release(lease.lease, aborted=False)
            await service.open_session(Caller(), "second")
            with pytest.raises(LimitExceeded, match="the limit is 2"):
                await service.open_session(Caller(), "third")

    run(test)


def test_memory_is_shared_by_need() -> None:
    """A pool that nobody uses gives way to another; one in use does not, and the refusal has the numbers."""

    async def test() -> None:
        async with running(size=4 << 20) as (service, _):
            first = await Client.attach(service)
            other = replace(NAMESPACE, revision="2")
            with pytest.raises(ConfigError, match="4 MiB in all"):
                await Client.attach(service, namespace=other)
            first.session.end(orderly=True)
            second = await Client.attach(service, namespace=other)
            assert [pool.namespace for pool in service.pools] == [other]
            second.session.end(orderly=True)

    run(test)


def test_quota_bounds_a_tenants_memory() -> None:
    """A tenant's pools together stay within its quota of host memory."""

    async def test() -> None:
        async with running(quotas={"small": Quota(host=Size(1 << 20))}) as (service, _):
            small = Caller(tenant="small")
            with pytest.raises(LimitExceeded, match="1 MiB"):
                await Client.attach(service, small, pool_bytes=2 << 20)
            client = await Client.attach(service, small)
            assert client.attached.slots * client.attached.page_bytes <= 1 << 20

    run(test)


def test_clear_forgets_one_namespace_or_all() -> None:
    """After a clear nothing of the namespace is found; others keep theirs."""

    async def test() -> None:
        async with running() as (service, _):
            client = await Client.attach(service)
            salted = RequestScope(salt="s")
            tokens = prompt(4)
            await client.store(tokens)
            await client.store(tokens, salted)
            assert await service.clear(Caller(), Target(model="org/model", scope=salted)) == (1, ())
            assert (await client.check(tokens), await client.check(tokens, salted)) == (4, 0)
            cleared, unconfirmed = await service.clear(Caller(), None)
            assert (cleared, unconfirmed) == (2, ())
            assert await client.check(tokens) == 0
            with pytest.raises(NotFound, match="org/model"):
                await service.clear(Caller(), Target(model="org/other"))

    run(test)


def test_pins_hold_and_give_way() -> None:
    """A soft pin makes room for requests, a hard one does not; both have names, bytes and an end."""

    async def test() -> None:
        async with running(size=64 * 4096 * 8) as (service, _):
            client = await Client.attach(service)
            slots = client.attached.slots
            soft, hard = prompt(4, 1), prompt(4, 2)
            await client.store(soft)
            await client.store(hard)
            target = Target(model="org/model")
            admin = Caller()
            pinned = await service.pin(admin, target, soft.tobytes(), hard=False, ttl_seconds=0, name="soft")
            assert (pinned.pages, pinned.of_pages) == (4, 4)
            await service.pin(admin, target, hard.tobytes(), hard=True, ttl_seconds=0, name="hard")
            with pytest.raises(InvalidInput, match="exists"):
                await service.pin(admin, target, hard.tobytes(), hard=True, ttl_seconds=0, name="hard")
            lease = await client.lease(prompt(slots - 4, 3))
            await client.session.reserve(lease.lease, slots - 4, until=None)
            assert [pin.name for pin in service.pins_of(admin)] == ["hard"]
            with pytest.raises(OutOfSlots):
                await client.session.reserve(lease.lease, 1, until=None)
            client.session.release(lease.lease, aborted=True)
            assert await client.check(hard) == 4
            assert service.unpin(admin, "hard") == 1
            with pytest.raises(NotFound):
                service.unpin(admin, "hard")

    run(test)


def test_warm_brings_prompts_into_host(tmp_path: Path) -> None:
    """Prompts that storage has are in HOST afterwards; those that nobody has are counted as missed."""
    url = f"file://{tmp_path}?capacity=1GiB"
    tokens = prompt(6)

    async def store() -> None:
        async with running(storage=url) as (service, _):
            await (await Client.attach(service)).store(tokens)

    async def warm() -> None:
        async with running(storage=url) as (service, _):
            client = await Client.attach(service)
            prompts = [tokens.tobytes(), prompt(2, 7).tobytes()]
            warmed = service.warm(Caller(), Target(model="org/model"), prompts, deadline_seconds=5)
            assert [step async for step in warmed] == [(1, 6, 0), (2, 6, 2)]
            assert client.session.match(1, PLAIN, hashes(tokens)).host == 6
            (pool,) = service.pools
            assert pool.cache.statistics().requests == 0  # no engine has asked for anything

    run(store)
    run(warm)


def test_engine_reports_are_mirrored() -> None:
    """DEVICE residency is what engines report: news for a match, never more."""

    async def test() -> None:
        async with running() as (service, _):
            client = await Client.attach(service)
            names = hashes(prompt(4))
            report = {"parent_hash": b"", "first_page": 0, "removed": b"", "cleared": False}
            await client.store(prompt(1, 5))
            client.session.report_device(1, PLAIN, stored=names[:96], **report)
            matched = client.session.match(1, PLAIN, names)
            assert (matched.device, matched.host) == (3, 0)
            client.session.report_device(1, PLAIN, stored=b"", **(report | {"removed": names[32:96]}))
            assert client.session.match(1, PLAIN, names).device == 1
            client.session.end(orderly=True)
            (pool,) = service.pools
            assert pool.mirror.pages == 0

    run(test)


def test_draining_takes_nothing_new() -> None:
    """Sessions are told; new leases are refused; what is left over at the end is reported."""

    async def test() -> None:
        async with running() as (service, _):
            client = await Client.attach(service)
            lease = await client.lease(prompt(2))
            draining = asyncio.ensure_future(service.drain(0.05))
            assert (await client.session.next_notice()).seconds == 0.05  # type: ignore[union-attr]
            with pytest.raises(ServiceUnavailable, match="draining"):
                await client.lease(prompt(2, 1))
            assert await draining == 1
            assert lease.lease

    run(test)


def test_diagnosis_finds_a_way_through_every_tier(tmp_path: Path) -> None:
    """The canary page comes back; namespaces of one model that differ are named."""

    async def test() -> None:
        async with running(storage=f"file://{tmp_path}?capacity=1GiB") as (service, _):
            await Client.attach(service, pool_bytes=4 << 20)
            findings = await service.diagnose(Caller())
            assert [finding.text for finding in findings if not finding.good] == []
            assert any("canary page" in finding.check for finding in findings)
            other = replace(NAMESPACE, numerics="x/y/z")
            await Client.attach(service, namespace=other, pool_bytes=4 << 20)
            (bad,) = [finding for finding in await service.diagnose(Caller()) if not finding.good]
            assert "numerics" in bad.text

    run(test)


def test_quota_bounds_a_tenants_storage(tmp_path: Path) -> None:
    """Pages beyond it are not put, and counted; a clear makes room again, and a new service begins with the truth."""
    url = f"file://{tmp_path}?capacity=1GiB"
    small = Caller(tenant="small")
    page = NAMESPACE.geometry.page_bytes(PAGE)
    quotas = {"small": Quota(storage=Size(5 * page))}

    async def until_stored(service: SidecarService, pages: int) -> None:
        (pool,) = service.pools
        end = asyncio.get_running_loop().time() + 10
        while service.quotas.used("small", Tier.STORAGE) != pages * page or pool.cache.statistics().core.transfers:
            assert asyncio.get_running_loop().time() < end
            await pool.changes.wait(min(end, asyncio.get_running_loop().time() + 0.05))

    async def fill() -> None:
        async with running(storage=url, quotas=quotas) as (service, _):
            client = await Client.attach(service, small)
            await client.store(prompt(3))
            await until_stored(service, 3)
            await client.store(prompt(4, 1))
            (pool,) = service.pools
            assert pool.cache.statistics().shed_by_reason["storage_quota"] >= 4
            await service.clear(small, Target(model=NAMESPACE.model))
            await client.store(prompt(2, 2))
            await until_stored(service, 2)

    async def count() -> None:
        backend = open_storage(url)
        found = stored_by_tenant(backend, ["small", "other"])
        backend.close()
        assert set(found) == {"small"}
        assert found["small"] >= 2 * page

    run(fill)
    run(count)
