"""How the bytes of one page lie, in engines' tensors and in canonical form.

Canonical form is what host pools and stored objects hold: `(head_group, layer, plane, token, head in group, row)`,
where a plane is K or V, and latent pages (MLA) are `(layer, token, row)`. Engines lay out whole pools instead, in
one of the orders of `LAYOUTS`; memory is converted between the two by these descriptions and by nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from hicache.core.layout import DTYPE_BYTES, KVGeometry, LayerGroup
from hicache.core.symbols import check_page_size
from hicache.errors import GeometryError

__all__ = ["LAYOUTS", "PageLayout", "layout_axes"]

LAYOUTS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "layer_first": ("layer", "plane", "slot", "token", "head", "dim"),
        "page_first": ("slot", "layer", "plane", "token", "head", "dim"),
        "opaque": ("slot", "byte"),
    }
)
"""Order of the axes of an engine's pool, by the layout's name. Latent state has no plane and no head axis; in
"opaque" a slot's bytes are the page in canonical form already, or in a form that is nobody's business here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageLayout:
    """Sizes of one page. Two pools can exchange pages exactly when their layouts are equal.

    Attributes:
        kind: "mha" (with planes K and V and a head axis), "mla" (latent rows) or "opaque" (one run of bytes).
        layers: layers of the page; 1 where opaque.
        planes: 2 for K and V, else 1.
        tokens: tokens of the page; 1 where opaque.
        heads: kv heads; 1 without a head axis.
        head_group: heads that lie together in canonical form.
        row_bytes: bytes of one token and head in one plane; the whole page where opaque.
        dtype: name of the elements' type, or a label that no type has.
    """

    kind: str
    layers: int
    planes: int
    tokens: int
    heads: int
    head_group: int
    row_bytes: int
    dtype: str

    @classmethod
    def of(cls, geometry: KVGeometry, page_size: int) -> PageLayout:
        """The layout of a geometry's pages. Where layers differ from each other, the page is one opaque run.

        Raises:
            GeometryError: no geometry.
            InvalidInput: a page size that is none.
        """
        if not isinstance(geometry, KVGeometry):
            raise GeometryError(
                f"geometry must be a KVGeometry, not {type(geometry).__name__}: use KVGeometry.mha(...) or another"
            )
        page_size = check_page_size(page_size)
        group = geometry.groups[0]
        if len(geometry.groups) > 1 or group.kind not in {"mha", "mla"} or group.page_bytes:
            return cls._run(geometry, page_size)
        if group.kind == "mla":
            return cls._of_group(group, page_size, planes=1, heads=1)
        return cls._of_group(group, page_size, planes=2, heads=group.kv_heads)

    @classmethod
    def _run(cls, geometry: KVGeometry, page_size: int) -> PageLayout:
        size = geometry.page_bytes(page_size)
        return cls(
            kind="opaque", layers=1, planes=1, tokens=1, heads=1, head_group=1, row_bytes=size, dtype=geometry.dtype
        )

    @classmethod
    def _of_group(cls, group: LayerGroup, page_size: int, *, planes: int, heads: int) -> PageLayout:
        head_group = group.head_group or 1
        return cls(
            kind=group.kind,
            layers=group.layer_count,
            planes=planes,
            tokens=page_size,
            heads=heads,
            head_group=head_group,
            row_bytes=group.token_bytes // (planes * head_group),
            dtype=group.dtype,
        )

    @property
    def head_groups(self) -> int:
        """Cells of one layer."""
        return self.heads // self.head_group

    @property
    def plane_bytes(self) -> int:
        """Bytes of one layer's K or V, all heads."""
        return self.tokens * self.heads * self.row_bytes

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer, all planes and heads."""
        return self.planes * self.plane_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of the page."""
        return self.layers * self.layer_bytes

    @property
    def element_bytes(self) -> int | None:
        """Bytes of one element, or None where the dtype is only a label."""
        return DTYPE_BYTES.get(self.dtype)

    @property
    def canonical_shape(self) -> tuple[int, int, int, int, int, int]:
        """Shape of a canonical page as bytes: (head_group, layer, plane, token, head in group, row byte)."""
        return (self.head_groups, self.layers, self.planes, self.tokens, self.head_group, self.row_bytes)

    def check_holds(self, geometry: KVGeometry, page_size: int) -> None:
        """See that a device pool whose slots are pages of this layout fits a namespace.

        Raises:
            GeometryError: the namespace's pages are others.
            InvalidInput: a page size that is none.
        """
        wanted = PageLayout.of(geometry, page_size)
        if wanted != self:
            raise GeometryError(
                f"the device pool holds {self.describe()} ({self.dtype}), the namespace has "
                f"{wanted.describe()} ({wanted.dtype}): open it with the pool's geometry and page size"
            )

    def describe(self) -> str:
        """One line for error messages."""
        if self.kind == "opaque":
            return f"opaque pages of {self.page_bytes} bytes"
        head = f"{self.heads} heads in groups of {self.head_group}, " if self.kind == "mha" else ""
        return f"{self.kind} pages of {self.layers} layers, {self.tokens} tokens, {head}rows of {self.row_bytes} bytes"


def layout_axes(name: str, page: PageLayout) -> tuple[str, ...]:
    """The axes of a pool in layout `name` that holds such pages.

    Raises:
        GeometryError: an unknown layout, or one that cannot hold these pages.
    """
    axes = LAYOUTS.get(str(name))
    if axes is None:
        raise GeometryError(f"unknown device layout {name!r:.40}: use one of {', '.join(LAYOUTS)}")
    if page.kind == "opaque" and name != "opaque":
        raise GeometryError(
            f'{page.describe()} have no layers and heads that layout "{name}" could order: use layout "opaque"'
        )
    absent = {"plane", "head"} if page.kind == "mla" else set()
    return tuple(axis for axis in axes if axis not in absent)
