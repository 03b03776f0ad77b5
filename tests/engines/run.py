"""Runs the tests in real engines and their measurements, and prints one table: `python run.py [ENGINE ...]`.

Each folder beside this file that has tests is a suite and an engine's name; so is what stands in front of the first
`_` of a script in `benchmarks/engines`. A suite runs in the environment of its engine, with the wheel that a user would
install there; its tests of prompts run in other releases of the engine too, in environments ENGINE-RELEASE. A script
runs like a suite, and writes its figures as a JSON list of `benchmarks.measure.Row` to the file that the environment
names by ENGINES_ROWS.

Exit code 1 if anything failed; what was skipped is shown as skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent.parent
SUITES = ROOT / "tests" / "engines"
SCRIPTS = ROOT / "benchmarks" / "engines"
OUT = ROOT / "build" / "engines"
"""Reports, and where everything runs: in the root of the repository Python would find its sources, not the wheel."""

SCRIPT_SECONDS = 1200
"""Longest time of one script."""

HANGS_SECONDS = 600
"""A test that takes longer ends its suite, with the stacks of all threads."""

OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
COUNTED = ("failed", "passed", "skipped")
IN_EACH_RELEASE = "test_prefixes.py"
"""What of a suite runs in each release of the engine that there is beside the one of the suite."""


@dataclass(frozen=True)
class Line:
    """One line of the table."""

    engine: str
    version: str
    name: str
    result: str
    seconds: float
    failed: bool = False


@dataclass(frozen=True)
class Place:
    """Where an engine lives.

    Attributes:
        engine: its name here.
        python: interpreter of its environment.
        version: of the engine.
        variables: of the environment for what runs there.
    """

    engine: str
    python: Path
    version: str
    variables: dict[str, str]


# ---- what there is


def engines_with_tests() -> list[str]:
    """Suites by name."""
    return sorted(folder.name for folder in SUITES.iterdir() if any(folder.glob("test_*.py")))


def scripts_of(engine: str) -> list[Path]:
    return [path for path in sorted(SCRIPTS.glob("*.py")) if engine_of(path) == engine]


def engine_of(script: Path) -> str:
    return script.stem.partition("_")[0]


def place_of(engine: str, engines: Path) -> Place:
    """The environment of an engine: SGLang has its own, all others that of vLLM."""
    return made_of(engine, engines / ("sglang" if engine == "sglang" else "vllm"), engines)


def other_releases(engine: str, engines: Path) -> list[Place]:
    """Environments of further releases of an engine."""
    return [made_of(engine, folder, engines) for folder in sorted(engines.glob(f"{engine}-[0-9]*"))]


def made_of(engine: str, folder: Path, engines: Path) -> Place:
    python = folder / "bin" / "python"
    distribution = engine if engine in ("sglang", "vllm", "transformers") else "vllm"
    code = f"from importlib.metadata import version; print(version({distribution!r}))"
    asked = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    variables = os.environ | OFFLINE | {"ENGINES_FOLDER": str(engines)}
    return Place(engine, python, asked.stdout.strip(), variables)


def install(engines: Path, places: list[Place]) -> None:
    """Put the wheel that users get into each environment."""
    OUT.mkdir(parents=True, exist_ok=True)
    for old in OUT.glob("*.whl"):
        old.unlink()
    pip = ["-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([engines / "vllm/bin/python", *pip, "wheel", "--no-deps", "--wheel-dir", OUT, ROOT], check=True)
    (wheel,) = OUT.glob("hicache-*.whl")
    for python in dict.fromkeys(place.python for place in places):
        subprocess.run([python, *pip, "install", "--no-deps", "--force-reinstall", wheel], check=True)


# ---- running


def run_suite(place: Place, only: str = "") -> list[Line]:
    """All tests of one engine, or of one module of them, a line for each test function."""
    folder, report = SUITES / place.engine, OUT / f"{place.engine}-{place.version}.xml"
    report.unlink(missing_ok=True)
    command: list[str | Path] = [place.python, "-m", "pytest", "-q", f"--confcutdir={SUITES}", "-p", "no:cacheprovider"]
    settings = ["filterwarnings=", f"pythonpath={folder}", f"faulthandler_timeout={HANGS_SECONDS}"]
    for setting in settings:  # the engine's warnings are its own
        command += ["-o", setting]
    began = time.monotonic()
    done = subprocess.run([*command, f"--junitxml={report}", folder / only], env=place.variables, cwd=OUT, check=False)
    lines = list(lines_of(place, report)) if report.exists() else []
    if done.returncode and not any(line.failed for line in lines):
        what = f"pytest ended with {done.returncode}"
        lines.append(Line(place.engine, place.version, what, "failed", time.monotonic() - began, failed=True))
    return lines


def lines_of(place: Place, report: Path) -> Iterator[Line]:
    """What a report of pytest has: variants of a test are one line, its figures lines of their own."""
    outcomes: dict[str, Counter[str]] = {}
    seconds: Counter[str] = Counter()
    figures: dict[str, list[Line]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = case.get("name", "").partition("[")[0].removeprefix("test_").replace("_", " ")
        outcomes.setdefault(name, Counter())[outcome_of(case)] += 1
        seconds[name] += float(case.get("time", 0))  # type: ignore[assignment]
        for found in case.iter("property"):
            text = f"{found.get('value')}"
            figures.setdefault(name, []).append(Line(place.engine, place.version, f"  {found.get('name')}", text, 0.0))
    for name, counts in outcomes.items():
        failed = bool(counts["failed"])
        yield Line(place.engine, place.version, name, said(counts), seconds[name], failed=failed)
        yield from figures.get(name, [])


def outcome_of(case: ElementTree.Element) -> str:
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    return "skipped" if case.find("skipped") is not None else "passed"


def said(counts: Counter[str]) -> str:
    """Outcomes of a test's variants in words."""
    present = [kind for kind in COUNTED if counts[kind]]
    if len(present) == 1 and counts[present[0]] == 1:
        return present[0]
    return ", ".join(f"{counts[kind]} {kind}" for kind in present)


def run_script(place: Place, script: Path) -> list[Line]:
    """One script of measurements, a line for each figure."""
    rows = OUT / f"{script.stem}.json"
    rows.unlink(missing_ok=True)
    variables = place.variables | {"ENGINES_ROWS": str(rows), "PYTHONPATH": str(beside_the_wheel())}
    began = time.monotonic()
    try:
        done = subprocess.run([place.python, script], env=variables, cwd=OUT, check=False, timeout=SCRIPT_SECONDS)
        ended = f"ended with {done.returncode}" if done.returncode else ""
    except subprocess.TimeoutExpired:
        ended = f"was not done in {SCRIPT_SECONDS} s"
    seconds = time.monotonic() - began
    lines = [figure(place, row) for row in json.loads(rows.read_text())] if rows.exists() else []
    if ended or not lines:
        result = f"failed: it {ended or 'has written no figures'}"
        lines.append(Line(place.engine, place.version, script.stem, result, seconds, failed=True))
    elif lines:
        lines[0] = Line(*(vars(lines[0]) | {"seconds": seconds}).values())
    return lines


def beside_the_wheel() -> Path:
    """A folder with the package `benchmarks` alone: the root of the repository would hide the wheel's packages."""
    folder = OUT / "path"
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / "benchmarks"
    link.unlink(missing_ok=True)
    link.symlink_to(ROOT / "benchmarks")
    return folder


def figure(place: Place, row: dict[str, object]) -> Line:
    """A row of `benchmarks.measure` as a line."""
    result = f"{float(str(row['value'])):.4g} {row['unit']}"
    if row.get("reference") is not None:
        result += f" (reference {float(str(row['reference'])):.4g})"
    if not row["ok"]:
        result = f"failed: {result}: {row['reason']}"
    return Line(place.engine, place.version, str(row["name"]), result, 0.0, failed=not row["ok"])


# ---- the table


def table(lines: list[Line]) -> str:
    heads = ("engine", "version", "test or figure", "result", "seconds")
    cells = [heads]
    cells += [
        (line.engine, line.version, line.name, line.result, f"{line.seconds:.1f}" if line.seconds else "")
        for line in lines
    ]
    widths = [max(len(row[at]) for row in cells) for at in range(4)]
    return "\n".join(
        "  ".join([*(row[at].ljust(widths[at]) for at in range(4)), row[4].rjust(7)]).rstrip() for row in cells
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the tests in real engines, and print a table.")
    known = sorted({*engines_with_tests(), *(engine_of(path) for path in SCRIPTS.glob("*.py"))})
    parser.add_argument("engines", nargs="*", metavar="ENGINE", help=f"of {', '.join(known)}; all by default")
    parser.add_argument("--from", dest="folder", type=Path, default=ROOT / ".engines", metavar="FOLDER")
    given = parser.parse_args()
    strange = set(given.engines) - set(known)
    if strange:
        parser.error(f"no engine {', '.join(sorted(strange))}: one of {', '.join(known)}")
    began, folder = time.monotonic(), given.folder.resolve()
    places = [place_of(engine, folder) for engine in known if engine in (given.engines or known)]
    others = {place.engine: other_releases(place.engine, folder) for place in places}
    install(folder, [*places, *(other for each in others.values() for other in each)])
    lines: list[Line] = []
    for place in places:
        print(f"engines: {place.engine} {place.version}", flush=True)
        if (SUITES / place.engine).is_dir():
            lines += run_suite(place)
        for other in others[place.engine]:
            print(f"engines: {other.engine} {other.version}", flush=True)
            lines += run_suite(other, IN_EACH_RELEASE)
        for script in scripts_of(place.engine):
            print(f"engines: {script.name}", flush=True)
            lines += run_script(place, script)
    print(f"\n{table(lines)}\n")
    failed = sum(line.failed for line in lines)
    print(f"{len(lines)} lines, {failed} failed, {(time.monotonic() - began) / 60:.1f} minutes")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
