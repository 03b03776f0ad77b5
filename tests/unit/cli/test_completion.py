"""Completion scripts are made from the parser, so they know what the commands know."""

from __future__ import annotations

import subprocess

import pytest

from hicache.cli import main
from hicache.cli.completion import commands
from hicache.cli.main import _COMMANDS, build_parser


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_everything_is_there(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every command and every option of it, in lines that quote evenly."""
    text = script(shell, capsys)
    found = list(commands(build_parser()[0]))
    assert [command.name for command in found] == list(_COMMANDS)
    for command in found:
        assert command.name in text
        for option in command.options:
            assert (option.name.removeprefix("--") if shell == "fish" else option.name) in text
    assert all(line.count("'") % 2 == 0 for line in text.splitlines())


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["hicache", "st"], ["stats"]),
        (["hicache", "p"], ["ping", "pin", "pins"]),
        (["hicache", "config", ""], ["check", "describe", "show"]),
        (["hicache", "config", "show", "--log"], ["--log-level", "--log-format"]),
        (["hicache", "completion", "z"], ["zsh"]),
        (["hicache", "serve", "--config", "/et"], []),
        (["hicache", "nonsense", "x"], []),
    ],
)
def test_bash_completes(words: list[str], expected: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """What bash offers at the end of a line; nothing where a file is to be named, so that bash offers files."""
    line = " ".join(f"'{word}'" for word in words)
    done = subprocess.run(
        ["bash", "--norc"],
        input=f"{script('bash', capsys)}\nCOMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _hicache; "
        'printf "%s\\n" "${COMPREPLY[@]}"',
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    offered = done.stdout.split()
    assert set(expected) <= set(offered)
    assert all(word.startswith(words[-1]) for word in offered)
    assert bool(expected) == bool(offered)
