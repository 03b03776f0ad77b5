"""Drives a `Core` at random and knows what must be true: which page's bytes lie in which slot, and what is stored.

`CoreDriver` plays the engine, the copy threads and the storage. Transfers begin and end in any order, fail, find their
source missing, are cancelled and outlive a clear. Bytes are modelled as one tag a slot: the hash of the page, or a mark
of the transfer that is writing it; so a slot that is read too early, freed too early or shared is seen at once.

It draws every decision from a `Choices`: a seeded random generator, or hypothesis, which can shrink.
"""

from __future__ import annotations

import numpy as np

from hicache.core.cache import Core
from hicache.core.config import CoreConfig
from hicache.core.residency import PRIVATE, RESIDENT, Slots
from hicache.core.transfers import Lease, Transfer, TransferKind
from hicache.core.tree import HiRadixTree
from hicache.errors import OutOfSlots
from hicache.records import PageResult, Tier
from hicache.testing.choices import Choices, Decider, tag
from hicache.testing.coremodel import (
    ModelEngine,
    Prompts,
    RunningTransfer,
    WatchedWords,
    check_orphans,
    some_fail,
    written_tags,
)
from hicache.testing.told import ToldResidency

_DEVICE, _HOST = int(Tier.DEVICE), int(Tier.HOST)


class CoreDriver(Decider):
    """A core under random use, with a model beside it.

    Attributes:
        core: the core.
        steps: steps made.
        seen: how often each kind of thing happened, so that a test can tell that it did.
    """

    def __init__(
        self,
        choices: Choices,
        config: CoreConfig,
        *,
        namespaces: int = 2,
        alphabet: int = 2,
        core: Core | None = None,
        hashes: bool = False,
    ) -> None:
        super().__init__(choices)
        self._words = WatchedWords(config.host_pages)
        self.core = Core(config, self._words.words) if core is None else core
        self._prompts = Prompts(choices, self.core, namespaces=namespaces, alphabet=alphabet, hashes=hashes)
        self._engines: list[ModelEngine] = []
        self._running: dict[int, RunningTransfer] = {}
        self._writers: dict[int, tuple[Transfer, int]] = {}
        self._stored: dict[tuple[bytes, int], set[int]] = {}
        self._acknowledged: dict[tuple[bytes, int], set[int]] = {}
        self._putting: set[tuple[bytes, int, int]] = set()
        self._top = self.core.registry.top
        self._tags = [np.zeros(self.core.registry.tables[tier].capacity, np.int64) for tier in (_DEVICE, _HOST)]
        self._told = ToldResidency()
        self._number = 0
        self._now = 0

    # ---- steps

    STEPS = (
        ("request", 16),
        ("allocate_and_commit", 18),
        ("close", 12),
        ("load", 10),
        ("prefetch", 8),
        ("run", 30),
        ("withdraw_interest", 4),
        ("give_up", 4),
        ("decline", 3),
        ("evict", 8),
        ("flush", 4),
        ("drain", 1),
        ("lose_stored", 2),
        ("clear", 1),
        ("sweep", 2),
        ("match", 4),
        ("decode", 6),
        ("touch", 4),
        ("detach_or_attach", 1),
        ("forget", 2),
    )
    _WEIGHTED = tuple(name for name, weight in STEPS for _ in range(weight))

    def step(self) -> str:
        """Do one random thing, then take what the core wants done. Returns its name."""
        name = self._WEIGHTED[self._choices.integer(0, len(self._WEIGHTED) - 1)]
        self.steps += 1
        getattr(self, f"_{name}")()
        self._take_actions()
        if self._running and self._one_in(4):
            self._run()
            self._take_actions()
        self._told.replay(self.core.events)
        return name

    def check(self) -> None:
        """Everything that must hold now."""
        self.core.check()
        self._words.check(self.core.registry.tables[_HOST])
        for engine in self._engines:
            for tier, slots, tags in engine.reads:
                assert self._tags[tier][slots].tolist() == tags, "bytes of a lease changed under it"
            private = self._private(engine.lease)
            assert (self._tags[self._top][private] == engine.mark).all(), "somebody else wrote a private slot"
        for writer, mark in self._writers.values():
            assert (self._tags[self._top][writer.private] == mark).all(), (
                "a slot was reused before its writer had ended"
            )
        for tree in self.core.trees:
            self._check_contents(tree)

    def _check_contents(self, tree: HiRadixTree) -> None:
        seen: dict[Tier, set[int]] = {tier: set() for tier in Tier}
        todo = list(tree.root.children.values())
        while todo:
            node = todo.pop()
            todo += node.children.values()
            hashes = [tag(h) for h in tree.hashes(node, 0, node.pages)]
            for tier in (_DEVICE, _HOST):
                resident = node.resident[tier]
                assert self._tags[tier][node.slots[tier][:resident]].tolist() == hashes[:resident], "wrong bytes"
                seen[Tier(tier)].update(hashes[:resident])
            seen[Tier.STORAGE].update(hashes[: node.believed])
        acknowledged = self._acknowledged.get((tree.namespace, tree.generation), set())
        if self.core.registry.forgetting is None:
            assert seen[Tier.STORAGE] <= acknowledged, "believed to be stored, but storage never said so"
        if self.core.config.events:
            for tier in Tier:
                told = self._told.pages(tree.namespace, tier)
                assert sorted(told) == sorted(seen[tier]), f"{tier.name}: events differ from residency"

    def finish(self) -> None:
        """End everything; afterwards nothing may be held, and both tiers can be emptied."""
        while self._engines:
            self._end(self._engines[-1])
        while self._running or self._writers or self.core.actions:
            self._take_actions()
            for number in [*self._running, *self._writers]:
                self._complete(number)
        self.core.sweep(1 << 30)
        self._told.replay(self.core.events)
        self.check()
        for tier in (_DEVICE, _HOST):
            table = self.core.registry.tables[tier]
            assert not table.pins.any(), "pins left"
            resident = table.counts[RESIDENT]
            assert table.counts == [table.capacity - resident, 0, 0, resident, 0], "slots left behind"
            assert self.core.evict(tier, 1 << 30) == resident
        self._told.replay(self.core.events)
        self.check()
        assert not self._putting
        assert not self.core.log.open

    # ---- the engine

    def _request(self) -> None:
        tree, prompt = self._prompts.draw()
        limit = self._choices.integer(0, prompt.pages) if self._one_in(4) else None
        before = self.core.match(tree, prompt, limit)
        assert self.core.registry.stores or not before.storage, "a match in a storage that is not there"
        lease = self.core.lease(tree, prompt, limit=limit, priority=self._choices.integer(0, 2))
        assert lease.match == before, "a lease found something else than the match before it"
        self._number += 1
        engine = ModelEngine(lease, self._number, mark=-(1 << 40) - self._number)
        self._engines.append(engine)
        self._remember_reads(engine)
        if self._one_in(2):
            self._bring_up(engine)
        if self._one_in(5) or len(self._engines) > self._choices.integer(1, 5):
            self._end(self._pick(self._engines))  # else everything is pinned and nothing happens

    def _remember_reads(self, engine: ModelEngine) -> None:
        lease = engine.lease
        slots = lease.usable_slots()
        assert len(slots) == lease.usable
        tags = [tag(h) for h in lease.prompt.hashes(0, lease.usable)]
        assert self._tags[self._top][slots].tolist() == tags, "a lease was given wrong bytes"
        engine.reads = [(self._top, slots.copy(), tags)]

    def _private(self, lease: Lease) -> Slots:
        own = lease.own
        private: Slots = own[self.core.registry.tables[self._top].state[own] == PRIVATE]
        return private

    def _open(self) -> ModelEngine | None:
        return self._pick(self._engines) if self._engines else None

    def _allocate_and_commit(self) -> None:
        engine = self._open()
        if engine is None:
            return
        lease = engine.lease
        wanted = lease.prompt.pages - (lease.usable if lease.start is None else lease.start + len(lease.own))
        if wanted > 0:
            room = self.core.available(self._top)
            try:
                slots = self.core.allocate(lease, wanted)
            except OutOfSlots:
                assert room < wanted
                self._note("out of slots")
                return
            assert room >= wanted
            self._tags[self._top][slots] = engine.mark
        if lease.start is None or self._one_in(5):
            return
        upto = lease.prompt.pages if self._one_in(2) else self._choices.integer(lease.committed, lease.prompt.pages)
        ready = self._one_in(2)
        own = lease.own[lease.committed - lease.start : max(upto - lease.start, 0)]
        written = own if ready else own[:0]
        hashes = [tag(h) for h in lease.prompt.hashes(lease.committed, upto)]
        if ready:
            self._tags[self._top][written] = hashes[: len(written)]
        transfer = self.core.commit(lease, upto, ready=ready)
        state = self.core.registry.tables[self._top].state
        self._tags[self._top][own[state[own] == PRIVATE]] = engine.mark
        if transfer is not None:
            assert transfer.target_slots is not None
            self._tags[self._top][transfer.target_slots] = -1 - transfer.id
            self._writers[transfer.id] = transfer, engine.mark
            self._note("writer")

    def _decode(self) -> None:
        engine = self._open()
        if engine is None or engine.lease.prompt.pages >= 14:
            return
        lease = engine.lease
        self.core.extend(lease, self._prompts.longer(lease.prompt))

    def _close(self) -> None:
        engine = self._open()
        if engine is not None:
            self._end(engine)

    def _end(self, engine: ModelEngine) -> None:
        self._engines.remove(engine)
        counts = self.core.release(engine.lease, aborted=self._one_in(4))
        assert counts.asked == counts.device + counts.host + counts.storage + sum(counts.missed.values())
        assert self.core.release(engine.lease) is counts
        engine.check_reasons(counts)

    def _decline(self) -> None:
        engine = self._open()
        if engine is not None:
            self._note("declined" if engine.decline(self.core, self._choices) else "unanswered")

    def _touch(self) -> None:
        engine = self._open()
        if engine is not None:
            self._now += self._choices.integer(0, 2)
            self.core.touch(engine.lease, self._now)

    def _load(self) -> None:
        engine = self._open()
        if engine is None:
            return
        upto = self._choices.integer(0, engine.lease.prompt.pages) if self._one_in(3) else None
        self.core.load(engine.lease, upto)
        self._remember_reads(engine)

    def _prefetch(self) -> None:
        engine = self._open()
        if engine is not None:
            self._bring_up(engine)

    def _bring_up(self, engine: ModelEngine) -> None:
        lease = engine.lease
        if not self.core.registry.stores:
            self.core.load(lease)
            self._remember_reads(engine)
            return
        stored = self._stored.get((lease.tree.namespace, lease.tree.generation), set())
        found = base = lease.match.device + lease.match.host
        for page_hash in lease.prompt.hashes(found, lease.limit) if lease.limit > found else []:
            if tag(page_hash) not in stored:
                break
            found += 1
        self._acknowledge(lease.tree, lease.prompt.hashes(base, found) if found > base else [])
        self.core.believe(lease, found)
        self.core.prefetch(lease)
        if self._one_in(2):
            self.core.load(lease)
            self._remember_reads(engine)

    def _withdraw_interest(self) -> None:
        waiting = [engine for engine in self._engines if engine.lease.waiting]
        if waiting:
            self._note("interest withdrawn")
            self.core.withdraw_interest(self._pick(waiting).lease)

    def _give_up(self) -> None:
        if numbers := [number for number, running in self._running.items() if running.copies]:
            self._note("given up")
            self.core.give_up(self._pick(numbers))

    def _match(self) -> None:
        tree, prompt = self._prompts.draw()
        for tier in (_DEVICE, _HOST) if self.core.config.events else ():
            told = self._told.leading(tree.namespace, Tier(tier), prompt.hashes(0, prompt.pages))
            assert tree.resident_pages(tree.walk(prompt), tier) == told, "match differs from the model"

    # ---- upkeep

    def _evict(self) -> None:
        tier = self._pick((_DEVICE, _DEVICE, _HOST))
        table = self.core.registry.tables[tier]
        pages = self._choices.integer(0, 12)
        expected = min(pages, table.evictable)
        assert self.core.evict(tier, pages) == expected, "eviction fell short, or went too far"

    def _flush(self) -> None:
        self.core.flush()

    def _drain(self) -> None:
        self.core.drain(self._choices.integer(1, 8))

    def _sweep(self) -> None:
        self.core.sweep(self._choices.integer(1, 6))

    def _clear(self) -> None:
        if not self._one_in(4):
            return
        tree = self._prompts.any_tree()
        generation = tree.generation + self._choices.integer(1, 3) if self._one_in(2) else None
        assert self.core.clear(tree, generation).generation == (generation or tree.generation + 1)
        self._note("clear")

    def _lose_stored(self) -> None:
        keys = [(key, page) for key, pages in self._stored.items() for page in sorted(pages)]
        if keys:
            key, page = self._pick(keys)
            self._stored[key].discard(page)
            self._note("stored page lost")

    def _detach_or_attach(self) -> None:
        """The storage goes, or another and empty one comes. What is under way ends whenever it wants to."""
        core = self.core
        if not core.config.storage or not self._one_in(4):
            return
        if not core.registry.stores:
            while core.forget_storage(self._choices.integer(1, 4)):
                core.check()
            core.attach_storage()
            self._note("attached")
            return
        core.detach_storage()
        self._note("detached")
        for model in (self._stored, self._acknowledged, self._putting):
            model.clear()
        check_orphans(self._running.values())

    def _forget(self) -> None:
        self.core.forget_storage(self._choices.integer(1, 4))
        if any(self.core.drop(tree) for tree in self.core.trees):
            self._note("dropped")

    # ---- transfers

    def _take_actions(self) -> None:
        while self.core.actions:
            transfer = self.core.actions.popleft()
            self._running[transfer.id] = RunningTransfer(transfer)
            self._note(transfer.kind.name)
            if transfer.kind is TransferKind.PUT:
                assert self.core.registry.stores, "a put although there is no storage"
                for page in transfer.pages:
                    key = (transfer.tree.namespace, transfer.tree.generation, tag(page.hash))
                    assert key not in self._putting, "two writers of one object"
                    self._putting.add(key)
        self.core.finished.clear()

    def _run(self) -> None:
        numbers = [*self._running, *self._writers]
        if not numbers:
            return
        number = self._pick(numbers)
        if number in self._running and self._one_in(4):
            self._begin(self._running[number])
        else:
            self._complete(number)

    def _source_tags(self, transfer: Transfer) -> list[int] | None:
        source = transfer.kind.source
        if source is None or source is Tier.STORAGE:
            return None
        tags: list[int] = self._tags[source][transfer.source_slots].tolist()
        assert all(t > 0 for t in tags), f"{transfer} reads a slot that is not filled"
        return tags

    def _begin(self, running: RunningTransfer) -> None:
        if running.begun:
            return
        running.begun = True
        transfer = running.transfer
        self._source_tags(transfer)
        if transfer.kind in (TransferKind.FETCH, TransferKind.TOUCH):
            stored = self._stored.get((transfer.tree.namespace, transfer.tree.generation), set())
            running.got = [tag(page.hash) in stored for page in transfer.pages]
        if transfer.target_slots is not None:
            self._tags[transfer.kind.target][transfer.target_slots] = -1 - transfer.id

    def _complete(self, number: int) -> None:
        if number in self._writers:
            writer, _ = self._writers.pop(number)
            self._fill_target(writer, some_fail(self._choices, writer.count))
            return
        running = self._running.pop(number)
        transfer = running.transfer
        if transfer.cancelled and not running.begun:
            self._note("cancelled")
            self._settle(transfer, [PageResult.FAILED] * transfer.count)
            return
        self._begin(running)
        results = some_fail(self._choices, transfer.count)
        if transfer.kind is TransferKind.LOAD and self._one_in(12):
            results[self._choices.integer(0, transfer.count - 1)] = PageResult.SOURCE_BAD
        if transfer.kind in (TransferKind.FETCH, TransferKind.TOUCH):
            depths = [page.depth for page in transfer.pages]
            assert transfer.kind is TransferKind.FETCH or depths == sorted(depths, reverse=True), (
                "root not touched last"
            )
            results = [r if got else PageResult.SOURCE_GONE for r, got in zip(results, running.got, strict=True)]
        if transfer.kind is TransferKind.TOUCH:
            self._settle(transfer, results)
        elif transfer.kind is TransferKind.PUT:
            self._put(transfer, results)
        else:
            self._fill_target(transfer, results)

    def _put(self, transfer: Transfer, results: list[PageResult]) -> None:
        tags = self._source_tags(transfer)
        assert tags == [tag(page.hash) for page in transfer.pages], "a put read other bytes than its name says"
        if transfer.orphaned:
            self._settle(transfer, results)
            return
        stored = self._stored.setdefault((transfer.tree.namespace, transfer.tree.generation), set())
        for page, result in zip(transfer.pages, results, strict=True):
            if result == PageResult.OK:
                stored.add(tag(page.hash))
        self._acknowledge(transfer.tree, [p.hash for p, r in zip(transfer.pages, results, strict=True) if r == 0])
        self._settle(transfer, results)

    def _acknowledge(self, tree: HiRadixTree, hashes: list[bytes]) -> None:
        known = self._acknowledged.setdefault((tree.namespace, tree.generation), set())
        known.update(tag(page_hash) for page_hash in hashes)

    def _fill_target(self, transfer: Transfer, results: list[PageResult]) -> None:
        target, slots = transfer.kind.target, transfer.target_slots
        assert slots is not None
        marks = self._tags[target][slots]
        assert (marks == -1 - transfer.id).all(), f"{transfer}: somebody else wrote its target meanwhile"
        if transfer.kind is TransferKind.FETCH:
            tags = [tag(page.hash) for page in transfer.pages]
        elif transfer.kind.is_engines:
            tags = written_tags(self.core, transfer)
        else:
            tags = self._source_tags(transfer) or []
        for slot, content, result in zip(slots.tolist(), tags, results, strict=True):
            if result == PageResult.OK:
                self._tags[target][slot] = content
        self._settle(transfer, results)

    def _settle(self, transfer: Transfer, results: list[PageResult]) -> None:
        if transfer.kind is TransferKind.PUT and not transfer.orphaned:
            for page in transfer.pages:
                self._putting.discard((transfer.tree.namespace, transfer.tree.generation, tag(page.hash)))
        self.core.complete(transfer.id, results)
        for engine in self._engines:
            if engine.lease.start is None and engine.lease.usable > len(engine.reads[0][1]):
                self._note("handed over")
                self._remember_reads(engine)
