"""What a running service learns from its requests: other sizes of its tiers, and hot prefixes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import numpy as np

from hicache.rpc.service import Caller, RequestScope
from hicache.sidecar.document import document
from hicache.sidecar.service import SidecarService
from hicache.testing.sessions import PLAIN, Client, hashes, prompt, running

PAGE_BYTES = 65_536


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(cast("Any", test()))


def pool_of(service: SidecarService, caller: Caller | None = None) -> dict[str, Any]:
    (pool,) = document(service, caller or Caller())["pools"]
    found: dict[str, Any] = pool
    return found


def test_twice_the_memory_would_have_hit() -> None:
    """Two prompts that do not fit together: the service misses again and again, and says that 2x would not."""

    async def test() -> None:
        async with running(size=8 * PAGE_BYTES) as (service, _):
            client = await Client.attach(service)
            assert [point["hit_rate"] for point in pool_of(service)["what_if"][0]["points"]] == [None] * 4
            for turn in range(10):
                await client.store(prompt(7, turn % 2))
            pool = pool_of(service)
            (ghost,) = pool["what_if"]
            pages = pool["statistics"]["pages"]
            assert (ghost["tier"], ghost["pages"], ghost["sample_rate"]) == ("host", 8, 1.0)
            assert ghost["asked_pages"] == pages["asked"] == 70
            points = {point["factor"]: point for point in ghost["points"]}
            assert points[1.0]["missed_pages"] == sum(pages["missed"].values())
            assert points[2.0]["missed_pages"] == 14
            assert points[2.0]["hit_rate"] == 0.8
            assert all(point["error_bound"] == 0 for point in ghost["points"])

    run(test)


def test_storage_has_its_own(tmp_path: Path) -> None:
    """A store with a limit is judged too; without one there is no other size."""

    async def test() -> None:
        for capacity, tiers in (("?capacity=4MiB", ["host", "storage"]), ("", ["host"])):
            async with running(storage=f"file://{tmp_path}/s{len(capacity)}{capacity}") as (service, _):
                client = await Client.attach(service)
                await client.store(prompt(4))
                found = pool_of(service)["what_if"]
                assert [ghost["tier"] for ghost in found] == tiers
                assert all(ghost["asked_pages"] == 4 for ghost in found)
                if capacity:
                    assert found[1]["pages"] == 4 * 2**20 // (PAGE_BYTES + 4 * 4352)

    run(test)


def test_hot_prefixes() -> None:
    """Those with most requests first, each as long as most of its prompts agree, and how much of it is where."""

    async def test() -> None:
        async with running() as (service, _):
            client = await Client.attach(service)
            system = prompt(5)
            for turn in range(6):
                await client.store(np.concatenate([system, prompt(3, 10 + turn)]))
            await client.store(prompt(2, 99))
            await client.store(prompt(2, 99), RequestScope(salt="s"))
            first, *others = pool_of(service)["prefixes"]
            assert first["page_hash"] == hashes(system)[:32].hex()
            assert (first["requests"], first["uncertain"], first["pages"], first["host_pages"]) == (6, 0, 5, 5)
            assert (first["asked_pages"], first["hit_pages"]) == (48, 25)
            assert [other["requests"] for other in others] == [1, 1]
            assert others[0]["namespace"] != others[1]["namespace"]

    run(test)


def test_tenants_see_their_own() -> None:
    """What is learnt belongs to a pool, and so to its tenant."""

    async def test() -> None:
        async with running() as (service, _):
            for tenant, pages in (("red", 3), ("blue", 2)):
                client = await Client.attach(service, Caller(tenant=tenant), pool_bytes=4 << 20)
                await client.store(prompt(pages))
            pool = pool_of(service, Caller(tenant="blue", admin=False))
            assert [prefix["asked_pages"] for prefix in pool["prefixes"]] == [2]
            assert pool["what_if"][0]["asked_pages"] == 2

    run(test)


def test_what_goes_past_the_cache_teaches_nothing() -> None:
    """A bypassed request has no page names; an uncounted one is nobody's."""

    async def test() -> None:
        async with running() as (service, _):
            client = await Client.attach(service)
            (pool,) = service.pools
            pool.cache.request(None, hashes(prompt(4)), tokens=64).close()
            scope = pool.cache.scope()
            pool.cache.request(scope, hashes(prompt(4)), tokens=64).discard()
            found = pool_of(service)
            assert (found["prefixes"], found["what_if"][0]["asked_pages"]) == ([], 0)
            assert not pool.cache.settle_insight()
            assert client.session.match(1, PLAIN, hashes(prompt(4))).host == 0

    run(test)
