"""Verbs as flows: the same coroutine blocks a thread, suspends a task, or goes on in the background."""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import Future

import pytest

from hicache.rpc.client.flow import answer, drive, launch, run


async def sum_of(*futures: Future[int]) -> int:
    return sum([await answer(future) for future in futures])


def ended(value: int) -> Future[int]:
    future: Future[int] = Future()
    future.set_result(value)
    return future


def test_a_thread_blocks_until_each_future_has_ended() -> None:
    later: Future[int] = Future()
    timer = threading.Thread(target=later.set_result, args=(40,))
    timer.start()
    assert run(sum_of(ended(1), later, ended(1))) == 42
    timer.join()


def test_a_task_goes_on_when_each_future_has_ended_in_another_thread() -> None:
    async def main() -> int:
        later: Future[int] = Future()
        task = asyncio.create_task(drive(sum_of(ended(1), later)))
        await asyncio.sleep(0)
        assert not task.done()
        await asyncio.to_thread(later.set_result, 41)
        return await task

    assert asyncio.run(main()) == 42


@pytest.mark.parametrize("how", ["run", "drive"])
def test_an_error_in_a_future_is_raised_where_the_flow_waits_for_it(how: str) -> None:
    async def careful() -> str:
        broken: Future[int] = Future()
        broken.set_exception(KeyError("x"))
        try:
            await answer(broken)
        except KeyError:
            return "caught"
        return "missed"

    assert (run(careful()) if how == "run" else asyncio.run(drive(careful()))) == "caught"


def test_a_flow_whose_task_is_cancelled_sees_it_and_may_clean_up() -> None:
    cleaned = []

    async def flow() -> None:
        future: Future[int] = Future()
        future.set_running_or_notify_cancel()
        try:
            await answer(future)
        finally:
            cleaned.append(future.cancelled())

    async def main() -> None:
        task = asyncio.create_task(drive(flow()))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert cleaned == [False]  # the future itself goes on: what it brings must be given back by somebody


def test_in_the_background_the_thread_that_ends_a_future_goes_on_with_the_flow() -> None:
    later: Future[int] = Future()
    seen: list[tuple[int, str]] = []

    async def flow() -> None:
        seen.append((await answer(ended(1)), threading.current_thread().name))
        seen.append((await answer(later), threading.current_thread().name))

    launch(flow())
    assert [value for value, _ in seen] == [1]
    other = threading.Thread(target=later.set_result, args=(2,), name="other")
    other.start()
    other.join()
    assert seen[1] == (2, "other")


def test_what_a_flow_in_the_background_raises_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def flow() -> None:
        await answer(ended(1))
        raise KeyError("lost")

    with caplog.at_level(logging.ERROR, logger="hicache.client"):
        launch(flow())
    assert "lost" in caplog.text
