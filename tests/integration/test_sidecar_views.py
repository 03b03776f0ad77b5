"""What tenants and administrators see of a service, and what a clear does to pins."""

from __future__ import annotations

import asyncio

from hicache.cli.stats import tables
from hicache.rpc.service import Caller, Target
from hicache.sidecar.document import document
from hicache.testing.sessions import Client, prompt, running


def test_tenants_see_nothing_of_each_other() -> None:
    """A tenant's statistics have its pools and quotas; what all tenants add up to is for administrators."""

    async def test() -> None:
        async with running() as (service, _):
            red, blue = Caller(tenant="red", admin=False), Caller(tenant="blue", admin=False)
            for caller, pages in ((red, 5), (blue, 2)):
                await (await Client.attach(service, caller, pool_bytes=4 << 20)).store(prompt(pages))
            seen = document(service, blue)
            assert [pool["tenant"] for pool in seen["pools"]] == ["blue"]
            assert seen["pools"][0]["statistics"]["core"]["host"]["resident"] == 2
            assert {row["tenant"] for row in seen["service"]["quotas"]} == {"blue"}
            assert set(seen["service"]) == {"quotas", "uptime_seconds", "degraded"}
            whole = document(service, Caller())
            assert {pool["tenant"] for pool in whole["pools"]} == {"red", "blue"}
            assert whole["service"]["sessions"] == 2
            for shown in (seen, whole):
                assert [table.title for table in tables(shown)][:1] == ["service, up 0 s"]

    asyncio.run(test())


def test_pins_of_cleared_pages_end() -> None:
    """After a clear nobody can find the pages: the pin is over, and its slots are free."""

    async def test() -> None:
        async with running() as (service, _):
            client = await Client.attach(service)
            await client.store(prompt(4))
            target = Target(model="org/model")
            await service.pin(Caller(), target, prompt(4).tobytes(), hard=True, ttl_seconds=0, name="p")
            await service.clear(Caller(), target)
            assert service.pins_of(Caller()) == ()
            (pool,) = service.pools
            pool.cache.upkeep()
            host = pool.cache.statistics().core.host
            assert (host.free, host.quarantined) == (host.capacity, 0)

    asyncio.run(test())
