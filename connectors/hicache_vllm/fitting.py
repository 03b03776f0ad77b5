"""Whether our class still fits the base class of the vLLM that is installed, asked once when it is loaded."""

from __future__ import annotations

import abc
import inspect
from collections.abc import Callable
from typing import Any

__all__ = ["fit"]


def fit(ours: type, *bases: type) -> tuple[str, ...]:
    """Make a class one that can be made, whatever its base classes ask for, and tell what does not fit.

    An abstract method that is not known here is replaced by one that does nothing. The class must then not be used but
    to say so.

    Returns:
        What does not fit, in words; empty if all does.
    """
    misfits = []
    for name in sorted(getattr(ours, "__abstractmethods__", ())):
        misfits.append(f"it asks for {name}, which is not known here")
        setattr(ours, name, _nothing)
    for base in bases:
        for name, method in inspect.getmembers(base, inspect.isfunction):
            own = inspect.getattr_static(ours, name)
            if name.startswith("_") or not inspect.isfunction(own) or own is method or own is _nothing:
                continue
            if not _accepts(own, method):
                misfits.append(f"it calls {name}{inspect.signature(method)}")
    abc.update_abstractmethods(ours)
    return tuple(misfits)


def _nothing(self: Any, *arguments: Any, **named: Any) -> None:
    del self, arguments, named


def _accepts(own: Callable[..., Any], asked: Callable[..., Any]) -> bool:
    """Whether a call that binds to `asked`, by position or by name, binds to `own`."""
    parameters = inspect.signature(own).parameters
    wanted = list(inspect.signature(asked).parameters)
    return list(parameters)[: len(wanted)] == wanted and all(
        one.default is not inspect.Parameter.empty for one in list(parameters.values())[len(wanted) :]
    )
