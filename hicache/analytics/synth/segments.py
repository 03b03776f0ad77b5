"""Prompts as paths of segments, so that what an unlimited cache hits is known while they are made."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from hicache.analytics.result import rate


class Segment:
    """Some tokens behind what is before them. Two segments behind the same one differ from their first token on.

    Attributes:
        end: tokens up to its end, from the prompt's begin on.
    """

    __slots__ = ("_children", "_pages", "_parent", "_tail", "_text", "_used", "end")

    def __init__(self, text: Text, parent: Segment | None, tokens: int) -> None:
        begin: int = 0 if parent is None else parent.end
        self.end: int = begin + tokens
        self._text = text
        self._parent = parent
        self._children: dict[Hashable, Segment] = {}
        # Ids of the pages whose last token is in here.
        self._pages = text.take(self.end // text.unit - begin // text.unit)
        self._tail: int | None = None
        self._used = False

    def then(self, tokens: int, name: Hashable = None) -> Segment:
        """A segment behind this one: a new one, or with a name the one of that name."""
        if name is None:
            return Segment(self._text, self, tokens)
        child = self._children.get(name)
        if child is None:
            child = self._children[name] = Segment(self._text, self, tokens)
        return child

    def ask(self) -> Prompt:
        """The prompt that ends here, as a request asks it now."""
        unit = self._text.unit
        ids: list[int] = []
        parts: list[range] = []
        node: Segment | None = self
        shared = 0
        while node is not None:
            parts.append(node._pages)
            if node._used:
                shared = max(shared, node.end)
            node._used = True
            node = node._parent
        for part in reversed(parts):
            ids.extend(part)
        hits = shared // unit
        if self.end % unit:
            if self._tail is None:
                self._tail = self._text.take(1)[0]
            else:
                hits = len(ids) + 1  # the same prompt came before
            ids.append(self._tail)
        return Prompt(ids, self.end, hits, min(hits * unit, self.end))


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt and what is known of it.

    Attributes:
        ids: of its pages, the last, partial one too.
        tokens: it has.
        hits: leading pages that an earlier prompt has too.
        hit_tokens: tokens that they stand for.
    """

    ids: list[int]
    tokens: int
    hits: int
    hit_tokens: int


class Text:
    """Where segments come from: gives ids to pages.

    Attributes:
        unit: tokens of a page.
    """

    def __init__(self, unit: int) -> None:
        self.unit = unit
        self._next = 0

    def begin(self, tokens: int) -> Segment:
        """A new begin of prompts."""
        return Segment(self, None, tokens)

    def take(self, count: int) -> range:
        """So many new ids."""
        self._next += count
        return range(self._next - count, self._next)


class Known:
    """What is known of a trace by how it was made: what an unlimited cache hits, prefixes only.

    The names are those of `hicache analyze`.
    """

    def __init__(self, unit: int) -> None:
        self._unit = unit
        self._requests = self._tokens = self._output = self._pages = self._hits = self._hit_tokens = self._lucky = 0
        self._page_rates = self._token_rates = 0.0

    def add(self, prompt: Prompt, output: int) -> None:
        """Count a request."""
        self._requests += 1
        self._tokens += prompt.tokens
        self._output += output
        self._pages += len(prompt.ids)
        self._hits += prompt.hits
        self._hit_tokens += prompt.hit_tokens
        self._lucky += prompt.hits > 0
        self._page_rates += rate(prompt.hits, len(prompt.ids))
        self._token_rates += rate(prompt.hit_tokens, prompt.tokens)

    def document(self) -> dict[str, int | float]:
        """All of it, ready for JSON."""
        return {
            "requests": self._requests,
            "unit": self._unit,
            "input_tokens": self._tokens,
            "output_tokens": self._output,
            "pages_asked": self._pages,
            "pages_different": self._pages - self._hits,
            "ideal_pages_hit": self._hits,
            "ideal_tokens_hit": self._hit_tokens,
            "ideal_hit_rate_pages": rate(self._hits, self._pages),
            "ideal_hit_rate_tokens": rate(self._hit_tokens, self._tokens),
            "ideal_hit_rate_requests": rate(self._page_rates, self._requests),
            "ideal_hit_rate_requests_tokens": rate(self._token_rates, self._requests),
            "requests_with_hits_share": rate(self._lucky, self._requests),
        }
