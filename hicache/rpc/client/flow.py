"""Verbs that are written once, and run blocking, under asyncio, or in the background.

A flow is a coroutine that waits for nothing but futures of `concurrent.futures`, by `await answer(future)`. Who runs it
decides how to wait: a thread blocks, an asyncio task is suspended, and in the background the thread that ends the
future goes on with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future
from typing import Any, Generic, TypeAlias, TypeVar

T = TypeVar("T")

Flow: TypeAlias = Coroutine["Future[Any]", Any, T]

_log = logging.getLogger("hicache.client")


class answer(Generic[T]):  # noqa: N801  reads as a verb in front of what is awaited
    """Wait for a future inside a flow."""

    __slots__ = ("_future",)

    def __init__(self, future: Future[T]) -> None:
        self._future = future

    def __await__(self) -> Generator[Future[T], T, T]:
        return (yield self._future)


def run(flow: Flow[T]) -> T:
    """Run a flow; the calling thread blocks where it waits."""
    try:
        future = flow.send(None)
        while True:
            try:
                value = future.result()
            except BaseException as error:  # KeyboardInterrupt too: the flow gives back what it holds
                future = flow.throw(error)
            else:
                future = flow.send(value)
    except StopIteration as done:
        result: T = done.value
        return result


async def drive(flow: Flow[T]) -> T:
    """Run a flow in an asyncio task, which is suspended where it waits."""
    try:
        future = flow.send(None)
        while True:
            try:
                value = await asyncio.wrap_future(future)
            except BaseException as error:  # CancelledError too
                future = flow.throw(error)
            else:
                future = flow.send(value)
    except StopIteration as done:
        result: T = done.value
        return result


def launch(flow: Flow[None], ended: Callable[[], None] = lambda: None) -> None:
    """Run a flow in the background: here up to its first wait, then in the threads that end its futures.

    What it raises is logged. `ended` is called when it is over.
    """
    _step(flow, None, ended)


def _step(flow: Flow[None], done: Future[Any] | None, ended: Callable[[], None]) -> None:
    try:
        error = None if done is None else done.exception()
        future = flow.send(None if done is None else done.result()) if error is None else flow.throw(error)
    except StopIteration:
        ended()
    except Exception:
        _log.exception("a request to the service that nobody waits for has failed")
        ended()
    else:
        future.add_done_callback(lambda future: _step(flow, future, ended))
