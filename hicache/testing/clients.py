"""What tests of clients begin with: tiny pages, a client that comes back soon, a prompt that is stored."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

import hicache
from hicache.testing.engine import small_namespace

__all__ = ["NAMESPACE", "PATIENCE", "SIZE", "SOON", "connected", "random_pages", "store", "until"]

PATIENCE: Final = 20.0
"""Real seconds for whatever comes by itself."""

NAMESPACE: Final = small_namespace(hash="sha256")
SIZE: Final = NAMESPACE.geometry.page_bytes(NAMESPACE.page_size)
"""Bytes of its pages."""

SOON: Final = hicache.Backoff(first=0.005, most=0.05)


def until(met: Callable[[], bool], what: str = "it") -> None:
    """Wait for something that happens in another thread or process.

    Raises:
        AssertionError: it has not happened.
    """
    end = time.monotonic() + PATIENCE
    pause = threading.Event()
    while not met():
        assert time.monotonic() < end, f"{what} did not happen"
        pause.wait(0.002)


def connected(address: str, **options: Any) -> hicache.ConnectedCache:
    """A client over TCP, without TLS."""
    settings: dict[str, Any] = {"insecure": True, "backoff": SOON} | options
    return hicache.connect(address, NAMESPACE, **settings)


def random_pages(count: int, *, seed: int = 1, size: int = SIZE) -> npt.NDArray[np.uint8]:
    """Bytes that no other seed has."""
    return np.frombuffer(np.random.default_rng(seed).bytes(count * size), np.uint8).reshape(count, size)


def store(cache: hicache.ConnectedCache, tokens: list[int], **options: Any) -> npt.NDArray[np.uint8]:
    """Commit a prompt of which nothing is there; returns its pages."""
    with cache.request(tokens, logits=False, **options) as request:
        assert not len(request.load())
        pages = random_pages(len(request.allocate()), seed=len(tokens), size=cache.host.page_bytes)
        assert request.write_from(pages) == len(pages)
        request.commit()
    return pages
