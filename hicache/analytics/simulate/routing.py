"""Which instance a request goes to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hicache.analytics.simulate.settings import ROUTING
from hicache.core.prompt import Prompt

if TYPE_CHECKING:
    from hicache.analytics.analysis.columns import Ints
    from hicache.analytics.simulate.instance import Instance

Route = Callable[[int, Sequence[int]], int]
"""Takes a request's number and how many of its leading pages each instance holds; the instance's number."""


def held(instances: Sequence[Instance], prompt: Prompt) -> list[int]:
    """How many leading pages of a prompt each instance holds itself, in device and host."""
    return [
        found.device + found.host for found in (instance.core.match(instance.tree, prompt) for instance in instances)
    ]


def router(name: str, instances: Sequence[Instance], sessions: Ints) -> Route:
    """A way to choose.

    `round_robin` takes turns; `sticky` sends all turns of a session to where its first one went, and those in turns;
    `prefix_aware` goes where most pages of the prompt are, of several to the one with the fewest open requests, and of
    those to the one that had the fewest so far.

    Args:
        name: one of `ROUTING`.
        instances: to choose from.
        sessions: of each request of the trace, the number of its session, dense from 0.
    """
    count = len(instances)
    ways: dict[str, Route] = {
        "round_robin": lambda request, _: request % count,
        "sticky": lambda request, _: int(sessions[request]) % count,
        "prefix_aware": lambda _, pages: min(
            range(count), key=lambda at: (-pages[at], instances[at].open, instances[at].requests)
        ),
    }
    assert set(ways) == set(ROUTING)
    return ways[name]
