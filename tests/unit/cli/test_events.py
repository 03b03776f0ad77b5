from __future__ import annotations

import re

from hicache.cli.events import documents, texts
from hicache.events import Cleared, Removed, Stored
from hicache.records import Tier
from hicache.rpc.service import EventBatch

NAMESPACE = bytes.fromhex("0123456789abcdef") * 2
PAGES = (b"\1" * 32, b"\2" * 32)
STORED = Stored(NAMESPACE, 3, Tier.HOST, PAGES, b"\7" * 32, 5, b"", b"\1\0\0\0\2\0\0\0")
CHANGES = EventBatch(
    100,
    1_700_000_000_250,
    (STORED, Removed(NAMESPACE, 3, Tier.STORAGE, PAGES[:1], "evicted"), Cleared(NAMESPACE, 3)),
)


def test_changes_for_people() -> None:
    """One line each, with what it takes to find the page again elsewhere."""
    lines = [re.sub(r"^\d\d:\d\d:\d\d\.250  ", "", line) for line in texts(CHANGES)]
    scope = "namespace 01234567 generation 3"
    assert lines == [
        f"stored    host     2 pages from page 5, 01010101, {scope}",
        f"removed   storage  1 page evicted, 01010101, {scope}",
        f"cleared   {scope}",
    ]


def test_losses_and_snapshots_for_people() -> None:
    (lost,) = texts(EventBatch(200, 0, lost=1234))
    assert "1,234 events or more" in lost
    first, last = texts(EventBatch(200, 0, (STORED,), snapshot=True, snapshot_end=True))
    assert "resident" in first
    assert last.endswith("the next event is number 200")


def test_changes_for_programs() -> None:
    """Each with its own number, without tokens unless they are wanted."""
    stored, removed, cleared = documents(CHANGES)
    common = {
        "namespace": NAMESPACE.hex(),
        "generation": 3,
        "timestamp_ms": 1_700_000_000_250,
        "snapshot": False,
    }
    hashes = [page.hex() for page in PAGES]
    assert stored == common | {
        "number": 100,
        "event": "stored",
        "tier": "host",
        "first_page": 5,
        "parent_hash": (b"\7" * 32).hex(),
        "page_hashes": hashes,
    }
    assert removed == common | {
        "number": 101,
        "event": "removed",
        "tier": "storage",
        "reason": "evicted",
        "page_hashes": hashes[:1],
    }
    assert cleared == common | {"number": 102, "event": "cleared"}
    assert next(documents(CHANGES, tokens=True))["tokens"] == [1, 2]


def test_losses_and_snapshots_for_programs() -> None:
    """All of a snapshot has the number of the event that follows it."""
    assert list(documents(EventBatch(200, 7, lost=4))) == [
        {"event": "lost", "lost": 4, "number": 200, "timestamp_ms": 7}
    ]
    snapshot = EventBatch(200, 7, (STORED, STORED), snapshot=True, snapshot_end=True)
    *events, end = documents(snapshot)
    assert [(event["number"], event["snapshot"]) for event in events] == [(200, True)] * 2
    assert end == {"event": "snapshot_end", "number": 200, "timestamp_ms": 7}
