"""KV tensors on a device. What is here was tried with tensors in host memory only: no CUDA device was at hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from hicache.errors import ConfigError
from hicache_vllm.layouts import Layout, PageForm, Run
from hicache_vllm.tensors import Bytes, integers

__all__ = ["CudaStreams", "DeviceTensors", "Streams", "like"]


class DeviceTensors:
    """Tensors on a device, which torch moves, on a stream of its own behind what the engine has begun.

    Args:
        layers, layout, form: as in `HostTensors`.
        streams: the device's streams and events.
    """

    def __init__(self, layers: Sequence[Any], layout: Layout, form: PageForm, streams: Streams) -> None:
        if len(layers) != form.layers:
            raise ConfigError(f"vLLM has {len(layers)} layers with a KV cache, the model {form.layers}: not understood")
        self._form = form
        self._streams = streams
        self._device = layers[0].device
        self._kind = integers(form.shape.itemsize)
        self._layers = [layout.planes(tensor.detach().view(self._kind), form.shape) for tensor in layers]

    @property
    def block_bytes(self) -> int:
        """See `KVTensors`."""
        return self._form.page_bytes // self._form.per_page

    def mark(self) -> Callable[[], None]:
        """See `KVTensors`."""
        return self._streams.mark()

    def load(self, pages: Bytes, runs: Sequence[Run], came: Callable[[int], None] | None = None) -> None:
        """See `KVTensors`."""
        import torch

        with self._streams.own():
            given = torch.from_numpy(pages).view(self._kind).to(self._device, non_blocking=True)
            places = [run.at + i for run in runs for i in range(run.count)]
            at, blocks = self._numbers(places), self._numbers(_blocks(runs))
            for layer, planes in enumerate(self._layers):
                for own, engine in zip(self._form.page_planes(given, layer), planes, strict=True):
                    by_block = own.permute(0, 2, 1, 5, 3, 4, 6, 7).flatten(0, 1).flatten(1, 2)
                    engine.index_copy_(0, blocks, by_block.index_select(0, at))
                if came is not None:
                    self._streams.wait()
                    came(layer)
            self._streams.wait()

    def store(self, pages: int, runs: Sequence[Run]) -> Bytes:
        """See `KVTensors`: always whole pages."""
        import torch

        form = self._form
        with self._streams.own():
            kept = torch.empty((pages, form.page_bytes // form.shape.itemsize), dtype=self._kind, device=self._device)
            blocks = self._numbers(_blocks(runs))
            for layer, planes in enumerate(self._layers):
                for own, engine in zip(form.page_planes(kept, layer), planes, strict=True):
                    found = engine.index_select(0, blocks)
                    split = found.unflatten(1, (form.shape.heads // form.group, form.group))
                    own.copy_(split.unflatten(0, (pages, form.per_page)).permute(0, 2, 1, 4, 5, 3, 6, 7))
            host = self._streams.host(kept)
            self._streams.wait()
        return np.asarray(host.view(torch.uint8).numpy())

    def _numbers(self, values: Sequence[int]) -> Any:
        import torch

        return torch.tensor(values, dtype=torch.int64).to(self._device)


class Streams:
    """Order between the engine's work on a device and ours. This one is for devices that do all work at once."""

    def mark(self) -> Callable[[], None]:
        """Remember what the calling thread has begun; returns what lets our work wait for it."""
        return _nothing

    def own(self) -> AbstractContextManager[Any]:
        """What is begun inside goes on our stream."""
        return nullcontext()

    def wait(self) -> None:
        """Block until our work is done."""

    def host(self, tensor: Any) -> Any:
        """A copy in host memory, there once `wait` returns."""
        return tensor.cpu()


class CudaStreams(Streams):
    """On CUDA."""

    def __init__(self) -> None:
        import torch

        self._cuda: Any = torch.cuda
        self._stream: Any = self._cuda.Stream()

    def mark(self) -> Callable[[], None]:
        """See `Streams`."""
        event = self._cuda.Event()
        event.record(self._cuda.current_stream())
        return lambda: self._stream.wait_event(event)

    def own(self) -> AbstractContextManager[Any]:
        """See `Streams`."""
        stream: AbstractContextManager[Any] = self._cuda.stream(self._stream)
        return stream

    def wait(self) -> None:
        """See `Streams`. Releases the GIL."""
        self._stream.synchronize()

    def host(self, tensor: Any) -> Any:
        """See `Streams`."""
        import torch

        kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return kept.copy_(tensor, non_blocking=True)


def like(tensor: Any, axis: int, blocks: int) -> Any:
    """A tensor of zeros that lies in memory as another one, with so many blocks.

    Args:
        tensor: the other one.
        axis: of its blocks.
        blocks: how many.
    """
    import torch

    order = sorted(range(tensor.dim()), key=lambda one: -tensor.stride(one))
    shape = [blocks if one == axis else length for one, length in enumerate(tensor.shape)]
    made = torch.zeros([shape[one] for one in order], dtype=tensor.dtype, device=tensor.device)
    return made.permute([order.index(one) for one in range(tensor.dim())])


def _blocks(runs: Sequence[Run]) -> list[int]:
    return [run.block + i for run in runs for i in range(run.count)]


def _nothing() -> None:
    return
