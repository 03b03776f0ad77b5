"""Ranks that come late, and views of slots that this process has let go of: nobody touches what others may have."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
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
    """A lease that has expired is let go of where nobody has views; whoever wants the first one then is refused."""
    with (
        ServiceProcess(folder, "--set", "leases.seconds=0.5") as service,
        Admin(service) as admin,
        hicache.connect(service.address, NAMESPACE, required=True) as cache,
        cache.request(TOKENS, logits=False) as request,
    ):
        slots = request.allocate()
        within(10.0, lambda: request.lost is not None and not admin.host()["private"])
        with pytest.raises(LeaseExpired, match="not used for"):
            request.page(0)
        with pytest.raises(LeaseExpired, match="not used for"):
            cache.host.page(int(slots[0]))
        with cache.request(TOKENS, logits=False) as again:  # the same slots, and this time they are its own
            fresh = again.allocate()
            assert set(fresh) & set(slots)
            again.page(0)[:] = 1
            cache.host.page(int(fresh[1]))[:] = 2
