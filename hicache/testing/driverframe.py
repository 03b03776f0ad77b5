"""The frame of a random driver of an embedded cache: its decisions, and who else does something while it works.

Wherever the cache waits or calls storage, other things may happen, as if other threads were at work.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from threading import Condition
from typing import Any

import numpy as np

from hicache.core.keys import ObjectKey
from hicache.errors import CacheClosed
from hicache.records import Tier
from hicache.storage.base import StorageBackend
from hicache.testing.cachelife import NAMESPACE, Engine, Life
from hicache.testing.choices import Choices, Decider
from hicache.testing.truth import Truth, Violation, require
from hicache.testing.watchedstorage import WatchedStorage

__all__ = ["DEEPEST", "SCOPES", "TICK", "DriverFrame", "whole_pages"]

_P = NAMESPACE.page_size
TICK = 0.125  # times are whole multiples of it, so that sums of them are exact
SCOPES: tuple[dict[str, Any], ...] = ({}, {"tenant": "a"}, {"salt": "b"}, {"tenant": "a", "salt": "b"})
DEEPEST = 3  # so many steps inside each other


class DriverFrame(Decider):
    """A cache under random use, life after life on one storage.

    Args:
        choices: where decisions come from.
        device, host: pages of the tiers; host 0 leaves that tier out.
        storage: the backend, or None. It stays its owner's.
        damage: flips a bit of a stored object, if it is there.
        options: of `hicache.open`.

    Attributes:
        steps: steps made, those included that happened inside others.
        seen: how often each kind of thing happened, so that a test can tell that it did.
    """

    def __init__(
        self,
        choices: Choices,
        *,
        device: int,
        host: int,
        storage: StorageBackend | None = None,
        damage: Callable[[ObjectKey], bool] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(choices)
        self._damage_object = damage
        self._sizes = {"device": device, "host": host}
        self._options = options
        self._truth = Truth(NAMESPACE)
        self._derived = [NAMESPACE.derive(**fields) for fields in SCOPES]
        self._prompts: list[tuple[int, list[int]]] = []
        self._depth = 0
        self._until = inf
        self._storage: WatchedStorage | None = None
        if storage is not None:
            watched = WatchedStorage(
                storage, truth=self._truth, choices=choices, meanwhile=self._meanwhile, note=self._note
            )
            assert isinstance(watched, WatchedStorage)
            self._storage = watched
        self._late: list[Callable[[], None]] = []
        self._life = self._open()

    def _open(self) -> Life:
        faults, storage = 0, self._storage
        if storage is not None:
            faults, storage.faults = storage.faults, 0  # opening asks for a generation, and may rightly fail
        try:
            return Life(
                storage,
                self._truth,
                **self._sizes,
                meanwhile=self._meanwhile,
                on_wait=self._on_wait,
                options=self._options,
            )
        finally:
            if storage is not None:
                storage.faults = faults

    # ---- choosing

    def _prompt(self) -> tuple[int, list[int]]:
        if self._prompts and not self._one_in(5):
            return self._pick(self._prompts)
        which = 0 if not self._one_in(3) else self._choices.integer(0, len(SCOPES) - 1)
        tokens: list[int] = []
        for _ in range(self._choices.integer(0, 9)):
            # Few different pages: prompts that share much and part anywhere.
            tokens += [self._choices.integer(1, 2) if self._one_in(2) else 0, 0]
        if self._one_in(3):
            tokens.append(3)
        self._truth.learn(self._derived[which], whole_pages(tokens))
        self._prompts = [*self._prompts, (which, tokens)][-12:]
        return which, tokens

    def _known(self, which: int) -> bool:
        """Whether the cache has met a namespace, and knows its generation."""
        fields = SCOPES[which]
        scope = self._life.parts.scopes.known(None, fields.get("tenant"), fields.get("salt"))
        return scope is not None and scope.tree is not None

    def _engine(self, *, reading: bool = False) -> Engine | None:
        """One that is not busy; or, if asked for, one that reads a load by layer."""
        free = [one for one in self._life.engines if not one.busy or (reading and one.reading is not None)]
        return self._pick(free) if free else None

    # ---- steps

    STEPS = (
        ("request", 20),
        ("prefill", 16),
        ("load", 10),
        ("load_by_layer", 4),
        ("come_back", 8),
        ("read_layers", 12),
        ("allocate", 10),
        ("commit", 12),
        ("write", 3),
        ("extend", 5),
        ("close", 10),
        ("drop", 2),
        ("work", 34),
        ("event", 8),
        ("settle", 4),
        ("sweep", 2),
        ("advance", 4),
        ("match", 3),
        ("flush", 2),
        ("evict", 6),
        ("clear", 1),
        ("spoil", 3),
        ("detach_or_attach", 2),
        ("restart", 1),
    )
    """What there is to do, and how often it is chosen."""
    _WEIGHTED = tuple(name for name, weight in STEPS for _ in range(weight))

    def step(self) -> str:
        """Do one random thing, others meanwhile included. Returns its name."""
        try:
            return self._step()
        except Violation as error:
            raise AssertionError(f"step {self.steps}: {error}") from error

    def _step(self) -> str:
        self.steps += 1
        name = self._pick(self._WEIGHTED)
        if self._life.over and not self._depth:
            self._life = self._open()
        self._depth += 1
        until, self._until = self._until, inf  # of the verb that waits for this step
        try:
            getattr(self, f"_{name}")()
            self._life.check()
        except CacheClosed as error:
            if not self._life.over:
                raise Violation("the cache says that it is closed") from error
        except Exception as error:
            raise Violation(f"{name}: {type(error).__name__}: {error}") from error
        finally:
            self._depth -= 1
            self._until = until
        return name

    def _meanwhile(self) -> None:
        """Other threads do something."""
        if 0 < self._depth < DEEPEST and self._one_in(6):
            self._note("meanwhile")
            self._step()

    def _on_wait(self, condition: Condition, timeout: float) -> None:
        """Somebody waits, with the lock held: let go of it, let something happen, or time pass."""
        life = self._life
        now = life.clock.now()
        require(now + timeout <= self._until, "a wait goes on behind its deadline")
        self._note("waited")
        condition.release()
        try:
            if self._depth < DEEPEST and self._one_in(4):
                self._step()
            elif self._one_in(6) or not self._some_work():
                life.clock.advance(timeout if self._one_in(2) else min(timeout, TICK))
        finally:
            condition.acquire()

    def _some_work(self) -> bool:
        life = self._life
        todo = life.work()
        if life.events and self._one_in(max(2, len(todo))):
            self._event()
        elif todo:
            self._pick(todo)()
        return bool(todo)

    def _event(self) -> None:
        """A writer's event passes, or breaks."""
        life = self._life
        if not life.events:
            return
        event = life.events.pop(self._choices.integer(0, len(life.events) - 1))
        if self._one_in(5):
            if life.pool.copies.fail_event(event):
                self._note("event failed")
            return
        table = life.core.registry.tables[Tier.DEVICE]
        for slot in event.writes:
            held = any(slot in engine.expected for engine in life.engines)
            require(held or table.pins[slot], "a slot that is being written was given back")
        life.write_behind(event)
        event.passed = True
        self._note("event passed")
        if not self._one_in(4):
            life.pool.copies.pass_events()


def whole_pages(tokens: list[int]) -> bytes:
    """The whole pages of a prompt, as token bytes."""
    return np.array(tokens[: len(tokens) // _P * _P], "<u4").tobytes()
