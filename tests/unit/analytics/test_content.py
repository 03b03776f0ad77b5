"""Content of replayed pages: a function of namespace and past, checked to the last byte."""

from __future__ import annotations

import numpy as np
import pytest

from hicache.analytics.content import PageContent


def tokens(*values: int) -> bytes:
    return np.array(values, dtype="<u4").tobytes()


def pages(content: PageContent, prompt: bytes) -> list[bytes]:
    return [content.make(state).tobytes() for state in content.states(prompt)]


def content(namespace: bytes = b"n" * 16, *, page_tokens: int = 2, page_bytes: int = 10_000) -> PageContent:
    return PageContent(namespace=namespace, page_tokens=page_tokens, page_bytes=page_bytes)


@pytest.mark.case("KEY-2")
def test_content_depends_on_the_whole_past() -> None:
    ax = pages(content(), tokens(1, 2, 9, 9))
    bx = pages(content(), tokens(1, 3, 9, 9))
    assert ax[0] != bx[0]
    assert ax[1] != bx[1]
    assert pages(content(), tokens(1, 2, 9, 9, 5)) == ax  # the tail is no page


def test_content_depends_on_the_namespace_and_on_nothing_else() -> None:
    prompt = tokens(1, 2)
    assert pages(content(), prompt) == pages(content(), prompt)
    assert pages(content(), prompt) != pages(content(b"m" * 16), prompt)


def test_no_word_is_shared_and_no_part_repeats() -> None:
    one, two = (np.frombuffer(page[:9984], np.uint64) for page in pages(content(), tokens(1, 2, 3, 4)))
    assert not (one == two).any()
    assert len(np.unique(one)) == len(one)


@pytest.mark.parametrize("page_bytes", [1, 7, 8, 4096, 10_001])
def test_every_byte_is_compared(page_bytes: int) -> None:
    made = content(page_bytes=page_bytes)
    (state,) = made.states(tokens(1, 2))
    page = made.make(state).copy()
    assert page.shape == (page_bytes,)
    assert made.matches(state, page)
    for at in {0, page_bytes // 2, page_bytes - 1}:
        page[at] ^= 1
        assert not made.matches(state, page)
        page[at] ^= 1
    assert made.matches(state, page)


def test_page_of_another_length_is_wrong() -> None:
    made = content(page_bytes=16)
    (state,) = made.states(tokens(1, 2))
    assert not made.matches(state, made.make(state)[:15])
