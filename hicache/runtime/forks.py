"""Forked children must not use their parent's caches: they have no threads, and locks that nobody will release."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forkable(Protocol):
    """Something that must know that it is in a forked child now."""

    def forked(self) -> None:
        """Called in the child, before any other code there. Must take no lock."""
        ...


_live: weakref.WeakSet[Forkable] = weakref.WeakSet()


def watch(cache: Forkable) -> None:
    """Tell it in every child that is forked from now on."""
    _live.add(cache)


def _in_child() -> None:
    for cache in list(_live):
        cache.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
