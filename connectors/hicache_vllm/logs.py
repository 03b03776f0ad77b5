"""What hicache's own modules log, in the engine's log: vLLM prints nothing but its own loggers in its form."""

from __future__ import annotations

import logging

__all__ = ["adopt_logs"]

_OURS = logging.getLogger("hicache")
_THEIRS = logging.getLogger("vllm.hicache")


class _Forward(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        """Say it again as the connector. vLLM's handlers write what is below their level to nobody."""
        _THEIRS.log(record.levelno, "hicache: %s", record.getMessage(), exc_info=record.exc_info)


def adopt_logs() -> None:
    """Let what `hicache` warns about appear as lines of vLLM's log. Idempotent.

    Where an application has given these loggers handlers, or the root, that is its choice.
    """
    if not _OURS.hasHandlers():
        _OURS.addHandler(_Forward())
