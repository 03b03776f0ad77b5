"""What callers hand over, checked at the door: before a slot, a pin or a lock is taken, and in one line."""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from hicache.core.symbols import Span, Tokens, check_span
from hicache.errors import ConfigError, InvalidInput
from hicache.memory.writer import READY, WriterEvent
from hicache.units import whole_number

MOST: Final = 2**48
"""Counts above it are mistakes, not wishes."""

_LEAST_PRIORITY: Final = -(2**31)


def number_of_seconds(name: str, value: Any) -> float:
    """The value as a float, if it is a finite number of 0 or more.

    Raises:
        ConfigError: it is not.
    """
    if type(value) is float and 0.0 <= value < math.inf:
        return value
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        seconds = float(value) if value < MOST else math.inf  # integers may be too large for a float
        if 0.0 <= seconds < math.inf:
            return seconds
    raise ConfigError(f"{name}={value!r:.60} is not a number of seconds, 0 or more")


def deadline_of(seconds: Any) -> float | None:
    """A deadline: None, or a number of seconds from now.

    Raises:
        ConfigError: anything else.
    """
    return None if seconds is None else number_of_seconds("deadline", seconds)


def whole(name: str, value: Any, *, least: int) -> int:
    """The value as an int, if it is a whole number of at least `least`.

    Raises:
        ConfigError: it is not, or absurdly large.
    """
    number = whole_number(value)
    if number is None or number < least:
        raise ConfigError(f"{name}={value!r:.60} is not a whole number of {least} or more")
    if number > MOST:
        raise ConfigError(f"{name}={number:.3g} is absurdly large")
    return number


def flag(name: str, value: Any) -> bool:
    """The value, if it is True or False.

    Raises:
        ConfigError: it is not.
    """
    if value is True or value is False:
        return bool(value)
    raise ConfigError(f"{name}={value!r:.60} is not True or False")


def priority_of(value: Any) -> int:
    """A priority that can be compared with others.

    Raises:
        InvalidInput: no integer of 32 bits.
    """
    number = whole_number(value)
    if number is None or not _LEAST_PRIORITY <= number < -_LEAST_PRIORITY:
        raise InvalidInput(f"request: priority={value!r:.40} is not an integer of -2^31 to 2^31-1")
    return number


def event_of(ready: Any) -> WriterEvent | None:
    """What `commit` is given as its writer's event.

    Raises:
        InvalidInput: it cannot be asked whether it has passed.
    """
    if ready is None or ready is READY:
        return ready
    verbs = (getattr(ready, verb, None) for verb in ("query", "wait"))
    if isinstance(ready, type) or not all(callable(verb) for verb in verbs):
        raise InvalidInput(
            f"commit: ready={ready!r:.60} is no writer event: give hicache.READY once the bytes are written, or an "
            "event with query() and wait(timeout) such as hicache.ThreadEvent()"
        )
    event: WriterEvent = ready
    return event


def length_of(tokens: Any) -> int:
    """How many tokens there are.

    Raises:
        InvalidInput: nothing that has a length.
    """
    try:
        return len(tokens)
    except TypeError:
        raise InvalidInput(f"tokens are {type(tokens).__name__}: give a list or an array of token ids") from None


def tail_of(tokens: Tokens, first: int) -> Tokens:
    """The tokens from position `first` on, also of sequences that have no slices, as `collections.deque`."""
    try:
        return tokens[first:]
    except TypeError:
        return [*tokens][first:]


def no_spans(extras: Any) -> None:
    """See that there is no non-text input.

    Raises:
        InvalidInput: there is some.
    """
    if not (type(extras) is tuple and not extras) and _items(extras):
        raise InvalidInput("extras were given to a cache that was opened without extras=True: open it with it")


def spans_of(extras: Iterable[Span], *, tokens: int, first: int = 0, before: Iterable[Span] = ()) -> tuple[Span, ...]:
    """The non-text input of a prompt, in the order given.

    Args:
        extras: (content hash, first token, tokens) each.
        tokens: tokens of the prompt.
        first: tokens that were there before, whose pages have their names already.
        before: their non-text input.

    Raises:
        InvalidInput: another form; an item that begins before `first`, ends behind the prompt, or overlaps another.
    """
    spans = tuple(_span(item) for item in _items(extras))
    end = first
    for _, start, length in sorted(spans, key=lambda span: span[1]):
        if start < end:
            where = f"before token {first}, where what follows begins" if end == first else "inside another"
            raise InvalidInput(f"extras: the item of {length} tokens at {start} begins {where}")
        end = start + length
        if end > tokens:
            raise InvalidInput(f"extras: the item of {length} tokens at {start} ends behind the prompt's {tokens}")
    return (*before, *spans)


def _items(extras: Any) -> tuple[Any, ...]:
    if not isinstance(extras, (str, bytes)):
        try:
            return tuple(extras)
        except TypeError:
            pass
    raise InvalidInput(
        f"extras are {type(extras).__name__}: give a list of (content hash, first token, tokens), or leave them out"
    )


def _span(item: Any) -> Span:
    if not isinstance(item, (tuple, list)) or len(item) != 3:
        raise InvalidInput(f"extras: {item!r:.60} is not (content hash, first token, tokens)")
    content, *place = item
    start, length = (number if (number := whole_number(value)) is not None else value for value in place)
    check_span(content, start, length)
    return content, start, length


def clock_of(clock: Any) -> Any:
    """A clock that can tell the time.

    Raises:
        ConfigError: it cannot.
    """
    if isinstance(clock, type) or not callable(getattr(clock, "now", None)):
        raise ConfigError(f"clock={clock!r:.60} is no clock: leave it out, or give an object with now() in seconds")
    return clock


def storage_of(storage: Any) -> Any:
    """What `open` was given as storage, unless it is a path.

    Raises:
        ConfigError: a path; says how to write it.
    """
    if isinstance(storage, os.PathLike):
        url = Path(os.path.abspath(storage)).as_uri()
        raise ConfigError(f"storage={storage!r:.200} is a path, not a URL: write it as {url!r}")
    return storage
