"""What `hicache top` shows: its figures against the documents they come from, and screens of every size."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import re
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.cli import top as command
from hicache.cli import top_screen
from hicache.cli.main import build_parser
from hicache.cli.output import Table
from hicache.cli.top import Answer, Asker, Shown
from hicache.cli.top_screen import painter, screen_of
from hicache.cli.top_view import SORTS, Look, View, duration, view_of
from hicache.errors import ServiceUnavailable


def pool_of(model: str, *, host: int = 0, storage: int = 0, missed: dict[str, int] | None = None) -> dict[str, Any]:
    missed = missed or {}
    asked = host + storage + sum(missed.values())
    totals = {"asked": asked, "device": 0, "host": host, "storage": storage, "missed": missed}
    queue = {"waiting": 1, "running": 2, "bytes": 1024, "hung": 0, "refused": 5}
    points = [
        {"factor": factor, "pages": 8, "missed_pages": 2, "hit_rate": 0.5, "error_bound": 0.01} for factor in (0.5, 1.0)
    ]
    prefix = {
        "namespace": "n", "page_hash": model.encode().hex() * 8, "requests": asked, "uncertain": 0,
        "asked_pages": asked, "hit_pages": host, "pages": 3, "host_pages": 2, "stored_pages": 1,
    }  # fmt: skip
    return {
        "model": f"org/{model}", "namespace": model, "tenant": None, "ranks": 1, "page_bytes": 1024, "sessions": 1,
        "device_pages": 0, "what_if": [{"tier": "host", "points": points}], "prefixes": [prefix],
        "statistics": {
            "requests": 3, "open_requests": 1, "tokens": totals, "pages": totals, "bytes_to_storage": storage * 1000,
            "bytes_from_storage": 0, "bytes_device_to_host": 0, "bytes_host_to_device": 0, "reads": queue,
            "writes": None, "storage": {"bytes_used": 512, "capacity": 2048},
            "core": {"host": {"resident": 3, "filling": 1, "capacity": 8, "evicted": 4}},
        },
    }  # fmt: skip


def look_of(*pools: dict[str, Any], at: float = 0.0, uptime: float = 10.0, **service: Any) -> Look:
    verbs = [{"verb": "lease", "answered": int(uptime), "failed": 0, "seconds": uptime / 1000}]
    whole = {
        "uptime_seconds": uptime,
        "degraded": [],
        "quotas": [],
        "sessions": 1,
        "leases": {"open": 2},
        "verbs": verbs,
    }
    return Look({"service": whole | service, "pools": list(pools)}, at)


def table(view: View, title: str) -> dict[str, tuple[str, ...]]:
    (found,) = [table for table in view.tables if table.title.startswith(title)]
    return {row[0].strip(): tuple(row[1:]) for row in found.rows}


@pytest.mark.case("STAT-5")
def test_every_share_has_its_denominator() -> None:
    """Hits by tier and misses by reason add up to what was asked, since the start and in the interval."""
    before = look_of(pool_of("a", host=60, missed={"cold": 40}), at=100.0)
    now = look_of(pool_of("a", host=80, storage=20, missed={"cold": 60, "late": 40}), at=102.0, uptime=12.0)
    rows = table(view_of(now, before), "tokens")
    assert rows["asked"] == ("50", "", "200", "100.0 %")
    assert rows["hit"] == ("20", "40.0 %", "100", "50.0 %")
    assert rows["host"] == ("10", "20.0 %", "80", "40.0 %")
    assert rows["storage"] == ("10", "20.0 %", "20", "10.0 %")
    assert rows["ideal"] == ("40", "80.0 %", "140", "70.0 %")
    assert rows["missed cold"] == ("10", "20.0 %", "60", "30.0 %")
    assert rows["missed late"] == ("20", "40.0 %", "40", "20.0 %")
    view = view_of(now, before).document
    for tokens in (view["tokens"], view["tokens_in_interval"]):
        assert tokens["asked"] == tokens["device"] + tokens["host"] + tokens["storage"] + sum(tokens["missed"].values())
    assert (view["hit_rate_tokens"], view["ideal_hit_rate_tokens"]) == (0.5, 0.7)
    assert view["pools"][0]["ideal_hit_rate_pages"] == 0.7
    assert table(view_of(now, before), "moved")["host to storage"] == ("9.77 KiB", "19.53 KiB")
    assert table(view_of(now, before), "verbs")["lease"] == ("1", "1,000", "0")


@pytest.mark.case("STAT-2")
def test_a_service_of_which_nothing_was_asked() -> None:
    """No number is NaN, no share stands without a denominator, and the document is JSON."""
    for look in (look_of(), look_of(pool_of("a"))):
        view = view_of(look, None)
        assert json.dumps(view.document, allow_nan=False)
        assert view.document["hit_rate_tokens"] is None
        assert table(view, "tokens")["hit"] == ("-", "-", "0", "-")


def test_a_service_that_was_started_anew() -> None:
    """Its counts began anew: there are no rates with what was before; pools that came and went count as well."""
    before = look_of(pool_of("a", host=500), at=0.0, uptime=1000.0)
    assert table(view_of(look_of(pool_of("a", host=5), at=2.0, uptime=1.0), before), "tokens")["asked"][0] == "-"
    later = look_of(pool_of("a", host=510), pool_of("b", host=70), at=2.0, uptime=1002.0)
    assert table(view_of(later, before), "tokens")["asked"] == ("5", "", "580", "100.0 %")


def test_what_a_tenant_sees() -> None:
    """Its document has no sessions, verbs or store of all tenants together."""
    pool = pool_of("a", host=5)
    pool["statistics"]["storage"] = None
    quotas = [{"tenant": "red", "tier": "host", "bytes": 512, "quota": 1024}]
    service = {"uptime_seconds": 3700.0, "degraded": ["storage: away"], "quotas": quotas}
    view = view_of(Look({"service": service, "pools": [pool]}, 0.0), None)
    assert (view.title, view.degraded) == ("up 1 h 1 min, 1 pool", ("storage: away",))
    assert table(view, "tenants")["red"] == ("host", "512 B", "1 KiB", "50 %")
    assert "storage" not in table(view, "tiers")


def test_sorting() -> None:
    """Prefixes and pools by requests, missed, hit rate or name; the title says which."""
    pools = (pool_of("a", host=90, missed={"cold": 10}), pool_of("b", host=10, missed={"cold": 190}))
    orders = {sort: [*table(view_of(look_of(*pools), None, sort=sort), f"pools, by {sort}")] for sort in SORTS.values()}
    assert orders["hit rate"] == orders["name"] == ["a", "b"]
    assert orders["missed"] == ["b", "a"]
    prefixes = {sort: [*table(view_of(look_of(*pools), None, sort=sort), "hottest")] for sort in SORTS.values()}
    assert prefixes["requests"] == prefixes["missed"] != prefixes["hit rate"]


@pytest.mark.parametrize(
    ("seconds", "words"), [(5.4, "5 s"), (65, "1 min 5 s"), (7260, "2 h 1 min"), (200_000, "2 d 7 h")]
)
def test_durations(seconds: float, words: str) -> None:
    """Two units at most."""
    assert duration(seconds) == words


# ---- the screen


def busy(pools: int = 3) -> View:
    found = [pool_of(f"model-with-a-long-name-{number}", host=10**9, missed={"cold": 5}) for number in range(pools)]
    return view_of(look_of(*found, degraded=["storage: reads breaker open: " + 50 * "refused "]), None)


@given(st.integers(1, 250), st.integers(1, 80), st.integers(0, 20), st.booleans())
def test_it_fits_any_screen(width: int, height: int, first: int, trouble: bool) -> None:
    """No line is wider than the screen, and no more lines than it has; the keys stay at the bottom."""
    state = "no answer for 3 s: " + 30 * "word " if trouble else ""
    lines = screen_of(busy(), title="hicache top  unix:///x", state=state, width=width, height=height, first=first)
    assert len(lines) <= max(2, height)
    if height > 1:
        assert len(lines) == height
    assert all(sum(len(piece.text) for piece in line) <= max(width, 20) for line in lines)
    assert lines[-1][0].text.startswith("q quit")


def shown(view: View, width: int, height: int, first: int = 0) -> str:
    lines = screen_of(view, title="hicache top", state="", width=width, height=height, first=first)
    return "\n".join("".join(piece.text for piece in line) for line in lines)


def test_narrow_and_wide() -> None:
    """80 columns have one table below another; 200 have two side by side, so more of them are seen."""
    narrow, wide = shown(busy(), 80, 24), shown(busy(), 200, 24)
    assert "tokens" in narrow
    assert "hottest" not in narrow
    assert "what other sizes" in wide
    assert any("tokens" in line and "tiers" in line for line in wide.splitlines())
    assert "degraded: storage" in narrow
    second = shown(busy(), 80, 24, first=1).splitlines()
    assert not any(line.startswith("tokens") for line in second)
    assert any(line.startswith("tiers") for line in second)


def test_tables_that_are_cut_say_so() -> None:
    """Of a long table the first rows, and how many more there are; long texts give way, numbers never."""
    rows = [(f"row {number} " + 100 * "x", f"{number:,}") for number in range(100)]
    view = View("t", (), (Table("many", ("name", "number"), rows),), {})
    text = shown(view, 40, 12)
    assert "more rows" in text
    first = next(line for line in text.splitlines() if "row 0" in line)
    assert first.endswith(" 0")
    assert "…" in first


@pytest.fixture(params=[True, False], ids=["rich", "plain"])
def stream(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    monkeypatch.setattr(top_screen, "has_rich", lambda: request.param)
    monkeypatch.setenv("TERM", "xterm")
    found = io.StringIO()
    found.isatty = lambda: True  # type: ignore[method-assign]
    return found


def test_the_screen_is_given_back(stream: io.StringIO) -> None:
    """Whatever happens inside: the alternate screen is left, and the cursor seen."""
    lines = screen_of(busy(), title="hicache top", state="gone", width=80, height=24)

    def fail() -> None:
        with painter(stream) as screen:
            assert min(screen.size()) > 0
            screen.paint(lines)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    text = stream.getvalue()
    assert "tokens" in text
    assert text.count("\x1b[?1049h") == text.count("\x1b[?1049l") == 1
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


# ---- asking


def test_who_asks_goes_on_after_trouble() -> None:
    """Each answer is told, good or not; after the end nobody is told any more."""
    answers: list[Any] = [look_of(), ServiceUnavailable("gone"), look_of(at=5.0)]
    told = []

    def ask() -> Look:
        answer = answers[min(len(told), 2)]
        if isinstance(answer, Exception):
            raise answer
        found: Look = answer
        return found

    with Asker(ask, 0.001, lambda: told.append(time.monotonic())) as asker:
        found = [asker.answers.get(timeout=30) for _ in range(3)]
    assert [answer.trouble for answer in found] == ["", "gone", ""]
    assert found[1] == Answer(None, "gone")
    ended = len(told)
    asker._thread.join(30)
    assert len(told) == ended
    assert all(math.isfinite(moment) for moment in told)


# ---- the command


def options(*arguments: str) -> argparse.Namespace:
    return build_parser()[0].parse_args(["top", "unix:///x", *arguments])


def text_of(shown: Shown) -> str:
    return "\n".join("".join(piece.text for piece in line) for line in shown.lines(120, 60))


def test_keys() -> None:
    """Sorting, the next table, a pause in which nothing moves, and the end; other keys change nothing."""
    shown = Shown(options(), look_of(pool_of("a", host=5), at=1.0), 2.0)
    assert shown.changed
    assert "every 2 s" in text_of(shown)
    assert not shown.changed
    shown.type(b"x\x1b[A")
    assert not shown.changed
    shown.type(b"h")
    assert "pools, by hit rate" in text_of(shown)
    shown.type(b"\t")
    assert text_of(shown).index("tiers") < text_of(shown).index("tokens")
    shown.type(b" ")
    shown.hear(Answer(look_of(pool_of("a", host=1005), at=2.0)))
    assert "[paused]" in text_of(shown)
    assert "1,005" not in text_of(shown)
    shown.type(b"p")
    shown.hear(Answer(look_of(pool_of("a", host=2005), at=3.0)))
    assert "2,005" in text_of(shown)
    assert not shown.over(None)
    assert shown.over(2)
    shown.type(b"q")
    assert shown.over(None)


def test_the_terminal_went_away() -> None:
    """Nothing can be read any more: that is the end too."""
    shown = Shown(options(), look_of(), 2.0)
    shown.type(b"")
    assert shown.over(None)


def test_trouble_is_shown_until_it_is_over() -> None:
    """What was seen last stays, with why there is nothing newer."""
    shown = Shown(options(), look_of(pool_of("a", host=5)), 2.0)
    shown.hear(Answer(None, "gone"))
    shown.hear(Answer(None, "still gone"))
    assert "trying again: still gone" in text_of(shown)
    assert "tokens" in text_of(shown)
    shown.hear(Answer(look_of(pool_of("a", host=6), at=1.0)))
    assert "no answer" not in text_of(shown)


def test_printing_goes_on_after_trouble(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A service that is gone for a while is told in a line; what is printed goes on when it is back."""
    answers: list[Any] = [look_of(), ServiceUnavailable("gone"), look_of(pool_of("a", host=7), at=9.0)]

    def look() -> Look:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        found: Look = answer
        return found

    monkeypatch.setattr(command, "looking", lambda _: contextlib.nullcontext(look))
    assert command.run(options("--plain", "--count", "2", "--interval", "0.05")) == 0
    captured = capsys.readouterr()
    assert captured.err == "hicache: gone; trying again\n"
    assert captured.out.count("unix:///x  up") == 2


def test_names_are_told_apart() -> None:
    """Long ones keep both ends, as variants of a model differ there; two of one model have their namespaces."""
    long = [f"Llama-3.1-70B-Instruct-of-somebody-who-likes-{kind}" for kind in ("names-w8a8", "names-bf16")]
    text = shown(view_of(look_of(*(pool_of(name, host=5) for name in long)), None), 80, 60)
    assert all(re.search(rf"host Llama\S*…\S*{end}\b", text) for end in ("w8a8", "bf16"))
    assert max(map(len, text.splitlines())) <= 80
    assert top_screen.HELP in text
    pools = [pool_of("same", host=5) | {"namespace": digits * 8} for digits in ("ab12", "cd34")]
    assert list(table(view_of(look_of(*pools), None), "pools")) == ["same ab12ab", "same cd34cd"]
