from __future__ import annotations

import pytest

from hicache.core.config import EdgePolicy
from hicache.errors import ConfigError
from hicache.runtime.options import (
    Options,
    PrefetchTimeout,
    check_deadline,
    pool_pages,
    prefetch_timeout,
    write_policies,
)
from hicache.runtime.queues import Bound


def test_defaults_are_valid() -> None:
    assert Options().prefetch == "timeout"


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("prefetch", "soon", "best_effort, timeout, wait_complete"),
        ("prefetch_threshold", -1, "prefetch_threshold=-1"),
        ("prefetch_threshold", 1.5, "prefetch_threshold=1.5"),
        ("read_threads", 0, "read_threads=0"),
        ("write_threads", True, "write_threads=True"),
        ("longest_wait", float("nan"), "longest_wait=nan"),
        ("longest_wait", -1.0, "longest_wait=-1.0"),
        ("absent_seconds", "1", "absent_seconds='1'"),
        ("call_timeout", 0, "call_timeout=0"),
        ("probe_seconds", -1.0, "probe_seconds=-1"),
        ("max_hung", 0, "max_hung=0"),
        ("generation_seconds", 0.0, "generation_seconds=0"),
        ("touch_seconds", 0.0, "touch_seconds=0"),
        ("touch_seconds", "soon", "touch_seconds='soon'"),
        ("write_bound", Bound(bytes=0, requests=1), "write_bound.bytes=0"),
        ("copy_bound", Bound(bytes=1, requests=0), "copy_bound.requests=0"),
        ("protected_share", 1.5, "protected_share=1.5"),
    ],
)
def test_what_cannot_work_is_named(name: str, value: object, text: str) -> None:
    with pytest.raises(ConfigError, match=text.replace("(", r"\(")):
        Options(**{name: value})  # type: ignore[arg-type]


def test_how_often_a_path_is_touched_depends_on_how_long_objects_live() -> None:
    assert Options().touches(None) == 60.0
    assert Options().touches(100.0) == 60.0
    assert Options().touches(3600.0) == 900.0
    assert Options(touch_seconds=5.0).touches(3600.0) == 5.0
    assert Options(touch_seconds=None).touches(3600.0) is None


def test_write_policies_by_name_pair_and_value() -> None:
    through, selective = EdgePolicy(1), EdgePolicy(2)
    assert write_policies("write_through") == (through, through)
    assert write_policies(("write_through", "write_through_selective")) == (through, selective)
    assert write_policies(EdgePolicy(7)) == (EdgePolicy(7), EdgePolicy(7))
    assert write_policies("write_back")[0].on_eviction
    with pytest.raises(ConfigError, match="write_around"):
        write_policies("write_around")
    with pytest.raises(ConfigError, match="3 parts"):
        write_policies(["write_back"] * 3)


def test_some_prompts_of_large_pages_may_be_copied_at_once() -> None:
    assert Options().copies(2**20).bytes == 2**30
    assert Options().copies(2**26).bytes == 256 * 2**26
    given = Bound(bytes=5, requests=3)
    assert Options(copy_bound=given).copies(2**26) is given


def test_sizes_are_pages_or_bytes() -> None:
    assert pool_pages(7, page_bytes=1024, tier="host") == 7
    assert pool_pages("1MiB", page_bytes=1024, tier="host") == 1024
    for given, page_bytes, text in [
        (-1, 1024, "host=-1"),
        (2.5, 1024, "host=2.5"),
        (2**60, 1024, "absurdly"),
        ("100 B", 1024, "less than one page"),
        ("1GiB", 0, "no bytes"),
        ("many", 1024, "many"),
    ]:
        with pytest.raises(ConfigError, match=text):
            pool_pages(given, page_bytes=page_bytes, tier="host")  # type: ignore[arg-type]


def test_prefetch_time_grows_with_tokens_up_to_a_cap() -> None:
    timeout = PrefetchTimeout(base=1.0, per_1024_tokens=0.5, cap=3.0)
    assert timeout.seconds(0) == 1.0
    assert timeout.seconds(2048) == 2.0
    assert timeout.seconds(10**9) == 3.0
    assert prefetch_timeout(0.25).seconds(10**6) == 0.25
    with pytest.raises(ConfigError, match="base"):
        prefetch_timeout(-1)


def test_deadlines() -> None:
    check_deadline(None)
    check_deadline(0)
    for bad in (-0.1, float("inf"), float("nan"), "1", True):
        with pytest.raises(ConfigError, match="deadline"):
            check_deadline(bad)  # type: ignore[arg-type]


def test_a_transfer_from_storage_is_cut_by_bytes_and_by_pages() -> None:
    options = Options(fetch_bytes=1000)
    assert options.fetch_pages(100) == 10
    assert options.fetch_pages(1) == 32
    assert options.fetch_pages(5000) == 1
    assert options.fetch_pages(0) == 32
