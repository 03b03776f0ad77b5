"""What a device may still write, though nobody can tell any more: kept until the process ends, and never given back.

That a copy has ended is known by an event behind it. Of a device that fails no event passes, and whether its bytes
still move is not known; so the memory that they would move to is nobody else's for as long as the device may reach it.
"""

from __future__ import annotations

import logging
from typing import Final

__all__ = ["KEPT", "keep"]

_LOG = logging.getLogger(__name__)

KEPT: Final[list[object]] = []
"""All that is kept in this process, in the order in which it was."""


def keep(what: object, why: str) -> None:
    """Hold on to an object, and whatever it holds, until the process ends; the log says why."""
    KEPT.append(what)
    _LOG.warning("%s: kept until this process ends, as CUDA does not say whether a copy still writes there", why)
