"""What a made trace is like, and the kinds of sessions in it."""

from __future__ import annotations

import bisect
import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any, Final, TypeAlias

from hicache.analytics.synth.segments import Segment, Text
from hicache.errors import ConfigError

MOST_TOKENS: Final = 2**20
"""Of a segment, on average."""
LONGEST: Final = 2**22
"""Tokens at which a session ends, as no context is that long."""
_SPREAD: Final = 0.5
"""Of lengths and pauses: standard deviation of their logarithm. 95 of 100 are from 0.33 to 2.4 times the mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What a made trace is like. Lengths in tokens, times in seconds; those of single requests vary around them.

    Attributes:
        requests: how many.
        seed: the same gives the same trace.
        rate: sessions that begin each second, on average.
        diurnal: how far that goes up and down over a `day`: 0 not at all, 1 to nothing and twice as many.
        day: seconds.
        zipf: exponent of popularity of system prompts, tasks and documents; 0: all alike.
        chat, few_shot, agents, rag: parts of the sessions, in any unit.
        systems, system_tokens: different system prompts.
        turns, user_tokens, answer_tokens, pause: of a chat.
        tasks, examples, example_tokens: of few-shot prompts; each task has its examples.
        tools_tokens, calls, call_tokens, result_tokens, call_seconds: of an agent, which calls tools.
        branch, branches: how often an agent's session goes on in several at a time, and in how many.
        documents, chunks, chunk_tokens: of retrieval: chunks of a prompt, in front of the question.

    Raises:
        ConfigError: what cannot be.
    """

    requests: int = 1000
    seed: int = 0
    rate: float = 1.0
    diurnal: float = 0.0
    day: float = 86_400.0
    zipf: float = 1.0
    chat: float = 4.0
    few_shot: float = 1.0
    agents: float = 1.0
    rag: float = 2.0
    systems: int = 20
    system_tokens: int = 1200
    turns: float = 4.0
    user_tokens: int = 120
    answer_tokens: int = 250
    pause: float = 30.0
    tasks: int = 10
    examples: int = 5
    example_tokens: int = 180
    tools_tokens: int = 6000
    calls: float = 12.0
    call_tokens: int = 90
    result_tokens: int = 700
    call_seconds: float = 3.0
    branch: float = 0.05
    branches: int = 3
    documents: int = 500
    chunks: int = 4
    chunk_tokens: int = 450

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            least, most = _RANGES.get(entry.name, (1, MOST_TOKENS if entry.name.endswith("_tokens") else 2**32))
            if not (math.isfinite(value) and least <= value <= most):
                raise ConfigError(f"--{entry.name.replace('_', '-')} {value:g}: must be {least:g} to {most:g}")
        if not any(getattr(self, kind) for kind in KINDS):
            raise ConfigError(f"--{', --'.join(KINDS)}: one of them must be above 0".replace("_", "-"))

    def document(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {entry.name: getattr(self, entry.name) for entry in fields(self)}


KINDS: Final = ("chat", "few_shot", "agents", "rag")

_RANGES: Final[dict[str, tuple[float, float]]] = {
    "requests": (0, 2**40),
    "seed": (0, 2**63),
    "rate": (1e-6, 1e6),
    "diurnal": (0, 1),
    "day": (1, 1e9),
    "zipf": (0, 10),
    **dict.fromkeys(KINDS, (0, 1e6)),
    "turns": (1, 1000),
    "calls": (1, 1000),
    "pause": (0, 1e6),
    "call_seconds": (0, 1e6),
    "branch": (0, 1),
    "branches": (2, 64),
    "systems": (1, 2**20),
    "tasks": (1, 2**20),
    "documents": (1, 2**20),
    "examples": (0, 1000),
    "chunks": (1, 100),
}


@dataclass(frozen=True, slots=True)
class Ask:
    """A session asks.

    Attributes:
        wait: seconds since it asked before.
        end: the last segment of its prompt.
        output: tokens that are generated.
        kind: of session.
        turn: of it, from 1.
        forks: sessions that begin beside it when this is answered.
    """

    wait: float
    end: Segment
    output: int
    kind: str
    turn: int
    forks: tuple[Session, ...] = field(default=())


Session: TypeAlias = Iterator[Ask]


class World:
    """What sessions share, and how they go. All chance comes from one seed."""

    def __init__(self, workload: Workload, unit: int) -> None:
        self.chance = random.Random(workload.seed)  # noqa: S311  the same for everybody, which is the point
        self._workload = workload
        text = Text(unit)
        self._systems = [text.begin(self._length(workload.system_tokens)) for _ in range(workload.systems)]
        self._tasks = [text.begin(self._length(workload.system_tokens)) for _ in range(workload.tasks)]
        self._shots = [[self._length(workload.example_tokens) for _ in range(workload.examples)] for _ in self._tasks]
        self._tools = text.begin(self._length(workload.tools_tokens))
        self._chunks = [self._length(workload.chunk_tokens) for _ in range(workload.documents)]
        counts = (workload.systems, workload.tasks, workload.documents)
        self._popular = {count: _cumulated(count, workload.zipf) for count in counts}
        self._kinds = [getattr(workload, kind) for kind in KINDS]

    def session(self) -> Session:
        """A new one."""
        ways: tuple[Callable[[], Session], ...] = (self._chat, self._few_shot, self._agent, self._retrieval)
        return self.chance.choices(ways, self._kinds)[0]()

    def next_arrival(self, now: float) -> float:
        """When the next session begins: a Poisson process whose rate goes up and down over the day."""
        workload, chance = self._workload, self.chance
        most = workload.rate * (1 + workload.diurnal)
        while True:
            now += chance.expovariate(most)
            level = workload.rate * (1 - workload.diurnal * math.cos(2 * math.pi * now / workload.day))
            if chance.random() * most <= level:
                return now

    # ---- sessions

    def _chat(self) -> Session:
        workload = self._workload
        node, wait = self._pick(self._systems), 0.0
        for turn in range(1, self._count(workload.turns) + 1):
            node = node.then(self._length(workload.user_tokens))
            answer = self._length(workload.answer_tokens)
            yield Ask(wait, node, answer, "chat", turn)
            node, wait = node.then(answer), self._seconds(workload.pause)

    def _few_shot(self) -> Session:
        workload = self._workload
        task = self._ranked(workload.tasks)
        node = self._tasks[task]
        for number, tokens in enumerate(self._shots[task]):
            node = node.then(tokens, number)
        node = node.then(self._length(workload.user_tokens))
        yield Ask(0.0, node, self._length(workload.answer_tokens), "few-shot", 1)

    def _agent(self) -> Session:
        node = self._tools.then(self._length(self._workload.user_tokens))
        return self._calling(node, 0.0, self._count(self._workload.calls), 1)

    def _calling(self, node: Segment, wait: float, calls: int, turn: int) -> Session:
        """An agent's calls from here on; now and then it tries several ways at a time."""
        workload = self._workload
        for call in range(calls):
            tokens = self._length(workload.call_tokens)
            forks: tuple[Session, ...] = ()
            if call and self.chance.random() < workload.branch:
                left = min(calls - call, 3)
                forks = tuple(
                    self._calling(node.then(tokens), self._seconds(workload.call_seconds), left, turn + call + 1)
                    for _ in range(workload.branches - 1)
                )
            yield Ask(wait, node, tokens, "agent", turn + call, forks)
            node = node.then(tokens).then(self._length(workload.result_tokens))
            wait = self._seconds(workload.call_seconds)

    def _retrieval(self) -> Session:
        workload = self._workload
        node = self._systems[0]
        found: dict[int, None] = {}
        for _ in range(workload.chunks):
            found[self._ranked(workload.documents)] = None
        for number in found:
            node = node.then(self._chunks[number], number)
        node = node.then(self._length(workload.user_tokens))
        yield Ask(0.0, node, self._length(workload.answer_tokens), "rag", 1)

    # ---- chance

    def _length(self, mean: int) -> int:
        return min(max(1, round(self._around(mean))), 4 * MOST_TOKENS)

    def _seconds(self, mean: float) -> float:
        return self._around(mean) if mean else 0.0

    def _around(self, mean: float) -> float:
        return self.chance.lognormvariate(math.log(mean) - _SPREAD**2 / 2, _SPREAD)

    def _count(self, mean: float) -> int:
        """At least one, geometrically distributed."""
        if mean <= 1:
            return 1
        return 1 + int(math.log(1 - self.chance.random()) / math.log(1 - 1 / mean))

    def _pick(self, segments: list[Segment]) -> Segment:
        return segments[self._ranked(len(segments))]

    def _ranked(self, count: int) -> int:
        popular = self._popular[count]
        return min(bisect.bisect(popular, self.chance.random() * popular[-1]), count - 1)


def _cumulated(count: int, exponent: float) -> list[float]:
    return list(itertools.accumulate(1 / rank**exponent for rank in range(1, count + 1)))
