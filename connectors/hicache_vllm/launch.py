"""`python -m hicache_vllm.launch PID ...`: the `hicache` command in a process that ends when its parent does."""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def end_with(parent: int) -> bool:
    """Ask the kernel for SIGTERM when the parent ends; False where it has ended already."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    return os.getppid() == parent


if __name__ == "__main__" and end_with(int(sys.argv[1])):
    sys.argv[:2] = ["hicache"]
    runpy.run_module("hicache", run_name="__main__")
