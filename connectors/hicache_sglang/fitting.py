"""Whether our class still fits the base class of the SGLang that is installed, asked once when it is loaded."""

from __future__ import annotations

import abc
import inspect
from collections.abc import Callable, Sized
from typing import Any, Final

__all__ = ["fit"]

_MISSES: Final[dict[str, Callable[[Any], Any]]] = {
    "batch_get": lambda keys: [None] * len(keys),
    "batch_get_v1": lambda keys: [False] * len(keys),
    "batch_set_v1": lambda keys: [False] * len(keys),
    "set": lambda _: False,
    "batch_set": lambda _: False,
    "exists": lambda _: False,
    "batch_exists": lambda _: 0,
}
"""What says "not there" in each verb; None in all others."""


def fit(ours: type, base: type) -> tuple[str, ...]:
    """Make a class usable whatever its base class asks for, and tell what does not fit.

    A method that the base class asks for and we do not know, or whose parameters it calls otherwise, is replaced by one
    that takes anything and answers that nothing is there. So the engine never fails for it, at load or later.

    Returns:
        What does not fit, in words; empty if all does.
    """
    misfits = []
    for name, method in inspect.getmembers(base, inspect.isfunction):
        own = getattr(ours, name)
        if name.startswith("_"):
            continue
        if getattr(own, "__isabstractmethod__", False):
            misfits.append(f"it asks for {name}, which is not known here")
        elif not _accepts(own, method):
            misfits.append(f"it calls {name}{inspect.signature(method)}")
        else:
            continue
        setattr(ours, name, _missing(name))
    abc.update_abstractmethods(ours)
    return tuple(misfits)


def _accepts(own: Callable[..., Any], asked: Callable[..., Any]) -> bool:
    """Whether a call that binds to `asked`, by position or by name, binds to `own`."""
    parameters = inspect.signature(own).parameters
    wanted = list(inspect.signature(asked).parameters)
    return list(parameters)[: len(wanted)] == wanted and all(
        one.default is not inspect.Parameter.empty for one in list(parameters.values())[len(wanted) :]
    )


def _missing(name: str) -> Callable[..., Any]:
    answer = _MISSES.get(name)

    def miss(self: Any, *arguments: Any, **named: Any) -> Any:
        del self
        first = next(iter((*arguments, *named.values())), ())
        return None if answer is None else answer(first if isinstance(first, Sized) else ())

    return miss
