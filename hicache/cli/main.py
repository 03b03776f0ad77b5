"""Finds the subcommand, runs it, and turns every way it can end into an exit code.

0    fine
1    something wrong was found: a wrong page, a broken invariant, a trace or a part of it without requests
2    bad usage or input, or output that cannot be written; one line says what, where and what to do
130  interrupted, by Ctrl-C or SIGTERM; what was reached is printed
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import errno
import importlib
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from types import FrameType
from typing import Any, NoReturn, Protocol, cast

from hicache.errors import HicacheError, HicacheInternalError

EXIT_FINE = 0
EXIT_WRONG = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

_ENDING = 2.0  # seconds in which a command that was told to end is not told again
_UNWRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG}
_COMMANDS = {
    name: f"hicache.cli.{name}"
    for name in (
        "serve",
        "config",
        "ping",
        "stats",
        "top",
        "clear",
        "pin",
        "unpin",
        "pins",
        "warm",
        "explain",
        "events",
        "doctor",
        "replay",
        "analyze",
        "diff",
        "convert",
        "synth",
        "plan",
        "simulate",
        "sweep",
        "report",
        "bench",
        "fsck",
        "completion",
    )
}


class Command(Protocol):
    """A module of `hicache.cli`."""

    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Give the subcommand's parser its options."""
        ...

    def run(self, options: argparse.Namespace) -> int:
        """Do it, and return the exit code."""
        ...


# argparse's words, and ours: the option, what was given, what is wrong with it.
_WORDS = [
    (re.compile(pattern, re.DOTALL), words)
    for pattern, words in (
        (r"argument (\S+): invalid int value: '(.*)'", r"\1 \2: is not a whole number"),
        (r"argument (\S+): invalid choice: '?(.*?)'? \(choose from (.*)\)", r"\1 \2: use one of \3"),
        (r"argument (\S+): expected one argument", r"\1: needs a value"),
        (r"argument (\S+): ignored explicit argument (.*)", r"\1 \2: takes no value"),
        (r"unrecognized arguments: (.*)", r"\1: no such option here, or too many arguments"),
        (r"the following arguments are required: (.*)", r"\1: is missing"),
    )
]


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, and which takes options by their full names only."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        options.setdefault("allow_abbrev", False)
        super().__init__(*arguments, **options)

    def error(self, message: str) -> NoReturn:
        for pattern, words in _WORDS:
            if found := pattern.fullmatch(message):
                message = found.expand(words)
        self.exit(EXIT_USAGE, f"{self.prog}: {' '.join(message.split())}; see {self.prog} --help\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, the process's own if none is given, and return the exit code."""
    _open_missing_streams()
    try:
        try:
            with _terminated_like_interrupted(last=arguments is None):
                code = _dispatch(arguments)
            sys.stdout.flush()
        except BrokenPipeError:
            _discard_output()  # the reader has what it wanted
            code = EXIT_FINE
        except OSError as error:
            if error.errno not in _UNWRITABLE or error.filename is not None:
                raise
            _discard_output()
            code = _complain(f"the output cannot be written: {error.strerror}; make room there", code=EXIT_USAGE)
    except KeyboardInterrupt:
        code = _complain("interrupted", code=EXIT_INTERRUPTED)
    except HicacheInternalError as error:
        code = _complain(f"an invariant is broken, which is a bug of hicache: {error}", code=EXIT_WRONG)
    except HicacheError as error:
        code = _complain(str(error), code=EXIT_USAGE)
    except MemoryError:
        code = _complain("out of memory; use smaller tiers", code=EXIT_USAGE)
    return code


def build_parser() -> tuple[argparse.ArgumentParser, dict[str, Command]]:
    """The parser of command lines, and the commands by their names."""
    parser = _Parser(prog="hicache", description="A hierarchical KV cache for LLM inference.")
    parser.add_argument("--version", action="version", version=f"hicache {version('hicache')}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)
    loaded: dict[str, Command] = {}
    for name, module in _COMMANDS.items():
        loaded[name] = cast("Command", importlib.import_module(module))
        command = commands.add_parser(name, help=loaded[name].HELP, description=loaded[name].HELP)
        command.set_defaults(parser=command)
        loaded[name].add_arguments(command)
    return parser, loaded


def _dispatch(arguments: Sequence[str] | None) -> int:
    parser, commands = build_parser()
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return commands[options.command].run(options)


@contextlib.contextmanager
def _terminated_like_interrupted(*, last: bool) -> Iterator[None]:
    """SIGTERM, as a supervisor sends it, ends a command as Ctrl-C does, instead of without a word.

    `timeout` and shells send it twice, to the process and to its group: the second one must not break off the ending,
    nor that of the process, where this is the last that it does.
    """
    first: float | None = None

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        nonlocal first
        now = time.monotonic()
        if first is None or now - first > _ENDING:  # who asks again later does not want to wait for it
            first = now
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # only there may a handler be set
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        if last and first is not None and before is signal.SIG_DFL:
            # By default the second one would kill what is still ending, and Python's handlers end before it does.
            atexit.register(signal.signal, signal.SIGTERM, signal.SIG_IGN)
        else:
            signal.signal(signal.SIGTERM, before)


def _open_missing_streams() -> None:
    """Started with a closed stdout or stderr, Python has None there; who closed it wants to hear nothing."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  stays open


def _discard_output() -> None:
    # Python flushes once more at exit, so there must be somewhere to.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(message: str, *, code: int) -> int:
    """One line on stderr, whatever the message holds; a closed stderr is no reason for another error."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"hicache: {' '.join(message.split())}\n")
        sys.stderr.flush()
    return code
