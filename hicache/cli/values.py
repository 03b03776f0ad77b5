"""Values of options as people give them, and the signals that ask a long command to end."""

from __future__ import annotations

import math
import re
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Final

from hicache.errors import ConfigError

MOST_REQUESTS: Final = 2**48


def choice(option: str, text: str, known: Sequence[str]) -> None:
    """See that a value is one of those known.

    Raises:
        ConfigError: it is not.
    """
    if text not in known:
        raise ConfigError(f"{option} {text:.60}: use one of {', '.join(known)}")


def whole(option: str, text: str) -> int:
    """A whole number.

    Raises:
        ConfigError: something else.
    """
    if re.fullmatch(r"[+-]?[0-9]{1,40}", text) is None:
        raise ConfigError(f"{option} {text:.60}: is not a whole number; use digits only")
    return int(text)


def requests(text: str) -> int:
    """The value of `--limit`.

    Raises:
        ConfigError: no number of requests.
    """
    number = whole("--limit", text)
    if number < 0:
        raise ConfigError(f"--limit {number}: cannot be negative; leave it out for the whole trace")
    if number > MOST_REQUESTS:
        raise ConfigError(f"--limit {number:.3g}: more than any trace has; leave it out for the whole trace")
    return number


def whole_list(option: str, text: str, *, least: int, most: int) -> tuple[int, ...]:
    """Whole numbers with commas between them.

    Raises:
        ConfigError: something else, or one out of range.
    """
    numbers = tuple(whole(option, part.strip()) for part in text.split(","))
    for number in numbers:
        if not least <= number <= most:
            raise ConfigError(f"{option} {number}: must be {least} to {most}")
    return numbers


def number(option: str, text: str, what: str) -> float:
    """A number above 0.

    Raises:
        ConfigError: something else; says what to give.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (value > 0 and math.isfinite(value)):
        raise ConfigError(f"{option} {text:.60}: is not a number above 0; give {what}")
    return value


@contextmanager
def stop_on_interrupt() -> Iterator[threading.Event]:
    """The first Ctrl-C or SIGTERM asks to stop between two requests, the second interrupts at once."""
    stop = threading.Event()

    def ask(_number: int, _frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    if threading.current_thread() is not threading.main_thread():  # only there may a handler be set
        yield stop
        return
    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def undisturbed() -> Iterator[None]:
    """A block that closes something: a Ctrl-C or SIGTERM within it comes behind it."""
    came: list[int] = []

    def later(number: int, _frame: FrameType | None) -> None:
        came.append(number)

    if threading.current_thread() is not threading.main_thread():  # only there may a handler be set
        yield
        return
    before = {number: signal.signal(number, later) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if came:
            signal.raise_signal(came[0])
