"""Sources of reports that cost nothing, and a reader of pages that is stricter than a browser."""

from __future__ import annotations

import json
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from hicache.analytics.analysis.columns import read_columns
from hicache.analytics.analysis.report import AnalyzeOptions, analyze
from hicache.analytics.report.build import Source
from hicache.analytics.simulate.advice import advice, recommend
from hicache.analytics.simulate.run import Simulation
from hicache.analytics.simulate.settings import Costs, SimulationSettings
from hicache.analytics.simulate.sweep import grid, sweep
from hicache.analytics.traces import open_trace

_VOID = {"meta", "br", "hr", "img", "input", "link"}


class Page(HTMLParser):
    """A page, read: every element is closed where it must be, and no id comes twice.

    Attributes:
        elements: name and attributes of each.
        text: all that is neither style nor script.
        told: what each plot tells its script.
    """

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        self.told: list[Any] = []
        self._open: list[str] = []
        self.feed(source)
        self.close()
        assert self._open == []
        ids = [values["id"] for _, values in self.elements if "id" in values]
        assert len(ids) == len(set(ids))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), (tag, names)
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in _VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        inside = self._open[-1] if self._open else ""
        if inside == "script" and self.all("script")[-1].get("type") == "application/json":
            self.told.append(json.loads(data, parse_constant=pytest.fail))
        elif inside not in ("style", "script"):
            self.text += data

    def all(self, tag: str) -> list[dict[str, str]]:
        """Attributes of all elements of a name."""
        return [values for name, values in self.elements if name == tag]


@pytest.fixture(scope="session")
def read_page() -> Callable[[str], Page]:
    """Reads a page."""
    return Page


def _mooncake(path: Path, prompts: list[list[int]]) -> Path:
    lines = [
        {"timestamp": 500 * at, "input_length": 512 * len(ids) - 100, "output_length": 5, "hash_ids": ids}
        for at, ids in enumerate(prompts)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="session")
def write_trace() -> Callable[[Path, list[list[int]]], Path]:
    """Writes a trace of prompts, each a list of ids."""
    return _mooncake


@pytest.fixture(scope="session")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sessions that share a system prompt, and go on in turns."""
    prompts = [[0, 1, *range(100 * user, 100 * user + 2 * turn + 2)] for turn in range(4) for user in range(1, 9)]
    return _mooncake(tmp_path_factory.mktemp("t") / "trace.jsonl", prompts)


@pytest.fixture(scope="session")
def sources(trace: Path) -> dict[str, Source]:
    """One of each kind."""
    analysis = analyze(open_trace([trace]), AnalyzeOptions(spans=3)).document()
    columns = read_columns(open_trace([trace]))
    result = Simulation(columns, SimulationSettings(device=12, host=20, costs=Costs(gpu_hour_price=2.0))).run()
    simulation = result.document() | {"advice": list(advice(result))}
    points = grid({"device": [12, 24], "host": [0, 20, 40], "eviction": ["lru", "slru"]}, Costs())
    results = sweep(columns, points)
    swept = {
        "points": len(points),
        "results": [each.document(definitions=False) for each in results],
        "recommendation": list(recommend(results)),
    }
    return {
        "analyze": Source("trace.jsonl", {"analyze": analysis}),
        "simulate": Source("one.json", {"simulate": simulation}),
        "sweep": Source("grid.json", {"sweep": swept}),
        "stats": Source("unix:///run/hicache.sock", {"stats": service_document()}),
    }


def counts(asked: int, device: int = 0, host: int = 0, storage: int = 0, **missed: int) -> dict[str, Any]:
    return {"asked": asked, "device": device, "host": host, "storage": storage, "missed": missed}


def service_document(model: str = "org/model") -> dict[str, Any]:
    """What a service tells: two pools, a store, a tenant, and a verb."""
    queue = dict.fromkeys(("waiting", "running", "bytes", "refused", "failed", "hung"), 0)
    store = dict.fromkeys(("objects", "puts", "gets", "hits", "bytes_written", "bytes_read", "evicted"), 7)
    statistics = {
        "requests": 9,
        "open_requests": 1,
        "pages": counts(100, host=40, storage=10, cold=30, evicted=20),
        "tokens": counts(1650, host=640, storage=160, cold=480, evicted=320, unaligned_tail=50),
        "bytes_device_to_host": 0,
        "bytes_host_to_device": 0,
        "bytes_to_storage": 4096,
        "bytes_from_storage": 1024,
        "failed_pages": {"fetch": 1},
        "shed_by_reason": {},
        "core": {"host": {"capacity": 64, "resident": 60, "filling": 1, "pinned": 2, "evicted": 20}},
        "storage": store | {"bytes_used": 900, "capacity": 1000, "by_reason": {"absent": 3, "corrupt": 0}},
        "reads": queue,
        "writes": queue,
    }
    points = [
        {
            "factor": factor,
            "pages": int(64 * factor),
            "missed_pages": missed,
            "hit_rate": 1 - missed / 100,
            "error_bound": 0.0,
        }
        for factor, missed in ((0.5, 70), (1.0, 50), (2.0, 31), (4.0, 30))
    ]
    prefix = dict.fromkeys(
        ("requests", "uncertain", "asked_pages", "hit_pages", "pages", "host_pages", "stored_pages"), 5
    )
    pool = {
        "model": model,
        "namespace": "0f" * 16,
        "tenant": "red",
        "ranks": 1,
        "page_bytes": 4096,
        "bytes": 64 * 4096,
        "sessions": 1,
        "device_pages": 0,
        "statistics": statistics,
        "what_if": [{"tier": "host", "pages": 64, "sample_rate": 1.0, "asked_pages": 100, "points": points}],
        "prefixes": [prefix | {"page_hash": "ab" * 32}],
    }
    return {
        "service": {
            "uptime_seconds": 90.5,
            "degraded": ["the store is away"],
            "quotas": [{"tenant": "red", "tier": "host", "bytes": 4096, "quota": 8192}],
            "verbs": [{"verb": "lease", "answered": 9, "failed": 0, "seconds": 0.01}],
            "sessions": 1,
        },
        "pools": [pool, pool | {"namespace": "aa" * 16, "tenant": None, "what_if": [], "prefixes": []}],
    }


@pytest.fixture(scope="session")
def service() -> Callable[..., dict[str, Any]]:
    """Makes the document of a service."""
    return service_document
