"""What engines say that they hold: as each of them says it, and as the pool as a whole."""

from __future__ import annotations

from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from hicache.events import Event, Removed, Stored
from hicache.sidecar.groups import Group
from hicache.sidecar.mirror import DeviceMirror

NAMESPACE = b"n" * 16


def group() -> Group:
    return Group("g", cast("Any", None))


def names(pages: list[int]) -> bytes:
    return b"".join(bytes([page]) * 32 for page in pages)


def report(mirror: DeviceMirror, who: Group, generation: int = 0, **fields: Any) -> list[Event]:
    given = {"stored": b"", "parent_hash": None, "first_page": 0, "removed": b"", "cleared": False} | fields
    return mirror.report(who, NAMESPACE, generation, **given)


def numbers(event: Stored | Removed) -> list[int]:
    return [page[0] for page in event.page_hashes]


def test_a_page_of_two_engines_is_stored_once_and_removed_once() -> None:
    """The pool's events are those of the first that has a page and the last that had it."""
    mirror, one, two = DeviceMirror(), group(), group()
    (first,) = report(mirror, one, stored=names([1, 2, 3]))
    (more,) = report(mirror, two, stored=names([1, 2, 3, 4]))
    assert (numbers(cast("Stored", first)), numbers(cast("Stored", more))) == ([1, 2, 3], [4])
    assert cast("Stored", more).parent_hash == names([3])
    assert cast("Stored", more).first_page == 3
    assert report(mirror, one, removed=names([3, 2])) == []
    (gone,) = mirror.forget(two)
    assert numbers(cast("Removed", gone)) == [4, 3, 2]  # deepest first
    assert mirror.leading(one, NAMESPACE, names([1, 2])) == 1
    assert mirror.pages == 1


def test_what_was_cleared_everywhere_is_forgotten_without_a_word() -> None:
    """A new generation of the namespace has told it already; pages stored since then are new ones."""
    mirror, one = DeviceMirror(), group()
    report(mirror, one, stored=names([1, 2]))
    (event,) = report(mirror, one, generation=1, stored=names([2]), first_page=1)
    assert (numbers(cast("Stored", event)), cast("Stored", event).generation) == ([2], 1)
    assert mirror.pages == 1


def test_what_was_never_reported_cannot_be_removed() -> None:
    """Reports are not trusted to make sense."""
    mirror, one = DeviceMirror(), group()
    assert report(mirror, one, removed=names([9, 9])) == []
    report(mirror, one, stored=names([1]))
    assert len(report(mirror, one, removed=names([1, 1]))) == 1
    assert mirror.forget(one) == []


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),
            st.lists(st.integers(0, 9), max_size=5, unique=True),
            st.lists(st.integers(0, 9), max_size=5),
            st.booleans(),
        ),
        max_size=20,
    )
)
def test_events_replayed_are_what_any_engine_holds(history: list[tuple[int, list[int], list[int], bool]]) -> None:
    """Whatever is reported, the events tell of the union of what the engines hold."""
    mirror, groups = DeviceMirror(), [group() for _ in range(3)]
    model: list[set[int]] = [set(), set(), set()]
    told: set[int] = set()
    for who, stored, removed, cleared in history:
        events = report(mirror, groups[who], stored=names(stored), removed=names(removed), cleared=cleared)
        model[who] = (set() if cleared else model[who] - set(removed)) | set(stored)
        for event in events:
            pages = set(numbers(cast("Any", event)))
            if isinstance(event, Stored):
                assert not pages & told
                told |= pages
            else:
                assert pages <= told
                told -= pages
        assert told == set.union(*model)
        assert mirror.pages == len(told)
