"""Wrong arguments are one line of a typed error, and nothing was taken; right ones may be of other libraries."""

from __future__ import annotations

import array
import pathlib
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import hicache
from hicache.testing.engine import FakeEngine, prompt, small_namespace

P = 4
NAN = float("nan")


@pytest.fixture
def cache() -> Iterator[hicache.EmbeddedCache]:
    with hicache.open(small_namespace(), device=64, host=64, events=True, extras=True) as cache:
        yield cache
        assert cache.flush()  # copies that are under way hold pins of their own
        cache.check()
        assert cache.statistics().core.device.private == cache.statistics().core.device.pinned == 0
        assert cache.statistics().open_requests == 0


def refused(call: Callable[[], object], words: str) -> None:
    with pytest.raises(hicache.InvalidInput, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.case("LEAK-1")
@pytest.mark.parametrize("priority", ["x", None, NAN, 1.5, True, 2**80, 2**31, -(2**31) - 1, np.float32(1)])
@pytest.mark.parametrize("salt", [None, "s"])
def test_a_priority_that_cannot_be_compared(cache: hicache.EmbeddedCache, priority: Any, salt: str | None) -> None:
    refused(lambda: cache.request(prompt(1, 8), priority=priority, salt=salt), "priority")


@pytest.mark.parametrize("kind", [list, tuple, deque, array.array, np.asarray])
def test_tokens_may_be_any_sequence(cache: hicache.EmbeddedCache, kind: Any) -> None:
    numbers = prompt(1, 9)
    tokens = array.array("I", numbers) if kind is array.array else kind(numbers)
    FakeEngine(cache).run(numbers)
    with cache.request(tokens) as request:
        assert request.tokens == 9
        assert (request.match, cache.match(tokens)) == (hicache.Match(2), hicache.Match(2))


def test_priorities_are_integers_of_any_kind(cache: hicache.EmbeddedCache) -> None:
    for priority in (-(2**31), 2**31 - 1, np.int64(3), np.uint8(1)):
        with cache.request(prompt(1, 9), priority=priority) as request:  # type: ignore[arg-type]
            request.load()
            request.allocate()
            request.commit(ready=hicache.READY)


WRONG_REQUESTS: dict[str, dict[str, Any]] = {
    "deadline": {"deadline": "1"},
    "negative deadline": {"deadline": -1},
    "huge deadline": {"deadline": 10**400},
    "logits": {"logits": "no"},
    "logits 1": {"logits": 1},
    "adapter": {"adapter": "lora"},
    "tenant": {"tenant": 5},
    "salt": {"salt": b"s"},
    "tenant list": {"tenant": []},
    "extras": {"extras": None},
    "extras 5": {"extras": [5]},
    "extras text": {"extras": "abc"},
    "extras pair": {"extras": [(b"h", 0)]},
    "extras hash": {"extras": [("h", 0, 1)]},
    "extras place": {"extras": [(b"h", 0.5, 1)]},
    "extras places": {"extras": [(b"h", 0, 1), (b"h", "1", 1)]},
    "extras behind": {"extras": [(b"h", 18, 1)]},
    "extras end behind": {"extras": [(b"h", 14, 5)]},
    "extras overlap": {"extras": [(b"h", 0, 4), (b"i", 3, 2)]},
}


@pytest.mark.parametrize("name", WRONG_REQUESTS)
def test_wrong_arguments_of_a_request(cache: hicache.EmbeddedCache, name: str) -> None:
    arguments = WRONG_REQUESTS[name]
    words = "non-text input|extras" if "extras" in arguments else next(iter(arguments))
    refused(lambda: cache.request(prompt(1, 18), **arguments), words)
    if "deadline" not in arguments:
        refused(lambda: cache.match(prompt(1, 18), **arguments), words)


@pytest.mark.parametrize("tokens", [None, 5, {1, 2}, (token for token in (1, 2)), "12", object()])
@pytest.mark.parametrize("extras", [True, False])
def test_tokens_that_are_none(tokens: Any, extras: bool) -> None:
    with hicache.open(small_namespace(), device=4, extras=extras) as cache:
        refused(lambda: cache.request(tokens), "give a list|give token ids")
        refused(lambda: cache.match(tokens), "give a list|give token ids")


def test_extras_stay_apart_and_within_what_follows(cache: hicache.EmbeddedCache) -> None:
    first = (b"h" * 16, 2, 4)
    with cache.request(prompt(1, 8), extras=[first], logits=False) as request:
        refused(lambda: request.extend([1, 2], extras=None), "extras are NoneType")  # type: ignore[arg-type]
        refused(lambda: request.extend([1, 2], extras=[(b"i", 7, 2)]), "begins before token 8")
        refused(lambda: request.extend([1, 2], extras=[(b"i", 9, 2)]), "behind the prompt's 10")
        assert request.tokens == 8
        request.extend([1, 2, 3, 4], extras=[(b"i" * 16, np.int64(9), 2)])  # type: ignore[list-item]
        request.load()
        request.allocate()
        request.commit(ready=hicache.READY)
    both = [first, (b"i" * 16, 9, 2)]
    assert cache.match([*prompt(1, 8), 1, 2, 3, 4], logits=False, extras=reversed(both)).device == 3
    assert cache.match([*prompt(1, 8), 1, 2, 3, 4], logits=False, extras=[first]).device == 2


@pytest.mark.parametrize("ready", [True, object(), "x", lambda: None, hicache.ThreadEvent, 0])
def test_what_is_no_event(cache: hicache.EmbeddedCache, ready: Any) -> None:
    with cache.request(prompt(1, 9)) as request:
        request.allocate()
        refused(lambda: request.commit(ready=ready), "no writer event")
        request.commit(ready=hicache.READY)
    assert cache.match(prompt(1, 9)).device == 2


@pytest.mark.parametrize("upto", ["x", 8.0, 4.5, True, -1, 10, NAN, None.__class__])
def test_what_is_no_number_of_tokens(cache: hicache.EmbeddedCache, upto: Any) -> None:
    with cache.request(prompt(1, 9)) as request:
        request.allocate()
        refused(lambda: request.commit(upto, ready=hicache.READY), "not a whole number between 0 and the 9")
        request.commit(np.int64(5), ready=hicache.READY)  # type: ignore[arg-type]
    assert cache.match(prompt(1, 9)).device == 1


@pytest.mark.parametrize("pages", ["1", 1.0, True, -1])
def test_what_is_no_number_of_pages(cache: hicache.EmbeddedCache, pages: Any) -> None:
    with cache.request(prompt(1, 9)) as request:
        refused(lambda: request.allocate(pages), "allocate: pages")
        refused(lambda: request.allocate(1, deadline="1"), "deadline")  # type: ignore[arg-type]
        assert len(request.allocate(np.int64(2), deadline=np.float32(0))) == 2  # type: ignore[arg-type]


def test_upkeep_takes_seconds_and_numbers(cache: hicache.EmbeddedCache) -> None:
    for wrong in (None, "1", -1, NAN, True):
        refused(lambda given=wrong: cache.flush(given), "deadline")  # type: ignore[misc]
        refused(lambda given=wrong: cache.clear(deadline=given), "deadline")  # type: ignore[misc]
        refused(lambda given=wrong: cache.close(given), "deadline")  # type: ignore[misc]
    for limit in (-1, 0, 1.0, "8", True, None):
        refused(lambda given=limit: cache.events(limit=given), "limit")  # type: ignore[misc]
    cache.events(limit=np.int64(8)).close()  # type: ignore[arg-type]
    assert cache.flush(np.float64(1))


WRONG_OPTIONS: dict[str, Any] = {
    "write_policy": 5,
    "eviction": [],
    "prefetch": None,
    "clock": 5,
    "bytes": "no",
    "extras": "no",
    "events": 1,
    "background": None,
    "reserve": "x",
    "stub_pages": "x",
    "ghost_pages": -1,
    "device_to_host": 5,
    "copy_bound": 5,
    "retry": 3,
    "breaker": True,
    "prefetch_timeout": "1",
    "copy_threads": 1.0,
    "storage": 5,
    "host": b"1",
    "device": 2.5,
    "longest_wait": 10**400,
}


@pytest.mark.parametrize("name", WRONG_OPTIONS)
def test_wrong_options(name: str) -> None:
    options: dict[str, Any] = {"device": 8, "host": 8} | {name: WRONG_OPTIONS[name]}
    words = "write_policy" if name == "device_to_host" else name
    refused(lambda: hicache.open(small_namespace(), **options), words)


def test_a_path_is_shown_as_a_url(tmp_path: pathlib.Path) -> None:
    refused(lambda: hicache.open(small_namespace(), device=8, host=8, storage=tmp_path), f"'file://{tmp_path}'")  # type: ignore[arg-type]
    with hicache.open(small_namespace(), device=8, host=8, attachable=True) as cache:
        refused(lambda: cache.attach_storage(tmp_path), f"'file://{tmp_path}'")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("64", r"device='64' is less than one page .*give 64 for pages"),
        ("abc", r"device: size 'abc' is not a number with a unit.* or give a number of pages"),
        ("1_000", "device: size '1_000'"),
        (" ", "device: size ' '"),
        ("64B", r"device='64B' is less than one page of 256 B: make it larger$"),
    ],
)
def test_sizes_say_what_helps(device: str, words: str) -> None:
    refused(lambda: hicache.open(small_namespace(), device=device), words)


def test_numbers_of_numpy_and_none_for_no_host() -> None:
    number: Any = np.int64
    with hicache.open(small_namespace(), device=number(8), host=None, copy_threads=number(1)) as cache:
        assert (cache.device.slots, cache.host) == (8, None)
    with hicache.open(small_namespace(), device=8, host=number(4), longest_wait=np.float32(2)) as cache:
        assert cache.host is not None
        assert (cache.host.slots, type(cache.parts.options.longest_wait)) == (4, float)


def test_write_policies_may_be_given_an_edge_each() -> None:
    with hicache.open(small_namespace(), device=8, host=8, host_to_storage="write_back") as cache:
        assert cache.parts.options.host_to_storage.on_eviction


def test_what_is_closed_is_not_entered(cache: hicache.EmbeddedCache) -> None:
    request = cache.request(prompt(1, 9))
    request.close()
    with pytest.raises(hicache.CacheClosed), request:
        pass
    other = hicache.open(small_namespace(), device=8)
    other.close()
    with pytest.raises(hicache.CacheClosed), other:
        pass


def test_objects_say_what_they_are(cache: hicache.EmbeddedCache) -> None:
    assert repr(cache) == "<hicache.EmbeddedCache 'tiny' device=64 host=64 pages, no storage: open>"
    subscription = cache.events(limit=3)
    with cache.request(prompt(1, 9)) as request:
        assert repr(request) == "<hicache.Request 9 tokens, device=0 host=0 storage=0 pages found: open>"
        request.allocate()
        request.commit(ready=hicache.READY)
    assert repr(request).endswith("closed>")
    assert repr(subscription).startswith("<hicache.Subscription ")
    subscription.close()
    assert repr(subscription).endswith("closed>")
    assert repr(hicache.READY) == "hicache.READY"


def test_statistics_are_a_few_lines_for_people(tmp_path: pathlib.Path) -> None:
    url = f"file://{tmp_path}/store?capacity=1MiB"
    with hicache.open(small_namespace(), device=8, host=8, storage=url) as cache:
        engine = FakeEngine(cache)
        engine.run(prompt(1, 9))
        engine.run(prompt(1, 9))
        cache.flush()
        text = str(cache.statistics())
    lines = {line.split()[0]: line for line in text.splitlines()}
    assert list(lines) == ["requests", "pages", "tokens", "device", "host", "storage", "moved", "trouble"]
    assert "2 closed (0 aborted" in lines["requests"]
    assert "4 asked: device 2, host 0, storage 0, missed 2 (cold 2); hit rate 50.00 %" in lines["pages"]
    assert "8 pages: " in lines["device"]
    assert " of 1 MiB" in lines["storage"]
    assert lines["trouble"].split()[1:] == ["none"]
    assert max(map(len, text.splitlines())) < 160


def test_open_is_called_open_and_its_options_are_public() -> None:
    assert hicache.open.__name__ == "open"
    assert hicache.Options().eviction == "lru"
    described = hicache.Options.__doc__ or ""
    assert all(name in described for name in hicache.Options.__dataclass_fields__)
    assert "hicache.Options" in (hicache.open.__doc__ or "")
    assert set(hicache.LAYOUTS) == {"layer_first", "page_first", "opaque"}
    assert isinstance(hicache.Options().retry, hicache.RetryPolicy)
    assert isinstance(hicache.Options().breaker, hicache.BreakerPolicy)


def test_an_unclosed_cache_warns() -> None:
    cache = hicache.open(small_namespace(), device=8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cache.__del__()
        cache.close()
        cache.__del__()
    assert [str(warning.category.__name__) for warning in caught] == ["ResourceWarning"]
