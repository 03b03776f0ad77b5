"""What a replayed trace would cost an engine of a stated prefill rate, with the cache and without lower tiers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from hicache.analytics.prompts import Prompt
from hicache.errors import ConfigError
from hicache.runtime.planner import check_rate
from hicache.runtime.request import Request

OPTION: Final = "--prefill-rate"


@dataclass(frozen=True, slots=True)
class PrefillTimes:
    """Modelled seconds of all requests together, the computing of what no tier had included.

    Attributes:
        tokens_per_second: the stated rate.
        seconds: with what was decided to be brought up, which is waited for, and the rest computed.
        seconds_without: with DEVICE alone, and the rest computed.
        pages_planned, pages_declined: pages of lower tiers that were to be brought up, and that were not.
    """

    tokens_per_second: float
    seconds: float = 0.0
    seconds_without: float = 0.0
    pages_planned: int = 0
    pages_declined: int = 0


class PrefillModel:
    """Adds up. Not thread-safe.

    Args:
        rate: tokens a second.
    """

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._seconds = self._without = 0.0
        self._planned = self._declined = 0

    def add(self, prompt: Prompt, tokens: int, request: Request) -> None:
        """Count one request that has loaded what it would.

        Args:
            prompt: its pages.
            tokens: all tokens of its prompt, which pages need not cover.
            request: open or closed.
        """
        known, decision = request.match.device, request.decision
        if decision is not None:
            known += decision.host + decision.storage
            self._seconds += decision.seconds
            self._without += decision.compute_seconds
            self._planned += decision.planned
            self._declined += decision.declined
        rest = max(tokens - prompt.covered(known), 0) / self._rate
        self._seconds += rest
        self._without += rest

    def times(self) -> PrefillTimes:
        """The sums so far."""
        return PrefillTimes(self._rate, self._seconds, self._without, self._planned, self._declined)


def check_option(rate: float | None) -> None:
    """The option is a number above 0, or not given.

    Raises:
        ConfigError: anything else.
    """
    if rate is None:
        return
    try:
        check_rate(OPTION, rate)
    except ConfigError as error:
        raise ConfigError(f"{error}: give the tokens a second that the engine computes") from None


def parse_rate(text: str | None) -> float | None:
    """The option's text as a number.

    Raises:
        ConfigError: no number above 0.
    """
    if text is None:
        return None
    try:
        rate = float(text)
    except ValueError:
        raise ConfigError(f"{OPTION} {text:.40}: give the tokens a second that the engine computes") from None
    check_option(rate)
    return rate
