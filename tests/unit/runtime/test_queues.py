from __future__ import annotations

import logging
import threading

import pytest

from hicache.runtime.queues import Bound, BoundedQueue, Job, Workers
from hicache.testing.gates import Gate


def _nothing() -> None:
    pass


def _job(cost: int = 1) -> Job:
    return Job(cost, _nothing, _nothing)


@pytest.mark.case("EVICT-6")
def test_the_bound_holds_for_requests_and_for_bytes() -> None:
    queue = BoundedQueue(Bound(bytes=10, requests=3))
    assert [queue.offer(_job(3)) for _ in range(4)] == [True, True, True, False]
    queue = BoundedQueue(Bound(bytes=10, requests=100))
    assert [queue.offer(_job(4)) for _ in range(3)] == [True, True, False]
    assert queue.statistics().refused == 1


@pytest.mark.case("EVICT-6")
def test_a_job_counts_until_it_has_ended() -> None:
    queue = BoundedQueue(Bound(bytes=10, requests=1))
    assert queue.offer(_job())
    job = queue.take()
    assert job is not None
    assert not queue.offer(_job())
    queue.ended(job)
    assert queue.offer(_job())


def test_a_job_above_the_bound_is_taken_when_nothing_else_is_under_way() -> None:
    queue = BoundedQueue(Bound(bytes=10, requests=5))
    assert queue.offer(_job(1000))
    assert not queue.offer(_job(1))
    job = queue.take()
    assert job is not None
    assert not queue.offer(_job(1))
    queue.ended(job)
    assert queue.offer(_job(1))
    assert not queue.offer(_job(1000))


def test_first_in_first_out_but_for_what_goes_in_front() -> None:
    queue = BoundedQueue(Bound(bytes=10, requests=10))
    jobs = [_job(0) for _ in range(3)]
    for job in jobs:
        queue.offer(job)
    front = _job(0)
    queue.offer(front, first=True)
    assert [queue.take() for _ in range(4)] == [front, *jobs]


def test_closing_wakes_who_waits_and_gives_back_what_nobody_began() -> None:
    queue = BoundedQueue(Bound(bytes=10, requests=10))
    taken: list[Job | None] = []
    thread = threading.Thread(target=lambda: taken.append(queue.take()))
    thread.start()
    assert queue.close() == []
    thread.join(10)
    assert taken == [None]
    assert not queue.offer(_job())
    queue = BoundedQueue(Bound(bytes=10, requests=10))
    left = _job()
    queue.offer(left)
    assert queue.close() == [left]
    assert queue.statistics().bytes == 0


@pytest.mark.case("THR-1")
def test_a_worker_survives_whatever_a_job_raises(caplog: pytest.LogCaptureFixture) -> None:
    class StrangeError(Exception):
        pass

    errors = [OSError("disk"), TimeoutError(), ValueError("x"), StrangeError()]
    queue = BoundedQueue(Bound(bytes=100, requests=100))
    done: list[int] = []
    failed: list[int] = []
    finished = Gate(opened=True)

    def work(i: int) -> None:
        if i % 3 == 2:
            raise errors[i // 3]
        done.append(i)
        finished.enter()

    def fail(i: int) -> None:
        failed.append(i)
        finished.enter()
        raise RuntimeError("even the failure fails")

    with caplog.at_level(logging.CRITICAL):
        for i in range(12):
            assert queue.offer(Job(1, lambda i=i: work(i), lambda i=i: fail(i)))
        workers = Workers("test", queue, threads=1)
        finished.until_passed(12)
        queue.close()
        assert workers.join(lambda thread: thread.join(10)) == 0
    assert failed == [2, 5, 8, 11]
    assert len(done) == 8
    assert queue.statistics().failed == 4
    assert queue.statistics().bytes == 0


def test_a_slow_job_delays_only_itself() -> None:
    queue = BoundedQueue(Bound(bytes=100, requests=100))
    slow, quick = Gate(), Gate(opened=True)
    queue.offer(Job(1, slow.enter, _nothing))
    for _ in range(5):
        queue.offer(Job(1, quick.enter, _nothing))
    workers = Workers("test", queue, threads=2)
    quick.until_passed(5)
    assert slow.passed == 0
    slow.open()
    queue.close()
    assert workers.join(lambda thread: thread.join(10)) == 0
