"""The service's memory, made ready for a device before there are requests: pinned, once each time that it is mapped."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from functools import partial

from hicache.rpc.client.cache import ConnectedCache
from hicache.rpc.client.memory import SharedPages
from hicache_vllm.copier import Copier
from hicache_vllm.tensors import DirectTensors

__all__ = ["Attaching"]

_log = logging.getLogger("vllm.hicache")


class Attaching:
    """Of one worker. Used on the engine's thread.

    Args:
        cache: client of the service.
        tensors: a device's; or None, and nothing has to be made ready.
        copier: does it where the engine has begun already.
    """

    def __init__(self, cache: ConnectedCache, tensors: DirectTensors | None, copier: Copier) -> None:
        self._cache = cache
        self._tensors = tensors
        self._copier = copier
        self._ready: Callable[[], SharedPages | None] = _none

    def begin(self, seconds: float) -> None:
        """The engine starts: wait so long for the service, and make its memory ready now."""
        tensors = self._tensors
        if tensors is None or not self._cache.wait_connected(seconds):
            return
        memory = self._cache.host.memory
        if memory is not None:
            self._ready = weakref.ref(memory)
            _attach(tensors, memory)
        else:  # out of reach: each thread that copies needs a buffer of its own
            self._copier.load(partial(_attach, tensors, None))
            self._copier.store(partial(_attach, tensors, None))

    def again(self) -> None:
        """A step begins: if the service has come, or come back, its memory is made ready while the engine goes on."""
        tensors = self._tensors
        memory = None if tensors is None else self._cache.host.memory
        if tensors is not None and memory is not None and memory is not self._ready():
            self._ready = weakref.ref(memory)
            self._copier.store(partial(_attach, tensors, memory))


def _attach(tensors: DirectTensors, memory: SharedPages | None) -> None:
    _log.info("hicache: %s", tensors.attach(memory))


def _none() -> None:
    return None
