"""To which size a simulated tier is worth enlarging, by the stack distances of the same trace."""

from __future__ import annotations

from typing import Final

import numpy as np

from hicache.analytics.analysis.columns import Columns
from hicache.analytics.analysis.curves import EXACT_REFERENCES, exact_distances
from hicache.analytics.analysis.larger import Larger, by_distances
from hicache.analytics.result import rate
from hicache.analytics.simulate.losses import TIERS, Cause, cause_of_losses
from hicache.analytics.simulate.pages import PromptPages
from hicache.analytics.simulate.result import SimulationResult
from hicache.analytics.simulate.settings import SimulationSettings
from hicache.records import MissReason

__all__ = ["larger"]

_SIZES: Final = (Cause.DEVICE, Cause.HOST, Cause.STORAGE)

TRUSTED: Final = 0.01
"""Share of the pages asked by which the curve may miss what was simulated at the present size, to be believed."""

WITHIN: Final = 0.02
"""Share of the pages asked within which a simulation at the size that is named hits what is named."""


def larger(result: SimulationResult, columns: Columns) -> Larger | None:
    """The size that is worth it of the tier that lost most, and its own size where no other is; None: not known.

    Each tier has what those above it have, so together they hit what one LRU pool of the largest of their sizes hits:
    that is what the curve is of. Where it does not give what was simulated, as time or queues decide, it is not known
    either. It costs about 3 us a page asked.

    Args:
        result: of a simulation to the end of the trace.
        columns: the trace.
    """
    cause, settings = cause_of_losses(result), result.settings
    if cause not in _SIZES or not _as_one_pool(settings, cause) or result.requests < columns.requests:
        return None
    pages = PromptPages(columns, settings.page_size).cut()
    asked = pages.references
    if not asked or asked > EXACT_REFERENCES:
        return None
    distances = exact_distances(pages)
    pool = max(size for tier in TIERS if (size := getattr(settings, tier)) is not None)
    now = result.hit_rate_pages
    if abs(float(np.searchsorted(distances, pool)) / asked - now) > TRUSTED:
        return None
    own = int(getattr(settings, cause))
    size, more = by_distances(distances, asked, pool) or (own, 0.0)
    # What is missed for other reasons is missed with more memory too.
    most = rate(result.misses_by_reason[MissReason.EVICTED], result.pages_asked)
    return Larger(own, size, now, now + min(more, most))


def _as_one_pool(settings: SimulationSettings, cause: Cause) -> bool:
    """Whether the tiers hit what one LRU pool does: all is written down, and brought up again, whatever it takes."""
    return (
        settings.instances == 1
        and settings.eviction == "lru"
        and settings.write_policy == "write_through"
        and (settings.admission or 1) == 1
        and not settings.decide
        and (cause is not Cause.STORAGE or settings.prefetch == "wait_complete")
    )
