"""Files that are there when all of them is written, or not at all."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final

from hicache.errors import InvalidInput

STANDARD_OUTPUT: Final = Path("-")


@contextmanager
def new_file(out: Path) -> Iterator[tuple[BinaryIO, Callable[[], None]]]:
    """A file beside its place, which takes it when what is yielded with it is called; else nothing is left of it.

    Args:
        out: its place; `-` is the standard output, which gets it then.

    Raises:
        InvalidInput: it cannot be written.
    """
    piped = out == STANDARD_OUTPUT
    try:
        file = tempfile.NamedTemporaryFile(  # noqa: SIM115  closed below, and renamed in between
            dir=None if piped else out.parent, prefix=f".{out.name}.", suffix=".part", delete=False
        )
    except OSError as error:
        raise InvalidInput(f"--out {out}: {error.strerror}; name a file in a folder that can be written") from None
    kept = False

    def finish() -> None:
        nonlocal kept
        file.flush()
        if piped:
            file.seek(0)
            sys.stdout.flush()
            shutil.copyfileobj(file, sys.stdout.buffer, 1 << 20)
            sys.stdout.buffer.flush()
            return
        os.chmod(file.name, 0o666 & ~_umask())
        os.replace(file.name, out)
        kept = True

    try:
        yield file, finish  # type: ignore[misc]  # it is a file, and says so of itself at run time only
    except OSError as error:
        if isinstance(error, BrokenPipeError) or error.filename is not None:
            raise
        raise InvalidInput(f"--out {out}: {error.strerror}; make room there") from None
    finally:
        file.close()
        if not kept:
            os.unlink(file.name)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
