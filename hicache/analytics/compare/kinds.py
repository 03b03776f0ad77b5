"""Which command wrote a document, by what only its documents have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

__all__ = ["kind_of"]

_KINDS: Final = (
    ("report", ("hicache_report",)),
    ("analyze", ("miss_ratio_curve", "ideal_hit_rate_pages")),
    ("simulate", ("settings", "misses_by_reason", "first_token_seconds")),
    ("replay", ("pages_verified", "misses_by_reason")),
    ("sweep", ("points", "results", "recommendation")),
    ("plan", ("layout", "token_bytes")),
    ("explain", ("explanations",)),
    ("diff", ("splits", "changes")),
    ("top", ("service", "pools", "interval_seconds")),
    ("stats", ("service", "pools")),
)


def kind_of(document: Mapping[str, Any]) -> str | None:
    """The command whose `--json` writes such documents; None for one of another kind."""
    return next((kind for kind, names in _KINDS if all(name in document for name in names)), None)
