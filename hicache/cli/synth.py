"""`hicache synth`: a request trace from parameters, of which is known what a cache hits and why it misses."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hicache.cli.fitting import print_fitted
from hicache.cli.output import Table, print_json, progress, say, warn
from hicache.cli.values import choice, stop_on_interrupt, whole
from hicache.errors import ConfigError

if TYPE_CHECKING:
    from hicache.analytics.synth.misses import Misses
    from hicache.analytics.synth.run import Making

HELP = "make a request trace from parameters, with known ideal hit rates or known reasons of misses"

FORMS: Final = ("mooncake", "bailian", "kv-cache-tester", "dynamo")
PRESETS: Final = ("mixed", "chat", "few-shot", "agents", "rag", "misses")
_UNITS: Final = {"mooncake": 512, "bailian": 16}
_UNIT: Final = 64
_MOST_UNIT: Final = 2**14
_MOST_TOKENS: Final = 2**17  # of prompts whose misses are known: what takes longer to store is still under way later
_STANDARD_OUTPUT: Final = Path("-")

# name, metavar, what it is; defaults are those of `Workload`
_PARAMETERS: Final = (
    ("requests", "N", "how many (default: 1000)"),
    ("seed", "N", "the same gives the same trace (default: 0)"),
    ("rate", "PER_SECOND", "sessions that begin each second, on average (default: 1)"),
    ("diurnal", "SHARE", "how far that goes up and down over a day, 0 to 1 (default: 0)"),
    ("day", "SECONDS", "length of a day (default: 86400)"),
    ("zipf", "EXPONENT", "popularity of system prompts, tasks and documents; 0: all alike (default: 1)"),
    ("chat", "PARTS", "sessions that are chats of several turns (default: 4)"),
    ("few_shot", "PARTS", "that are a question behind a task's examples (default: 1)"),
    ("agents", "PARTS", "that call tools, now and then several ways at a time (default: 1)"),
    ("rag", "PARTS", "that are a question behind chunks of documents (default: 2)"),
    ("systems", "N", "different system prompts (default: 20)"),
    ("system_tokens", "TOKENS", "of one (default: 1200)"),
    ("turns", "N", "of a chat, on average (default: 4)"),
    ("user_tokens", "TOKENS", "that a user writes (default: 120)"),
    ("answer_tokens", "TOKENS", "of an answer (default: 250)"),
    ("pause", "SECONDS", "between turns of a chat (default: 30)"),
    ("tasks", "N", "with examples (default: 10)"),
    ("examples", "N", "of a task (default: 5)"),
    ("example_tokens", "TOKENS", "of an example (default: 180)"),
    ("tools_tokens", "TOKENS", "of an agent's system prompt and tools (default: 6000)"),
    ("calls", "N", "of tools by an agent, on average (default: 12)"),
    ("call_tokens", "TOKENS", "of a call (default: 90)"),
    ("result_tokens", "TOKENS", "of its result (default: 700)"),
    ("call_seconds", "SECONDS", "between calls (default: 3)"),
    ("branch", "SHARE", "of calls behind which an agent goes on several ways (default: 0.05)"),
    ("branches", "N", "how many ways (default: 3)"),
    ("documents", "N", "that chunks are of (default: 500)"),
    ("chunks", "N", "in a prompt (default: 4)"),
    ("chunk_tokens", "TOKENS", "of a chunk (default: 450)"),
)
_FLOATS: Final = {
    *("rate", "diurnal", "day", "zipf", "chat", "few_shot", "agents", "rag", "turns", "pause", "calls"),
    *("call_seconds", "branch"),
}

_EPILOG = """\
What is known of the trace is printed, and stored as JSON in FILE.known.json: it follows from how prompts are put
together, not from looking at the trace. `hicache analyze` finds the same numbers under the same names.

--preset misses makes rounds of six requests whose misses are known by reason; FILE.known.json has the settings of
`hicache simulate` that go with it, and what it counts there.

  hicache synth --out chats.jsonl --preset chat --requests 5000 --zipf 1.2
  hicache synth --out misses.jsonl --preset misses --rounds 20
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--out",
        required=True,
        type=Path,
        metavar="FILE",
        help="the trace, compressed if it ends with .gz, .bz2 or .xz; - is standard output",
    )
    parser.add_argument("--known", type=Path, metavar="FILE", help="what is known of it (default: FILE.known.json)")
    parser.add_argument(
        "--to", default="mooncake", metavar="FORMAT", help=f"one of {', '.join(FORMS)} (default: mooncake)"
    )
    parser.add_argument("--unit", metavar="TOKENS", help="of a page (default: mooncake 512, bailian 16, else 64)")
    parser.add_argument(
        "--preset",
        default="mixed",
        metavar="|".join(PRESETS),
        help="sessions of all kinds, of one alone, or known misses (default: mixed)",
    )
    for name, metavar, text in _PARAMETERS:
        parser.add_argument(f"--{name.replace('_', '-')}", metavar=metavar, help=text)
    parser.add_argument("--rounds", metavar="N", help="of --preset misses (default: 10)")
    parser.add_argument("--pages", metavar="N", help="of its prompts (default: 8)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(options: argparse.Namespace) -> int:
    """Make it, say what is known of it, and return the exit code."""
    from hicache.analytics.convert.files import new_file
    from hicache.analytics.synth.run import make
    from hicache.analytics.traces import KNOWN
    from hicache.cli.main import EXIT_FINE, EXIT_INTERRUPTED

    choice("--to", options.to, FORMS)
    choice("--preset", options.preset, PRESETS)
    unit = _between("--unit", options.unit, 1, _MOST_UNIT, _UNITS.get(options.to, _UNIT))
    piped = options.out == _STANDARD_OUTPUT
    if piped and options.json:
        raise ConfigError("--json: the trace itself goes to standard output; give --known FILE instead")
    place = options.known or (None if piped else options.out.with_name(options.out.name + KNOWN))
    _see_apart(options.out, place)
    making, document = _wanted(options, unit)
    with stop_on_interrupt() as stop, progress("synth") as show:
        written = make(
            making,
            options.to,
            options.out,
            unit=unit,
            stopped=stop.is_set,
            progress=lambda done: show(done, document["planned_requests"]),
        )
    if not written:
        warn("interrupted; nothing was written")
        return EXIT_INTERRUPTED
    document |= {"known": making.known.document()}
    if place is not None:
        with new_file(place, option="--known") as (file, finish):
            file.write(json.dumps(document, indent=2, allow_nan=False).encode() + b"\n")
            finish()
    _tell(options, document, unit, place, piped=piped)
    return EXIT_FINE


def _see_apart(out: Path, known: Path | None) -> None:
    from hicache.analytics.convert.files import same_file

    if known is not None and same_file(out, known):
        raise ConfigError(f"--known {known!s:.200}: the trace itself goes there; name another file")


def _wanted(options: argparse.Namespace, unit: int) -> tuple[Making | Misses, dict[str, Any]]:
    """What is to be made, and what is written down of it in front."""
    from hicache.analytics.synth.misses import Misses
    from hicache.analytics.synth.run import Making
    from hicache.analytics.synth.workload import KINDS, Workload

    given = {name: text for name, *_ in _PARAMETERS if (text := getattr(options, name)) is not None}
    common = {"format": options.to, "unit": unit, "preset": options.preset}
    if options.preset == "misses":
        for name in given:
            raise ConfigError(f"--{name.replace('_', '-')}: --preset misses has --rounds, --pages and --unit only")
        rounds = _between("--rounds", options.rounds, 0, 2**20, 10)
        pages = _between("--pages", options.pages, 1, _MOST_TOKENS, 8)
        if pages * unit > _MOST_TOKENS:
            raise ConfigError(f"--pages {pages}: prompts of {pages * unit} tokens, at most {_MOST_TOKENS} are possible")
        making = Misses(rounds, pages, unit)
        return making, common | {"planned_requests": 6 * rounds, "simulations": making.simulations()}
    for name in ("rounds", "pages"):
        if getattr(options, name) is not None:
            raise ConfigError(f"--{name}: only --preset misses has it")
    chosen = options.preset.replace("-", "_")
    values: dict[str, Any] = {} if chosen == "mixed" else {kind: float(kind == chosen) for kind in KINDS}
    workload = Workload(**(values | {name: _value(name, text) for name, text in given.items()}))
    return Making(workload, unit), common | {"planned_requests": workload.requests, "workload": workload.document()}


def _value(name: str, text: str) -> int | float:
    option = f"--{name.replace('_', '-')}"
    if name not in _FLOATS:
        return whole(option, text)
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{option} {text:.40}: is not a number") from None


def _between(option: str, text: str | None, least: int, most: int, otherwise: int) -> int:
    if text is None:
        return otherwise
    number = whole(option, text)
    if not least <= number <= most:
        raise ConfigError(f"{option} {text:.40}: must be {least} to {most}")
    return number


def _tell(options: argparse.Namespace, document: dict[str, Any], unit: int, place: Path | None, *, piped: bool) -> None:
    known = document["known"]
    if piped:
        rate = known["ideal_hit_rate_pages"]
        warn(f"{known['requests']:,} requests; an unlimited cache hits {100 * rate:.4f} % of the pages asked")
    elif options.json:
        print_json(document)
    else:
        for table in tables(document):
            print_fitted(table)
        say(f"{options.out}: the trace; {place}: what is known of it")
    if unit != _UNITS.get(options.to, unit):
        warn(f"--unit {unit}: who reads it has to be told the same")


def tables(document: dict[str, Any]) -> Iterator[Table]:
    """What is known, for people."""
    known = document["known"]
    counts = ("input_tokens", "output_tokens", "pages_asked", "pages_different", "ideal_pages_hit", "ideal_tokens_hit")
    yield Table(
        f"{known['requests']:,} requests made, pages of {known['unit']} tokens",
        ("what", "count"),
        [(name.replace("_", " "), f"{known[name]:,}") for name in counts],
    )
    yield Table(
        "what an unlimited cache hits, by how the trace was made",
        ("of", "rate"),
        [
            (words, f"{known[name]:.4f}" if known["requests"] else "n/a")
            for name, words in (
                ("ideal_hit_rate_pages", "pages"),
                ("ideal_hit_rate_tokens", "tokens"),
                ("ideal_hit_rate_requests", "requests (mean of their page rates)"),
                ("ideal_hit_rate_requests_tokens", "requests (mean of their token rates)"),
            )
        ],
    )
    for part in document.get("simulations", ()):
        flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in part["settings"].items())
        expected = part["expected"]
        rows = [(f"from {tier}", f"{expected[f'pages_{tier}']:,}") for tier in ("device", "host", "storage")]
        rows += [(f"missed: {name}", f"{pages:,}") for name, pages in expected["misses_by_reason"].items()]
        yield Table(f"hicache simulate {flags}", ("whole pages", "count"), rows)
