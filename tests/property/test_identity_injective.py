from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hicache.core.hashing import HASH_ALGORITHMS, PageHasher
from hicache.core.identity import Adapter, Namespace, normal_model_name
from hicache.core.layout import KVGeometry
from hicache.core.symbols import page_extras, symbols
from hicache.errors import NamespaceError

GEOMETRY = KVGeometry.mha(2, kv_heads=2, head_dim=4, dtype="float32")
# Few letters, so that texts that look alike when glued together are common.
texts = st.text("ab/.\0-", min_size=1, max_size=6).filter(str.strip)
names = st.text("ab/.-", min_size=1, max_size=6)
digests = st.sampled_from([b"a" * 16, b"a" * 17, b"b" * 16])
requests = st.tuples(
    st.none() | st.tuples(texts.filter(lambda text: "\0" not in text), digests), st.none() | texts, st.none() | texts
)


def derived(request: tuple[tuple[str, bytes] | None, str | None, str | None]) -> bytes:
    adapter, tenant, salt = request
    base = Namespace("m", geometry=GEOMETRY, page_size=4)
    return base.derive(adapter=None if adapter is None else Adapter(*adapter), tenant=tenant, salt=salt).digest


@pytest.mark.case("KEY-1", "KEY-3")
@given(requests, requests)
def test_requests_share_a_digest_only_if_equal(
    one: tuple[tuple[str, bytes] | None, str | None, str | None],
    two: tuple[tuple[str, bytes] | None, str | None, str | None],
) -> None:
    assert (derived(one) == derived(two)) == (one == two)


@pytest.mark.case("KEY-1", "KEY-8")
@given(names)
def test_normal_names_are_fixed_points(name: str) -> None:
    try:
        normal = normal_model_name(name)
    except NamespaceError:
        assert not name.strip("/. ") or name.startswith("/")
        return
    assert normal_model_name(normal) == normal
    assert not normal.endswith("/")


@pytest.mark.case("SEC-2")
@given(st.text(max_size=40))
def test_any_text_is_a_name_or_refused(text: str) -> None:
    try:
        namespace = Namespace(text, geometry=GEOMETRY, page_size=4)
    except NamespaceError:
        return
    assert len(namespace.digest) == 16
    namespace.model.encode("utf-8")


tokens = st.lists(st.integers(0, 2), max_size=12)


@pytest.mark.case("KEY-2")
@given(tokens, tokens, st.sampled_from(HASH_ALGORITHMS))
def test_page_hashes_are_equal_exactly_for_equal_pasts(one: list[int], two: list[int], algorithm: str) -> None:
    hasher = PageHasher(algorithm, page_size=3)  # type: ignore[arg-type]
    size = hasher.hash_size
    first, second = (hasher.extend(None, symbols(ids, 3), len(ids) // 3) for ids in (one, two))
    for page in range(min(len(one), len(two)) // 3):
        same_past = one[: (page + 1) * 3] == two[: (page + 1) * 3]
        assert (first[page * size : (page + 1) * size] == second[page * size : (page + 1) * size]) == same_past


items = st.lists(st.tuples(st.sampled_from([b"a", b"b", b"ab"]), st.integers(0, 9), st.integers(1, 9)), max_size=3)


@pytest.mark.case("KEY-6")
@given(items, items)
def test_extras_are_equal_exactly_for_equal_overlaps(
    one: list[tuple[bytes, int, int]], two: list[tuple[bytes, int, int]]
) -> None:
    def overlaps(spans: list[tuple[bytes, int, int]], page: int) -> list[tuple[bytes, int, int]]:
        first, end = page * 4, page * 4 + 4
        return sorted((c, s, min(s + n, end)) for c, s, n in spans if s < end and s + n > first)

    first, second = page_extras(one, 4, 5), page_extras(two, 4, 5)
    for page in range(5):
        part = slice(page * 16, page * 16 + 16)
        assert (first[part] == second[part]) == (overlaps(one, page) == overlaps(two, page))
        assert (first[part] == bytes(16)) == (not overlaps(one, page))


@given(items, st.integers(0, 6), st.integers(0, 6))
def test_extras_of_a_piece_are_the_piece_of_the_extras(
    spans: list[tuple[bytes, int, int]], first: int, pages: int
) -> None:
    assume(first + pages <= 6)
    assert page_extras(spans, 4, pages, first_page=first) == page_extras(spans, 4, 6)[first * 16 : (first + pages) * 16]
