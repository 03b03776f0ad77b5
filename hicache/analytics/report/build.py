"""From the documents of one source or two to a report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from hicache.analytics.analysis.recorded import DEFINITIONS as OF_LOGS
from hicache.analytics.analysis.report import DEFINITIONS as OF_TRACES
from hicache.analytics.compare.documents import page_warnings
from hicache.analytics.report.analysis import analysis_sections
from hicache.analytics.report.answers import answers_of
from hicache.analytics.report.content import Plot, Report, Section
from hicache.analytics.report.difference import difference_section
from hicache.analytics.report.documents import KINDS, parse
from hicache.analytics.report.service import service_sections
from hicache.analytics.report.simulation import simulation_sections
from hicache.analytics.report.simulation_documents import SweepDocument
from hicache.analytics.report.sweep import sweep_sections
from hicache.analytics.report.words import visible
from hicache.analytics.simulate.advice import choose
from hicache.analytics.simulate.result import DEFINITIONS as OF_SIMULATIONS
from hicache.errors import InvalidInput

__all__ = ["Source", "build"]

_WORDS: Final = {
    "analyze": "a trace, analysed",
    "simulate": "a simulation",
    "sweep": "a sweep of simulations",
    "stats": "a running service",
}
_SECTIONS: Final[dict[str, Any]] = {
    "stats": service_sections,
    "sweep": sweep_sections,
    "simulate": simulation_sections,
    "analyze": analysis_sections,
}
"""By kind, in the order in which a report tells them."""


@dataclass(frozen=True, slots=True)
class Source:
    """What a report tells of.

    Attributes:
        name: of it.
        documents: what the commands in `KINDS` print with --json, by the command.
        warnings: what was odd about it.
    """

    name: str
    documents: Mapping[str, Mapping[str, Any]]
    warnings: tuple[str, ...] = ()


def build(sources: Sequence[Source], *, token_bytes: int | None = None) -> Report:
    """A report of one source, or of two side by side.

    Args:
        sources: one or two.
        token_bytes: KV of a token, to show the memory of traces in bytes.

    Raises:
        InvalidInput: two sources that have nothing in common, or documents that hold what they cannot.
    """
    read = [
        {kind: parse(document, KINDS[kind], name=source.name) for kind, document in source.documents.items()}
        for source in sources
    ]
    if len(sources) > 1 and not read[0].keys() & read[1].keys():
        words = [
            " and ".join(_words(source, kind) for kind in _SECTIONS if kind in source.documents) for source in sources
        ]
        raise InvalidInput(
            f"{sources[0].name!r:.200} is {words[0]}, {sources[1].name!r:.200} is {words[1]}: give two alike, or one "
            "report for each"
        )
    # What only one of two has cannot stand beside anything.
    common = set.intersection(*(set(each) for each in read))
    read = [{kind: each[kind] for kind in common} for each in read]
    several = len(common) > 1
    sections: list[Section] = []
    kinds = [kind for kind in _SECTIONS if kind in common]
    for kind in kinds:
        more = {"token_bytes": token_bytes} if kind == "analyze" else {}
        if len(sources) > 1:
            section = difference_section(*(_compared(source, kind) for source in sources))
            sections.append(_renamed(section, kind) if several else section)
        made = _SECTIONS[kind]([each[kind] for each in read], **more)
        sections += [_renamed(section, kind) if several else section for section in made]
    return Report(
        title="hicache report: " + " and ".join(_short(source.name) for source in sources),
        sources=tuple(
            (source.name, ", ".join(_words(source, kind) for kind in reversed(_SECTIONS) if kind in source.documents))
            for source in sources
        ),
        answers=answers_of(read),
        sections=tuple(sections),
        definitions=_definitions(read),
        documents=tuple({kind: dict(document) for kind, document in source.documents.items()} for source in sources),
        warnings=tuple(visible(line, 1000) for line in (*_odd(sources), *_beside(sources, kinds))),
    )


def _odd(sources: Sequence[Source]) -> Iterator[str]:
    """What was odd about each."""
    for source in sources:
        yield from source.warnings


def _beside(sources: Sequence[Source], kinds: Sequence[str]) -> Iterator[str]:
    """What does not compare between two."""
    if len(sources) > 1:
        a, b = sources
        yield from dict.fromkeys(line for kind in kinds for line in page_warnings(a.documents[kind], b.documents[kind]))


def _words(source: Source, kind: str) -> str:
    """What a document is of."""
    is_log = kind == "analyze" and source.documents[kind].get("recorded") is not None
    return "an access log, analysed" if is_log else _WORDS[kind]


def _compared(source: Source, kind: str) -> Mapping[str, Any]:
    """What is compared of a source: of a sweep the point that it recommends, as two sweeps have points of their own."""
    document = source.documents[kind]
    if kind != "sweep":
        return document
    results = parse(document, SweepDocument, name=source.name).results
    found = choose(results)
    if found is None:
        return {}
    point: Mapping[str, Any] = document["results"][next(at for at, each in enumerate(results) if each is found[0])]
    return point


def _renamed(section: Section, kind: str) -> Section:
    """With keys that no section of another kind has."""
    plots: list[Plot] = [replace(plot, key=f"{kind}-{plot.key}") for plot in section.plots]
    return replace(section, key=f"{kind}-{section.key}", plots=tuple(plots))


def _short(name: str) -> str:
    return visible(name.rstrip("/").rpartition("/")[2] or name, 80)


def _definitions(read: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    found: dict[str, str] = {}
    kinds = {kind for each in read for kind in each}
    if "analyze" in kinds:
        found |= OF_TRACES
    if any(each["analyze"].recorded is not None for each in read if "analyze" in each):
        found |= OF_LOGS
    if kinds & {"simulate", "sweep"}:
        found |= OF_SIMULATIONS
    return found
