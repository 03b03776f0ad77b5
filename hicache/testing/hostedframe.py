"""The frame of a random driver of a hosted cache: its decisions, and who else does something while it works.

Wherever the cache calls storage, or a verb waits, other things may happen.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Condition
from typing import Any

import numpy as np

from hicache.core.keys import ObjectKey
from hicache.storage.base import StorageBackend
from hicache.testing.choices import Choices, Decider
from hicache.testing.hostedlife import HOSTED_NAMESPACE, Client, HostedLife
from hicache.testing.truth import Truth, Violation
from hicache.testing.watchedstorage import WatchedStorage

__all__ = ["DEEPEST", "SCOPES", "HostedFrame"]

_P = HOSTED_NAMESPACE.page_size
SCOPES: tuple[dict[str, Any], ...] = ({}, {"tenant": "a"}, {"salt": "b"})
DEEPEST = 2  # so many steps inside each other


class HostedFrame(Decider):
    """A hosted cache under random use, life after life on one storage.

    Args:
        choices: where decisions come from.
        host: slots.
        storage: the backend, or None. It stays its owner's.
        damage: flips a bit of a stored object, if it is there.
        options: of `open_hosted`.

    Attributes:
        steps: steps made, those included that happened inside others.
        seen: how often each kind of thing happened.
    """

    def __init__(
        self,
        choices: Choices,
        *,
        host: int,
        storage: StorageBackend | None = None,
        damage: Callable[[ObjectKey], bool] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(choices)
        self._damage_object = damage
        self._host, self._options = host, options
        self._truth = Truth(HOSTED_NAMESPACE, hides=self._one_in(4))
        self._derived = [HOSTED_NAMESPACE.derive(**fields) for fields in SCOPES]
        self._prompts: list[tuple[int, list[int]]] = []
        self._depth = 0
        self._storage: WatchedStorage | None = None
        if storage is not None:
            watched = WatchedStorage(
                storage, truth=self._truth, choices=choices, meanwhile=self._meanwhile, note=self._note
            )
            assert isinstance(watched, WatchedStorage)
            self._storage = watched
        self._life = self._open()

    def _open(self) -> HostedLife:
        return HostedLife(self._storage, self._truth, host=self._host, on_wait=self._on_wait, options=self._options)

    # ---- choosing

    def _prompt(self) -> tuple[int, list[int]]:
        if self._prompts and not self._one_in(4):
            return self._pick(self._prompts)
        which = 0 if not self._one_in(3) else self._choices.integer(0, len(SCOPES) - 1)
        tokens: list[int] = []
        for _ in range(self._choices.integer(0, 9)):
            tokens += [self._choices.integer(1, 2) if self._one_in(2) else 0, 0]
        if self._one_in(3):
            tokens.append(3)
        self._prompts = [*self._prompts, (which, tokens)][-12:]
        return which, tokens

    def _hashes(self, which: int, tokens: list[int]) -> bytes:
        whole = np.array(tokens[: len(tokens) // _P * _P], "<u4").tobytes()
        return b"".join(self._truth.learn(self._derived[which], whole))

    def _client(self) -> Client | None:
        return self._pick(self._life.clients) if self._life.clients else None

    # ---- steps

    STEPS = (
        ("request", 14), ("prefill", 24), ("load", 12), ("reserve", 8), ("commit", 12), ("commit_wrongly", 3),
        ("extend", 5), ("close", 8), ("drop", 1), ("prefetch", 5), ("work", 36), ("settle", 8), ("look", 3),
        ("upkeep", 4), ("advance", 3), ("match", 3), ("evict", 5), ("clear", 1), ("spoil", 3),
        ("restart", 1), ("exchange", 2),
    )  # fmt: skip
    """What there is to do, and how often it is chosen."""
    _WEIGHTED = tuple(name for name, weight in STEPS for _ in range(weight))

    def step(self) -> str:
        """Do one random thing. Returns its name."""
        try:
            return self._step()
        except Violation as error:
            raise AssertionError(f"step {self.steps}: {error}") from error

    def _step(self) -> str:
        self.steps += 1
        name = self._pick(self._WEIGHTED)
        self._depth += 1
        try:
            getattr(self, f"_{name}")()
            self._life.check()
        except Exception as error:
            raise Violation(f"{name}: {type(error).__name__}: {error}") from error
        finally:
            self._depth -= 1
        return name

    def _meanwhile(self) -> None:
        if 0 < self._depth < DEEPEST and self._one_in(6):
            self._note("meanwhile")
            self._step()

    def _on_wait(self, condition: Condition, timeout: float) -> None:
        """A verb that may wait does, in a thread of its own: let go of the lock, and let the loop go on."""
        condition.release()
        try:
            todo = self._life.work()
            if todo and not self._one_in(6):
                self._pick(todo)()
            else:
                self._life.clock.advance(timeout)
        finally:
            condition.acquire()
