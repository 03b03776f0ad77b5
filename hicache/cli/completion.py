"""`hicache completion bash|zsh|fish`: what a shell needs to complete command lines, made from the parser itself."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

HELP = "print a completion script for a shell"

_EPILOG = """\
  bash   source <(hicache completion bash)                           in ~/.bashrc
  zsh    hicache completion zsh > "${fpath[1]}/_hicache"
  fish   hicache completion fish > ~/.config/fish/completions/hicache.fish
"""

_PATHS = {"FILE", "FOLDER", "TRACE"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("shell", choices=sorted(_WRITERS), help="which shell")


def run(options: argparse.Namespace) -> int:
    """Print the script; returns the exit code."""
    from hicache.cli.main import EXIT_FINE, build_parser

    sys.stdout.write("\n".join(_WRITERS[options.shell](list(commands(build_parser()[0])))) + "\n")
    return EXIT_FINE


@dataclass(frozen=True, slots=True)
class Option:
    """An option of a command.

    Attributes:
        name: the long one.
        help: what it is, in a few words.
        metavar: what its value is called; empty without a value.
        choices: its possible values, where only some are.
    """

    name: str
    help: str
    metavar: str = ""
    choices: tuple[str, ...] = ()

    @property
    def is_path(self) -> bool:
        """Whether its value is a file."""
        return self.metavar in _PATHS


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand as shells see it; `words` are values of its first argument, where only some are possible."""

    name: str
    help: str
    options: tuple[Option, ...] = ()
    words: tuple[str, ...] = field(default=())


def commands(parser: argparse.ArgumentParser) -> Iterator[Command]:
    """All subcommands of a parser."""
    # Private names, since argparse has no public list of what was added.
    (subparsers,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    helps = {action.dest: action.help or "" for action in subparsers._choices_actions}
    for name, command in subparsers.choices.items():
        options: list[Option] = []
        words: tuple[str, ...] = ()
        for action in command._actions:
            choices = tuple(map(str, action.choices or ()))
            if action.option_strings:
                metavar = "" if action.nargs == 0 else str(action.metavar or action.dest.upper())
                long = next(each for each in action.option_strings if each.startswith("--"))
                options.append(Option(long, _short(action.help), metavar, choices))
            else:
                words = words or choices
        yield Command(name, _short(helps[name]), tuple(options), words)


def _short(text: str | None) -> str:
    """Help in one line, fit for single quotes."""
    plain = " ".join((text or "").replace("%%", "%").split())
    return plain.translate({ord("'"): None, ord("\\"): None, ord("`"): None})[:100]


def _bash(found: list[Command]) -> Iterator[str]:
    yield "_hicache() {"
    yield '    local current="${COMP_WORDS[COMP_CWORD]}" previous="${COMP_WORDS[COMP_CWORD-1]}" words=""'
    yield "    COMPREPLY=()"
    yield '    case "$COMP_CWORD ${COMP_WORDS[1]} $previous" in'
    yield f'        "1 "*) words="{" ".join(command.name for command in found)} --help --version" ;;'
    for command in found:
        for option in command.options:
            if option.metavar:  # without choices bash's own completion of files
                yield f'        *" {command.name} {option.name}") words="{" ".join(option.choices)}" ;;'
        everything = " ".join((*command.words, *(option.name for option in command.options)))
        yield f'        *" {command.name} "*) words="{everything}" ;;'
    yield "    esac"
    yield '    [[ -n "$words" ]] && COMPREPLY=($(compgen -W "$words" -- "$current"))'
    yield "}"
    yield "complete -o default -F _hicache hicache"


def _zsh(found: list[Command]) -> Iterator[str]:
    yield "#compdef hicache"
    yield "_hicache() {"
    yield "    if (( CURRENT == 2 )); then"
    yield "        local -a commands=("
    yield from (f"            '{command.name}:{_zsh_text(command.help)}'" for command in found)
    yield "        )"
    yield "        _describe command commands"
    yield "        return"
    yield "    fi"
    yield "    local command=$words[2]"
    yield "    shift words"
    yield "    (( CURRENT-- ))"
    yield "    case $command in"
    for command in found:
        yield f"        {command.name})"
        yield "            _arguments \\"
        yield from (
            f"                '*{option.name}[{_zsh_text(option.help)}]{_zsh_value(option)}' \\"
            for option in command.options
        )
        first = f"({' '.join(command.words)})" if command.words else "_files"
        yield f"                '1:argument:{first}' '*:file:_files'"
        yield "            ;;"
    yield "    esac"
    yield "}"
    yield 'if [[ "$funcstack[1]" == _hicache ]]; then _hicache "$@"; else compdef _hicache hicache; fi'


def _zsh_text(text: str) -> str:
    return re.sub(r"([\[\]:])", r"\\\1", text)


def _zsh_value(option: Option) -> str:
    if not option.metavar:
        return ""
    values = f"({' '.join(option.choices)})" if option.choices else "_files" if option.is_path else ""
    return f":{_zsh_text(option.metavar)}:{values}"


def _fish(found: list[Command]) -> Iterator[str]:
    names = " ".join(command.name for command in found)
    yield f"set -l hicache_commands {names}"
    for command in found:
        none = '-n "not __fish_seen_subcommand_from $hicache_commands"'
        yield f"complete -c hicache -f {none} -a {command.name} -d '{command.help}'"
    for command in found:
        seen = f"complete -c hicache -n '__fish_seen_subcommand_from {command.name}'"
        if command.words:
            yield f"{seen} -f -a '{' '.join(command.words)}'"
        for option in command.options:
            value = ""
            if option.metavar:
                value = (
                    f" -x -a '{' '.join(option.choices)}'" if option.choices else " -r -F" if option.is_path else " -x"
                )
            yield f"{seen} -l {option.name.removeprefix('--')}{value} -d '{option.help}'"


_WRITERS = {"bash": _bash, "zsh": _zsh, "fish": _fish}
