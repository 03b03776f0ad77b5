"""Lays a view out on a screen of any size, and paints it: with `rich` where it is installed, else with plain codes."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, Self, TextIO

from hicache.cli.output import Table, has_rich
from hicache.cli.top_view import View

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Painter", "Piece", "painter", "screen_of"]

_WIDE: Final = 130
"""Columns of a terminal from which on tables stand in two columns."""

_GAP: Final = 3
_LEAST: Final = 3  # lines of a table: its title, its columns, a row
_MOST_DEGRADED: Final = 4

HELP: Final = "q quit  space pause  tab next table  sort: r requests m missed h hit rate n name"


class Piece(NamedTuple):
    """Text of one look: "title", "dim", "bad", "good", "head" or ""."""

    text: str
    style: str = ""


Line = list[Piece]


def screen_of(view: View, *, title: str, state: str, width: int, height: int, first: int = 0) -> list[Line]:
    """The lines of a screen, none wider than it, and no more than fit.

    Args:
        view: what is shown.
        title: what stands in front of the view's own.
        state: why it is not up to date, or empty.
        width: columns of the screen.
        height: lines of it.
        first: which table stands first; those before it come last.
    """
    width = max(width, 20)
    top: list[Line] = [[Piece(_cut(title, width), "title")]]
    if len(title) + 2 + len(view.title) <= width:
        top[0].append(Piece(f"  {view.title}"))
    else:
        top.append([Piece(_cut(view.title, width))])
    if state:
        top += [[Piece(line, "bad")] for line in textwrap.wrap(state, width)[:_MOST_DEGRADED]]
    for reason in view.degraded[:_MOST_DEGRADED]:
        top += [[Piece(line, "bad")] for line in textwrap.wrap(f"degraded: {reason}", width)[:2]]
    bottom: list[Line] = [[Piece(_cut(HELP, width), "dim")]]
    room = height - len(top) - len(bottom) - 1
    columns = 2 if width >= _WIDE else 1
    tables = view.tables[first % max(1, len(view.tables)) :] + view.tables[: first % max(1, len(view.tables))]
    body = _packed(tables, width=width, height=room, columns=columns)
    lines = [*top, [], *body][: max(1, height - len(bottom))]
    return lines + [[] for _ in range(height - len(bottom) - len(lines))] + bottom


def _packed(tables: Sequence[Table], *, width: int, height: int, columns: int) -> list[Line]:
    each = (width - _GAP * (columns - 1)) // columns
    stacks: list[list[Line]] = [[] for _ in range(columns)]
    for table in tables:
        stack = min(stacks, key=len)
        left = height - len(stack) - bool(stack)
        if left < _LEAST:
            continue
        block = list(_block(table, width=each, most=left))
        stack += [[], *block] if stack else block
    lines: list[Line] = []
    for at in range(max(map(len, stacks), default=0)):
        line: Line = []
        for number, stack in enumerate(stacks):
            own = stack[at] if at < len(stack) else []
            line += own
            if number + 1 < len(stacks):
                line.append(Piece(" " * (each + _GAP - sum(len(piece.text) for piece in own))))
        lines.append(line)
    return lines


def _block(table: Table, *, width: int, most: int) -> Iterator[Line]:
    rows = list(table.rows)
    cut = len(rows) - (most - 2)
    if cut > 0:
        rows = rows[: most - 2 - (most > _LEAST)]
    widths = _widths(table, rows, width)
    yield [Piece(_cut(table.title, width), "head")]
    yield [Piece(_cut(_row(table.columns, widths, table.texts), width), "dim")]
    for row in rows:
        yield [Piece(_cut(_row(row, widths, table.texts), width))]
    if cut > 0 and most > _LEAST:
        yield [Piece(_cut(f"  {len(table.rows) - len(rows):,} more rows", width), "dim")]


def _widths(table: Table, rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """Of the columns; the texts give way where all of it does not fit."""
    found = [max(len(line[column]) for line in (table.columns, *rows)) for column in range(len(table.columns))]
    over = sum(found) + 2 * len(found) - width
    for column in sorted(range(table.texts), key=lambda column: -found[column]):
        less = max(0, min(over, found[column] - 8))
        found[column] -= less
        over -= less
    return found


def _row(cells: Sequence[str], widths: Sequence[int], texts: int) -> str:
    shown = [
        _squeezed(cell, width).ljust(width) if at < texts else _cut(cell, width).rjust(width)
        for at, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return ("  " + "  ".join(shown)).rstrip()


def _squeezed(text: str, width: int) -> str:
    """A name of so many characters: the middle gives way, as names of models differ at their ends."""
    end = min(10, width // 3)
    return text if len(text) <= width else text[: max(0, width - 1 - end)] + "…" + text[len(text) - end :]


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"


# ---- painting


class Painter(Protocol):
    """Owns the terminal's screen while it is entered."""

    def __enter__(self) -> Self:
        """Take the screen."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        """Give it back as it was."""
        ...

    def size(self) -> tuple[int, int]:
        """Columns and lines, now."""
        ...

    def paint(self, lines: Sequence[Line]) -> None:
        """Show them."""
        ...


def painter(stream: TextIO) -> Painter:
    """The best one that there is."""
    return _Rich(stream) if has_rich() else _Plain(stream)


class _Plain:
    """An alternate screen, by codes that every terminal of today knows."""

    _STYLES: Final = {"title": "1", "head": "1", "bad": "31", "dim": "2", "good": "32"}

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __enter__(self) -> Self:
        self._write("\x1b[?1049h\x1b[?25l")
        return self

    def __exit__(self, *_: object) -> None:
        self._write("\x1b[?25h\x1b[?1049l")

    def size(self) -> tuple[int, int]:
        try:
            columns, lines = os.get_terminal_size(self._stream.fileno())
        except (OSError, ValueError):  # a stream that is no file
            return 80, 24
        return columns or 80, lines or 24

    def paint(self, lines: Sequence[Line]) -> None:
        shown = []
        for line in lines:
            pieces = (f"\x1b[{self._STYLES[style]}m{text}\x1b[0m" if style else text for text, style in line)
            shown.append("".join(pieces) + "\x1b[K")
        self._write("\x1b[H" + "\r\n".join(shown) + "\x1b[J")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


class _Rich:
    """The same through `rich`, which knows the terminal's colours and Windows."""

    _STYLES: Final = {"title": "bold cyan", "head": "bold", "bad": "red", "dim": "dim", "good": "green"}

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(file=stream, highlight=False)
        self._live = Live(console=self._console, screen=True, auto_refresh=False, redirect_stderr=False)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def size(self) -> tuple[int, int]:
        columns, lines = self._console.size
        return columns, lines

    def paint(self, lines: Sequence[Line]) -> None:
        self._live.update(self.text(lines), refresh=True)

    def text(self, lines: Sequence[Line]) -> Any:
        """The lines as rich's text."""
        from rich.text import Text

        whole = Text(no_wrap=True, overflow="crop", end="")
        for number, line in enumerate(lines):
            if number:
                whole.append("\n")
            for text, style in line:
                whole.append(text, self._STYLES.get(style) or None)
        return whole


def terminal() -> bool:
    """Whether keys can be read and a screen be drawn."""
    return sys.stdin.isatty() and sys.stdout.isatty()
