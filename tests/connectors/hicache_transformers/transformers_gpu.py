"""A GPU for the small model: a fake of CUDA holds pages, and the model computes on the CPU, as one of its streams."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np
import torch

from hicache.cuda import CudaDevicePool, CudaOptions
from hicache.cuda.driver import Event, Stream
from hicache.testing.cuda import FakeCuda
from hicache.testing.cudacopy import KERNELS
from hicache.testing.cudastreams import Gate
from hicache_transformers.convert import PageShape
from hicache_transformers.window import GpuWindow

BATCH = CudaOptions(method="batch")
CPU = torch.device("cpu")
PAGE = 4  # tokens


class ModelCuda(FakeCuda):
    """The model computes on the CPU, as the current stream: what that waits for, its thread has to."""

    def __init__(self, *, memory: int = 1 << 20, seed: int = 0) -> None:
        super().__init__(memory=memory, kernels=KERNELS, seed=seed)

    def wait(self, stream: Stream, event: Event) -> None:
        super().wait(stream, event)
        if stream is self.current_stream():
            self.synchronize(event)


class Overlapped(ModelCuda):
    """Once it is armed, the stream of copies up stands still behind the first layer's event, until it is opened."""

    armed = False
    held: Gate | None = None

    def record(self, event: Event, stream: Stream) -> None:
        super().record(event, stream)
        if self.armed and self.held is None and self.timeline.streams[stream.ptr].priority == "high":
            self.held = self.gate(self.timeline.streams[stream.ptr])


def of_fake(pool: CudaDevicePool, device: torch.device) -> torch.Tensor:
    """As torch makes one of memory on a GPU."""
    assert device == CPU
    shown = pool.__cuda_array_interface__
    memory = (ctypes.c_uint8 * math.prod(shown["shape"])).from_address(shown["data"][0])
    return torch.from_numpy(np.ctypeslib.as_array(memory).reshape(shown["shape"]))


def window_on(cuda: FakeCuda, shape: PageShape, dtype: torch.dtype, size: Any) -> GpuWindow:
    """A window on the fake, in memory that torch has."""

    def made(sizes: tuple[int, ...], device: torch.device) -> torch.Tensor:
        memory = torch.full(sizes, 0xEE, dtype=torch.uint8, device=device)
        cuda.adopt(memory.data_ptr(), memory.numel())
        return memory

    return GpuWindow(shape, device=CPU, dtype=dtype, size=size, driver=cuda, options=BATCH, make=made)


def prompt(*, seed: int = 1, tokens: int = 41) -> torch.Tensor:
    return torch.randint(2, 97, (1, tokens), generator=torch.Generator().manual_seed(seed))
