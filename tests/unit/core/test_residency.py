"""The table of slot states, and the one function that uses it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from hicache.core.residency import TRANSITIONS, SlotEvent, SlotState, SlotTable
from hicache.errors import ResidencyError
from hicache.records import Tier


def table_with(state: SlotState) -> tuple[SlotTable, np.ndarray]:
    """A table of 8 slots of which 3 have been brought to a state by legal events."""
    table = SlotTable(Tier.HOST, 8)
    slots = table.allocate(3)
    if state is SlotState.FREE:
        table.give_back(slots)
    else:
        ways = {
            SlotState.PRIVATE: [],
            SlotState.FILLING: [SlotEvent.RESERVE],
            SlotState.RESIDENT: [SlotEvent.RESERVE, SlotEvent.PUBLISH],
            SlotState.QUARANTINED: [SlotEvent.RESERVE, SlotEvent.DETACH],
        }
        at = SlotState.PRIVATE
        for event in ways[state]:
            table.advance(slots, at, event)
            at = TRANSITIONS[at, event]
    return table, slots


@pytest.mark.parametrize(("state", "event"), list(itertools.product(SlotState, SlotEvent)))
def test_every_edge(state, event):
    """A legal event moves the slots and the counts; an illegal one raises and changes nothing."""
    table, slots = table_with(state)
    assert (table.state[slots] == state).all()
    before, counts = table.state.copy(), list(table.counts)
    if (state, event) in TRANSITIONS:
        table.advance(slots, state, event)
        assert (table.state[slots] == TRANSITIONS[state, event]).all()
        counts[state] -= 3
        counts[TRANSITIONS[state, event]] += 3
    else:
        with pytest.raises(ResidencyError):
            table.advance(slots, state, event)
        assert (table.state == before).all()
    assert table.counts == counts
    assert sum(table.counts) == table.capacity


def test_one_slot_in_another_state_stops_the_whole_event():
    table, slots = table_with(SlotState.PRIVATE)
    table.advance(slots[:1], SlotState.PRIVATE, SlotEvent.RESERVE)
    before = table.state.copy()
    with pytest.raises(ResidencyError, match=r"PRIVATE slots, but slot .* is FILLING"):
        table.advance(slots, SlotState.PRIVATE, SlotEvent.RESERVE)
    assert (table.state == before).all()


def test_taking_more_than_is_free_is_refused():
    table = SlotTable(Tier.DEVICE, 2)
    with pytest.raises(ResidencyError, match="3 slots taken, 2 free"):
        table.allocate(3)
    assert table.counts == [2, 0, 0, 0, 0]


def test_a_growing_table_gives_what_is_asked():
    table = SlotTable(Tier.DEVICE, None)
    first = table.allocate(1000)
    second = table.allocate(5000)
    assert len(np.unique(np.concatenate((first, second)))) == 6000
    table.give_back(second)
    assert sum(table.counts) == table.capacity
    assert len(np.unique(table.free[: table.counts[0]])) == table.counts[0]


def test_slots_that_are_taken_together_lie_in_order():
    """Pages side by side are copied in one piece, whatever order their slots were freed in."""
    table = SlotTable(Tier.HOST, 8)
    assert table.allocate(6).tolist() == [0, 1, 2, 3, 4, 5]
    table.give_back(np.array([4, 1, 3]))
    assert table.allocate(3).tolist() == [1, 3, 4]
