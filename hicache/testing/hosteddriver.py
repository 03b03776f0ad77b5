"""Drives a hosted cache at random, with real bytes, in one thread: clients, storage's threads, storage, and time.

What must be true is in `hostedlife` and `watchedstorage`.
"""

from __future__ import annotations

from hicache.core.identity import Adapter
from hicache.errors import HashMismatch, InvalidInput, OutOfSlots, StorageError
from hicache.records import Match, Tier
from hicache.testing.hostedframe import DEEPEST, SCOPES, HostedFrame
from hicache.testing.hostedlife import HOSTED_NAMESPACE, Client
from hicache.testing.truth import Violation, require

__all__ = ["HostedDriver"]

_P = HOSTED_NAMESPACE.page_size
_TICK = 0.125
_NO_DIGEST = Adapter("lora")


class HostedDriver(HostedFrame):
    """A hosted cache under random use, life after life on one storage; see `HostedFrame` for its arguments."""

    # ---- requests

    def _request(self) -> None:
        life, (which, tokens) = self._life, self._prompt()
        adapter = _NO_DIGEST if self._one_in(40) else None
        hashes = self._hashes(which, tokens)
        scope = life.cache.scope(adapter, SCOPES[which].get("tenant"), SCOPES[which].get("salt"))
        require(
            (scope is None) == (adapter is not None), "what has no digest was given a namespace, or other way round"
        )
        while scope is not None and scope.tree is None and scope.asking and not self._one_in(12):
            self._some_work()  # a session waits for the first answer
            life.cache.settle()
        known = scope is not None and scope.tree is not None
        pages = len(tokens) // _P
        limit = self._choices.integer(0, pages) if self._one_in(3) else pages
        told = life.cache.match(scope, hashes, limit)
        request = life.cache.request(
            scope, hashes, tokens=len(tokens), limit=limit, priority=self._choices.integer(0, 2)
        )
        require(request.bypassed != known, "a request goes past the cache, or should have")
        require(request.match == told, f"a request matches {request.match}, a match said {told}")
        scoped = self._derived[which] if known else None
        client = Client(request, scoped, list(tokens), prompt_tokens=len(tokens), asked=limit)
        life.clients.append(client)
        self._note("request" if known else "bypassed")
        life.look_at(client)
        if len(life.clients) > self._choices.integer(2, 6):
            self._close()  # else everything is pinned and nothing happens

    def _load(self) -> None:
        client = self._client()
        if client is not None:
            self._load_for(client)

    def _load_for(self, client: Client) -> None:
        if client.finished:
            return
        life, request = self._life, client.request
        if client.loading is None:
            until = self._pick((None, life.clock.now(), life.clock.now() + 4 * _TICK, life.clock.now() + 8.0))
            client.loading = request.loading(until)
        if self._one_in(8):
            client.loading.cancel()
            self._note("cancelled loading")
        seconds = client.loading.step()
        require(seconds is None or seconds > 0, "a load wants to be looked at again at once")
        client.finished = seconds is None
        if seconds is not None:
            self._note("waits")
            if self._one_in(6):
                life.clock.advance(seconds)
        life.look_at(client)
        if client.finished:
            got = len(request.usable)
            rate = life.cache.parts.options.prefill_tokens_per_second
            require(not request.lease.waiting or rate, "a load has finished, and something is waited for")
            self._note("loaded from storage" if got > request.match.host else "loaded")

    def _reserve(self) -> None:
        client = self._client()
        if client is not None:
            self._reserve_for(client)

    def _reserve_for(self, client: Client) -> None:
        if not client.finished and not self._one_in(4):
            return
        life, request = self._life, client.request
        left = -(-len(client.tokens) // _P) - (request.first + len(request.own))
        pages = self._choices.integer(0, 3) if self._one_in(3) else max(left, 0)
        life.cache.settle()  # what comes now may evict
        evicted = list(life.core.registry.evicted)
        try:
            slots = request.reserve(pages)
        except OutOfSlots:
            self._note("out of slots")
            require(evicted == life.core.registry.evicted, "evicted for nothing")
            return
        require(len(slots) == pages, f"{len(slots)} slots given, {pages} wanted")
        client.finished = True
        client.committed = max(client.committed, request.first)
        life.given(client, slots)

    def _commit(self) -> None:
        client = self._client()
        if client is not None:
            self._commit_for(client)

    def _commit_for(self, client: Client) -> None:
        if not len(client.request.own) or client.scope is None:
            return
        life, request = self._life, client.request
        end = min(request.first + len(request.own), client.pages)
        if end < client.committed:
            return
        upto = self._choices.integer(client.committed, end) if self._one_in(2) else end
        for page in range(client.committed, upto):
            life.write(client, int(request.own[page - request.first]), life.content(client, page))
        first = self._choices.integer(0, client.committed) if self._one_in(3) else client.committed
        tokens = None if self._truth.hides and self._one_in(3) else client.symbols(first, upto)
        request.commit(upto, tokens=tokens, first=first)
        self._note("committed" if tokens is not None else "committed by hash")
        client.committed = max(client.committed, upto)

    def _commit_wrongly(self) -> None:
        """Tokens that are not those of the hashes, missing ones, or pages without slots: nothing happens."""
        client = self._client()
        if client is None or not len(client.request.own) or client.scope is None:
            return
        life, request = self._life, client.request
        first, end = client.committed, min(request.first + len(request.own), client.pages)
        if first >= end:
            return
        before = life.cache.statistics().core
        tokens = bytearray(client.symbols(first, end))
        how = self._choices.integer(1, 3)
        expected: type[InvalidInput] = HashMismatch if how == 1 else InvalidInput
        if how == 1:
            tokens[self._choices.integer(0, len(tokens) - 1)] ^= 64
        upto = end + 1 if how == 2 else end
        first += how == 3
        try:
            request.commit(upto, tokens=bytes(tokens), first=first)
        except expected:
            self._note("commit refused")
        else:
            require(False, "a commit that is wrong was taken")
        require(life.cache.statistics().core == before, "a commit that was refused has changed something")

    def _prefill(self) -> None:
        """What clients mostly do: load, reserve, commit."""
        client = self._client()
        if client is None:
            return
        for _ in range(8):
            if not client.finished and client in self._life.clients:
                self._load_for(client)
                self._work()
        for verb in (self._reserve_for, self._commit_for):
            if client in self._life.clients:
                verb(client)

    def _extend(self) -> None:
        client = self._client()
        if client is None or len(client.tokens) > 24:
            return
        tokens = client.tokens + [self._choices.integer(0, 2) for _ in range(self._choices.integer(1, 3))]
        hashes = b""
        if client.scope is not None:
            which = self._derived.index(client.scope)
            hashes = self._hashes(which, tokens)[client.pages * 32 :]
        client.request.extend(hashes, len(tokens))
        client.tokens = tokens

    def _close(self) -> None:
        client = self._client()
        if client is not None:
            self._end(client)

    def _end(self, client: Client) -> None:
        self._life.clients.remove(client)
        aborted = self._one_in(4)
        expected = client.request.counts_now(aborted=aborted)
        counts = client.request.close(aborted=aborted)
        require(counts.asked == expected.asked, "what it would be counted as is something else")
        require(client.request.close() is counts, "counted again")
        self._life.count(client, counts)

    def _drop(self) -> None:
        """A request is forgotten: its counts say so once that was noticed."""
        client = self._client()
        if client is None:
            return
        life = self._life
        life.clients.remove(client)
        client.loading = None
        lease = client.request.lease
        del client.request
        life.cache.settle()
        require(lease.counts is not None, "a request that was collected is still open")
        assert lease.counts is not None
        life.count(client, lease.counts)
        self._note("dropped")

    def _prefetch(self) -> None:
        life, (which, tokens) = self._life, self._prompt()
        scope = life.cache.known(None, SCOPES[which].get("tenant"), SCOPES[which].get("salt"))
        hashes = self._hashes(which, tokens)
        told = life.cache.match(scope, hashes)
        require(life.cache.prefetch(scope, hashes) == told, "a prefetch matches something else than a match")
        self._note("prefetch")

    # ---- the loop, and storage

    def _work(self) -> None:
        for _ in range(self._choices.integer(1, 4)):
            self._some_work()

    def _some_work(self) -> None:
        todo = self._life.work()
        if todo:
            self._pick(todo)()

    def _settle(self) -> None:
        self._life.cache.settle()

    def _look(self) -> None:
        seconds = self._life.cache.look()
        require(seconds is None or seconds >= 0, "it is to be looked at in the past")

    def _upkeep(self) -> None:
        self._life.cache.upkeep()

    def _advance(self) -> None:
        self._life.clock.advance(self._pick((_TICK, 4 * _TICK, 2.0)))

    def _match(self) -> None:
        life, (which, tokens) = self._life, self._prompt()
        scope = life.cache.known(None, SCOPES[which].get("tenant"), SCOPES[which].get("salt"))
        before = life.core.registry.tick
        found = life.cache.match(scope, self._hashes(which, tokens))
        require(life.core.registry.tick == before, "a match was a use")
        require(scope is not None or found == Match(), "a match in a namespace that is not known")

    def _evict(self) -> None:
        with self._life.cache.parts.reducer.lock:
            self._life.core.evict(Tier.HOST, self._choices.integer(1, 24))

    def _clear(self) -> None:
        life, fields = self._life, self._pick(SCOPES)
        if not self._one_in(2):
            return
        self._depth += DEEPEST  # nothing else but storage's threads meanwhile
        try:
            life.cache.clear(**fields, deadline=self._pick((0.0, 8.0)))
            self._note("clear")
        except StorageError:
            self._note("clear not confirmed")
        finally:
            self._depth -= DEEPEST

    def _exchange(self) -> None:
        """The storage is taken away, or the same one comes back."""
        life, storage = self._life, self._storage
        detached = storage is not None and life.cache.statistics().storage is None
        if storage is None or self._depth > 1 or not (detached or self._one_in(8)):
            return
        faults, storage.faults = storage.faults, 0
        self._depth += DEEPEST
        try:
            if detached:
                life.cache.attach_storage(storage)
                self._note("attached")
            else:
                life.cache.detach_storage(8.0, force=True)
                self._note("detached")
        finally:
            self._depth -= DEEPEST
            storage.faults = faults

    def _spoil(self) -> None:
        """Objects are damaged, lost or replaced behind the cache's back."""
        storage = self._storage
        if storage is None or not storage.stored:
            return
        key = self._pick(list(storage.stored))
        how = self._choices.integer(1, 3)
        if how == 1 and storage.collide(key):
            self._note("collision planted")
        elif how == 2 and storage.lose(key):
            self._note("object lost")
        elif self._damage_object is not None and self._damage_object(key):
            self._note("object damaged")

    # ---- the end of a life

    def _restart(self) -> None:
        if self._depth > 1 or not self._one_in(2):
            return
        self._depth += DEEPEST
        try:
            if self._one_in(2):
                self._end_in_order()
            else:
                self._end_abruptly()
        finally:
            self._depth -= DEEPEST
        self._life = self._open()

    def _end_abruptly(self) -> None:
        life = self._life
        clients, life.clients = life.clients, []
        life.over = True
        report = life.cache.close(self._pick((0.0, 8.0)))
        require(report.aborted_requests == len(clients), f"{report}, and {len(clients)} requests were open")
        for client in clients:
            life.count(client, client.request.close())
        life.check_statistics()
        for queue, job in life.jobs:  # threads that were inside storage come back
            queue.carry_out(job)
        self._note("closed abruptly")

    def _end_in_order(self) -> None:
        life, storage = self._life, self._storage
        faults = 0
        if storage is not None:
            faults, storage.faults = storage.faults, 0
        while life.clients:
            self._end(life.clients[-1])
        rounds = 0
        while rounds < 2:  # what ends may begin something, such as telling storage that pages were used
            if life.work():
                self._some_work()
                rounds = 0
            elif life.cache.parts.reducer.idle:
                life.clock.advance(120.0)  # prefetches wait for nobody, but not for ever
                life.cache.look()
                rounds += 1
            life.cache.settle()
        while life.cache.upkeep():
            pass
        life.check()
        life.check_idle()
        report = life.cache.close(8.0)
        life.over = True
        left = (report.abandoned_pages, report.aborted_requests, report.stuck_threads)
        require(left == (0, 0, 0), f"closing an idle cache left something: {report}")
        if storage is not None:
            storage.faults = faults
        self._note("ended in order")

    def finish(self) -> None:
        """End everything. Nothing may be held, and storage holds only what is right."""
        try:
            self._depth += DEEPEST
            self._end_in_order()
            if self._storage is not None:
                self._storage.faults = 0
                self.seen["objects found right"] = self._storage.check_all()
        except Violation as error:
            raise AssertionError(f"at the end, after {self.steps} steps: {error}") from error

    def abandon(self) -> None:
        """After a failure: no more of it."""
        self._life.cache.forked()  # so that nothing warns of a cache that is not closed
