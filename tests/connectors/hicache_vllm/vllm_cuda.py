"""The small engine's tensors on a GPU: a fake of CUDA reaches the engine's and the service's memory."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import torch

from hicache.cuda import CudaOptions
from hicache.cuda.driver import Event, Stream
from hicache.testing.cuda import FakeCuda
from hicache.testing.cudacopy import KERNELS
from hicache_vllm.gpu import GpuTensors
from hicache_vllm.layouts import LAYOUTS, ROWS, PageForm

BATCH = CudaOptions(method="batch")


class EngineCuda(FakeCuda):
    """The small engine computes on the CPU, as its current stream: what that waits for, its thread has to.

    Attributes:
        layers_waited: how often the engine's stream was let wait.
        slow: copies end only when the engine waits for one, or `let_go` is called.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(memory=1 << 22, kernels=KERNELS, **options)
        self.layers_waited = 0
        self.slow = False
        self._allowed = threading.Event()

    def wait(self, stream: Stream, event: Event) -> None:
        super().wait(stream, event)
        if stream is self.default:
            self.layers_waited += 1
            self._allowed.set()
            super().synchronize(event)

    def synchronize(self, event: Event) -> None:
        if self.slow:
            assert self._allowed.wait(20)
        super().synchronize(event)

    def let_go(self) -> None:
        """Let copies end."""
        self._allowed.set()


def adopt(cuda: FakeCuda, tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        cuda.adopt(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def on_gpu(made: list[EngineCuda], layers: Any, form: PageForm) -> GpuTensors:
    """Tensors of the small engine on a device of their own, which is added to `made`."""
    cuda = EngineCuda(seed=len(made))
    made.append(cuda)
    adopt(cuda, layers)
    rows = dataclasses.replace(form, halves=(ROWS, ROWS))
    return GpuTensors(layers, LAYOUTS["rows"], rows, driver=cuda, options=BATCH)
