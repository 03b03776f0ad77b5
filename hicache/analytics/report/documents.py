"""The documents that a report is made of, checked: whoever reads on from here has numbers where numbers must be.

Documents come from files, which anybody may have written. Only what a report tells is named here; all else is kept for
its JSON form and otherwise left alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any, Final, TypeVar

import msgspec

from hicache.analytics.compare.kinds import kind_of
from hicache.analytics.report.service_documents import ServiceDocument
from hicache.analytics.report.simulation_documents import SimulationDocument, SweepDocument
from hicache.analytics.report.trace_documents import AnalysisDocument
from hicache.errors import InvalidInput

__all__ = ["KINDS", "parse", "require_kind"]

T = TypeVar("T")

KINDS: Final[dict[str, type[Any]]] = {
    "analyze": AnalysisDocument,
    "simulate": SimulationDocument,
    "sweep": SweepDocument,
    "stats": ServiceDocument,
}
"""Commands whose documents a report tells of."""


def parse(document: Mapping[str, Any], kind: type[T], *, name: str) -> T:
    """A document of a kind.

    Args:
        document: of JSON's types.
        kind: one of `KINDS`.
        name: what it is called, for messages.

    Raises:
        InvalidInput: it has something else where a figure must be, or figures that do not add up.
    """
    _finite(document, name)
    try:
        return msgspec.convert(document, kind)
    except RecursionError:
        raise InvalidInput(f"{name!r:.200} is nested too deeply to be a document") from None
    except msgspec.ValidationError as error:
        raise InvalidInput(f"{name!r:.200}: {error}; give it as the command has written it") from None


def require_kind(document: Mapping[str, Any], *, name: str) -> str:
    """The command that wrote a document.

    Raises:
        InvalidInput: none, or one whose documents make no report.
    """
    kind = kind_of(document)
    if kind in KINDS:
        return str(kind)
    what = "no command of hicache" if kind is None else f"`hicache {kind}`"
    raise InvalidInput(f"{name!r:.200} is a document of {what}; a report is made of those of {', '.join(KINDS)}")


def _finite(value: Any, name: str) -> None:
    """See that every number can be drawn."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping):
            waiting += value.values()
        elif isinstance(value, list | tuple):
            waiting += value
        elif isinstance(value, float) and not isfinite(value):
            raise InvalidInput(f"{name!r:.200} holds {value}, which is no figure")
