"""What an analysis tells of traces whose answers are known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.analytics.analysis.report import Analysis, AnalyzeOptions, analyze
from hicache.analytics.traces import open_trace
from hicache.errors import TraceError


def mooncake(path: Path, requests: list[tuple[float, int, list[int]]]) -> Path:
    """A trace of (seconds, input tokens, ids)."""
    lines = [
        {"timestamp": 1000 * at, "input_length": tokens, "output_length": 7, "hash_ids": ids}
        for at, tokens, ids in requests
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def analysed(*paths: Path, **options: Any) -> Analysis:
    return analyze(open_trace(list(paths)), AnalyzeOptions(**options))


def session(path: Path, block: int, requests: list[tuple[int, list[int]]]) -> Path:
    """A trace of (input tokens, ids) with blocks of any size."""
    entries = [
        {"t": number, "type": "n", "model": "m", "in": tokens, "out": 1, "hash_ids": ids}
        for number, (tokens, ids) in enumerate(requests)
    ]
    path.write_text(json.dumps({"block_size": block, "hash_id_scope": "local", "requests": entries}))
    return path


@pytest.mark.case("STAT-5")
def test_each_rate_has_its_own_weights(tmp_path: Path) -> None:
    """A long prompt that comes twice, and nine short ones that nobody has seen."""
    long = list(range(10))
    short = [(100, [100 + number]) for number in range(9)]
    found = analysed(session(tmp_path / "s.json", 100, [(1000, long), (1000, long), *short]))
    assert found.ideal_hit_rate_tokens == pytest.approx(1000 / 2900)
    assert found.ideal_hit_rate_pages == pytest.approx(10 / 29)
    assert found.ideal_hit_rate_requests == pytest.approx(1 / 11)
    assert found.ideal_hit_rate_requests_tokens == pytest.approx(1 / 11)
    assert found.requests_with_hits_share == pytest.approx(1 / 11)
    definitions = found.document()["definitions"]
    for name in ("pages", "tokens", "requests", "requests_tokens"):
        assert definitions[f"ideal_hit_rate_{name}"]


@pytest.mark.case("STAT-2")
@pytest.mark.parametrize("text", ["", '{"timestamp":0,"input_length":0,"output_length":0,"hash_ids":[]}\n' * 3])
def test_nothing_is_no_number_that_is_none(tmp_path: Path, text: str) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(text)
    found = analysed(trace)
    document = json.dumps(found.document(), allow_nan=False)  # raises where something is not finite
    assert json.loads(document)["ideal_hit_rate_pages"] == 0.0
    assert found.pages_asked == 0
    assert found.requests == text.count("\n")


def test_a_prompt_of_100_tokens_reuses_96_at_16(tmp_path: Path) -> None:
    found = analysed(session(tmp_path / "s.json", 100, [(100, [1]), (100, [1])]), page_sizes=(1, 16, 32, 64, 128))
    assert [effect.tokens_reused for effect in found.page_sizes] == [100, 96, 96, 64, 0]
    assert [effect.tokens_reused_before_last for effect in found.page_sizes] == [99, 96, 96, 64, 0]
    assert [effect.lost_share for effect in found.page_sizes] == pytest.approx([0, 0.04, 0.04, 0.36, 1])
    assert found.page_sizes[1].hit_rate_tokens == pytest.approx(96 / 200)


def test_prefixes_have_sharers_and_depths(tmp_path: Path) -> None:
    """Three prompts on one head of two pages, two of them on one more page; one alone."""
    trace = mooncake(
        tmp_path / "t.jsonl",
        [
            (0, 4 * 512, [1, 2, 3, 4]),
            (10, 4 * 512, [1, 2, 3, 5]),
            (20, 3 * 512, [1, 2, 6]),
            (30, 512, [9]),
        ],
    )
    tree = analysed(trace).tree
    assert (tree.pages, tree.roots, tree.leaves, tree.branches, tree.runs, tree.deepest) == (7, 2, 4, 2, 6, 4)
    assert tree.one_hit_pages == 4
    assert tree.one_hit_share_of_asked == pytest.approx(4 / 12)
    assert tree.pages_by_sharers == ((2, 3),)
    head, more = tree.hottest
    assert (head.first_page, head.pages, head.tokens, head.sharers, head.pages_reused) == (0, 2, 1024, 3, 4)
    assert (head.request, head.first_seen, head.last_seen) == (1, 0.0, 20.0)
    assert (more.first_page, more.pages, more.sharers, more.pages_reused) == (2, 1, 2, 1)
    assert head.share_of_hits + more.share_of_hits == pytest.approx(1.0)


def test_turns_go_on_from_what_they_begin_with(tmp_path: Path) -> None:
    head = [(0.0, 1200, [1, 2, 100])]  # two whole pages and some tokens
    turns = [(5.0, 1800, [1, 2, 3, 101]), (9.0, 2400, [1, 2, 3, 4, 102])]
    other = [(20.0, 600, [50, 103])]
    found = analysed(mooncake(tmp_path / "t.jsonl", [*head, *turns, *other])).sessions
    assert (found.sessions, found.requests_in_later_turns) == (2, 2)
    assert found.turns.most == 3
    assert (found.pauses.least, found.pauses.most) == (4.0, 5.0)
    assert (found.new_tokens.least, found.new_tokens.most) == (1800 - 1024, 2400 - 1536)


def test_a_head_that_all_share_is_no_turn(tmp_path: Path) -> None:
    """Many prompts begin with a system prompt of one page, one is hardly longer than it."""
    many = [(float(n), 1024, [1, 10 + n]) for n in range(1, 12)]
    found = analysed(mooncake(tmp_path / "t.jsonl", [(0.0, 600, [1, 9]), *many]))
    assert found.sessions.sessions == 12


def test_reuse_over_time(tmp_path: Path) -> None:
    """Page 1 is used at 0, 10, 100; page 2 once."""
    trace = mooncake(tmp_path / "t.jsonl", [(0, 512, [1]), (10, 512, [1]), (40, 512, [2]), (100, 512, [1])])
    found = analysed(trace, spans=2)
    assert (found.reuse_seconds.least, found.reuse_seconds.most, found.reuse_seconds.mean) == (10.0, 90.0, 50.0)
    assert (found.reuse_distance_pages.least, found.reuse_distance_pages.most) == (0.0, 1.0)
    kept = {row.seconds: row for row in found.keeping}
    assert kept[10.0].hit_rate_pages == pytest.approx(1 / 4)
    assert kept[10.0].mean_pages == pytest.approx((10 + 10 + 10 + 0) / 100)
    assert kept[60.0].mean_pages == pytest.approx((10 + 60 + 60 + 0) / 100)
    first, second = found.working_set
    assert (first.requests, first.pages_asked, first.pages_different, first.pages_new) == (3, 3, 2, 2)
    assert (second.requests, second.pages_new, second.ideal_hit_rate_pages) == (1, 0, 1.0)
    assert (found.busiest_second, found.busiest_minute) == (1, 3)


def test_the_same_id_behind_another_past_is_another_page(tmp_path: Path) -> None:
    found = analysed(mooncake(tmp_path / "t.jsonl", [(0, 1024, [1, 2]), (1, 1024, [3, 2]), (2, 1024, [2, 2])]))
    assert (found.pages_different, found.ideal_pages_hit) == (6, 0)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=5), st.integers(1, 64)), max_size=15))
def test_sums_and_bounds(rows: list[tuple[list[int], int]]) -> None:
    """Whatever is asked: parts add up, nothing is above 1, and a larger cache is no worse."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        requests = [(64 * (len(ids) - 1) + tail, ids) for ids, tail in rows]
        found = analysed(session(Path(folder) / "s.json", 64, requests))
    json.dumps(found.document(), allow_nan=False)
    new = sum(span.pages_new for span in found.working_set)
    assert new == found.pages_different
    assert sum(span.pages_asked for span in found.working_set) == found.pages_asked
    assert new + found.ideal_pages_hit == found.pages_asked
    assert found.sessions.sessions + found.sessions.requests_in_later_turns == found.requests
    rates = [point.hit_rate_pages for point in found.curve.points]
    assert rates == sorted(rates)
    if rates:
        assert rates[-1] == pytest.approx(found.ideal_hit_rate_pages)
        assert found.curve.points[-1].hit_rate_tokens == pytest.approx(found.ideal_hit_rate_tokens)
    reused = [effect.tokens_reused for effect in found.page_sizes]
    assert reused == sorted(reused, reverse=True)
    assert all(tokens <= found.ideal_tokens_hit for tokens in reused)


def test_known_values_of_public_traces(large_traces: Path) -> None:
    known = {
        "conversation_trace.jsonl": (12_031, 144_793_823, 288_500, 182_790, 0.3664, 0.3736, 0.3843, 0.4094),
        "synthetic_trace.jsonl": (3_993, 61_194_628, 121_877, 43_924, 0.6396, 0.6512, 0.4232, 0.4315),
    }
    for name, (requests, tokens, asked, different, *rates) in known.items():
        found = analysed(large_traces / name, sizes=(10_000, 100_000))
        assert (found.requests, found.input_tokens) == (requests, tokens)
        assert (found.pages_asked, found.pages_different) == (asked, different)
        assert [
            found.ideal_hit_rate_pages,
            found.ideal_hit_rate_tokens,
            found.ideal_hit_rate_requests,
            found.ideal_hit_rate_requests_tokens,
        ] == pytest.approx(rates, abs=0.00005)
        if name.startswith("conversation"):
            small, large = found.curve.points
            assert small.hit_rate_pages == pytest.approx(0.211, abs=0.001)
            assert large.hit_rate_pages == pytest.approx(0.3637, abs=0.00005)


def test_sessions_are_one_population_or_one_by_one(large_traces: Path) -> None:
    files = sorted((large_traces / "agent-sessions").glob("*.json"))
    together = analysed(large_traces / "agent-sessions")
    each = [analysed(file) for file in files]
    assert len(each) == 12
    for name in ("requests", "input_tokens", "pages_asked", "pages_different", "ideal_pages_hit"):
        assert getattr(together, name) == sum(getattr(one, name) for one in each), name  # ids are each file's own


def test_a_trace_that_does_not_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicache.analytics.analysis.columns.BYTES_A_REFERENCE", 2**60)
    with pytest.raises(TraceError, match=r"an analysis of 1 pages asked .* or analyse a part: --limit N"):
        analysed(mooncake(tmp_path / "t.jsonl", [(0, 512, [1])]))
