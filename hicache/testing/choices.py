"""Parts of the random drivers: where decisions come from, and page hashes that cannot collide."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Choices(Protocol):
    """Where decisions come from."""

    def integer(self, low: int, high: int) -> int:
        """An integer of low to high, both included."""
        ...


class SeededChoices:
    """Decisions of a seeded generator."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311  tests need it repeatable, not secret

    def integer(self, low: int, high: int) -> int:
        """An integer of low to high, both included."""
        return self._random.randint(low, high)


class DrawnChoices:
    """Decisions drawn by hypothesis, so that a failing history shrinks.

    Args:
        data: what `hypothesis.strategies.data()` gives.
    """

    def __init__(self, data: Any) -> None:
        self._data = data

    def integer(self, low: int, high: int) -> int:
        """An integer of low to high, both included."""
        from hypothesis import strategies

        return int(self._data.draw(strategies.integers(low, high)))


class Decider:
    """What random drivers share: decisions, and notes of what happened.

    Attributes:
        steps: steps made.
        seen: how often each kind of thing happened, so that a test can tell that it did.
    """

    def __init__(self, choices: Choices) -> None:
        self.steps = 0
        self.seen: dict[str, int] = {}
        self._choices = choices

    def _one_in(self, n: int) -> bool:
        return self._choices.integer(1, n) == 1

    def _pick(self, items: Sequence[T]) -> T:
        return items[self._choices.integer(0, len(items) - 1)]

    def _note(self, what: str) -> None:
        self.seen[what] = self.seen.get(what, 0) + 1


class CountingHasher:
    """Page hashes as 8-byte integers that depend on everything from the root on. No hash function: no collisions."""

    size = 8

    def __init__(self) -> None:
        self._numbers: dict[tuple[bytes | None, bytes], int] = {}
        self.width = 2

    def extend(self, parent: bytes | None, symbols: bytes, pages: int) -> bytes:
        """Number each (past, symbol) as it is first met."""
        hashes = []
        for i in range(pages):
            key = (parent, symbols[i * self.width : (i + 1) * self.width])
            number = self._numbers.setdefault(key, len(self._numbers) + 1)
            parent = number.to_bytes(8, "little")
            hashes.append(parent)
        return b"".join(hashes)


def tag(page_hash: bytes) -> int:
    """The tag of a page's bytes."""
    return int.from_bytes(page_hash, "little")
