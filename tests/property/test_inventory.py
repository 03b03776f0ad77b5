"""Pages that are taken along into a new core are the same pages: found alike, evicted alike, stored alike."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.core.cache import Core
from hicache.core.config import CoreConfig
from hicache.core.inventory import HeldRun, adopt, claim, slots_of, take
from hicache.core.prompt import Prompt, SymbolsAreHashes
from hicache.core.registry import HOST
from hicache.core.residency import NO_SLOTS, PRIVATE
from hicache.core.tree import HiRadixTree
from hicache.errors import InvalidInput
from hicache.records import PageResult

WIDTH = 4
SLOTS = 24
HASHER = SymbolsAreHashes(WIDTH)

prompts = st.lists(st.integers(0, 2), min_size=1, max_size=8).map(tuple)


def chained(letters: tuple[int, ...]) -> Prompt:
    """A prompt whose page symbols depend on all in front of them, as page hashes do."""
    symbols, before = b"", b"\0" * WIDTH
    for letter in letters:
        before = ((int.from_bytes(before, "little") * 31 + letter + 1) % 2**32).to_bytes(WIDTH, "little")
        symbols += before
    return Prompt(symbols, WIDTH, HASHER)


def core_of(slots: int = SLOTS, *, storage: bool = True) -> tuple[Core, HiRadixTree]:
    core = Core(CoreConfig(device_pages=0, host_pages=slots, storage=storage))
    return core, core.tree(b"n" * 16, width=WIDTH, hasher=HASHER, generation=3)


def use(core: Core, tree: HiRadixTree, letters: tuple[int, ...], *, stores: bool) -> None:
    """One request that commits what it does not find; `stores` lets its puts succeed."""
    lease = core.lease(tree, chained(letters))
    core.allocate(lease, len(letters) - lease.usable)
    core.commit(lease, len(letters), ready=True)
    core.release(lease)
    while core.actions:
        transfer = core.actions.popleft()
        result = PageResult.OK if stores else PageResult.FAILED
        core.complete(transfer.id, [result] * transfer.count)


def moved(tree: HiRadixTree, *, stored: bool = True, without: np.ndarray = NO_SLOTS) -> tuple[Core, HiRadixTree]:
    """A new core that has taken over what the tree holds, by way of bytes."""
    data = msgspec.msgpack.encode(take(tree, without=without))
    runs = msgspec.msgpack.decode(data, type=list[HeldRun])
    core, fresh = core_of()
    claim(core, np.concatenate([NO_SLOTS, *slots_of(runs)]))
    adopt(core, fresh, runs, stored=stored)
    core.check()
    return core, fresh


def found(core: Core, tree: HiRadixTree, used: list[tuple[int, ...]]) -> list[tuple[int, int]]:
    return [(match.host, match.storage) for match in (core.match(tree, chained(letters)) for letters in used)]


@given(st.lists(st.tuples(prompts, st.booleans()), min_size=1, max_size=12))
def test_what_was_found_is_found_in_the_same_slots(history: list[tuple[tuple[int, ...], bool]]) -> None:
    """Every prompt matches as before in HOST, in the very slots that hold its bytes; beliefs are taken along."""
    core, tree = core_of()
    for letters, stores in history:
        use(core, tree, letters, stores=stores)
    fresh_core, fresh = moved(tree)
    for letters, _ in history:
        prompt = chained(letters)
        ours, theirs = (one.held(one.walk(prompt), HOST)[0] for one in (tree, fresh))
        assert ours.tolist() == theirs.tolist()
        old, new = core.match(tree, prompt), fresh_core.match(fresh, prompt)
        assert new.host == old.host
        walked = fresh.walk(prompt)
        assert fresh.believed_pages(walked) == min(tree.believed_pages(tree.walk(prompt)), len(ours))
    assert fresh_core.statistics().host.free == core.statistics().host.free


@given(st.lists(prompts, min_size=1, max_size=8))
def test_what_was_coldest_goes_first(used: list[tuple[int, ...]]) -> None:
    """Recency is taken along: page by page, both cores evict the same."""
    core, tree = core_of()
    for letters in used:
        use(core, tree, letters, stores=True)
    fresh_core, fresh = moved(tree)
    for _ in range(SLOTS):
        assert core.evict(HOST, 1) == fresh_core.evict(HOST, 1)
        ours = [host for host, _ in found(core, tree, used)]
        assert ours == [host for host, _ in found(fresh_core, fresh, used)]
    fresh_core.check()


@given(st.lists(prompts, min_size=1, max_size=8), st.sets(st.integers(0, SLOTS - 1), max_size=6))
def test_slots_left_out_take_what_is_below_along(used: list[tuple[int, ...]], barred: set[int]) -> None:
    """A page whose slot somebody may still write is left behind, and what hangs on it; no such slot is ever free."""
    core, tree = core_of()
    for letters in used:
        use(core, tree, letters, stores=True)
    without = np.array(sorted(barred), np.int64)
    fresh_core, fresh = moved(tree, without=without)
    for letters in used:
        held, _ = tree.held(tree.walk(chained(letters)), HOST)
        kept, _ = fresh.held(fresh.walk(chained(letters)), HOST)
        expected = next((i for i, slot in enumerate(held.tolist()) if slot in barred), len(held))
        assert kept.tolist() == held[:expected].tolist()
    claim(fresh_core, without)
    assert (fresh_core.registry.tables[HOST].state[without] == PRIVATE).all()
    fresh_core.registry.tables[HOST].give_back(without)
    fresh_core.check()


def test_another_storage_is_not_believed_to_have_anything() -> None:
    """With `stored=False` everything is dirty, and the next use puts it."""
    core, tree = core_of()
    use(core, tree, (0, 1, 2), stores=True)
    fresh_core, fresh = moved(tree, stored=False)
    assert fresh.believed_pages(fresh.walk(chained((0, 1, 2)))) == 0
    lease = fresh_core.lease(fresh, chained((0, 1, 2)))
    fresh_core.release(lease)
    assert sum(transfer.count for transfer in fresh_core.actions) == 3


@pytest.mark.parametrize("slots", [[0, 0], [SLOTS], [-1], [1, 2, 1]])
def test_claims_are_all_or_nothing(slots: list[int]) -> None:
    """Slots that there are not, or twice, are refused, and nothing is taken."""
    core, _ = core_of()
    with pytest.raises(InvalidInput):
        claim(core, np.array(slots, np.int64))
    assert core.statistics().host.free == SLOTS
    core.check()


@pytest.mark.parametrize(
    "run",
    [
        HeldRun(0, b"\1" * WIDTH, b"\0" * 8, 0, 1, 1, 0),  # hangs on itself
        HeldRun(-2, b"\1" * WIDTH, b"\0" * 8, 0, 1, 1, 0),
        HeldRun(-1, b"\1" * WIDTH * 2, b"\0" * 8, 0, 1, 1, 0),  # two pages, one slot
        HeldRun(-1, b"", b"", 0, 1, 1, 0),
    ],
)
def test_runs_that_do_not_hang_together_are_refused(run: HeldRun) -> None:
    """What another version may have written wrong is an error, not a wrong hit."""
    core, tree = core_of()
    claim(core, np.array([0], np.int64))
    with pytest.raises(InvalidInput):
        adopt(core, tree, [run], stored=True)
