"""What an explanation says, in a service and in a store alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hicache.records import MissReason

__all__ = ["Cause", "Difference", "Explanation", "Other", "nearest_first"]


@dataclass(frozen=True, slots=True)
class Cause:
    """Why some pages in a row, or the tokens behind the last whole page, would be missed.

    Attributes:
        first_page, end_page: page indexes, the first and the one behind the last; equal for the page tail.
        tokens: how many that are.
        reason: a `MissReason`, as requests are counted by.
        text: in words, with what to do where something can be done.
        seconds_ago: how long ago they went, where that is known.
    """

    first_page: int
    end_page: int
    tokens: int
    reason: MissReason
    text: str
    seconds_ago: float | None = None


@dataclass(frozen=True, slots=True)
class Difference:
    """A field in which two namespaces differ.

    Attributes:
        field: its name in the manifest; that of a geometry's part has dots.
        asked: its value in the namespace that was asked about, as text.
        found: its value in the other one. Salts and tenants are digests.
    """

    field: str
    asked: str
    found: str


@dataclass(frozen=True, slots=True)
class Other:
    """Another namespace that has this prompt.

    Attributes:
        model: its model.
        namespace: digest of its base namespace, in hex.
        derived: digest of the derived one, with adapter, tenant and salt.
        pages: leading pages of the prompt that it has; pages of its own page size.
        tokens: in these.
        differs: where it differs from the one asked about, all of it.
    """

    model: str
    namespace: str
    derived: str
    pages: int
    tokens: int
    differs: tuple[Difference, ...]


@dataclass(frozen=True, slots=True)
class Explanation:
    """One prompt in one namespace. `tokens == usable_tokens + sum(cause.tokens for cause in causes)`, always.

    Attributes:
        model: the model.
        namespace, derived: digests of the base and of the derived namespace, in hex; `derived` is empty where the
            namespace is known by its manifest alone and nothing was ever stored under it.
        generation: life of its content; None where it is not known.
        page_size: tokens a page.
        tokens: of the prompt.
        pages: whole ones.
        tiers: leading pages that each tier has, by its name; None where there is no such tier, or it was not asked.
        usable_pages: leading pages that a request would get, if nothing goes wrong.
        usable_tokens: of these.
        causes: why the others are missed, in the prompt's order.
        others: other namespaces that have the prompt, the longest first.
        notes: what else there is to know.
    """

    model: str
    namespace: str
    derived: str
    generation: int | None
    page_size: int
    tokens: int
    pages: int
    tiers: dict[str, int | None]
    usable_pages: int
    usable_tokens: int
    causes: tuple[Cause, ...] = ()
    others: tuple[Other, ...] = ()
    notes: tuple[str, ...] = ()

    def document(self) -> dict[str, Any]:
        """Of JSON's types."""
        found = asdict(self)
        for cause in found["causes"]:
            cause["reason"] = cause["reason"].value
        return found

    @classmethod
    def of(cls, document: dict[str, Any]) -> Explanation:
        """The explanation of a document. Fields that are not known here are left out."""
        known = {name: document[name] for name in cls.__dataclass_fields__ if name in document}
        known["causes"] = tuple(
            Cause(**({name: cause[name] for name in _CAUSE} | {"reason": MissReason(cause["reason"])}))
            for cause in known["causes"]
        )
        known["others"] = tuple(
            Other(
                **{name: other[name] for name in _OTHER},
                differs=tuple(Difference(*(each[name] for name in _DIFFERENCE)) for each in other["differs"]),
            )
            for other in known["others"]
        )
        known["notes"] = tuple(known["notes"])
        return cls(**known)


_CAUSE = tuple(Cause.__dataclass_fields__)
_OTHER = tuple(name for name in Other.__dataclass_fields__ if name != "differs")
_DIFFERENCE = tuple(Difference.__dataclass_fields__)


def nearest_first(others: Sequence[Other], most: int = 5) -> tuple[Other, ...]:
    """Those that have most of the prompt, and of these the ones that differ least; at most so many."""
    ranked = sorted(others, key=lambda other: (-other.tokens, len(other.differs), other.namespace, other.derived))
    return tuple(ranked[:most])
