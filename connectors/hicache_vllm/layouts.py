"""vLLM's KV tensors: where each element of a block lies, by explicit description, and copies from and to pages.

Every layer's tensor is seen through one view for keys and one for values, with the axes

    (block, head, T, t, D, d)      token of the block = T * len(t) + t, element of the head = D * len(d) + d

whatever their order in memory is. A rank's part of a canonical page is `(head group, layer, 2, token, head in group,
element)`; divided in the same way it has the same axes, so that a copy is one assignment for each layer, plane and run
of blocks that follow each other. What is not described here is kept as bytes that only the same engine understands
(`opaque`), and what has not even the axes (block, head, token, bytes) is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from hicache.errors import ConfigError

__all__ = ["LAYOUTS", "OPAQUE", "BlockShape", "Half", "Layout", "PageForm", "Run", "runs_of"]

Array: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Half:
    """How the keys, or the values, of one block and head lie in memory.

    Attributes:
        order: the axes T, t, D and d from the slowest to the fastest.
        tokens: length of t; 1 where tokens are not divided.
        elements: length of d.
    """

    order: str
    tokens: int = 1
    elements: int = 1

    def lengths(self, block: int, width: int) -> dict[str, int]:
        """Length of each axis for so many tokens a block and elements a head."""
        return {
            "T": block // self.tokens,
            "t": self.tokens,
            "D": width // self.elements,
            "d": self.elements,
        }

    def fits(self, block: int, width: int) -> bool:
        """Whether tokens and elements divide evenly."""
        return block % self.tokens == 0 and width % self.elements == 0

    def view(self, flat: Any, block: int, width: int) -> Any:
        """`(..., block * width)` elements in memory order as `(..., T, t, D, d)`, not a copy; numpy or torch."""
        lengths = self.lengths(block, width)
        lead = len(flat.shape) - 1
        split = flat.reshape(*flat.shape[:-1], *(lengths[axis] for axis in self.order))
        return _permuted(split, (*range(lead), *(lead + self.order.index(axis) for axis in "TtDd")))


ROWS: Final = Half("TtDd")
"""Token after token, each a row of elements."""


@dataclass(frozen=True, slots=True)
class BlockShape:
    """What vLLM says of one rank's KV cache.

    Attributes:
        heads: kv heads of this rank, or head slots of the tensor.
        tokens: of a block.
        width: elements of a key row; values have as many. Bytes of a whole row where it is opaque.
        itemsize: bytes of an element.
        planes: 2 for keys and values, 1 for opaque rows.
    """

    heads: int
    tokens: int
    width: int
    itemsize: int
    planes: int = 2


@dataclass(frozen=True, slots=True)
class Layout:
    """One description.

    Attributes:
        name: by which it is known in logs and tests.
        axes: of the tensor: b = block, h = head, n = token, c = content, 2 = keys and values.
        halves: how keys and values lie; both `ROWS` where token and element are axes of their own.
        packed: whether token and content of a (block, head) are one run of memory, keys before values.
    """

    name: str
    axes: str
    halves: tuple[Half, ...]
    packed: bool = False

    def planes(self, tensor: Any, shape: BlockShape) -> tuple[Any, ...]:
        """The views of one layer, `(block, head, T, t, D, d)` each; numpy or torch, elements of any type.

        Raises:
            ConfigError: the tensor is not as described.
        """
        self._check(tensor, shape)
        if self.packed:
            return self._packed_planes(tensor, shape)
        at = {axis: i for i, axis in enumerate(self.axes)}
        if "2" in at:
            both = _permuted(tensor, tuple(at[axis] for axis in "2bhnc"))
            return tuple(_as_rows(both[plane]) for plane in range(2))
        whole = _permuted(tensor, tuple(at[axis] for axis in "bhnc"))
        return tuple(
            _as_rows(whole[..., plane * shape.width : (plane + 1) * shape.width]) for plane in range(shape.planes)
        )

    def _packed_planes(self, tensor: Any, shape: BlockShape) -> tuple[Any, ...]:
        size = shape.tokens * shape.width
        flat = tensor.reshape(*tensor.shape[:2], shape.planes * size)
        return tuple(
            half.view(flat[..., plane * size : (plane + 1) * size], shape.tokens, shape.width)
            for plane, half in enumerate(self.halves)
        )

    def _check(self, tensor: Any, shape: BlockShape) -> None:
        content = shape.width if "2" in self.axes else shape.planes * shape.width
        wanted = {"h": shape.heads, "n": shape.tokens, "c": content, "2": 2}
        found = tuple(tensor.shape)
        fits = len(found) == len(self.axes) and all(
            axis == "b" or found[i] == wanted[axis] for i, axis in enumerate(self.axes)
        )
        if not fits or not all(half.fits(shape.tokens, shape.width) for half in self.halves):
            expected = ", ".join("blocks" if axis == "b" else str(wanted[axis]) for axis in self.axes)
            raise ConfigError(f"layout {self.name}: a KV tensor of {found} is none of ({expected})")
        if self.packed and not _packs(tensor):
            raise ConfigError(f"layout {self.name}: rows of a block and head are not one run of memory")


def _as_rows(plane: Any) -> Any:
    """`(block, head, token, element)` with the axes that other layouts divide further."""
    return plane[:, :, :, None, :, None]


def _permuted(array: Any, order: tuple[int, ...]) -> Any:
    return array.transpose(order) if isinstance(array, np.ndarray) else array.permute(order)


def _packs(tensor: Any) -> bool:
    if isinstance(tensor, np.ndarray):
        item = tensor.itemsize
        return tensor.strides[3] == item and tensor.strides[2] == item * tensor.shape[3]
    return bool(tensor.stride(3) == 1 and tensor.stride(2) == tensor.shape[3])


LAYOUTS: Final = {
    layout.name: layout
    for layout in (
        # Keys of a head as [element][token], values as [token][element].
        Layout("cpu_attn/vec", "bhnc", (Half("DdTt"), ROWS), packed=True),
        # Tiles of the matrix unit: keys in 16 tokens x pairs of elements, values in 16 elements x pairs of tokens.
        Layout("cpu_attn/amx", "bhnc", (Half("TDtd", 16, 2), Half("DTdt", 2, 16)), packed=True),
        # Keys and values of a token and head side by side; strides tell whether tokens or heads go first (NHD, HND).
        Layout("rows", "bhnc", (ROWS, ROWS)),
        # Keys and values as tensors of their own.
        Layout("split/nhd", "2bnhc", (ROWS, ROWS)),
        Layout("split/hnd", "2bhnc", (ROWS, ROWS)),
        Layout("blocks/nhd", "b2nhc", (ROWS, ROWS)),
        Layout("blocks/hnd", "b2hnc", (ROWS, ROWS)),
    )
}

OPAQUE: Final = Layout("opaque", "bhnc", (ROWS,))
"""Bytes of each token's row, as the engine has them."""


@dataclass(frozen=True, slots=True)
class Run:
    """Blocks that follow each other in the engine and in the prompt.

    Attributes:
        block: the engine's number of the first one.
        at: its place among the blocks of the pages that are copied, 0 for the first block of the first page.
        count: how many.
    """

    block: int
    at: int
    count: int


def runs_of(blocks: Sequence[int], *, first: int, per_page: int) -> Iterator[Run]:
    """Divide the blocks of consecutive pages into runs that one copy moves.

    A run is within one page, or is whole pages.

    Args:
        blocks: the engine's numbers, in the order of the prompt.
        first: place of the first of them, counted in blocks from the start of the first page.
        per_page: blocks a page.
    """
    start = 0
    while start < len(blocks):
        end = start + 1
        while end < len(blocks) and blocks[end] == blocks[end - 1] + 1:
            end += 1
        while start < end:
            at = first + start
            inside = at % per_page
            whole = (end - start) // per_page * per_page
            count = min(per_page - inside, end - start) if inside or not whole else whole
            yield Run(blocks[start], at, count)
            start += count


@dataclass(frozen=True, slots=True)
class PageForm:
    """A rank's pages, and how blocks go into them. Pure; copies run in any thread.

    Attributes:
        shape: of the blocks.
        layers: of this rank.
        group: heads a head group.
        per_page: blocks a page.
        halves: how each plane divides tokens and elements.
    """

    shape: BlockShape
    layers: int
    group: int
    per_page: int
    halves: tuple[Half, ...]

    @property
    def page_bytes(self) -> int:
        """Bytes of this rank's part of a page."""
        shape = self.shape
        return self.layers * shape.planes * shape.heads * self.per_page * shape.tokens * shape.width * shape.itemsize

    def page_planes(self, pages: Any, layer: int) -> tuple[Any, ...]:
        """One layer of pages, `(pages, page elements)`, as `(page, head group, block, T, t, head, D, d)` a plane.

        Numpy or torch, not a copy.
        """
        shape = self.shape
        groups = shape.heads // self.group
        split = pages.reshape(
            len(pages), groups, self.layers, shape.planes, self.per_page, shape.tokens, self.group, shape.width
        )[:, :, layer]
        planes = []
        for plane, half in enumerate(self.halves):
            lengths = half.lengths(shape.tokens, shape.width)
            one = split[:, :, plane]
            planes.append(
                one.reshape(*one.shape[:3], lengths["T"], lengths["t"], self.group, lengths["D"], lengths["d"])
            )
        return tuple(planes)

    def block_planes(self, planes: tuple[Any, ...], run: Run) -> tuple[Any, ...]:
        """Blocks of a layer's planes as `(page or 1, head group, block, T, t, head, D, d)`, not a copy."""
        inner = self.per_page if run.count % self.per_page == 0 else run.count
        found = []
        for plane in planes:
            blocks = plane[run.block : run.block + run.count]
            groups = self.shape.heads // self.group
            split = blocks.reshape(run.count // inner, inner, groups, self.group, *blocks.shape[2:])
            found.append(_permuted(split, (0, 2, 1, 4, 5, 3, 6, 7)))
        return tuple(found)

    def copy(
        self, pages: Array, layers: Sequence[tuple[Array, ...]], runs: Sequence[Run], layer: int, *, load: bool
    ) -> None:
        """Move one layer between the engine's tensors in host memory and pages. Releases the GIL while bytes move.

        Args:
            pages: `(pages, page elements)`, contiguous, elements of the same size as the tensors'.
            layers: the planes of each layer, see `Layout.planes`.
            runs: which blocks belong where.
            layer: which one.
            load: into the tensors; else out of them.
        """
        ours = self.page_planes(pages, layer)
        for run in runs:
            page, inside = divmod(run.at, self.per_page)
            theirs = self.block_planes(layers[layer], run)
            for own, engine in zip(ours, theirs, strict=True):
                part = own[page : page + engine.shape[0], :, inside : inside + engine.shape[2]]
                if load:
                    np.copyto(engine, part)
                else:
                    np.copyto(part, engine)
