"""`hicache top ADDRESS`: a running service, live."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from hicache.cli.output import print_json, print_table, say, warn
from hicache.cli.service import add_service_arguments, connected, seconds_of
from hicache.errors import ConfigError, HicacheError

if TYPE_CHECKING:
    from hicache.cli.top_view import Look, View

HELP = "watch a service: tiers, hit rates, transfers, hot prefixes, and what other sizes would hit"

_EPILOG = """\
Keys: q quits, space pauses, tab puts the next table first, r m h n sort prefixes and pools by requests, what they
missed, hit rate or name. Where standard input or output is no terminal, tables are printed again and again, as with
--plain.

Shares name what they divide by: tokens asked, since the start and since the look before; pages asked for what other
sizes would hit, an estimate with its error (see deploy/metrics.md). The ideal misses only what was never seen.

JSON: a document a look, a line each, until it is ended, into a pipe too (as `hicache events` does it); --count N ends
it, and --once prints one document. Fields: service, interval_seconds (null at the first look), tokens and
tokens_in_interval (asked, device, host, storage, missed by reason), hit_rate_tokens and ideal_hit_rate_tokens (since
the start; null before anything was asked), and pools (model, namespace, tenant, what_if, ideal_hit_rate_pages,
prefixes), with the fields of hicache.core.whatif.WhatIfStatistics and hicache.runtime.popular.Prefix.

Exit codes: 0 ended by q, Ctrl-C or --count, 2 the service was not reached at the start.
"""

_KEYS_EVERY: Final = 0.25
"""Seconds between two looks at the terminal's size."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_service_arguments(parser)
    parser.add_argument("--interval", default="2", metavar="SECONDS", help="between two looks (default: 2)")
    parser.add_argument("--once", action="store_true", help="print one look and end")
    parser.add_argument("--count", type=int, metavar="N", help="end after N looks (default: never)")
    parser.add_argument("--plain", action="store_true", help="print tables below each other, without keys")


def run(options: argparse.Namespace) -> int:
    """Watch until told to stop; returns the exit code."""
    from hicache.cli.main import EXIT_FINE
    from hicache.cli.top_screen import terminal

    interval = seconds_of(options.interval, "--interval", least=0.05)
    if options.count is not None and options.count < 1:
        raise ConfigError(f"--count {options.count}: give 1 or more")
    count = 1 if options.once else options.count
    with contextlib.suppress(KeyboardInterrupt):  # it is how one ends it
        if options.json or options.once or options.plain or not terminal():
            _print(options, interval, count)
        else:
            _watch(options, interval, count)
    return EXIT_FINE


# ---- asking


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of one question: a look, or why there is none."""

    look: Look | None
    trouble: str = ""


class Asker:
    """Asks a service on a thread of its own, so that one that hangs stops nobody.

    Args:
        ask: gives a look, and may wait or raise `HicacheError`.
        interval: seconds between two questions.
        told: called after each answer, on that thread.
    """

    def __init__(self, ask: Callable[[], Look], interval: float, told: Callable[[], None]) -> None:
        self.answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._ask, self._interval, self._told = ask, interval, told
        self._stop, self._telling = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._run, name="hicache-top", daemon=True)

    def __enter__(self) -> Asker:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._telling:  # from now on nobody is told: whoever listened is gone
            self._stop.set()  # a question under way ends with its own time; it is not waited for

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                answer = Answer(self._ask())
            except HicacheError as error:
                answer = Answer(None, str(error))
            except Exception:
                if self._stop.is_set():  # the connection was closed under it
                    return
                raise
            self.answers.put(answer)
            with self._telling:
                if not self._stop.is_set():
                    self._told()
            self._stop.wait(self._interval)


@contextlib.contextmanager
def looking(options: argparse.Namespace) -> Iterator[Callable[[], Look]]:
    """What asks, over a new connection each time after trouble: the service may have been started anew."""
    from hicache.cli.top_view import Look

    client: Any = None

    def look() -> Look:
        nonlocal client
        try:
            if client is None:
                client = undo.enter_context(connected(options))
            return Look(client.statistics(), time.monotonic())
        except HicacheError:
            client = None
            undo.close()
            raise

    with contextlib.ExitStack() as undo:
        yield look


# ---- without a terminal


def _print(options: argparse.Namespace, interval: float, count: int | None) -> None:
    from hicache.cli.top_view import view_of

    pause, before, shown = threading.Event(), None, 0
    with looking(options) as look:
        while True:
            try:
                now = look()
            except HicacheError as error:
                if before is None:
                    raise
                warn(f"{error}; trying again")
            else:
                view = view_of(now, before)
                _say(options, view)
                before = now
                shown += 1
            if shown == count or pause.wait(interval):
                return


def _say(options: argparse.Namespace, view: View) -> None:
    if options.json:
        if options.once:
            print_json(view.document)
        else:
            sys.stdout.write(json.dumps(view.document, allow_nan=False) + "\n")
    else:
        say(f"{options.address}  {view.title}")
        for reason in view.degraded:
            say(f"degraded: {reason}")
        for table in view.tables:
            print_table(table)
    sys.stdout.flush()


# ---- on a terminal


def _watch(options: argparse.Namespace, interval: float, count: int | None) -> None:
    from hicache.cli.top_screen import painter

    with looking(options) as look:
        first = look()  # a service that is not there is said in a line, before the screen is taken
        reading, writing = os.pipe()
        asking = Asker(look, interval, lambda: _wake(writing))
        with _closing(reading, writing), asking as asker, _keys() as keys, painter(sys.stdout) as screen:
            shown = Shown(options, first, interval)
            while not shown.over(count):
                size = screen.size()
                screen.paint(shown.lines(*size))
                while not shown.changed and screen.size() == size:
                    ready, _, _ = select.select([keys, reading], [], [], _KEYS_EVERY)
                    if reading in ready:
                        os.read(reading, 4096)
                    if keys in ready:
                        shown.type(os.read(keys, 64))
                    while not asker.answers.empty():
                        shown.hear(asker.answers.get())


class Shown:
    """What is on the screen, and why.

    Attributes:
        changed: whether it must be drawn anew.
    """

    def __init__(self, options: argparse.Namespace, first: Look, interval: float) -> None:
        self._options = options
        self._interval = interval
        self._look, self._before = first, first
        self._sort, self._first, self._paused, self._quit = "requests", 0, False, False
        self._trouble, self._since = "", 0.0
        self._looks = 0
        self.changed = True

    def over(self, count: int | None) -> bool:
        """Whether to end."""
        return self._quit or (count is not None and self._looks >= count)

    def type(self, keys: bytes) -> None:
        """Keys were typed; none, where the terminal has gone."""
        for key in keys.decode("ascii", "ignore") or "q":
            self.press(key)

    def press(self, key: str) -> None:
        """A key was pressed."""
        from hicache.cli.top_view import SORTS

        if key in ("q", "Q", "\x03", "\x04"):
            self._quit = True
        elif key in (" ", "p"):
            self._paused = not self._paused
        elif key == "\t":
            self._first += 1
        elif key in SORTS:
            self._sort = SORTS[key]
        else:
            return
        self.changed = True

    def hear(self, answer: Answer) -> None:
        """The service has answered, or has not."""
        self.changed = True
        if answer.look is None:
            self._since = self._since if self._trouble else time.monotonic()
            self._trouble = answer.trouble
            return
        self._trouble = ""
        self._looks += 1
        if not self._paused:
            self._before, self._look = self._look, answer.look

    def lines(self, width: int, height: int) -> Any:
        """The screen."""
        from hicache.cli.top_screen import screen_of
        from hicache.cli.top_view import view_of

        self.changed = False
        before = None if self._before is self._look else self._before
        view = view_of(self._look, before, sort=self._sort)
        state = ""
        if self._trouble:
            state = f"no answer for {time.monotonic() - self._since:.0f} s, trying again: {self._trouble}"
        pace = "[paused]" if self._paused else f"every {self._interval:g} s"
        title = f"hicache top  {pace}  {self._options.address}"
        return screen_of(view, title=title, state=state, width=width, height=height, first=self._first)


@contextlib.contextmanager
def _keys() -> Iterator[int]:
    """Standard input, of which every key is read at once and none is shown."""
    import termios
    import tty

    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)
    try:
        tty.setcbreak(number)
        yield number
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)


@contextlib.contextmanager
def _closing(*descriptors: int) -> Iterator[None]:
    try:
        yield
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _wake(descriptor: int) -> None:
    os.write(descriptor, b"!")
