from __future__ import annotations

import pytest

from hicache.runtime import absent
from hicache.runtime.absent import AbsentPages
from hicache.testing.clock import ManualClock

NAMESPACE = bytes(16)
PAGES = [bytes([i]) * 16 for i in range(4)]


def test_a_missing_page_is_known_for_a_while() -> None:
    clock = ManualClock()
    pages = AbsentPages(clock, seconds=1.0)
    pages.note(NAMESPACE, 0, PAGES[2])
    assert pages.leading(NAMESPACE, 0, PAGES) == 2
    assert pages.leading(NAMESPACE, 1, PAGES) == 4
    assert pages.leading(b"x" * 16, 0, PAGES) == 4
    clock.advance(1.0)
    assert pages.leading(NAMESPACE, 0, PAGES) == 4


def test_a_stored_page_is_not_missing_any_more() -> None:
    pages = AbsentPages(ManualClock(), seconds=1.0)
    pages.note(NAMESPACE, 0, PAGES[0])
    pages.forget(NAMESPACE, 0, PAGES[0])
    assert pages.leading(NAMESPACE, 0, PAGES) == 4


def test_nothing_is_remembered_for_zero_seconds() -> None:
    pages = AbsentPages(ManualClock(), seconds=0.0)
    pages.note(NAMESPACE, 0, PAGES[0])
    assert pages.leading(NAMESPACE, 0, PAGES) == 4


def test_the_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(absent, "LIMIT", 2)
    pages = AbsentPages(ManualClock(), seconds=1.0)
    for page in PAGES:
        pages.note(NAMESPACE, 0, page)
    assert [pages.leading(NAMESPACE, 0, [page]) for page in PAGES] == [1, 1, 0, 0]
