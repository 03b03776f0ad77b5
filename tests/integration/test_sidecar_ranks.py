"""Ranks that come late, and views of slots that this process has let go of: nobody touches what others may have."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

import hicache
from hicache.errors import LeaseExpired
from hicache.testing.admin import Admin, within
from hicache.testing.ranks import rank_namespace
from hicache.testing.sidecars import ServiceProcess

pytestmark = pytest.mark.slow

NAMESPACE = rank_namespace("mha")
TOKENS = np.arange(3 * NAMESPACE.page_size, dtype=np.uint32)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: sockets have at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="hc") as name:
        yield Path(name)


def test_replicas_find_each_others_whole_pages(folder: Path) -> None:
    """A page that one of the ranks has not written is no hit in the other replica; then each rank finds its part."""
    with ServiceProcess(folder) as service, ExitStack() as stack:
        one, two = (
            [
                stack.enter_context(
                    hicache.connect(service.address, NAMESPACE, group=group, tp_size=2, tp_rank=rank, required=True)
                )
                for rank in range(2)
            ]
            for group in ("one", "two")
        )
        parts = [np.full((3, one[0].host.page_bytes), 1 + rank, np.uint8) for rank in range(2)]
        with one[0].request(TOKENS, logits=False) as request:
            request.allocate()
            ticket = request.ticket()
            assert ticket is not None
            request.write_from(parts[0])
            request.commit()
            assert two[0].match(TOKENS, logits=False).host == 0
            with one[1].join(ticket) as joined:
                joined.write_from(parts[1])
                joined.commit(upto=2 * NAMESPACE.page_size)
                assert two[0].match(TOKENS, logits=False).host == 2
                joined.commit()
        with two[1].request(TOKENS, logits=False) as request:
            assert len(request.load()) == 3
            ticket = request.ticket()
            assert ticket is not None
            found = [np.empty_like(part) for part in parts]
            with two[0].join(ticket) as joined:
                assert joined.read_into(found[0]) == 3
            assert request.read_into(found[1]) == 3
        assert all(np.array_equal(part, expected) for part, expected in zip(found, parts, strict=True))


def test_rank_that_joins_late_leaves_older_requests_alone(folder: Path) -> None:
    """The service does not wait for it when such a request ends, so it neither reads nor writes; newer ones are its."""
    with (
        ServiceProcess(folder) as service,
        hicache.connect(service.address, NAMESPACE, group="g", tp_size=2, required=True) as first,
    ):
        with first.request(TOKENS, logits=False) as request:
            assert len(request.allocate()) == 3
            ticket = request.ticket()
            assert ticket is not None
            with hicache.connect(service.address, NAMESPACE, group="g", tp_size=2, tp_rank=1, required=True) as second:
                page = np.ones((3, second.host.page_bytes), np.uint8)
                with second.join(ticket) as late:
                    assert late.lost == "the request was made before this rank has joined the group"
                    assert late.write_from(page) == 0
                    late.commit()
                with first.request(TOKENS + np.uint32(1), logits=False) as newer:
                    newer.allocate()
                    ticket = newer.ticket()
                    assert ticket is not None
                    with second.join(ticket.encode()) as joined:
                        assert joined.lost is None
                        assert joined.write_from(page) == 3
                        joined.commit()
                    assert newer.write_from(page) == 3
                    newer.commit()
                assert first.match(TOKENS + np.uint32(1), logits=False).host == 3
            request.commit()
        assert first.match(TOKENS, logits=False).host == 0


def test_no_views_of_slots_that_were_given_up(folder: Path) -> None:
    """A lease that was revoked is let go of where nobody has views; whoever wants the first one then is refused."""
    with (
        ServiceProcess(folder) as service,
        Admin(service) as admin,
        hicache.connect(service.address, NAMESPACE, group="g", tp_size=2, required=True) as cache,
        hicache.connect(service.address, NAMESPACE, group="g", tp_size=2, tp_rank=1, required=True) as lost,
        cache.request(TOKENS, logits=False) as request,
    ):
        slots = request.allocate()
        lost.close()
        within(10.0, lambda: request.lost is not None and not admin.host()["private"])
        with pytest.raises(LeaseExpired, match="rank 1 of stage 0 was lost"):
            request.page(0)
        with pytest.raises(LeaseExpired, match="rank 1 of stage 0 was lost"):
            cache.host.page(int(slots[0]))
        with cache.request(TOKENS, logits=False) as again:  # the same slots, and this time they are its own
            fresh = again.allocate()
            assert set(fresh) & set(slots)
            again.page(0)[:] = 1
            cache.host.page(int(fresh[1]))[:] = 2


def test_pages_with_images_are_committed_by_workers_of_a_scheduler(folder: Path) -> None:
    """Who only schedules commits nothing: the workers tell what else than tokens is in the pages, by its ticket."""
    image = (b"image", 3, NAMESPACE.page_size)
    settings = {"group": "g", "required": True, "extras": True}
    with (
        ServiceProcess(folder) as service,
        hicache.connect(service.address, NAMESPACE, worker=False, **settings) as scheduler,
        hicache.connect(service.address, NAMESPACE, **settings) as worker,
    ):
        with scheduler.request(TOKENS, logits=False, extras=[image]) as request:
            request.allocate()
            ticket = request.ticket()
            assert ticket is not None
            with worker.join(ticket.encode()) as joined:
                joined.write_from(np.ones((3, worker.host.page_bytes), np.uint8))
                joined.commit()
        assert scheduler.match(TOKENS, logits=False, extras=[image]).host == 3
        assert scheduler.match(TOKENS, logits=False).host == 0
