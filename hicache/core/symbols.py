"""Page symbols: a prompt as fixed-width bytes, one symbol a page, that the tree compares and the chain hashes.

A symbol is the page's tokens as u32 little endian, followed by a 16-byte extras digest where the tree carries extras.
Extras stand for input that tokens do not show, such as the image behind a run of equal placeholder tokens. A page
without any has a digest of zeros.
"""

from __future__ import annotations

import array
import struct
from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hicache.core.framing import digest16, frame
from hicache.errors import InvalidInput
from hicache.units import whole_number

__all__ = [
    "EXTRAS_SIZE",
    "MAX_PAGE_SIZE",
    "TOKEN_SIZE",
    "Span",
    "Tokens",
    "check_page_size",
    "check_span",
    "extras_digest",
    "page_extras",
    "symbols",
]

TOKEN_SIZE: Final = 4
EXTRAS_SIZE: Final = 16
MAX_PAGE_SIZE: Final = 32_768
"""Most tokens a page; their bytes have to fit into an object's header."""

Tokens: TypeAlias = Sequence[int] | NDArray[np.integer]
Span: TypeAlias = tuple[bytes, int, int]
"""Non-text input in a prompt: (hash of its content, first token, number of tokens)."""

_EXTRAS_TAG: Final = b"hicache-extras-v1"
_SPAN = struct.Struct("<qQ")
_TOKEN_LIMIT: Final = 2**32 - 1


def check_page_size(page_size: int) -> int:
    """The page size as an int, if it is one.

    Raises:
        InvalidInput: not an integer of 1 to `MAX_PAGE_SIZE`.
    """
    if type(page_size) is int and 1 <= page_size <= MAX_PAGE_SIZE:
        return page_size
    number = whole_number(page_size)
    if number is None or not 1 <= number <= MAX_PAGE_SIZE:
        raise InvalidInput(f"page_size {page_size!r:.40} must be an integer of 1 to {MAX_PAGE_SIZE}, such as 64")
    return number


def symbols(tokens: Tokens, page_size: int, extras: bytes | None = None) -> bytes:
    """The whole pages of a prompt as symbols; tokens behind the last whole page are checked and left out.

    Fastest for contiguous uint32 arrays (one copy), then other integer arrays, then lists.

    Args:
        tokens: token ids of 0 to 2^32-1: a one-dimensional integer array or a sequence of integers.
        page_size: tokens a page.
        extras: 16 bytes for each whole page (`page_extras`) where the tree carries extras, else None.

    Returns:
        `pages * width` bytes, width = 4 * page_size, and 16 more with extras.

    Raises:
        InvalidInput: what is no token id, by position; extras of another length.
    """
    check_page_size(page_size)
    ids = _as_u32(tokens)
    pages = len(ids) // page_size
    ids = ids[: pages * page_size]
    if extras is None:
        return ids.tobytes()
    if len(extras) != pages * EXTRAS_SIZE:
        raise InvalidInput(f"extras have {len(extras)} bytes, {pages} pages need {EXTRAS_SIZE} bytes each")
    width = TOKEN_SIZE * page_size
    both = np.empty((pages, width + EXTRAS_SIZE), np.uint8)
    both[:, :width] = np.ascontiguousarray(ids).view(np.uint8).reshape(pages, width)
    both[:, width:] = np.frombuffer(extras, np.uint8).reshape(pages, EXTRAS_SIZE)
    return both.tobytes()


def _as_u32(tokens: Tokens) -> NDArray[np.uint32]:
    if isinstance(tokens, (str, bytes, bytearray)):
        raise InvalidInput(f"tokens are {type(tokens).__name__}: give token ids, as integers")
    if isinstance(tokens, (list, tuple, range)):
        return _sequence_as_u32(tokens)
    try:
        ids = np.asarray(tokens)  # arrays of numpy and others, tensors in host memory, array.array
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidInput(f"tokens of type {type(tokens).__name__} cannot be read: give integers ({error})") from error
    if ids.ndim == 0:
        raise InvalidInput(f"tokens are {type(tokens).__name__}: give a list or an array of token ids")
    if ids.ndim != 1:
        raise InvalidInput(f"tokens have {ids.ndim} dimensions: give one prompt at a time, shape (tokens,)")
    if ids.dtype.kind not in "iu" and ids.size:  # an empty array is float by default
        raise InvalidInput(f"tokens are {ids.dtype}, not integers: give token ids of 0 to 2^32-1")
    return _array_as_u32(ids)


def _array_as_u32(ids: NDArray[np.integer]) -> NDArray[np.uint32]:
    size = ids.dtype.itemsize
    if size > TOKEN_SIZE or ids.dtype.kind == "i":
        # Seen as unsigned, a negative number is above every limit: one pass finds both kinds of bad ids.
        limit = min(_TOKEN_LIMIT, 2 ** (8 * size - (ids.dtype.kind == "i")) - 1)
        unsigned = ids.view(ids.dtype.str.replace("i", "u"))
        if len(ids) and int(unsigned.max()) > limit:
            at = int(np.argmax(unsigned > limit))
            raise _no_token(at, int(ids[at]))
    return ids.astype("<u4", copy=False)


def _sequence_as_u32(tokens: Sequence[int]) -> NDArray[np.uint32]:
    try:
        ids = np.array(array.array("I", tokens), dtype="<u4")
    except (TypeError, OverflowError, ValueError):
        raise _first_bad(tokens) from None
    # array.array takes bools as numbers; they can only hide among zeros and ones, which are few.
    for at in np.flatnonzero(ids <= 1).tolist():
        if isinstance(tokens[at], (bool, np.bool_)):
            raise _no_token(at, tokens[at])
    return ids


def _first_bad(tokens: Sequence[object]) -> InvalidInput:
    for at, token in enumerate(tokens):
        if isinstance(token, (bool, np.bool_)) or not isinstance(token, (int, np.integer)):
            return _no_token(at, token)
        if not 0 <= token <= _TOKEN_LIMIT:
            return _no_token(at, token)
    return InvalidInput("tokens cannot be read as integers: give a list or an array of token ids")


def _no_token(at: int, token: object) -> InvalidInput:
    return InvalidInput(f"token {token!r:.40} at position {at} is no token id: use integers of 0 to 2^32-1")


def extras_digest(items: Iterable[Span]) -> bytes:
    """Digest of the non-text input that overlaps one page; the order of the items does not matter.

    Args:
        items: (content hash, offset, length): first token of the item relative to the page, negative where it began
            in an earlier page, and how many tokens from there up to its end or the page's.

    Returns:
        16 bytes; zeros for no items.
    """
    frames = [frame(content) + _SPAN.pack(offset, length) for content, offset, length in items]
    if not frames:
        return bytes(EXTRAS_SIZE)
    return digest16(_EXTRAS_TAG + b"".join(sorted(frames)))


def page_extras(items: Iterable[Span], page_size: int, pages: int, *, first_page: int = 0) -> bytes:
    """Extras digests of consecutive pages.

    An item counts on each page that it overlaps, with its offset from that page, so that the same image one token
    further is another page. What lies outside the pages asked for is left out.

    Args:
        items: (content hash of 1 to 64 bytes, first token in the prompt, number of tokens).
        page_size: tokens a page.
        pages: how many pages.
        first_page: index of the first of them in the prompt.

    Returns:
        `16 * pages` bytes, zeros for pages without items.

    Raises:
        InvalidInput: an item without a content hash, before the prompt's start or of no length.
    """
    check_page_size(page_size)
    by_page: dict[int, list[Span]] = {}
    for content, start, length in items:
        check_span(content, start, length)
        end = start + length
        last = min((end - 1) // page_size, first_page + pages - 1)
        for page in range(max(start // page_size, first_page), last + 1):
            offset = start - page * page_size
            by_page.setdefault(page, []).append((content, offset, min(length, page_size - offset)))
    digests = bytearray(EXTRAS_SIZE * pages)
    for page, spans in by_page.items():
        at = (page - first_page) * EXTRAS_SIZE
        digests[at : at + EXTRAS_SIZE] = extras_digest(spans)
    return bytes(digests)


def check_span(content: object, start: object, length: object) -> None:
    """See that an item of non-text input has a content hash and a place.

    Raises:
        InvalidInput: it has not.
    """
    if type(content) is not bytes or not 1 <= len(content) <= 64:
        raise InvalidInput("non-text input needs a content hash of 1 to 64 bytes")
    if type(start) is not int or type(length) is not int or start < 0 or length < 1:
        raise InvalidInput(f"non-text input at {start!r:.40} of {length!r:.40} tokens: start must be >= 0, length >= 1")
