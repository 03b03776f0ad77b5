"""The core, the one lock around it, and the inbox through which other threads reach it.

Nobody but the holder of the lock touches the core. Worker threads never take the lock: they `post` what happened, and
whoever holds the lock next applies it, a caller on his way or the pump thread. What the core wants done goes into the
queues of the executor under the lock, in its order, and runs outside it.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from hicache.core.cache import Core
from hicache.core.transfers import Transfer
from hicache.errors import CacheClosed
from hicache.events import Event
from hicache.runtime.waiting import Wait

_log = logging.getLogger("hicache.runtime")

_LEAST_WAIT = 0.05  # seconds: with a clock that stands still there is nothing to hurry for
SWEEP_PAGES = 8192  # freeing so many cleared pages takes well under a millisecond


class Reducer:
    """Owner of the core.

    Args:
        core: the pure core.
        wait: how to wait on a condition.
        publish: takes residency events, under the lock.
        flushes: whether a write policy writes on eviction, so that the clean reserve needs keeping.
        failed: told of each exception that was caught where nobody could handle it, under the lock.

    Attributes:
        lock: around every use of `core`; held for about a millisecond at most.
        changed: notified when transfers have ended or slots came free, if `waiters`.
        on_change: called then, under the lock, for who waits in another way; must not block, nor call back.
        transfers: what was begun and has not ended, by id: its pages may still wait to become visible.
        dispatch: starts a transfer; set once by the executor.
        closed: why nobody may use the cache any more, or None.
        sweeping: whether cleared pages wait to be freed, slice by slice.
        forgetting: whether beliefs about a storage that was detached wait to be dropped, slice by slice.
        look: gives up storage calls that hang; returns seconds until the next could, None when nothing is under way.
        flushes: whether the clean reserve needs keeping.
        internal_errors: exceptions of the core that were caught where nobody could handle them.
    """

    def __init__(
        self,
        core: Core,
        *,
        wait: Wait,
        publish: Callable[[Sequence[Event]], None],
        flushes: bool = False,
        failed: Callable[[Exception], None] | None = None,
    ) -> None:
        self.core = core
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        self.waiters = 0
        self.closed: str | None = None
        self.dispatch: Callable[[Transfer], None] = _nowhere
        self.transfers: dict[int, Transfer] = {}
        self.internal_errors = 0
        self.sweeping = False
        self.forgetting = False
        self.look: Callable[[], float | None] = _no_storage
        self.flushes = flushes
        self._came = 0
        self._wait = wait
        self._publish = publish
        self._failed = failed
        self._inbox: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        # The core fills these and never replaces them; they are looked at in every verb.
        self._actions, self._finished, self._events = core.actions, core.finished, core.events
        self.on_change: Callable[[], None] | None = None
        self._wake: Callable[[], None] | None = None

    def post(self, call: Callable[..., object], *args: Any) -> None:
        """Have `call(*args)` run under the lock, soon. Any thread may call it, a finaliser too: it takes no lock."""
        self._inbox.append((call, args))
        if self._wake is not None:
            self._wake()

    def use_pump(self, wake: Callable[[], None]) -> None:
        """From now on `wake` is called after each post, from any thread and without the lock."""
        self._wake = wake

    @property
    def idle(self) -> bool:
        """Nothing waits to be applied."""
        return not self._inbox

    def settle(self) -> None:
        """Apply what was posted, start what the core wants done, wake who waits. The lock is held."""
        inbox, actions, finished, events = self._inbox, self._actions, self._finished, self._events
        flushes = self.flushes
        while inbox or actions:
            if inbox:
                while inbox:
                    self._guarded(*inbox.popleft())
                if flushes and self._progress():
                    # Once: what a full queue turns away has ended at once, and would be planned again without end.
                    flushes = False
                    self._guarded(self.core.flush, ())
            while actions:
                transfer = actions.popleft()
                self.transfers[transfer.id] = transfer
                self._guarded(self.dispatch, (transfer,))
        if finished:
            for transfer in finished:
                self.transfers.pop(transfer.id, None)
            finished.clear()
            self.notify()
        if events:
            news = events[:]
            events.clear()
            self._publish(news)

    def _progress(self) -> bool:
        """Whether pages have come to anywhere since the last look.

        Where writes only fail, planning them again at each failure would never end; the next request tries again.
        """
        came = sum(pages for (_, good), pages in self.core.log.pages.items() if good)
        before, self._came = self._came, came
        return came != before

    def flush(self) -> None:
        """Keep the clean reserve, if a policy wants one, then settle. The lock is held."""
        if self.flushes:
            self.core.flush()
        self.settle()

    def notify(self) -> None:
        """Wake who waits for a change. The lock is held."""
        if self.waiters:
            self.changed.notify_all()
        if self.on_change is not None:
            self.on_change()

    def wait(self, timeout: float) -> None:
        """Wait for a change, with the lock held before and after; then settle. The caller looks again in a loop.

        Raises:
            CacheClosed: the cache was closed meanwhile.
        """
        self.waiters += 1
        try:
            # Whoever waits looks after calls that hang, so that what is queued behind them gets its turn.
            soon = self.look()
            self._wait(self.changed, timeout if soon is None else min(timeout, soon))
        finally:
            self.waiters -= 1
        if self.closed is not None:
            raise CacheClosed(self.closed)
        self.settle()

    def sweep(self) -> None:
        """Free one slice of cleared pages. Takes the lock."""
        with self.lock:
            self.sweeping = self.core.sweep(SWEEP_PAGES) > 0
            self.notify()

    def forget(self) -> None:
        """Drop one slice of beliefs about a storage that was detached. Takes the lock."""
        with self.lock:
            self.forgetting = self.core.forget_storage()
            self.settle()

    def _guarded(self, call: Callable[..., object], args: tuple[Any, ...]) -> None:
        try:
            call(*args)
        except Exception as error:
            # It belongs to a transfer, not to whoever holds the lock right now: he must not fail because of it.
            self.internal_errors += 1
            _log.exception("an internal error; please report it")
            if self._failed is not None:
                self._failed(error)


class Ringer(Protocol):
    """Whoever applies what was posted while no caller comes by."""

    def ring(self) -> None:
        """There may be something to do. Any thread, finalisers too."""
        ...

    def watch(self) -> None:
        """Storage work has begun. Any thread."""
        ...

    def stop(self, join: Callable[[threading.Thread], None]) -> bool:
        """The cache is closed. Returns whether nothing of it goes on."""
        ...


class Pump:
    """The thread that applies what was posted while no caller comes by, and frees cleared pages in slices.

    While storage work is under way it looks now and then for calls that hang.
    """

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer
        # A SimpleQueue may be put to from finalisers, which can interrupt anything; locks and events may not.
        self._bell: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._watching = False
        self._thread = threading.Thread(target=self._loop, name="hicache-pump", daemon=True)
        reducer.use_pump(self.ring)
        self._thread.start()

    def ring(self) -> None:
        """There may be something to do."""
        self._bell.put(True)

    def watch(self) -> None:
        """Storage work has begun."""
        if not self._watching:
            self._bell.put(True)

    def stop(self, join: Callable[[threading.Thread], None]) -> bool:
        """End the thread; True if it has ended."""
        self._bell.put(False)
        if self._thread is not threading.current_thread():
            join(self._thread)
        return not self._thread.is_alive()

    def _loop(self) -> None:
        reducer = self._reducer
        while self._next():
            if not reducer.idle:
                with reducer.lock:
                    reducer.settle()
            while reducer.sweeping:
                reducer.sweep()
            while reducer.forgetting:
                reducer.forget()

    def _next(self) -> bool:
        """Wait for the bell, or until it is time to look for calls that hang. False: the end."""
        self._watching = False  # before the look: what begins after it rings
        soon = self._reducer.look()
        self._watching = soon is not None
        try:
            return self._bell.get(timeout=soon if soon is None else max(soon, _LEAST_WAIT))
        except queue.Empty:
            return True


def _no_storage() -> None:
    return None


def _nowhere(transfer: Transfer) -> None:
    raise AssertionError(f"{transfer!r} was started before the executor was there")
