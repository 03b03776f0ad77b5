"""Residency changes for whoever listens: bounded, never in the way of the cache, and with visible gaps."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hicache.events import Event


@dataclass(frozen=True, slots=True)
class Gap:
    """So many events were lost here because the listener was too slow: what it knows of residency is wrong now.

    Attributes:
        lost: events that were not delivered.
    """

    lost: int


class Subscription:
    """One listener's queue of events. Iterating blocks until the next event and ends when the cache is closed.

    At the bound new events are dropped and counted; a `Gap` stands where they would have been. Thread-safe; leave it
    by `close`.
    """

    def __init__(self, *, limit: int, forget: Callable[[Subscription], None]) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._events: deque[Event | Gap] = deque()
        self._limit = limit
        self._lost = 0
        self._closed = False
        self._forget = forget

    def offer(self, events: Sequence[Event]) -> None:
        """Add events. Takes a lock that is held only to move references, so it never waits for the listener."""
        with self._changed:
            if self._closed:
                return
            room = self._limit - len(self._events)
            if self._lost and room > 0:
                self._events.append(Gap(self._lost))
                self._lost = 0
                room -= 1
            self._events.extend(events[:room] if room < len(events) else events)
            self._lost += max(len(events) - max(room, 0), 0)
            self._changed.notify_all()

    def get(self, timeout: float | None = None) -> Event | Gap | None:
        """The next event; None after `timeout` real seconds without one, or when the stream has ended."""
        with self._changed:
            self._changed.wait_for(self._ready, timeout)
            return self._next()

    def drain(self) -> list[Event | Gap]:
        """All that is there now, without waiting."""
        with self._changed:
            found: list[Event | Gap] = []
            while (event := self._next()) is not None:
                found.append(event)
            return found

    def close(self) -> None:
        """Listen no more. What was delivered can still be read. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._forget(self)

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return f"<hicache.Subscription {len(self._events)} of {self._limit} waiting, {self._lost} lost: {state}>"

    def __iter__(self) -> Iterator[Event | Gap]:
        while (event := self.get()) is not None:
            yield event

    def _ready(self) -> bool:
        return bool(self._events or self._lost or self._closed)

    def _next(self) -> Event | Gap | None:
        if self._events:
            return self._events.popleft()
        if self._lost:
            lost, self._lost = self._lost, 0
            return Gap(lost)
        return None


class Publisher:
    """Hands events to every subscription. `publish` is called under the cache's lock and never blocks.

    Attributes:
        tap: gets them too, in the same call; None for nobody.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._subscriptions: tuple[Subscription, ...] = ()
        self._closed = False
        self.tap: Callable[[Sequence[Event]], None] | None = None

    def subscribe(self, *, limit: int) -> Subscription:
        """A new listener; it gets what happens from now on."""
        subscription = Subscription(limit=limit, forget=self._forget)
        with self._lock:
            closed = self._closed
            if not closed:
                self._subscriptions = (*self._subscriptions, subscription)
        if closed:
            subscription.close()
        return subscription

    def publish(self, events: Sequence[Event]) -> None:
        """Give events to all listeners."""
        for subscription in self._subscriptions:
            subscription.offer(events)
        if self.tap is not None:
            self.tap(events)

    def close(self) -> None:
        """End all streams."""
        with self._lock:
            self._closed = True
            left = self._subscriptions
        for subscription in left:
            subscription.close()

    def _forget(self, subscription: Subscription) -> None:
        with self._lock:
            self._subscriptions = tuple(s for s in self._subscriptions if s is not subscription)
