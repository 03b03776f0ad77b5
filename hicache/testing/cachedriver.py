"""Drives a whole embedded cache at random, with real bytes in all tiers, in one thread.

`CacheDriver` plays engines, copy threads, storage threads, the storage itself and time (see `driverframe`). All of it
is checked after each step (see `cachelife`), and what storage is given and gives is checked where it happens (see
`watchedstorage`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np

from hicache.core.identity import Adapter
from hicache.errors import InvalidInput, OutOfSlots, StorageError
from hicache.memory.writer import READY
from hicache.records import Match, PageResult, Tier
from hicache.runtime.attaching import under_way
from hicache.testing.cachelife import NAMESPACE, Engine, Written
from hicache.testing.driverframe import DEEPEST, SCOPES, TICK, whole_pages
from hicache.testing.layersteps import LayerSteps
from hicache.testing.truth import Violation, require

__all__ = ["CacheDriver"]

T = TypeVar("T")
_P = NAMESPACE.page_size
_DEADLINES = (None, None, 0.0, TICK, 4 * TICK, 8.0)
_NO_DIGEST = Adapter("lora")
_PARTIAL = b"\x77"


class CacheDriver(LayerSteps):
    """A cache under random use, life after life on one storage. Arguments and attributes are those of its frame."""

    # ---- requests

    def _request(self) -> None:
        self._request_for(*self._prompt())

    def _request_for(self, which: int, tokens: list[int]) -> None:
        life = self._life
        logits = not self._one_in(3)
        extra: dict[str, Any] = dict(SCOPES[which])
        if self._one_in(40):
            extra["adapter"] = _NO_DIGEST
        asked = (max(len(tokens) - 1, 0) if logits else len(tokens)) // _P
        before, at_rest = (self.steps, self.seen.get("waited")), life.at_rest()
        told = life.told(self._derived[which], whole_pages(tokens), asked)
        deadline = self._pick(_DEADLINES)
        self._until = life.clock.now() + (1.0 if deadline is None else min(deadline, 1.0))
        request = life.cache.request(
            np.array(tokens, np.uint32),
            deadline=deadline,
            logits=logits,
            priority=self._choices.integer(0, 2),
            **extra,
        )
        bypassed = request.bypassed
        self._note("bypassed" if bypassed else "request")
        engine = Engine(
            request,
            request._lease,
            scope=None if bypassed else self._derived[which],
            tokens=list(tokens),
            prompt_tokens=len(tokens),
            asked=asked,
        )
        life.engines.append(engine)
        if bypassed:
            require(request.match == Match(), "a request past the cache has matched something")
        elif at_rest and before == (self.steps, self.seen.get("waited")) and self._known(which):
            require(request.match == told, f"a request matches {request.match}, events say {told}")
            self._note(f"matched {'nothing' if not told.pages else 'something'}")
        if len(life.engines) > self._choices.integer(2, 6):
            self._close()  # else everything is pinned and nothing happens

    def _come_back(self) -> None:
        """A prompt that DEVICE has lost and HOST has not is asked for again, and loaded by layer."""
        life = self._life
        with life.parts.reducer.lock:
            life.core.evict(Tier.DEVICE, self._choices.integer(1, 24))
            life.parts.reducer.settle()
        below = [
            (which, tokens)
            for which, tokens in self._prompts
            if life.told(self._derived[which], whole_pages(tokens), max(len(tokens) - 1, 0) // _P).host
        ]
        if not below:
            return
        known = list(life.engines)
        self._request_for(*self._pick(below))
        for engine in life.engines:
            if engine not in known and not engine.busy:
                self._load_by_layer_for(engine)
                break

    def _load(self) -> None:
        engine = self._engine()
        if engine is not None:
            self._load_for(engine)

    def _load_for(self, engine: Engine) -> None:
        life, request, lease = self._life, engine.request, engine.lease
        fresh = lease.start is None
        self._until = self._end_of_load(engine)
        engine.busy = True
        try:
            slots = request.load()
        finally:
            engine.busy = False
        if not fresh and engine.loaded is not None:
            require(slots.tolist() == engine.loaded, "load found more behind private slots")
        life.check_loaded(engine, slots)
        explores = life.parts.options.prefill_tokens_per_second is not None  # then it may go on, to learn from it
        require(not lease.waiting or not fresh or explores, "load left something that the request waits for")
        if fresh and len(slots):
            self._note("loaded")
        if fresh and len(slots) > lease.match.device:
            self._note(
                "loaded from storage" if len(slots) > lease.match.device + lease.match.host else "loaded from below"
            )
        if len(slots) < min(lease.match.pages, engine.asked):
            self._note("loaded less than matched")

    def _prefill(self) -> None:
        """What engines mostly do: load, allocate, commit."""
        engine = self._engine()
        if engine is None:
            return
        for verb in (self._load_for, self._allocate_for, self._commit_for):
            if engine in self._life.engines and not engine.busy:
                verb(engine)

    def _allocate(self) -> None:
        engine = self._engine()
        if engine is not None:
            self._allocate_for(engine)

    def _allocate_for(self, engine: Engine) -> None:
        life, lease = self._life, engine.lease
        pages = self._choices.integer(0, 4) if self._one_in(3) else None
        deadline = self._pick((0.0, 4 * TICK)) if self._one_in(3) else None
        evicted = list(life.core.registry.evicted)
        first = lease.usable if lease.start is None else lease.start + len(lease.own)
        self._until = life.clock.now() + (deadline or 0.0)
        engine.busy = True
        refused = False
        try:
            slots = engine.request.allocate(pages, deadline=deadline)
        except OutOfSlots:
            self._note("out of slots")
            require(deadline is not None or evicted == life.core.registry.evicted, "evicted for nothing")
            slots, refused = np.empty(0, np.int64), True
        finally:
            engine.busy = False
        if engine.loaded is None:
            self._load_for(engine)
        if not refused:
            wanted = max(-(-len(engine.tokens) // _P) - first, 0) if pages is None else pages
            require(len(slots) == wanted, f"{len(slots)} slots given, {wanted} wanted")
        life.expect_private(engine, slots)
        engine.own += slots.tolist()

    def _first(self, engine: Engine) -> int:
        return len(engine.loaded or ())

    def _write(self) -> None:
        """The engine writes a page that it has not committed, an unaligned tail too."""
        engine = self._engine()
        if engine is None or not engine.own:
            return
        first = self._first(engine)
        at = self._choices.integer(max(engine.committed - first, 0), len(engine.own))
        if at < len(engine.own):
            self._life.write(engine, engine.own[at], self._content(engine, first + at))

    def _content(self, engine: Engine, page: int) -> bytes:
        if (page + 1) * _P <= len(engine.tokens):
            return self._life.content(engine, page)
        return _PARTIAL * self._life.pool.page_bytes

    def _commit(self) -> None:
        engine = self._engine()
        if engine is not None:
            self._commit_for(engine)

    def _commit_for(self, engine: Engine) -> None:
        if engine.lease.start is None:
            return
        life, first = self._life, self._first(engine)
        end = min(first + len(engine.own), len(engine.tokens) // _P)
        if self._one_in(12) and end < len(engine.tokens) // _P and end >= engine.committed:
            try:
                engine.request.commit((end + 1) * _P, ready=READY)
            except InvalidInput:
                self._note("commit refused")
            else:
                require(engine.scope is None, "pages without slots were committed")
            return
        start = max(engine.committed, first)
        upto = end if self._one_in(2) else self._choices.integer(min(start, end), end)
        pages = {engine.own[page - first]: life.content(engine, page) for page in range(start, upto)}
        ready = self._pick((READY, None, Written(pages), Written(pages)))
        if not isinstance(ready, Written):
            for slot, content in pages.items():
                life.write(engine, slot, content)
        engine.request.commit(min(upto * _P + self._choices.integer(0, 1), len(engine.tokens)), ready=ready)
        engine.committed = max(engine.committed, upto)
        if isinstance(ready, Written):
            self._note("committed behind an event")
            life.events.append(ready)

    def _extend(self) -> None:
        engine = self._engine()
        if engine is None or len(engine.tokens) > 24:
            return
        more = [self._choices.integer(0, 2) for _ in range(self._choices.integer(1, 3))]
        tokens = engine.tokens + more
        if engine.scope is not None:
            self._truth.learn(engine.scope, whole_pages(tokens))
        engine.request.extend(np.array(more, np.uint32))
        engine.tokens = tokens

    def _close(self) -> None:
        engine = self._engine(reading=True)
        if engine is not None:
            self._end(engine)

    def _end(self, engine: Engine) -> None:
        self._life.engines.remove(engine)  # its writes may still be under way
        self._stop_reading(engine)
        aborted = self._one_in(4)
        counts = engine.request.close(aborted=aborted)
        require(counts.aborted == aborted, "aborted, and not counted so")
        require(engine.request.close() is counts and engine.request.counts is counts, "counted again")
        self._life.count(engine, counts)

    def _drop(self) -> None:
        """An engine forgets to close: the request is collected."""
        engine = self._engine(reading=True)
        if engine is None:
            return
        self._life.engines.remove(engine)
        self._stop_reading(engine)
        del engine.request
        self._life.dropped.append(engine)
        self._note("dropped")

    # ---- upkeep

    def _work(self) -> None:
        life = self._life
        copies = life.pool.copies
        if copies.pending and self._one_in(8):
            at = self._choices.integer(0, len(copies.pending) - 1)
            pages = copies.pending[at].copy.pages
            if self._one_in(4):
                self._note("copy answered wrongly")
                copies.answer_wrongly(at, self._pick((-1, 1)))
                return
            self._note("copy failed")
            bad = (PageResult.OK, PageResult.FAILED, PageResult.FAILED)
            worst = PageResult.FAILED if copies.pending[at].down else PageResult.SOURCE_BAD
            copies.end(at, results=[worst if self._one_in(8) else self._pick(bad) for _ in range(pages)])
            return
        if self._late and self._one_in(4):
            self._note("late job of a former life")
            self._late.pop(self._choices.integer(0, len(self._late) - 1))()
            return
        for _ in range(self._choices.integer(1, 4)):
            self._some_work()

    def _settle(self) -> None:
        self._life.settle()

    def _sweep(self) -> None:
        reducer = self._life.parts.reducer
        if reducer.forgetting:
            reducer.forget()
        with reducer.lock:
            reducer.sweeping = self._life.core.sweep(self._choices.integer(1, 6)) > 0

    def _advance(self) -> None:
        self._life.clock.advance(self._pick((TICK, 4 * TICK, 2.0)))

    def _match(self) -> None:
        life = self._life
        which, tokens = self._prompt()
        if not self._known(which):
            return
        told = life.told(self._derived[which], whole_pages(tokens), len(tokens) // _P)
        at_rest = life.at_rest()
        found = life.cache.match(tokens, logits=False, **SCOPES[which])
        require(found == told or not at_rest, f"match finds {found}, events say {told}")

    def _flush(self) -> None:
        deadline = self._pick((0.0, 4 * TICK, 8.0))
        self._until = self._life.clock.now() + deadline
        self._note(f"flush {self._life.cache.flush(deadline)}")

    def _evict(self) -> None:
        life = self._life
        with life.parts.reducer.lock:
            for tier in self._pick(((Tier.DEVICE,), (Tier.HOST,), (Tier.DEVICE, Tier.HOST))):
                life.core.evict(tier, self._choices.integer(1, 24))

    def _clear(self) -> None:
        life, which = self._life, self._choices.integer(0, len(SCOPES) - 1)
        digest = self._derived[which].digest
        before = next((tree.generation for tree in life.core.trees if tree.namespace == digest), None)
        deadline = self._pick((0.0, 8.0))
        self._until = life.clock.now() + deadline
        try:
            life.cache.clear(**SCOPES[which], deadline=deadline)
        except StorageError:
            self._note("clear not confirmed")
        else:
            self._note("clear")
            if before is not None and life is self._life and not life.over:
                life.remember_cleared(digest, before + 1)

    def _detach_or_attach(self) -> None:
        """Storage is taken away or given back, whatever is under way."""
        life, cache, storage = self._life, self._life.cache, self._storage
        if storage is None or cache._attaching.locked():
            return
        if not cache._attached:
            try:
                cache.attach_storage(storage)
            except (StorageError, OSError):  # it could not tell its generations
                self._note("attach failed")
            else:
                self._note("attached")
            return
        deadline, force = self._pick((0.0, 4 * TICK, 8.0)), self._one_in(2)
        self._until = life.clock.now() + deadline
        try:
            cache.detach_storage(deadline, force=force)
        except StorageError:
            require(not force, "detaching was refused although it was forced")
            self._note("detach refused")
        else:
            require(
                not life.parts.executor.running or force or not under_way(life.parts), "detached with work under way"
            )
            self._note("detached")

    def _spoil(self) -> None:
        """Objects are damaged, lost or replaced behind the cache's back."""
        storage = self._storage
        if storage is None or not storage.stored:
            return
        key = self._pick(list(storage.stored))
        how = self._choices.integer(1, 4)
        if how == 1 and storage.collide(key):
            self._note("collision planted")
        elif how == 2 and storage.lose(key):
            self._note("object lost")
        elif self._damage_object is not None and self._damage_object(key):
            self._note("object damaged")

    # ---- the end of a life

    def _restart(self) -> None:
        if self._life.over:
            return
        if self._depth == 1 and self._one_in(4):
            self._end_in_order()
        elif self._one_in(3):
            self._end_abruptly()

    def _end_abruptly(self) -> None:
        """Somebody closes the cache, whatever is open or under way."""
        life = self._life
        life.over = True
        self._note("closed abruptly")
        engines = list(life.engines)
        for engine in engines:
            self._life.engines.remove(engine)
            self._stop_reading(engine)
        deadline = self._pick((0.0, 4 * TICK, 8.0))
        self._until = life.clock.now() + deadline
        report = life.cache.close(deadline)
        require(life.cache.close() is report, "closed twice")
        require(report.aborted_requests == len(engines), f"{report}, and {len(engines)} requests were open")
        require(report.stuck_threads == 0, "threads are left")
        for engine in engines:
            life.count(engine, engine.request.close())
        life._forget_dropped()
        life.check_statistics()
        self._late += [_late(queue.carry_out, job) for queue, job in life.jobs]
        life.jobs.clear()

    def _end_in_order(self) -> None:
        """Everything ends, nothing may be left, then the cache is closed."""
        life, storage = self._life, self._storage
        faults = 0
        if storage is not None:
            faults, storage.faults = storage.faults, 0
        self._note("ended in order")
        self._depth += DEEPEST  # nothing else happens meanwhile
        try:
            while life.engines:
                self._end(life.engines[-1])
            self._finish_work()
            life.check()
            life.check_idle()
            told = life.cache.statistics().storage
            if told is not None and any(breaker.opened for breaker in told.breakers):
                self._note("breaker opened")
            life.over = True
            report = life.cache.close(8.0)
            left = (report.abandoned_pages, report.aborted_requests, report.stuck_threads)
            require(report.complete and left == (0, 0, 0), f"closing an idle cache left something: {report}")
        finally:
            self._depth -= DEEPEST
            if storage is not None:
                storage.faults = faults

    def _finish_work(self) -> None:
        life = self._life
        while True:
            life.settle()
            while life.events:
                event = life.events.pop()
                life.write_behind(event)
                event.passed = True
            passed = life.pool.copies.pass_events()
            todo = life.work()
            if not todo and not passed and life.at_rest():
                break
            if todo:
                self._pick(todo)()
        while life.parts.reducer.sweeping:
            life.parts.reducer.sweep()

    def abandon(self) -> None:
        """After a failure: close what is open, whatever state it is in."""
        life = self._life
        life.clock.on_wait = lambda condition, timeout: life.clock.advance(timeout)  # noqa: ARG005  names say what
        self._depth = DEEPEST
        if self._storage is not None:
            self._storage.faults = 0
        with suppress(Exception, Violation):
            life.cache.close(0.0)

    def finish(self) -> None:
        """End everything. Nothing may be held, and storage holds only what is right."""
        try:
            if not self._life.over:
                self._end_in_order()
            for job in self._late:
                job()
            self._late.clear()
            if self._storage is not None:
                self._storage.faults = 0
                self.seen["objects found right"] = self._storage.check_all()
        except Violation as error:
            raise AssertionError(f"at the end, after {self.steps} steps: {error}") from error


def _late(carry_out: Callable[[T], None], job: T) -> Callable[[], None]:
    return lambda: carry_out(job)
