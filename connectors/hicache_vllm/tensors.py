"""One rank's KV tensors, on the processor or a device, as something that pages are copied into and out of."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from hicache.errors import ConfigError, HicacheError
from hicache_vllm.layouts import Layout, PageForm, Run, runs_of

if TYPE_CHECKING:
    from hicache.rpc.client.group import JoinedRequest
    from hicache.rpc.client.memory import SharedPages

__all__ = [
    "Bytes",
    "DirectTensors",
    "HostTensors",
    "KVTensors",
    "PagesAtRiskError",
    "Wait",
    "integers",
    "made_of",
    "ordered",
]

_log = logging.getLogger("vllm.hicache")

Bytes: TypeAlias = npt.NDArray[np.uint8]

_NUMBER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


class PagesAtRiskError(HicacheError):
    """A device has failed under copies into the service's pages: nobody can tell whether their bytes still move.

    So the pages must not become anybody else's while this process lives.
    """


class KVTensors(Protocol):
    """Copies between pages and blocks. `load` and `store` are for one thread at a time, not the engine's."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers."""
        ...

    def mark(self) -> Callable[[], None]:
        """Remember what the engine has begun to compute; called by its thread.

        Returns:
            Waits until that is done, in another thread.
        """
        ...

    def load(self, pages: Bytes, runs: Sequence[Run], came: Callable[[int], None] | None = None) -> None:
        """Copy pages, `(pages, page_bytes)`, into blocks; done when it returns. `came` hears of each layer."""
        ...

    def store(self, pages: int, runs: Sequence[Run]) -> Bytes:
        """Copy blocks into pages that are new, or were given by the call before."""
        ...


Wait: TypeAlias = Callable[[int], object]
"""Lets the stream of the calling thread wait for a layer."""


@runtime_checkable
class DirectTensors(Protocol):
    """Tensors that copy pages from and to the service's memory themselves, loads and stores at the same time."""

    def fetch(
        self, joined: JoinedRequest, first: int, blocks: Sequence[int], *, inside: int, begun: Callable[[Wait], None]
    ) -> int:
        """Copy pages into blocks; how many blocks, from the first on, are right.

        Args:
            joined: the request.
            first: index of the first page.
            blocks: the engine's numbers, in the order of the prompt.
            inside: place of the first of them in the first page.
            begun: called once when all layers are on their way, or are there.
        """
        ...

    def put(self, joined: JoinedRequest, first: int, blocks: Sequence[int]) -> int:
        """Copy blocks into pages from the index `first` on; how many pages, from the first on, are written."""
        ...

    def attach(self, memory: SharedPages | None) -> str:
        """Make ready all that copies from and to a service's memory need, so that no copy has to.

        Args:
            memory: of the service, as it is mapped here; None where it is out of reach. Then what the calling thread
                needs to copy without is made.

        Returns:
            In words what copies will be like.
        """
        ...

    def close(self) -> None:
        """Let go of everything. Idempotent."""
        ...


def ordered(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The layers' tensors by name, in the order of the layers.

    Raises:
        ConfigError: names without a number, or two with the same.
    """
    numbers: dict[int, str] = {}
    for name in tensors:
        found = _NUMBER.search(name)
        if found is None or int(found[1]) in numbers:
            raise ConfigError(f"layer {name!r} has no number of its own: its place in a page is not known")
        numbers[int(found[1])] = name
    return {numbers[number]: tensors[numbers[number]] for number in sorted(numbers)}


class HostTensors:
    """Tensors in host memory, which numpy moves.

    Args:
        layers: one tensor a layer, in order; they stay the engine's.
        layout: of each.
        form: of a page.
    """

    def __init__(self, layers: Sequence[Any], layout: Layout, form: PageForm) -> None:
        if len(layers) != form.layers:
            raise ConfigError(f"vLLM has {len(layers)} layers with a KV cache, the model {form.layers}: not understood")
        self._form = form
        self._element = np.dtype(f"u{form.shape.itemsize}")
        self._layers = [layout.planes(_elements(tensor, form.shape.itemsize), form.shape) for tensor in layers]

    @property
    def block_bytes(self) -> int:
        """See `KVTensors`."""
        return self._form.page_bytes // self._form.per_page

    def mark(self) -> Callable[[], None]:
        """See `KVTensors`: on the processor everything is computed when the engine's thread goes on."""
        return _nothing

    def load(self, pages: Bytes, runs: Sequence[Run], came: Callable[[int], None] | None = None) -> None:
        """See `KVTensors`."""
        elements = pages.view(self._element)
        for layer in range(self._form.layers):
            self._form.copy(elements, self._layers, runs, layer, load=True)
            if came is not None:
                came(layer)

    def store(self, pages: int, runs: Sequence[Run]) -> Bytes:
        """See `KVTensors`."""
        buffer = np.empty((pages, self._form.page_bytes), np.uint8)
        elements = buffer.view(self._element)
        for layer in range(self._form.layers):
            self._form.copy(elements, self._layers, runs, layer, load=False)
        return buffer

    def by_layer(self, joined: JoinedRequest, first: int, blocks: Sequence[int]) -> HostLayers:
        """See `early.LayerTensors`."""
        runs = list(runs_of(blocks, first=0, per_page=self._form.per_page))
        return HostLayers(self._form, self._layers, joined, first, len(blocks) // self._form.per_page, runs)


class HostLayers:
    """Layers on their way into pages; see `early.LayerCopy`."""

    def __init__(
        self,
        form: PageForm,
        tensors: Sequence[tuple[Any, ...]],
        joined: JoinedRequest,
        first: int,
        pages: int,
        runs: Sequence[Run],
    ) -> None:
        self._form = form
        self._tensors = tensors
        self._joined = joined
        self._first = first
        self._runs = runs
        self._buffer = np.empty((pages, form.page_bytes), np.uint8)
        self._elements = self._buffer.view(f"u{form.shape.itemsize}")

    def copy(self, first: int, end: int) -> None:
        """See `early.LayerCopy`."""
        for layer in range(first, end):
            self._form.copy(self._elements, self._tensors, self._runs, layer, load=False)

    def finish(self, *, good: bool) -> int:
        """See `early.LayerCopy`."""
        return self._joined.write_from(self._buffer, first=self._first) if good else 0


def made_of(layers: Sequence[Any], layout: Layout, form: PageForm) -> KVTensors:
    """What moves these tensors, wherever they are.

    Raises:
        ConfigError: a device that is not known here, or several.
    """
    places = sorted({str(tensor.device) for tensor in layers})
    if len(places) > 1:
        raise ConfigError(f"KV tensors on {', '.join(places)}: all of a worker's have to be on one, give each a worker")
    kind = layers[0].device.type
    if kind == "cpu":
        return HostTensors(layers, layout, form)
    if kind == "cuda":
        return _on_gpu(layers, layout, form)
    raise ConfigError(f"KV tensors on {layers[0].device} are not understood: known are cpu and cuda")


def _on_gpu(layers: Sequence[Any], layout: Layout, form: PageForm) -> KVTensors:
    from hicache_vllm.devices import CudaStreams, DeviceTensors
    from hicache_vllm.gpu import GpuTensors

    try:
        return GpuTensors(layers, layout, form)
    except ConfigError as error:  # no cupy beside the engine, or a layout of its kernels' own
        _log.warning("hicache: pages go by torch's own copies, which are slower: %s", error)
        return DeviceTensors(layers, layout, form, CudaStreams())


def _nothing() -> None:
    return


def integers(itemsize: int) -> Any:
    """Torch's integers of so many bytes."""
    import torch

    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[itemsize]


def _elements(tensor: Any, itemsize: int) -> Any:
    """A tensor in host memory as unsigned integers of numpy, not a copy."""
    if tensor.device.type != "cpu":
        raise ConfigError(f"a KV tensor on {tensor.device} is not in host memory")
    return tensor.detach().view(integers(itemsize)).numpy().view(f"u{itemsize}")
