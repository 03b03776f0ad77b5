"""SGLang's host pools: where a page's cells lie in them, by explicit description. What is not described is refused.

A page comes to us in one of two ways: as a place in the pool (`HostPages.at`), or flat, as SGLang's generic interface
passes it (`HostPages.flat`). Both hold the same axes in the same order, that of the pool's layout, and are seen through
one transposed view in canonical order: `(head group, layer, 2, token, head in group, row bytes)`, for MLA
`(layer, token, row bytes)`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from hicache.errors import ConfigError

__all__ = ["Bytes", "HostPages", "PoolShape", "describe_pool"]

Bytes: TypeAlias = npt.NDArray[np.uint8]

# By class name, and not for subclasses: those keep state beside the pages (scales, an indexer) or lay rows out anew.
_MHA: Final = "MHATokenToKVPoolHost"
_MLA: Final = "MLATokenToKVPoolHost"

# Axes of a pool's buffer: c = keys and values, l = layer, s = token slot, n = page, p = token in page, h = head,
# d = row, 1 = an axis of length one.
_BUFFERS: Final = {
    _MHA: {
        "layer_first": "clshd",
        "page_first": "cslhd",
        "page_first_direct": "cnlphd",
        "page_head": "cnhpld",
    },
    _MLA: {
        "layer_first": "ls1d",
        "page_first": "sl1d",
        "page_first_direct": "nlp1d",
    },
}


@dataclass(frozen=True, slots=True)
class PoolShape:
    """What a host pool says of itself.

    Attributes:
        kind: "mha" or "mla".
        layout: SGLang's name.
        dtype: name of the elements' type as the pool keeps them.
        itemsize: bytes of an element.
        page_size: tokens a page.
        tokens: token slots.
        layers: layers that the pool holds, those of packed draft models included.
        first_layer: absolute index of the first one.
        draft_layers: how many of the layers are a draft model's.
        heads: kv heads of this rank; 1 for MLA.
        row: elements of a row.
        latent, rope: parts of an MLA row; 0 for MHA.
    """

    kind: str
    layout: str
    dtype: str
    itemsize: int
    page_size: int
    tokens: int
    layers: int
    first_layer: int
    draft_layers: int
    heads: int
    row: int
    latent: int = 0
    rope: int = 0

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.row * self.itemsize

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in this pool."""
        planes = 2 if self.kind == "mha" else 1
        return planes * self.layers * self.page_size * self.heads * self.row_bytes


def describe_pool(pool: Any) -> PoolShape:
    """Read a host pool's geometry.

    Raises:
        ConfigError: a kind of pool or a layout that is not described here.
    """
    name = type(pool).__name__
    if name not in _BUFFERS:
        raise ConfigError(f"host pool {name} is not understood: known are {', '.join(_BUFFERS)}")
    layout = str(pool.layout)
    if layout not in _BUFFERS[name]:
        known = ", ".join(_BUFFERS[name])
        raise ConfigError(f"layout {layout} of {name} is not understood: use --hicache-mem-layout with one of {known}")
    if getattr(pool, "dcp_size", 1) != 1:
        raise ConfigError("decode context parallelism splits pages over ranks: switch it off, or use no storage")
    itemsize = int(pool.dtype.itemsize)
    layers = int(pool.layer_num)
    common: dict[str, Any] = {
        "layout": layout,
        "dtype": str(pool.dtype).removeprefix("torch."),
        "itemsize": itemsize,
        "page_size": int(pool.page_size),
        "tokens": int(pool.size),
        "layers": layers,
        "first_layer": int(pool.start_layer or 0),
        "draft_layers": layers - int(getattr(pool, "target_layer_num", layers)),
    }
    if name == _MLA:
        latent, rope = int(pool.kv_lora_rank), int(pool.qk_rope_head_dim)
        return PoolShape(kind="mla", heads=1, row=int(pool.kv_cache_dim), latent=latent, rope=rope, **common)
    row = int(pool.head_dim)
    if int(getattr(pool, "v_head_dim", row)) != row:
        raise ConfigError(
            f"host pool {name} has keys of {row} and values of {pool.v_head_dim} elements: not understood"
        )
    return PoolShape(kind="mha", heads=int(pool.head_num), row=row, **common)


class HostPages:
    """The pages of one host pool, as views in canonical order. Owns nothing; any thread may use it.

    Args:
        pool: SGLang's host pool; it stays SGLang's and must outlive this object.
        shape: its description.
        head_group: kv heads a cell; divides the pool's heads. 1 for MLA.

    Raises:
        ConfigError: the pool's buffer is not as its layout says.
    """

    def __init__(self, pool: Any, shape: PoolShape, *, head_group: int) -> None:
        self.shape = shape
        axes = _BUFFERS[type(pool).__name__][shape.layout]
        self._buffer = _bytes_of(pool.kv_buffer, shape, axes)
        self._paged = "n" in axes
        self._at = axes.index("n" if self._paged else "s")
        self._page_axes = axes.replace("n", "").replace("s", "p")
        self._page_shape = tuple(_lengths(shape)[axis] for axis in self._page_axes)
        self._head_group = head_group
        self._check_places(pool)

    def at(self, first_token: int) -> Bytes | None:
        """The page that begins at a token slot of the pool; None if no page begins there."""
        size = self.shape.page_size
        if first_token % size or not 0 <= first_token <= self.shape.tokens - size:
            return None
        where = first_token // size if self._paged else slice(first_token, first_token + size)
        index: Any = (*(slice(None) for _ in range(self._at)), where)
        return self._canonical(self._buffer[index])

    def flat(self, tensor: Any) -> Bytes | None:
        """A flat page as SGLang's generic interface passes it; None if it is no page of this pool."""
        import torch

        if not isinstance(tensor, torch.Tensor) or tensor.device.type != "cpu" or not tensor.is_contiguous():
            return None
        if str(tensor.dtype).removeprefix("torch.") != self.shape.dtype or tensor.nbytes != self.shape.page_bytes:
            return None
        page = tensor.reshape(-1).view(torch.uint8).numpy()
        return self._canonical(page.reshape(self._page_shape))

    def _canonical(self, page: Bytes) -> Bytes:
        if self.shape.kind == "mla":
            at = {axis: i for i, axis in enumerate(self._page_axes)}
            one: Bytes = page.transpose(*(at[axis] for axis in "1lpd"))[0]
            return one
        heads = self._page_axes.index("h")
        groups = self.shape.heads // self._head_group
        split = page.reshape(*page.shape[:heads], groups, self._head_group, *page.shape[heads + 1 :])
        at = {axis: i for i, axis in enumerate(self._page_axes.replace("h", "gh"))}
        return split.transpose(*(at[axis] for axis in "glcphd"))

    def _check_places(self, pool: Any) -> None:
        """See that SGLang says the same about where a page begins; the last page shows all strides."""
        import torch

        shape = self.shape
        first = shape.tokens - shape.page_size
        pointers, sizes = pool.get_page_buffer_meta(torch.arange(first, shape.tokens))
        page = self.at(first)
        assert page is not None
        # Keys of the first layer, and its values where they lie apart.
        begins = [page[0, 0, 0], page[0, 0, 1]] if shape.kind == "mha" else [page]
        wanted = [int(view.__array_interface__["data"][0]) for view in begins]
        if sum(sizes) != shape.page_bytes or list(pointers[: len(wanted)]) != wanted:
            raise ConfigError(f"host pool {type(pool).__name__} of layout {shape.layout} lies otherwise than described")


def _lengths(shape: PoolShape) -> dict[str, int]:
    return {
        "c": 2,
        "l": shape.layers,
        "s": shape.tokens,
        "n": shape.tokens // shape.page_size,
        "p": shape.page_size,
        "h": shape.heads,
        "d": shape.row_bytes,
        "1": 1,
    }


def _bytes_of(buffer: Any, shape: PoolShape, axes: str) -> Bytes:
    import torch

    lengths = _lengths(shape)
    wanted = tuple(lengths[axis] for axis in axes[:-1])
    if not isinstance(buffer, torch.Tensor) or buffer.device.type != "cpu" or not buffer.is_contiguous():
        raise ConfigError("host pool has no contiguous buffer in host memory: not understood")
    if tuple(buffer.shape[:-1]) != wanted or buffer.shape[-1] * buffer.element_size() != lengths["d"]:
        raise ConfigError(
            f"host pool of layout {shape.layout} has a buffer of {tuple(buffer.shape)}, not {(*wanted, shape.row)}"
        )
    found: Bytes = buffer.detach().view(torch.uint8).numpy().reshape(*wanted, lengths["d"])
    assert found.nbytes == math.prod(wanted) * lengths["d"]
    return found
