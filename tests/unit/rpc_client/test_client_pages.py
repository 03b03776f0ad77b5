"""Buffers of engines as pages, and pages that come in pieces."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.errors import GeometryError, LeaseExpired
from hicache.rpc.client.pages import _Sink, as_pages, unpack
from hicache.rpc.v1 import session_pb2 as pb

SIZE = 24


@pytest.mark.parametrize(
    "buffers",
    [
        np.zeros((2, SIZE), np.uint8),
        np.zeros(2 * SIZE, np.uint8),
        np.zeros((2, 3, 4), np.float16),
        np.zeros((4, SIZE), np.uint8)[::2],
        bytearray(2 * SIZE),
        [bytearray(SIZE), np.zeros((3, 4), np.float16)],
    ],
    ids=["rows", "flat", "halves", "strided rows", "bytearray", "one a page"],
)
def test_whatever_holds_whole_pages_is_seen_as_pages_without_a_copy(buffers: Any) -> None:
    pages = as_pages(buffers, SIZE, writable=True)
    assert [len(page) for page in pages] == [SIZE, SIZE]
    pages[1][:] = 7
    last = buffers[1] if isinstance(buffers, list) else np.frombuffer(memoryview(np.ascontiguousarray(buffers)), "u1")
    assert bytes(last)[-1] == 7


@pytest.mark.parametrize(
    ("buffers", "text"),
    [
        (np.zeros(SIZE + 1, np.uint8), "no whole pages"),
        ([bytearray(SIZE), bytearray(3)], "a buffer of 3 bytes is no page"),
        (bytes(SIZE), "read-only"),
        ([bytes(SIZE)], "read-only"),
        (np.zeros((4, 12), np.uint8)[:, ::2], "no contiguous buffer"),
        (7, "a int is no contiguous buffer"),
        ("x" * SIZE, "no contiguous buffer"),
    ],
)
def test_buffers_that_are_no_pages_are_refused(buffers: Any, text: str) -> None:
    with pytest.raises(GeometryError, match=text):
        as_pages(buffers, SIZE, writable=True)


def test_read_only_buffers_can_be_written_from() -> None:
    assert len(as_pages(bytes(2 * SIZE), SIZE, writable=False)) == 2


def test_slots_without_their_words_mean_nothing() -> None:
    with pytest.raises(LeaseExpired):
        unpack(b"\0\0\0\0", b"")


@given(st.data())
def test_pieces_in_order_are_whole_pages_and_nothing_behind_a_hole_counts(data: st.DataObject) -> None:
    pages = data.draw(st.integers(1, 4))
    content = np.frombuffer(np.random.default_rng(pages).bytes(pages * SIZE), np.uint8).reshape(pages, SIZE)
    pieces = []
    for page in range(pages):
        cuts = sorted({0, SIZE, *data.draw(st.lists(st.integers(1, SIZE - 1), max_size=3))})
        pieces += [(page, begin, end) for begin, end in itertools.pairwise(cuts)]
    lost = data.draw(st.none() | st.integers(0, len(pieces) - 1))
    target = np.zeros((pages, SIZE), np.uint8)
    sink = _Sink(target, 0, 5, SIZE)
    for at, (page, begin, end) in enumerate(pieces):
        if at != lost:
            sink(pb.Bytes(page=5 + page, offset=begin, data=content[page, begin:end].tobytes()))
    whole = pages if lost is None else pieces[lost][0]
    assert sink.pages == whole
    assert (target[:whole] == content[:whole]).all()


@pytest.mark.parametrize("piece", [(6, 0, 24), (5, 8, 8), (5, 0, 25)], ids=["another page", "a hole", "too long"])
def test_a_piece_that_does_not_come_next_is_left_out(piece: tuple[int, int, int]) -> None:
    page, offset, length = piece
    target = np.zeros((2, SIZE), np.uint8)
    sink = _Sink(target, 0, 5, SIZE)
    sink(pb.Bytes(page=page, offset=offset, data=b"\7" * length))
    assert sink.pages == 0
    assert not target.any()
