"""Comparing two reports, figure by figure, and where a change of the hit rate comes from."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.analytics.compare.documents import compare, warnings

COUNTS = st.fixed_dictionaries(
    {name: st.integers(0, 1000) for name in ("device", "host", "storage")}
    | {"missed": st.dictionaries(st.sampled_from(["cold", "evicted", "late"]), st.integers(0, 1000))}
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)


def whole(counts: dict[str, Any]) -> dict[str, Any]:
    hits = counts["device"] + counts["host"] + counts["storage"]
    return {"tokens": counts | {"asked": hits + sum(counts["missed"].values())}}


@given(COUNTS, COUNTS)
def test_parts_add_up(a: dict[str, Any], b: dict[str, Any]) -> None:
    """Tiers' points are the change of the hit rate; with those of the reasons they are nothing."""
    first, second = whole(a), whole(b)
    splits = compare(first, second).splits
    if not first["tokens"]["asked"] or not second["tokens"]["asked"]:
        assert splits == ()
        return
    (split,) = splits
    tiers = sum(part.points for part in split.parts if not part.name.startswith("missed"))
    assert abs(tiers - split.points) < 1e-9
    assert abs(sum(part.points for part in split.parts)) < 1e-9
    assert abs(100 * (split.hit_rate_b - split.hit_rate_a) - split.points) < 1e-9


@settings(max_examples=60)
@given(st.dictionaries(st.text(max_size=5), JSON, max_size=4), st.dictionaries(st.text(max_size=5), JSON, max_size=4))
def test_any_two_documents(a: dict[str, Any], b: dict[str, Any]) -> None:
    """Whatever is in them: valid JSON without NaN, nothing where they are equal, and the same both ways."""
    found = compare(a, b)
    json.dumps(found.document(), allow_nan=False)
    assert compare(a, a).changes == ()
    assert {change.path for change in found.changes} == {change.path for change in compare(b, a).changes}


def test_rows_are_found_by_their_names() -> None:
    """Rows of lists that moved are the same rows; one that came is compared with nothing."""
    a = {"rows": [{"tier": "host", "n": 1}, {"tier": "storage", "n": 2}], "points": [{"pages": 5, "name": "x", "n": 1}]}
    b = {"rows": [{"tier": "storage", "n": 2}, {"tier": "host", "n": 3}], "points": [{"pages": 7, "name": "x", "n": 1}]}
    changes = {change.path: (change.a, change.b, change.relative) for change in compare(a, b).changes}
    assert changes["rows[host].n"] == (1, 3, 2.0)
    assert "rows[storage].n" not in changes
    assert changes["points[5].n"] == (1, None, None)
    assert changes["points[7].n"] == (None, 1, None)


def test_order() -> None:
    """Figures of the whole first, then parts, then lists; large changes first; no denominator, no percentage."""
    a = {"x": 10, "y": 10, "z": 0, "part": {"x": 1}, "rows": [1], "text": "a", "name": "A", "definitions": {"x": "1"}}
    b = {
        "x": 11,
        "y": 1,
        "z": 5,
        "part": {"x": 100},
        "rows": [1000],
        "text": "b",
        "name": "B",
        "definitions": {"x": "2"},
    }
    found = compare(a, b)
    assert [change.path for change in found.changes] == ["y", "x", "part.x", "rows[0]", "text", "z"]
    assert found.changes[-1].relative is None


def test_flat_counts() -> None:
    """Results of replays and simulations have their counts side by side; they are split alike."""
    a = {"pages_asked": 10, "pages_device": 1, "pages_host": 2, "pages_storage": 0, "misses_by_reason": {"cold": 7}}
    b = {"pages_asked": 20, "pages_device": 1, "pages_host": 9, "pages_storage": 0, "misses_by_reason": {"cold": 10}}
    (split,) = compare({"result": a}, {"result": b}).splits
    assert (split.path, split.asked_a, split.asked_b) == ("result.pages", 10, 20)
    assert round(split.points, 6) == 20.0
    assert [(part.name, round(part.points, 6)) for part in split.parts] == [
        ("host", 25.0), ("missed cold", -20.0), ("device", -5.0),
    ]  # fmt: skip


def test_points_of_sweeps_are_compared_with_their_like() -> None:
    """By their settings, wherever they stand in the two sweeps."""

    def point(device: int, hits: int, **more: object) -> dict[str, object]:
        counts = {"pages_asked": 10, "pages_device": hits, "misses_by_reason": {"cold": 10 - hits}}
        return {
            "settings": {"device": device, "host": 0, "storage": 0, "eviction": "lru", "costs": {}} | more,
            **counts,
        }

    found = compare({"results": [point(5, 1), point(9, 4)]}, {"results": [point(9, 6), point(5, 1, eviction="lfu")]})
    (split,) = found.splits
    assert (split.path, round(split.points)) == ("results[device 9, host 0, storage 0].pages", 20)


def analysis(sizes: dict[int, float], *page_tokens: int) -> dict[str, Any]:
    points = [{"pages": pages, "miss_ratio": ratio} for pages, ratio in sizes.items()]
    return {"page_tokens": list(page_tokens), "miss_ratio_curve": {"sampled": False, "points": points}}


def test_curves_are_compared_at_common_sizes() -> None:
    """What only one curve tells is no difference of the traces; it is said in words that sizes differ."""
    a, b = analysis({10: 0.5, 20: 0.4, 40: 0.2}, 16), analysis({10: 0.6, 30: 0.4, 40: 0.2}, 16)
    changes = [(change.path, change.a, change.b) for change in compare(a, b).changes]
    assert changes == [("miss_ratio_curve.points[10].miss_ratio", 0.5, 0.6)]
    (line,) = warnings(a, b)
    assert "compared at the 2 sizes that both have" in line
    (line,) = warnings(a, analysis({7: 0.1}, 16))
    assert "at no size: they have none in common" in line
    assert compare(a, analysis({7: 0.1}, 16)).changes == ()
    assert list(warnings(a, a)) == []
    # one without a curve: as other documents
    assert compare(a, {"miss_ratio_curve": {"points": 5}}).changes


def test_pages_of_other_sizes_are_told() -> None:
    a, b = analysis({10: 0.5}, 512), analysis({10: 0.5}, 16)
    (line,) = warnings(a, b)
    assert line.startswith("pages of A and B have 512 and 16 tokens, so their counts of pages are of different things")
    (again,) = warnings(a, {"page_tokens": 16})  # as a simulation has it
    assert again == line
    assert list(warnings(a, {"x": 1})) == []
    assert line.endswith(
        "and their hit rates of pages do not compare; compare those of tokens, or convert one with `hicache convert "
        "--to-unit`"
    )


def of_sweep(*page_tokens: int) -> dict[str, Any]:
    results = [{"page_tokens": tokens, "settings": {}} for tokens in page_tokens]
    return {"points": len(results), "results": results, "recommendation": []}


def test_pages_of_two_sweeps() -> None:
    """Those of all points."""
    assert list(warnings(of_sweep(16, 64), of_sweep(64, 16))) == []
    (line,) = warnings(of_sweep(16, 64), of_sweep(16))
    assert line.startswith("pages of A and B have 16/64 and 16 tokens")


@pytest.mark.parametrize("told", [True, False])
def test_pages_of_which_nobody_knows_the_size(told: bool) -> None:
    """Documents of older versions do not tell it; those of commands that never do are not blamed for it."""
    new = analysis({10: 0.5}, 16) | {"ideal_hit_rate_pages": 0.5}
    old = {name: value for name, value in new.items() if name != "page_tokens"}
    (line,) = warnings(new if told else old, old)
    assert line.startswith("B does not tell" if told else "A and B do not tell")
    assert "so it cannot be known whether counts and hit rates of pages compare" in line
    untold = of_sweep(16) | {"results": [{"settings": {}}]}
    assert [line.startswith("A does not tell") for line in warnings(untold, of_sweep(16))] == [True]
    assert list(warnings(new, analysis({10: 0.5}) | {"ideal_hit_rate_pages": 0.0})) == []  # of no requests, so no pages
    replays = [{"pages_verified": 1, "misses_by_reason": {}, "hit_rate_pages": rate} for rate in (0.1, 0.2)]
    assert list(warnings(*replays)) == []
