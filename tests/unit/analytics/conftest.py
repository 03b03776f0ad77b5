"""What tests of traces and their files share."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest


@pytest.fixture
def full_disk() -> Callable[[int], AbstractContextManager[None]]:
    """For a block: files end at so many bytes, and what is written behind them fails, as on a full disk."""

    @contextmanager
    def limited(most: int) -> Iterator[None]:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return limited
