"""One behaviour, whatever stands between an engine and its pages: the same suite on each door of the cache."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hicache
from hicache.errors import CacheClosed, HicacheError, InvalidInput, NamespaceError, OutOfSlots
from hicache.testing.engine import prompt
from hicache.testing.sidecars import ServiceProcess
from hicache.testing.subjects import PAGE, PROFILES, SLOT_BYTES, Subject, open_subject

PATIENCE = 20.0

SLOTS = 256

pytestmark = pytest.mark.parametrize("profile", PROFILES, scope="module")


@pytest.fixture(scope="module")
def address(profile: str) -> Iterator[str]:
    """A service in a process of its own is started once for all tests; the others are quick to start."""
    if profile != "process":
        yield ""
        return
    with (
        tempfile.TemporaryDirectory(prefix="hc") as folder,
        ServiceProcess(Path(folder), host=str(SLOTS * SLOT_BYTES)) as service,
    ):
        yield service.address


@pytest.fixture
def subject(profile: str, address: str) -> Iterator[Subject]:
    with ExitStack() as stack:
        subject = open_subject(profile, stack, slots=SLOTS, address=address)
        subject.cache.clear()
        yield subject
        assert subject.cache.statistics().open_requests == 0


def until(met: Callable[[], bool]) -> None:
    """Wait for something that happens in another thread or process."""
    end = time.monotonic() + PATIENCE
    pause = threading.Event()
    while not met():
        assert time.monotonic() < end, "it did not happen"
        pause.wait(0.002)


def test_what_one_request_computes_the_next_one_loads(subject: Subject) -> None:
    tokens = prompt(1, 22)
    cold = subject.run(tokens)
    warm = subject.run(tokens)
    assert (cold.asked, cold.device + cold.host, cold.missed) == (5, 0, {hicache.MissReason.COLD: 5})
    assert (warm.asked, warm.device + warm.host, warm.missed) == (5, 5, {})


def test_prompts_share_exactly_the_pages_that_are_equal_from_the_start(subject: Subject) -> None:
    tokens = prompt(1, 24)
    subject.run(tokens)
    other = tokens[:13] + prompt(2, 11)
    assert subject.top(subject.cache.match(other)) == 3
    counts = subject.run(other)
    assert (counts.device + counts.host, counts.asked) == (3, 5)
    assert subject.run(other).device + subject.run(other).host == 5
    assert subject.top(subject.cache.match(tokens[4:])) == 0


@pytest.mark.case("PAGE-1")
@pytest.mark.case("PAGE-2")
@pytest.mark.parametrize("tokens", [0, 1, 3, 4, 5, 8, 9])
def test_a_prompt_never_takes_all_of_its_tokens_from_the_cache_unless_it_may(subject: Subject, tokens: int) -> None:
    whole = prompt(1, 16)
    subject.run(whole)
    asked = whole[:tokens]
    assert subject.top(subject.cache.match(asked)) == max(tokens - 1, 0) // PAGE
    assert subject.top(subject.cache.match(asked, logits=False)) == tokens // PAGE
    with subject.cache.request(asked) as request:
        assert len(request.load()) == max(tokens - 1, 0) // PAGE
        assert request.tokens == tokens


def test_only_whole_pages_are_published(subject: Subject) -> None:
    tokens = prompt(1, 11)
    subject.run(tokens)
    assert subject.top(subject.cache.match([*tokens, 1, 2, 3, 4, 5])) == 2


def test_adapters_and_salts_see_their_own_pages_only(subject: Subject) -> None:
    tokens = prompt(1, 12)
    scopes: list[dict[str, Any]] = [
        {},
        {"salt": "a"},
        {"salt": "b"},
        {"adapter": hicache.Adapter("sql", digest=b"1" * 16)},
        {"adapter": hicache.Adapter("sql", digest=b"2" * 16)},
        {"adapter": hicache.Adapter("sql", digest=b"1" * 16), "salt": "a"},
    ]
    for scope in scopes:
        assert subject.top(subject.cache.match(tokens, **scope)) == 0
        subject.run(tokens, **scope)
    for scope in scopes:
        counts = subject.run(tokens, **scope)
        assert counts.device + counts.host == 2


def test_an_adapter_without_a_digest_goes_past_the_cache(subject: Subject) -> None:
    tokens, adapter = prompt(1, 12), hicache.Adapter("unknown")
    subject.run(tokens)
    with subject.cache.request(tokens, adapter=adapter) as request:
        assert request.bypassed
        assert request.match.pages == len(request.load()) == 0
        request.commit(ready=hicache.READY)
    assert (request.counts.asked, request.counts.missed) == (2, {hicache.MissReason.BYPASSED: 2})


def test_chunks_are_published_one_after_the_other(subject: Subject) -> None:
    tokens = prompt(1, 22)
    with subject.cache.request(tokens) as request:
        slots = request.allocate()
        subject.compute(request, tokens, slots, 0)
        for upto, pages in ((3, 0), (4, 1), (10, 2), (10, 2), (22, 5)):
            request.commit(upto=upto, ready=hicache.READY)
            assert subject.top(subject.cache.match(tokens)) == pages


def test_a_prompt_that_grows_is_published_as_its_pages_become_whole(subject: Subject) -> None:
    tokens = prompt(1, 10)
    with subject.cache.request(tokens) as request:
        subject.compute(request, tokens, request.allocate(), 0)
        request.commit(ready=hicache.READY)
        for token in range(100, 109):
            tokens.append(token)
            request.extend([token])
            fresh = request.allocate()
            assert len(fresh) == (len(tokens) % PAGE == 1)
            subject.compute(request, tokens, fresh, (len(tokens) - 1) // PAGE)
        assert request.tokens == 19
        request.commit(upto=19, ready=hicache.READY)
    assert subject.top(subject.cache.match(tokens, logits=False)) == 4


def test_the_next_turn_finds_the_last_one(subject: Subject) -> None:
    tokens = prompt(1, 12)
    for turn in range(4):
        counts = subject.run(tokens)
        assert counts.device + counts.host == (3 * turn + 0 if turn else 0)
        tokens = tokens + prompt(10 + turn, 12)


def test_more_slots_than_the_tier_has_are_refused_and_nothing_is_evicted(subject: Subject) -> None:
    tokens = prompt(1, 12)
    subject.run(tokens)
    with subject.cache.request(prompt(2, 12)) as request:
        with pytest.raises(OutOfSlots) as caught:
            request.allocate(subject.slots + 1)
        assert (caught.value.asked, caught.value.capacity) == (subject.slots + 1, subject.slots)
        assert len(request.allocate()) == 3
    assert subject.top(subject.cache.match(tokens)) == 2


def test_pages_of_open_requests_are_never_given_away(subject: Subject) -> None:
    tokens = prompt(1, 4 * 20 + 1)
    subject.run(tokens)
    with subject.cache.request(tokens) as holder:
        assert len(holder.load()) == 20
        for seed in range(2, 20):
            subject.run(prompt(seed, 4 * 25))
        assert subject.check(holder, tokens) == 20


@pytest.mark.case("STAT-1")
def test_looking_counts_nothing_and_a_request_is_counted_once(subject: Subject) -> None:
    tokens = prompt(1, 22)
    subject.run(tokens)
    before = subject.cache.statistics().requests
    for _ in range(3):
        subject.cache.match(tokens)
    with subject.cache.request(tokens) as request:
        request.load()
        request.load()
    assert subject.cache.statistics().requests == before + 1


def test_clearing_forgets_all_of_a_scope_and_nothing_of_another(subject: Subject) -> None:
    tokens = prompt(1, 12)
    subject.run(tokens)
    subject.run(tokens, salt="kept")
    with subject.cache.request(tokens) as reader, subject.cache.request(prompt(2, 12)) as writer:
        assert subject.check(reader, tokens) == 2
        subject.compute(writer, prompt(2, 12), writer.allocate(), 0)
        subject.cache.clear()
        assert subject.top(subject.cache.match(tokens)) == 0
        assert subject.check(reader, tokens) == 2  # an open request keeps what it has
        writer.commit(ready=hicache.READY)
        assert subject.top(subject.cache.match(prompt(2, 12))) == 0  # and publishes nothing any more
    assert subject.top(subject.cache.match(tokens, salt="kept")) == 2
    subject.cache.clear(salt="kept")
    subject.run(tokens)
    assert subject.top(subject.cache.match(tokens)) == 2


def test_pages_wait_for_the_event_of_their_writer(subject: Subject) -> None:
    tokens, written = prompt(1, 12), hicache.ThreadEvent()
    with subject.cache.request(tokens) as request:
        subject.compute(request, tokens, request.allocate(), 0)
        request.commit(ready=written)
        assert subject.top(subject.cache.match(tokens)) == 0
    assert request.counts.asked == 2
    assert subject.top(subject.cache.match(tokens)) == 0
    written.set()
    until(lambda: subject.top(subject.cache.match(tokens)) == 2)
    assert subject.run(tokens).missed == {}


def test_two_requests_that_compute_the_same_pages_end_with_one_copy(subject: Subject) -> None:
    tokens = prompt(1, 13)
    with subject.cache.request(tokens) as one, subject.cache.request(tokens) as other:
        for request in (one, other):
            subject.compute(request, tokens, request.allocate(), 0)
        one.commit(ready=hicache.READY)
        other.commit(ready=hicache.READY)
        assert subject.top(subject.cache.match(tokens)) == 3
    assert subject.run(tokens).missed == {}


def test_an_aborted_request_publishes_only_what_it_committed(subject: Subject) -> None:
    tokens = prompt(1, 22)
    with pytest.raises(ZeroDivisionError), subject.cache.request(tokens) as request:  # noqa: PT012
        subject.compute(request, tokens, request.allocate(), 0)
        request.commit(upto=8, ready=hicache.READY)
        raise ZeroDivisionError
    assert request.counts.aborted
    assert subject.top(subject.cache.match(tokens)) == 2


def test_a_closed_request_says_so_and_closes_again(subject: Subject) -> None:
    request = subject.cache.request(prompt(1, 12))
    with pytest.raises(InvalidInput, match="counted when it is closed"):
        _ = request.counts
    counts = request.close()
    assert request.close() == request.counts == counts
    assert request.closed
    for call in (request.load, request.allocate, lambda: request.commit(ready=hicache.READY)):
        with pytest.raises(CacheClosed, match="slots belong to others"):
            call()
    with pytest.raises(CacheClosed):
        request.extend([1])


BAD: list[tuple[str, Callable[[Any], object], type[HicacheError], str]] = [
    ("text", lambda cache: cache.request("text"), InvalidInput, "tokens are str"),
    ("negative", lambda cache: cache.request([1, -2]), InvalidInput, "token -2 at position 1"),
    ("too large", lambda cache: cache.match([2**32]), InvalidInput, "token 4294967296 at position 0"),
    ("bool", lambda cache: cache.request([True]), InvalidInput, "token True"),
    ("two dimensions", lambda cache: cache.request([[1, 2]]), InvalidInput, r"token \[1, 2\]"),
    ("deadline", lambda cache: cache.request([1], deadline=-1), InvalidInput, "deadline=-1 is not a number of seconds"),
    ("logits", lambda cache: cache.request([1], logits=1), InvalidInput, "logits=1 is not True or False"),
    ("priority", lambda cache: cache.request([1], priority=2**31), InvalidInput, "-2\\^31 to 2\\^31-1"),
    ("adapter", lambda cache: cache.request([1], adapter="a"), NamespaceError, "adapter must be an Adapter"),
    ("salt", lambda cache: cache.request([1], salt=""), NamespaceError, "salt is empty"),
    ("extras", lambda cache: cache.request([1], extras=[(b"x", 0, 1)]), InvalidInput, "extras=True"),
    ("prefill", lambda cache: cache.report_prefill(0, 1), InvalidInput, "0"),
]


@pytest.mark.parametrize(("call", "error", "text"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_what_cannot_work_gets_the_same_error(
    subject: Subject, call: Callable[[Any], object], error: type[HicacheError], text: str
) -> None:
    with pytest.raises(error, match=text):
        call(subject.cache)


BAD_VERBS: list[tuple[str, Callable[[Any], object], str]] = [
    ("fewer than none", lambda request: request.allocate(-1), "allocate: pages=-1"),
    ("no number", lambda request: request.allocate(1.5), "allocate: pages=1.5"),
    ("no deadline", lambda request: request.allocate(1, deadline="soon"), "deadline='soon'"),
    ("behind the prompt", lambda request: request.commit(upto=14, ready=hicache.READY), "upto=14"),
    ("without slots", lambda request: request.commit(ready=hicache.READY), "behind the last one that can be committed"),
    ("no event", lambda request: request.commit(ready="x"), "ready='x' is no writer event"),
    ("no token", lambda request: request.extend(["x"]), "token 'x' at position 0"),
]


@pytest.mark.parametrize(("call", "text"), [row[1:] for row in BAD_VERBS], ids=[row[0] for row in BAD_VERBS])
def test_verbs_that_cannot_work_get_the_same_error_and_change_nothing(
    subject: Subject, call: Callable[[Any], object], text: str
) -> None:
    tokens = prompt(1, 13)
    with subject.cache.request(tokens) as request:
        with pytest.raises(InvalidInput, match=text):
            call(request)
        subject.compute(request, tokens, request.allocate(), 0)
        request.commit(ready=hicache.READY)
    assert subject.run(tokens).missed == {}


def test_many_threads_may_use_one_cache(subject: Subject) -> None:
    failures: list[BaseException] = []

    def engine(seed: int) -> None:
        try:
            for turn in range(8):
                subject.run(prompt(turn % 3, 17) + prompt(seed, 8))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=engine, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not failures
    assert not any(thread.is_alive() for thread in threads)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    steps=st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 40), st.integers(0, 40), st.booleans()), min_size=1, max_size=12
    )
)
def test_over_random_histories_every_byte_is_right_and_every_page_is_counted(
    subject: Subject, steps: list[tuple[int, int, int, bool]]
) -> None:
    """A model that knows only what was committed: what a request gets is never more, and in a large pool never less."""
    subject.cache.clear()
    known: set[tuple[int, ...]] = set()
    for family, length, upto, abort in steps:
        tokens = prompt(family, length)
        expected = 0
        while (expected + 1) * PAGE < length and tuple(tokens[: (expected + 1) * PAGE]) in known:
            expected += 1
        with subject.cache.request(tokens) as request:
            found = subject.check(request, tokens)
            assert found == expected
            if not abort:
                slots = request.allocate()
                subject.compute(request, tokens, slots, found)
                end = min(upto, length)
                request.commit(upto=end, ready=hicache.READY)
                known |= {tuple(tokens[: (page + 1) * PAGE]) for page in range(end // PAGE)}
        counts = request.close()
        assert counts.device + counts.host == found
        assert counts.asked == max(length - 1, 0) // PAGE
        assert counts.asked == counts.device + counts.host + counts.storage + sum(counts.missed.values())


# ---- with storage behind it, or images in front


@pytest.fixture
def small(profile: str, tmp_path: Path) -> Iterator[Subject]:
    with ExitStack() as stack:
        yield open_subject(profile, stack, slots=32, storage=f"file://{tmp_path}/store?capacity=64MiB")


def test_what_leaves_the_top_tiers_comes_back_from_storage(small: Subject) -> None:
    prompts = [prompt(seed, 41) for seed in range(16)]
    for tokens in prompts:
        small.run(tokens)
        small.settle()
    stored = 0
    for tokens in prompts:
        counts = small.run(tokens, deadline=PATIENCE)
        assert counts.asked == counts.device + counts.host + counts.storage + sum(counts.missed.values()) == 10
        assert not counts.missed
        small.settle()
        stored += counts.storage
    assert stored >= 160 - 2 * 32


def test_a_deadline_that_is_over_takes_what_is_there_and_says_that_the_rest_was_late(small: Subject) -> None:
    prompts = [prompt(seed, 41) for seed in range(16)]
    for tokens in prompts:
        small.run(tokens)
        small.settle()
    assert small.cache.match(prompts[0]).storage == 10
    with small.cache.request(prompts[0], deadline=0.0) as request:
        found = small.check(request, prompts[0])
        small.compute(request, prompts[0], request.allocate(deadline=PATIENCE), found)
        request.commit(ready=hicache.READY)
    counts = request.counts
    assert counts.device + counts.host + counts.storage == found
    assert set(counts.missed) <= {hicache.MissReason.LATE, hicache.MissReason.OVER_BUDGET}


def test_images_tell_pages_apart(profile: str) -> None:
    tokens = prompt(1, 17)
    with ExitStack() as stack:
        subject = open_subject(profile, stack, extras=True)
        for extras in ([], [(b"one", 5, 3)], [(b"two", 5, 3)], [(b"one", 6, 3)]):
            counts = subject.run(tokens, extras=extras)
            assert counts.device + counts.host == (1 if extras else 0)  # the page before the image is shared
            assert subject.run(tokens, extras=extras).missed == {}
        with subject.cache.request(tokens[:6], extras=[]) as request:
            with pytest.raises(InvalidInput, match="extras"):
                request.extend([1, 2], extras=[(b"one", 2, 3)])
            request.extend([1, 2, 3], extras=[(b"one", 6, 3)])
