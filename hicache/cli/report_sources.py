"""What a report is made of: traces are analysed and simulated, documents read, services asked."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hicache.cli.analyze import read_options
from hicache.cli.diff import MOST_REPORT, read_report
from hicache.cli.output import progress
from hicache.cli.service import connected
from hicache.cli.simulation import NAMES, choices_of, costs_of, given_settings, read_trace
from hicache.cli.sweep import read_jobs
from hicache.cli.trace_options import FORMATS, opening
from hicache.cli.values import choice
from hicache.errors import ConfigError, InvalidInput

if TYPE_CHECKING:
    from hicache.analytics.analysis.report import Analysis, AnalyzeOptions
    from hicache.analytics.report.build import Source
    from hicache.analytics.traces import Trace

__all__ = ["Reader"]

_PIPED: Final = "-"
_SWEEP: Final = b'{"hicache_sweep"'
_PAGE: Final = b"<!doctype html"
_HEAD: Final = 256  # bytes that tell these apart


class Reader:
    """Reads sources, one after the other; the curve of a second trace has the sizes of the first one's.

    Args:
        options: the command's.
        stopped: whether somebody asked to stop.

    Attributes:
        interrupted: whether one was stopped.
        empty: whether a trace, or what was asked for of it, has no requests.
        problems: what simulations found that must not be.

    Raises:
        ConfigError: an option that cannot be.
    """

    def __init__(self, options: argparse.Namespace, stopped: Callable[[], bool]) -> None:
        choice("--trace-format", options.format, FORMATS)
        self.interrupted = self.empty = False
        self.problems: list[str] = []
        self._options = options
        self._stopped = stopped
        self._given = given_settings(options)
        self._costs = costs_of(self._given)
        self._jobs = read_jobs(options.jobs)
        self._wanted = read_options(options)
        self._way = opening(options)
        self._sizes: tuple[int, ...] = ()

    def ask(self, address: str) -> Source:
        """A running service.

        Raises:
            HicacheError: it does not answer.
        """
        from hicache.analytics.report.build import Source

        with connected(argparse.Namespace(**vars(self._options) | {"address": address})) as client:
            return Source(address, {"stats": client.statistics()})

    def read(self, name: str) -> Source:
        """A document, or a trace.

        Raises:
            InvalidInput: it is none, or is broken.
        """
        from hicache.analytics.report.build import Source
        from hicache.analytics.report.documents import require_kind

        document = None if name == _PIPED else _document(Path(name))
        if document is None:
            return self._trace(name)
        kind = require_kind(document, name=name)
        if kind == "analyze":
            points = (
                document["miss_ratio_curve"].get("points", ()) if isinstance(document["miss_ratio_curve"], dict) else ()
            )
            self._sizes = tuple(
                each["pages"] for each in points if isinstance(each, dict) and type(each.get("pages")) is int
            )
        return Source(name, {kind: document})

    # ---- traces

    def _trace(self, name: str) -> Source:
        from hicache.analytics.report.build import Source

        path = Path(name)
        simulated = any(setting in self._given for setting in NAMES)
        if name == _PIPED and (simulated or self._options.each):
            raise ConfigError("-: standard input can be read only once; save it to a file and name that")
        analysis, each, odd = self._analysis(path)
        document = analysis.document() | ({"each": [part.document() for part in each]} if each else {})
        documents = {"analyze": document}
        if simulated and not self._stopped():
            documents |= self._simulation(path)
        shown = "standard input" if name == _PIPED else name
        return Source(shown, documents, odd)

    def _analysis(self, path: Path) -> tuple[Analysis, list[Analysis], tuple[str, ...]]:
        """The whole, its files where each is wanted, and what is odd about the whole."""
        from dataclasses import replace

        from hicache.analytics.analysis.report import analyze
        from hicache.analytics.traces import expand

        files = expand([path]) if self._options.each else []
        wanted: AnalyzeOptions = replace(self._wanted, sizes=self._wanted.sizes or self._sizes)
        found: list[Analysis] = []
        odd: tuple[str, ...] = ()
        with progress(f"analyze {path.name:.40}") as show:
            for paths, name in (([path], None), *(([file], str(file)) for file in files if len(files) > 1)):
                trace = self._way.open(paths)
                found.append(analyze(trace, wanted, name=name, progress=show, stopped=self._stopped))
                if len(found) == 1:
                    odd = tuple(_odd(found[0], trace))
                if found[-1].interrupted:
                    self.interrupted = True
                    break
        if not self._sizes:
            self._sizes = tuple(point.pages for point in found[0].curve.points)
        self.empty |= not found[0].requests and not found[0].interrupted
        return found[0], found[1:], odd

    def _simulation(self, path: Path) -> dict[str, dict[str, Any]]:
        """A simulation, or a sweep where a setting has several values."""
        from hicache.analytics.simulate.advice import advice, recommend
        from hicache.analytics.simulate.result import DEFINITIONS
        from hicache.analytics.simulate.run import Simulation
        from hicache.analytics.simulate.sweep import grid, sweep

        columns = read_trace(argparse.Namespace(**vars(self._options) | {"trace": [path]}))
        points = grid(choices_of(self._given, columns, self._costs, several=True), self._costs)
        with progress(f"simulate {path.name:.40}") as show:
            if len(points) == 1:
                result = Simulation(columns, points[0]).run(stopped=self._stopped, progress=show)
                self.problems += result.problems
                self.interrupted |= result.interrupted
                return {"simulate": result.document() | {"advice": list(advice(result, columns))}}
            results = sweep(columns, points, jobs=self._jobs, stopped=self._stopped, progress=show)
        self.problems += [problem for result in results for problem in result.problems]
        told = list(recommend(results))
        if len(results) < len(points):
            self.interrupted = True
            told = [f"Stopped after {len(results)} of {len(points)} points, so none is recommended."]
        plain = [result.document(definitions=False) for result in results]
        return {"sweep": {"points": len(points), "results": plain, "recommendation": told, "definitions": DEFINITIONS}}


def _odd(analysis: Analysis, trace: Trace) -> list[str]:
    """What was odd about a trace."""
    found = []
    if analysis.interrupted:
        found.append(f"{analysis.name:.200}: reading was interrupted, so this is a part of it")
    if analysis.entries_skipped:
        found.append(f"{analysis.entries_skipped:,} broken entries of the trace were skipped")
    if not analysis.requests and not analysis.interrupted:
        found.append(f"{analysis.name:.200}: {trace.why_nothing}")
    if analysis.out_of_order:
        found.append(f"{analysis.out_of_order:,} requests have a time before that of the request in front of them")
    return found


def _document(path: Path) -> dict[str, Any] | None:
    """A document, or the results that `hicache sweep --out` keeps; None for a trace."""
    try:
        if path.is_file() and path.stat().st_size <= MOST_REPORT:
            with path.open("rb") as file:
                head = file.read(_HEAD)
            if head.startswith(_SWEEP):
                return _kept(path)
            if head.lstrip()[: len(_PAGE)].lower() == _PAGE:
                raise InvalidInput(
                    f"{str(path)!r:.200} is a page, as `hicache report` writes it for people; name what it was made "
                    "of: a trace, a document of analyze, simulate, sweep or stats --json, a file of sweep --out, or "
                    "--address"
                )
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{str(path)!r:.200} cannot be read: {error}") from None
    return read_report(path)


def _kept(path: Path) -> dict[str, Any]:
    results = []
    for line in path.read_bytes().splitlines()[1:]:
        try:
            results.append(json.loads(line)["result"])
        except (ValueError, KeyError, TypeError, RecursionError):
            raise InvalidInput(
                f"{str(path)!r:.200} is no whole file of `hicache sweep --out`; let the sweep end"
            ) from None
    return {"points": len(results), "results": results, "recommendation": []}
