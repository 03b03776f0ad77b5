"""Every way a command can end has its exit code and one line."""

from __future__ import annotations

import argparse
import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hicache.cli import main
from hicache.cli.main import _COMMANDS
from hicache.cli.values import undisturbed
from hicache.errors import ConfigError, HicacheInternalError, StorageUnavailable


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A command `try`, whose `run` a test sets."""
    module: Any = ModuleType("trial")
    module.HELP = "a trial"
    module.add_arguments = lambda parser: parser.add_argument("--number", type=int)
    module.run = lambda options: 0
    monkeypatch.setitem(sys.modules, "trial", module)
    monkeypatch.setitem(_COMMANDS, "try", "trial")
    return module


def raising(error: BaseException) -> Any:
    def run(_: argparse.Namespace) -> int:
        raise error

    return run


@pytest.mark.parametrize("code", [0, 1, 2])
def test_code_of_the_command_is_the_code(command: Any, code: int) -> None:
    command.run = lambda options: code
    assert main(["try"]) == code


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("--x 5: too\nlarge;  use 4"), 2, "hicache: --x 5: too large; use 4"),
        (StorageUnavailable("folder /x is gone"), 2, "hicache: folder /x is gone"),
        (MemoryError(), 2, "hicache: out of memory; use smaller tiers"),
        (HicacheInternalError("pins"), 1, "hicache: an invariant is broken, which is a bug of hicache: pins"),
        (KeyboardInterrupt(), 130, "hicache: interrupted"),
    ],
)
def test_errors_are_one_line(
    command: Any, capsys: pytest.CaptureFixture[str], error: BaseException, code: int, line: str
) -> None:
    command.run = raising(error)
    assert main(["try"]) == code
    assert capsys.readouterr().err == line + "\n"


def test_our_own_faults_are_not_hidden(command: Any) -> None:
    command.run = raising(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        main(["try"])


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["try", "--number", "x"], ["try", "--unknown"]])
def test_bad_usage_is_one_line(command: Any, capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "--help" in error


def test_commands_are_light(repository: Path) -> None:
    """Parsing a command line loads nothing that only some commands need."""
    code = "import sys; from hicache.cli.main import build_parser; build_parser(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert not loaded & {"grpc", "google", "torch", "redis", "rich", "numpy", "msgspec", "asyncio", "zmq"}


def test_version_and_help(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, text in ((["--version"], "hicache "), (["--help"], "replay"), (["replay", "--help"], "--page-size")):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 0
        assert text in capsys.readouterr().out


def test_a_second_signal_does_not_break_off_the_ending(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """As `timeout` sends it: to the process, and to its group."""
    ended = []

    def run(_: argparse.Namespace) -> int:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGTERM)
            ended.append(True)
        return 0

    command.run = run
    assert main(["try"]) == 130
    assert (ended, capsys.readouterr().err) == ([True], "hicache: interrupted\n")


def test_a_second_signal_does_not_kill_the_ending_process() -> None:
    code = """if True:
        import atexit, signal, sys
        from hicache.cli import main, ping
        ping.run = lambda _: signal.raise_signal(signal.SIGTERM)
        atexit.register(signal.raise_signal, signal.SIGTERM)
        sys.argv = ["hicache", "ping", "unix:///none"]
        sys.exit(main())
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (130, "hicache: interrupted\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_is_being_closed_is_closed(
    command: Any, capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    closed = []

    @contextlib.contextmanager
    def opened() -> Iterator[None]:
        try:
            yield
        finally:
            with undisturbed():
                signal.raise_signal(number)
                closed.append(number)

    def run(_: argparse.Namespace) -> int:
        with opened():
            return 0

    command.run = run
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background ignores it
    try:
        assert main(["try"]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert (closed, capsys.readouterr().err) == ([number], "hicache: interrupted\n")
