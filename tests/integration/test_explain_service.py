"""Misses that are made on purpose in a running service, and what `Explain` says of each."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

import hicache
from hicache.analytics.analysis.larger import by_estimates
from hicache.analytics.explain.records import Cause, Explanation
from hicache.config import Policies
from hicache.errors import InvalidInput, NotFound, PermissionDenied
from hicache.records import MissReason
from hicache.rpc.service import Caller, RequestScope, Target
from hicache.sidecar.service import SidecarService
from hicache.testing.gates import Gate
from hicache.testing.sessions import NAMESPACE, PAGE, PLAIN, Client, hashes, prompt, running

PAGE_BYTES = 65_536


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(cast("Any", test()))


async def explained(
    service: SidecarService,
    tokens: NDArray[np.uint32],
    scope: RequestScope = PLAIN,
    *,
    caller: Caller = Caller(),  # noqa: B008  frozen
    seconds: float = 5.0,
    namespace: hicache.Namespace = NAMESPACE,
) -> Explanation:
    """The one explanation; its sums are checked, and that it says the same again."""
    target = Target(namespace_digest=namespace.digest, scope=scope)
    text = await service.explain(caller, target, tokens.tobytes(), storage_seconds=seconds)
    (document,) = json.loads(text)["explanations"]
    found = Explanation.of(document)
    assert json.loads(json.dumps(found.document())) == document
    assert found.tokens == len(tokens) == found.usable_tokens + sum(cause.tokens for cause in found.causes)
    pages = [page for cause in found.causes for page in range(cause.first_page, cause.end_page)]
    assert pages == list(range(found.usable_pages, found.pages))
    return found


def only(found: Explanation) -> Cause:
    (cause,) = found.causes
    return cause


def test_a_prompt_that_is_here_misses_nothing() -> None:
    """All of it is in host memory: no cause; what is behind the last whole page is always computed."""

    async def test() -> None:
        async with running() as (service, _):
            client = await Client.attach(service)
            await client.store(prompt(6))
            found = await explained(service, prompt(6))
            assert (found.tiers, found.usable_pages, found.causes) == (
                {"device": None, "host": 6, "storage": None},
                6,
                (),
            )
            tail = only(await explained(service, np.concatenate([prompt(6), prompt(1)[:5]])))
            assert (tail.reason, tail.tokens, tail.first_page, tail.end_page) == (MissReason.UNALIGNED_TAIL, 5, 6, 6)

    run(test)


def test_a_prompt_that_nobody_has_seen() -> None:
    """Cold; and where another prompt has the same beginning, up to which token."""

    async def test() -> None:
        async with running() as (service, _):
            client = await Client.attach(service)
            await client.store(prompt(6))
            cold = only(await explained(service, prompt(3, 9)))
            assert (cold.reason, cold.tokens) == (MissReason.COLD, 3 * PAGE)
            assert "never seen" in cold.text
            for at in (4 * PAGE, 4 * PAGE + 7, 5):
                edited = prompt(6)
                edited[at] += 1
                cause = only(await explained(service, edited))
                assert (cause.reason, cause.first_page) == (MissReason.COLD, at // PAGE)
                assert f"new from token {at:,} on" in cause.text

    run(test)


def test_another_namespace_has_it() -> None:
    """Every field that differs is named, with both values: salt and adapter, and settings of the engine."""
    adapter = hicache.Adapter("lora", b"d" * 16)
    other = replace(NAMESPACE, numerics="other/kernels/bfloat16", revision="2")

    async def test() -> None:
        async with running() as (service, _):
            client = await Client.attach(service, pool_bytes=4 << 20)
            await client.store(prompt(4))
            salted = await explained(service, prompt(4), RequestScope(salt="s"))
            assert only(salted).reason is MissReason.OTHER_NAMESPACE
            (found,) = salted.others
            assert [each.field for each in found.differs] == ["salt"]
            assert (found.pages, found.differs[0].found) == (4, "none")
            assert found.differs[0].asked != "s"
            (found,) = (await explained(service, prompt(4), RequestScope(adapter=adapter))).others
            assert [(each.field, each.asked, each.found) for each in found.differs] == [
                ("adapter", f"lora={(b'd' * 16).hex()}", "none")
            ]
            await Client.attach(service, namespace=other, pool_bytes=4 << 20)
            await client.store(prompt(4, 3), RequestScope(salt="s"))
            (found,) = (await explained(service, prompt(4, 3), RequestScope(salt="s"), namespace=other)).others
            assert [each.field for each in found.differs] == ["revision", "numerics"]  # the salt is the same
            (found,) = (await explained(service, prompt(4), namespace=other)).others
            assert [(each.field, each.asked, each.found) for each in found.differs] == [
                ("revision", "2", "1"),
                ("numerics", "other/kernels/bfloat16", "any/any/bfloat16"),
            ]

    run(test)


def test_a_shorter_beginning_under_another_page_size() -> None:
    """Namespaces of other page sizes are looked at by their own pages."""
    wide = replace(NAMESPACE, page_size=2 * PAGE)

    async def test() -> None:
        async with running() as (service, _):
            client = await Client.attach(service, pool_bytes=4 << 20)
            await client.store(prompt(5))
            await Client.attach(service, namespace=wide, pool_bytes=4 << 20)
            found = await explained(service, prompt(5), namespace=wide)
            (other,) = found.others
            assert (found.pages, other.pages, other.tokens) == (2, 5, 5 * PAGE)
            assert ("page_size", "32", "16") in [(each.field, each.asked, each.found) for each in other.differs]

    run(test)


def test_many_salts_have_it() -> None:
    """Where every user's own namespace has the prompt, some are named, and looking ends."""

    async def test() -> None:
        async with running() as (service, _):
            client = await Client.attach(service)
            for number in range(35):
                await client.store(prompt(2), RequestScope(salt=f"user {number}"))
            found = await explained(service, prompt(2))
            assert len(found.others) == 5
            assert any("32 other namespaces" in note for note in found.notes)

    run(test)


def test_an_evicted_prompt() -> None:
    """Evicted, and since when; the pages in front are still there."""

    async def test() -> None:
        async with running(size=8 * PAGE_BYTES) as (service, _):
            client = await Client.attach(service)
            await client.store(prompt(6))
            await client.store(prompt(5, 1))
            found = await explained(service, prompt(6))
            assert found.tiers["host"] == 3
            cause = only(found)
            assert (cause.reason, cause.first_page, cause.end_page) == (MissReason.EVICTED, 3, 6)
            assert cause.seconds_ago is not None
            assert 0 <= cause.seconds_ago < 60

    run(test)


def test_a_larger_tier_that_would_have_kept_it_is_named_with_what_it_hits() -> None:
    """By the pool's own estimate; not where nothing was evicted."""

    async def test() -> None:
        async with running(size=8 * PAGE_BYTES) as (service, _):
            client = await Client.attach(service)
            for number in range(10):
                await client.store(prompt(6) if number % 2 else prompt(5, 1))
            found = await explained(service, prompt(5, 1))
            assert MissReason.EVICTED in {cause.reason for cause in found.causes}
            (pool,) = service.pools
            (ghost,) = pool.cache.insight().what_if
            size = by_estimates(ghost.points)
            assert size is not None
            assert (size.pages_now, size.pages) == (8, 16)
            assert f"a larger host would evict less: {size.told(pool.page_bytes)} since the start" in found.notes
            there = await explained(service, prompt(6))
            assert (there.causes, [note for note in there.notes if "larger" in note]) == ((), [])

    run(test)


def test_a_cleared_prompt() -> None:
    """Gone with a clear, in the generation before."""

    async def test() -> None:
        async with running() as (service, _):
            client = await Client.attach(service)
            await client.store(prompt(6))
            await service.clear(Caller(), Target(model="org/model"))
            (pool,) = service.pools
            while pool.cache.upkeep():
                pass
            found = await explained(service, prompt(6))
            assert (found.generation, only(found).reason) == (1, MissReason.EXPIRED)
            assert only(found).seconds_ago is not None

    run(test)


def test_a_damaged_page(tmp_path: Path) -> None:
    """A page whose stored copy is damaged fails at the first load, and that is remembered."""
    url = f"file://{tmp_path}/s?capacity=1GiB"

    async def store() -> None:
        async with running(storage=url) as (service, _):
            await (await Client.attach(service)).store(prompt(4))

    async def test() -> None:
        async with running(storage=url) as (service, _):
            client = await Client.attach(service)
            assert await client.check(prompt(4)) == 2
            found = await explained(service, prompt(4))
            assert (found.usable_pages, found.causes[0].reason) == (2, MissReason.FAILED)
            assert "damaged" in found.causes[0].text

    run(store)
    names = hashes(prompt(4))
    for victim in tmp_path.rglob(f"{names[64:96].hex()}*"):
        with victim.open("r+b") as file:
            file.seek(5000)
            file.write(b"spoilt")
    run(test)


def test_what_only_the_store_knows(tmp_path: Path) -> None:
    """After a restart the store has pages of which the service knows nothing: it is asked, and nothing is changed."""
    url = f"file://{tmp_path}/s?capacity=1GiB"

    async def store() -> None:
        async with running(storage=url) as (service, _):
            await (await Client.attach(service)).store(prompt(4), RequestScope(salt="s"))

    async def test() -> None:
        async with running(storage=url) as (service, _):
            client = await Client.attach(service)
            found = await explained(service, prompt(5), RequestScope(salt="s"))
            assert (found.tiers["storage"], found.usable_pages, only(found).first_page) == (4, 4, 4)
            assert any("did not know" in note for note in found.notes)
            unasked = await explained(service, prompt(5), RequestScope(salt="s"), seconds=0)
            assert (unasked.tiers["storage"], unasked.usable_pages) == (0, 0)
            assert await client.check(prompt(5), RequestScope(salt="s")) == 4

    run(store)
    run(test)


def test_what_storage_has_lost(tmp_path: Path) -> None:
    """Pages that the service believes to be in storage, and that somebody removed: the store is asked, and it shows."""

    async def test() -> None:
        async with running(storage=f"file://{tmp_path}/s?capacity=1GiB", size=8 * PAGE_BYTES) as (service, _):
            client = await Client.attach(service)
            await client.store(prompt(6))
            (pool,) = service.pools
            await asyncio.to_thread(pool.cache.flush, 10.0)
            await client.store(prompt(8, 1))
            assert (await explained(service, prompt(7), seconds=0)).tiers["storage"] == 6
            for path in tmp_path.rglob(f"{hashes(prompt(6))[64:96].hex()}*"):
                path.unlink()
            found = await explained(service, prompt(7))
            assert (found.usable_pages, found.tiers["storage"]) == (2, 2)
            lost, cold = found.causes
            assert (lost.reason, lost.first_page, lost.end_page) == (MissReason.EVICTED, 2, 6)
            assert "lost" in lost.text
            assert cold.reason is MissReason.COLD
            assert any("3 pages behind page 2" in note for note in found.notes)
            assert (await explained(service, prompt(6))).usable_pages == 2  # also where all of it is believed

    run(test)


def test_what_storage_has_in_parts(tmp_path: Path) -> None:
    """A page of which one object is gone is none, though the one that usually tells for it is there."""

    async def test() -> None:
        async with running(storage=f"file://{tmp_path}/s?capacity=1GiB", size=8 * PAGE_BYTES) as (service, _):
            client = await Client.attach(service)
            await client.store(prompt(4))
            (pool,) = service.pools
            await asyncio.to_thread(pool.cache.flush, 10.0)
            await client.store(prompt(8, 1))
            await asyncio.to_thread(pool.cache.flush, 10.0)
            max(tmp_path.rglob(f"{hashes(prompt(4))[96:128].hex()}*")).unlink()
            found = await explained(service, prompt(4))
            assert (found.usable_pages, only(found).reason) == (3, MissReason.EVICTED)
            assert await client.check(prompt(4)) == 3

    run(test)


@pytest.mark.parametrize("seed", range(2))
def test_what_is_told_is_what_happens(seed: int, tmp_path: Path) -> None:
    """Before each of many requests: as many pages as are told are hits, and the others are missed for these reasons."""
    storage = f"file://{tmp_path}/s" if seed % 2 else None

    async def test() -> None:
        random = np.random.default_rng(seed)
        async with running(size=12 * PAGE_BYTES, storage=storage) as (service, _):
            client = await Client.attach(service)
            (pool,) = service.pools
            for _ in range(40):
                system, user = prompt(4, int(random.integers(4))), prompt(4, 100 + int(random.integers(9)))
                tokens = np.concatenate([system, user[: PAGE * int(random.integers(1, 5))]])
                if storage is not None:
                    await asyncio.to_thread(pool.cache.flush, 10.0)
                found = await explained(service, tokens)
                before = Counter(pool.cache.statistics().pages.missed)
                assert await client.store(tokens) == found.usable_pages
                missed = Counter(pool.cache.statistics().pages.missed) - before
                assert missed == {
                    cause.reason: sum(c.end_page - c.first_page for c in found.causes if c.reason is cause.reason)
                    for cause in found.causes
                }

    run(test)


def test_what_is_left_in_storage(tmp_path: Path) -> None:
    """Pages of which too few are there to be fetched, and pages that the engine computes faster than they load."""
    url = f"file://{tmp_path}/s?capacity=1GiB"

    async def store() -> None:
        async with running(storage=url) as (service, _):
            await (await Client.attach(service)).store(prompt(4))

    async def test() -> None:
        async with running(storage=url, policies=Policies(prefetch_threshold=5 * PAGE)) as (service, _):
            await Client.attach(service)
            found = await explained(service, prompt(4))
            assert (found.tiers["storage"], found.usable_pages) == (4, 0)
            assert (only(found).reason, "threshold of 80" in only(found).text) == (MissReason.LATE, True)
        async with running(storage=url) as (service, _):
            client = await Client.attach(service)
            assert await client.check(prompt(2)) == 2  # so that it is known how long loading takes
            client.session.report_prefill(1, 10**9, 1.0)
            found = await explained(service, prompt(4))
            assert (found.tiers["storage"], found.usable_pages) == (4, 2)
            assert (only(found).reason, "not worth" in only(found).text) == (MissReason.OVER_BUDGET, True)

    run(store)
    run(test)


def test_pages_that_are_on_their_way() -> None:
    """Another request has these pages in hand: they are late, not cold."""

    async def test() -> None:
        async with running() as (service, _):
            client = await Client.attach(service)
            (pool,) = service.pools
            scope = pool.cache.known()
            assert scope is not None
            assert scope.tree is not None
            core, tokens = pool.cache.parts.core, prompt(3)
            lease = core.lease(scope.tree, pool.cache.prompt(scope, hashes(tokens)))
            core.allocate(lease, 3)
            written = core.commit(lease, 3, ready=False)  # as an engine that owns HOST and computes still
            assert written is not None
            assert only(await explained(service, tokens)).reason is MissReason.LATE
            core.complete(written.id, [hicache.records.PageResult.OK] * 3)
            core.release(lease)
            assert (await explained(service, tokens)).causes == ()
            assert await client.store(tokens) == 3

    run(test)


def test_storage_that_does_not_answer(tmp_path: Path) -> None:
    """It is waited for as long as was said, and the answer says so; the rest is explained all the same."""

    async def test() -> None:
        async with running(storage=f"file://{tmp_path}/s") as (service, _):
            client = await Client.attach(service)
            await client.store(prompt(2))
            (pool,) = service.pools
            gate = Gate()
            port = pool.cache.parts.port
            assert port is not None
            before = port.contains
            port.contains = lambda keys, **more: (gate.enter(), before(keys, **more))[1]  # type: ignore[method-assign]
            found = await explained(service, prompt(3), seconds=0.05)
            assert any("did not answer" in note for note in found.notes)
            assert found.usable_pages == 2
            gate.open()

    run(test)


def test_device_is_what_engines_report() -> None:
    """Leading pages that an engine says it holds are shown; they change nothing of what a request gets."""

    async def test() -> None:
        async with running() as (service, _):
            client = await Client.attach(service)
            names = hashes(prompt(5))
            await client.store(prompt(2))
            client.session.report_device(
                1, PLAIN, stored=names, parent_hash=b"", first_page=0, removed=b"", cleared=False
            )
            found = await explained(service, prompt(5))
            assert (found.tiers["device"], found.tiers["host"], found.usable_pages) == (5, 2, 2)

    run(test)


@pytest.mark.case("STAT-1")
def test_nothing_moves_is_pinned_or_counted() -> None:
    """Invariant 5: however often one explains, the service's own numbers and what is evicted next stay the same."""

    async def test() -> None:
        async with running(size=8 * PAGE_BYTES) as (service, _):
            client = await Client.attach(service)
            await client.store(prompt(3))
            await client.store(prompt(3, 1))
            (pool,) = service.pools
            before = pool.cache.statistics()
            for _ in range(5):
                await explained(service, np.concatenate([prompt(3), prompt(3, 7)]), RequestScope(salt="x"))
                await explained(service, prompt(3))
            assert pool.cache.statistics() == before
            assert pool.cache.known(None, None, "x") is None
            await client.store(prompt(3, 2))  # one page too many: the least recently used is still the first prompt
            assert (await explained(service, prompt(3))).usable_pages == 2
            assert (await explained(service, prompt(3, 1))).usable_pages == 3

    run(test)


def test_tenants_and_rights() -> None:
    """A caller sees its own tenant: others' pools are not there, and others' prompts are in no list."""

    async def test() -> None:
        async with running() as (service, _):
            for tenant in ("red", "blue"):
                client = await Client.attach(service, Caller(tenant=tenant), pool_bytes=4 << 20)
                await client.store(prompt(4) if tenant == "red" else prompt(1, 5))
            blue = Caller(tenant="blue")
            found = await explained(service, prompt(4), caller=blue)
            assert (found.usable_pages, found.others, only(found).reason) == (0, (), MissReason.COLD)
            with pytest.raises(PermissionDenied, match="administer"):
                await explained(service, prompt(4), caller=Caller(tenant="red", admin=False))
            target = Target(model="org/model", tenant="red")
            with pytest.raises(PermissionDenied, match="other tenants"):
                await service.explain(blue, target, prompt(4).tobytes(), storage_seconds=0)
            text = await service.explain(Caller(), target, prompt(4).tobytes(), storage_seconds=0)
            assert json.loads(text)["explanations"][0]["usable_pages"] == 4

    run(test)


def test_what_cannot_be_explained() -> None:
    """No such model, and tokens that are cut."""

    async def test() -> None:
        async with running() as (service, _):
            with pytest.raises(NotFound, match="no pool of model"):
                await service.explain(Caller(), Target(model="nobody"), b"", storage_seconds=0)
            await Client.attach(service)
            with pytest.raises(InvalidInput, match="multiple of 4"):
                await service.explain(Caller(), Target(model="org/model"), b"123", storage_seconds=0)
            found = await explained(service, prompt(0))
            assert (found.tokens, found.causes) == (0, ())

    run(test)
