from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def nothing_is_logged() -> Iterator[None]:
    """Records keep exceptions, these keep frames, and these the requests that an engine or a client has forgotten."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
