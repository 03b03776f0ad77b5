"""What is read of the documents of `hicache analyze`."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from hicache.analytics.report.figures import LONGEST, MOST, Amount, Count, Distribution, Moment, Share, Text, same

__all__ = ["AnalysisDocument"]


class CurvePoint(msgspec.Struct, frozen=True):
    """Of a curve."""

    pages: Annotated[int, Meta(ge=1, le=MOST)]
    hit_rate_pages: Share
    hit_rate_tokens: Share
    miss_ratio_pages: Share
    error_bound: Share


class Curve(msgspec.Struct, frozen=True):
    """See `hicache.analytics.analysis.curves.Curve`."""

    method: Text
    sample_rate: Share
    error_bound_standard_deviations: Amount
    points: Annotated[list[CurvePoint], Meta(max_length=LONGEST)]


class Keeping(msgspec.Struct, frozen=True):
    """A cache that forgets by time."""

    seconds: Amount
    hit_rate_pages: Share
    mean_pages: Amount


class Span(msgspec.Struct, frozen=True):
    """A part of the time."""

    begin: Moment
    end: Moment
    requests: Count
    pages_asked: Count
    pages_different: Count
    pages_new: Count
    ideal_hit_rate_pages: Share


class PageSize(msgspec.Struct, frozen=True):
    """What a page size costs."""

    page_size: Annotated[int, Meta(ge=1, le=MOST)]
    tokens_reused: Count
    hit_rate_tokens: Share
    lost_share: Share
    tokens_reused_before_last: Count


class Sessions(msgspec.Struct, frozen=True):
    """Derived sessions."""

    sessions: Count
    turns: Distribution
    requests_in_later_turns: Count
    share_of_requests: Share
    pauses: Distribution
    new_tokens: Distribution
    branching: Count


class HotPrefix(msgspec.Struct, frozen=True):
    """A prefix of a trace."""

    request: Count
    first_page: Count
    pages: Count
    tokens: Count
    sharers: Count
    pages_reused: Count
    share_of_hits: Share
    first_seen: Moment
    last_seen: Moment


class Tree(msgspec.Struct, frozen=True):
    """All prompts of a trace."""

    pages: Count
    roots: Count
    leaves: Count
    branches: Count
    runs: Count
    deepest: Count
    one_hit_pages: Count
    one_hit_share: Share
    one_hit_share_of_asked: Share
    pages_by_sharers: list[tuple[Annotated[int, Meta(ge=1, le=MOST)], Count]]
    hottest: Annotated[list[HotPrefix], Meta(max_length=LONGEST)]


class Recorded(msgspec.Struct, frozen=True):
    """What really happened, of an access log."""

    requests: Count
    aborted: Count
    pages_asked: Count
    pages_device: Count
    pages_host: Count
    pages_storage: Count
    pages_missed: Count
    misses_by_reason: dict[Text, Count]
    tokens_asked: Count
    tokens_hit: Count
    recorded_hit_rate_pages: Share
    recorded_hit_rate_tokens: Share
    recorded_hit_rate_requests: Share
    recorded_ideal_hit_rate_pages: Share
    pages_that_could_hit: Count
    load_seconds: Distribution
    request_seconds: Distribution
    processes: Count
    requests_ended: Count
    requests_left_out: Count
    requests_dropped: Count
    sample: Share
    requests_gone: Count = 0
    pages_not_asked: int = 0
    pages_not_asked_known: Count = 0
    pages_of_answers: Count = 0
    pages_not_kept: Count = 0
    pages_hit_unknown: Count = 0

    def __post_init__(self) -> None:
        told = self.pages_device + self.pages_host + self.pages_storage + sum(self.misses_by_reason.values())
        same(self.pages_asked, told, "pages_asked", "hits by tier and misses by reason")


class AnalysisDocument(msgspec.Struct, frozen=True):
    """What `hicache analyze` prints."""

    name: Text
    requests: Count
    input_tokens: Count
    output_tokens: Count
    pages_asked: Count
    pages_different: Count
    begin: Moment
    end: Moment
    out_of_order: Count
    entries_skipped: Count
    interrupted: bool
    prompt_tokens: Distribution
    generated_tokens: Distribution
    prompt_pages: Distribution
    gaps: Distribution
    busiest_second: Count
    busiest_minute: Count
    ideal_pages_hit: Count
    ideal_tokens_hit: Count
    ideal_hit_rate_pages: Share
    ideal_hit_rate_tokens: Share
    ideal_hit_rate_requests: Share
    ideal_hit_rate_requests_tokens: Share
    requests_with_hits_share: Share
    reuse_seconds: Distribution
    reuse_distance_pages: Distribution
    miss_ratio_curve: Curve
    knee_pages: Count | None
    keeping: Annotated[list[Keeping], Meta(max_length=LONGEST)]
    working_set: Annotated[list[Span], Meta(max_length=LONGEST)]
    page_sizes: Annotated[list[PageSize], Meta(max_length=LONGEST)]
    sessions: Sessions
    tree: Tree
    recorded: Recorded | None = None
    each: list[AnalysisDocument] = []

    def __post_init__(self) -> None:
        if self.ideal_pages_hit > self.pages_asked or self.ideal_tokens_hit > self.input_tokens:
            raise ValueError("more was hit than was asked")
