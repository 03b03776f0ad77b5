"""Timing a service from outside: the figures of `hicache bench sidecar`.

Latencies are measured beside an empty message of the same stream, and pages are stored by one process and loaded by
another, beside a plain copy of as many bytes in the same process and at the same time.
"""

from __future__ import annotations

import contextlib
import json
import secrets as random_secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from hicache.core.identity import Namespace
from hicache.core.layout import KVGeometry
from hicache.errors import ConfigError, HicacheError, ServiceUnavailable
from hicache.memory.writer import READY
from hicache.rpc.address import Address
from hicache.rpc.client.admin import AdminClient
from hicache.rpc.client.cache import ConnectedCache, connect
from hicache.rpc.client.options import Secrets
from hicache.rpc.v1 import session_pb2 as pb

__all__ = ["Latency", "Rate", "TrialOptions", "TrialResult", "run_trial"]

NAMESPACE: Final = Namespace(
    model="hicache/bench",
    revision="1",
    geometry=KVGeometry.mha(layers=4, kv_heads=4, head_dim=64, dtype="float16"),  # pages of 256 KiB
    page_size=64,
    hash="sha256",
)
_PATIENCE: Final = 120.0
_WORKER: Final = "from hicache.rpc.client.trial import worker; worker()"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialOptions:
    """What is measured.

    Attributes:
        calls: of each verb.
        tokens: of the prompt that is looked up.
        batch: bytes of pages that are stored or loaded at once; less where the pool is too small for all rounds.
        rounds: batches; a rate is the median.
    """

    calls: int = 500
    tokens: int = 8192
    batch: int = 32 * 2**20
    rounds: int = 5

    def __post_init__(self) -> None:
        for name, least in (("calls", 10), ("tokens", NAMESPACE.page_size + 1), ("batch", 1), ("rounds", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"bench: {name} is {getattr(self, name)}, must be {least} or more")


@dataclass(frozen=True, slots=True)
class Latency:
    """One verb, in microseconds.

    Attributes:
        verb: its name; `echo` is an empty message.
        p50, p99: of its calls.
    """

    verb: str
    p50: float
    p99: float


@dataclass(frozen=True, slots=True)
class Rate:
    """Moving pages, in 10^9 bytes a second.

    Attributes:
        what: "store" or "load".
        gigabytes_per_second: median of the rounds, with all that belongs to it.
        reference: of a plain copy.
        wrong: pages that had other bytes, or were not there.
    """

    what: str
    gigabytes_per_second: float
    reference: float
    wrong: int

    @property
    def ratio(self) -> float:
        """Of the plain copy's rate."""
        return self.gigabytes_per_second / self.reference


@dataclass(frozen=True, slots=True)
class TrialResult:
    """All figures.

    Attributes:
        latencies: of the verbs.
        rates: of two processes.
        batch: bytes at once, as it was possible.
    """

    latencies: tuple[Latency, ...]
    rates: tuple[Rate, ...]
    batch: int

    @property
    def wrong(self) -> int:
        """Pages that were not as they were stored."""
        return sum(rate.wrong for rate in self.rates)

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "latencies": [asdict(latency) for latency in self.latencies],
            "rates": [asdict(rate) | {"ratio": rate.ratio} for rate in self.rates],
            "batch": self.batch,
        }


def run_trial(address: str, secrets: Secrets, options: TrialOptions) -> TrialResult:
    """Measure a service. Its pages have a salt of their own, and are cleared where this caller may do that.

    Raises:
        ServiceUnavailable: it is away, or goes away meanwhile.
        ConfigError: what a client cannot work with.
    """
    with AdminClient(Address.parse(address), secrets) as admin:
        admin.ping()  # a client would try for a while, and know less of why
    salt = random_secrets.token_hex(16)
    with _connected(address, secrets) as cache:
        pages = min(options.batch // cache.host.page_bytes, cache.host.slots // (options.rounds + 1))
        if pages < 1:
            raise ConfigError(f"the pool has {cache.host.slots} pages: too few for {options.rounds} rounds")
        try:
            latencies = _latencies(cache, salt, options)
            job = {
                "address": address,
                "secrets": asdict(secrets),
                "salt": salt,
                "pages": pages,
                "rounds": options.rounds,
            }
            rates = tuple(_elsewhere({"what": what, **job}) for what in ("store", "load"))
        finally:
            with contextlib.suppress(HicacheError):
                cache.clear(salt=salt)
        return TrialResult(latencies, rates, pages * cache.host.page_bytes)


def _connected(address: str, secrets: Secrets) -> ConnectedCache:
    return connect(address, NAMESPACE, required=True, deadline=_PATIENCE, name="hicache bench", **asdict(secrets))


def _prompt(number: int, tokens: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
    return np.random.default_rng(number).integers(0, 2**32, tokens, dtype=np.uint32)


# ---- latencies


def _latencies(cache: ConnectedCache, salt: str, options: TrialOptions) -> tuple[Latency, ...]:
    prompt = _prompt(-1 % 2**32, options.tokens)
    page = bytes(cache.host.page_bytes)
    with cache.request(prompt, salt=salt) as request:
        request.write_from([page] * len(request.allocate()))
        request.commit(ready=READY)
    times: dict[str, list[float]] = {}

    def timed(verb: str, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        start = time.perf_counter()
        result = call(*arguments, **options)
        times.setdefault(verb, []).append(time.perf_counter() - start)
        return result

    for number in range(options.calls):
        timed("echo", _echo, cache)
        timed("match", cache.match, prompt, salt=salt)
        request = timed("lease", cache.request, prompt, salt=salt)
        timed("load", request.load)
        timed("release", request.close)
        fresh = cache.request(_prompt(2**40 + number, NAMESPACE.page_size + 1), salt=salt)
        timed("reserve", fresh.allocate, 1)
        fresh.write_from(page)
        timed("commit", fresh.commit, NAMESPACE.page_size, ready=READY)
        fresh.close()
    if not cache.connected:
        raise ServiceUnavailable("the service went away during the measurement")
    return tuple(Latency(verb, *_microseconds(seen)) for verb, seen in times.items())


def _echo(cache: ConnectedCache) -> None:
    connection = cache.state.connection()
    if connection is None:
        raise ServiceUnavailable("the service went away during the measurement")
    connection.call(pb.Request(echo=pb.Echo()), seconds=_PATIENCE, grace=0.0).result()


def _microseconds(seen: list[float]) -> tuple[float, float]:
    p50, p99 = np.percentile(seen, (50, 99)) * 1e6
    return float(p50), float(p99)


# ---- rates


def _elsewhere(job: dict[str, Any]) -> Rate:
    """Do it in a process of its own. Secrets go through a pipe: arguments can be seen by others."""
    done = subprocess.run(  # noqa: S603  our own interpreter and code
        [sys.executable, "-c", _WORKER],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        check=False,
        timeout=10 * _PATIENCE,
    )
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise ServiceUnavailable(f"the process that was to {job['what']} pages failed: {last:.400}")
    return Rate(**json.loads(lines[-1]))


def worker() -> None:
    """One process of the trial: a job on stdin, its figures on stdout."""
    sys.stdout.write(json.dumps(asdict(work(json.loads(sys.stdin.read())))) + "\n")


def work(job: dict[str, Any]) -> Rate:
    """Store or load, beside a plain copy."""
    secrets = Secrets(**job["secrets"])
    move = {"store": _store, "load": _load}[job["what"]]
    with _connected(job["address"], secrets) as cache:
        size = job["pages"] * cache.host.page_bytes
        took, reference, wrong = [], [], 0
        here, there = np.ones(size, np.uint8), np.ones(size, np.uint8)
        _touch(cache, job, here)
        for number in range(job["rounds"]):
            expected = np.random.default_rng(number).integers(0, 256, size, dtype=np.uint8)
            np.copyto(here, expected if job["what"] == "store" else 0)
            reference.append(_timed(np.copyto, there, here))
            prompt = _prompt(number, job["pages"] * NAMESPACE.page_size + 1)
            steps = move(cache, prompt, job["salt"], here)
            took.append(_timed(next, steps))
            wrong += job["pages"] - next(steps)
            if job["what"] == "load":
                differ = (here != expected).reshape(job["pages"], -1).any(axis=1)
                wrong += int(differ.sum())
    rate, plain = (size / float(np.median(seen)) / 1e9 for seen in (took, reference))
    return Rate(job["what"], rate, plain, wrong)


def _touch(cache: ConnectedCache, job: dict[str, Any], pages: Any) -> None:
    """Have this process touch the shared memory that it will use, as one that has run for a while has."""
    rounds = range(job["rounds"])
    if job["what"] == "load":
        for number in rounds:
            list(_load(cache, _prompt(number, job["pages"] * NAMESPACE.page_size + 1), job["salt"], pages))
        return
    total = job["pages"] * job["rounds"]
    with cache.request(_prompt(2**41, total * NAMESPACE.page_size), salt=job["salt"], logits=False) as request:
        request.allocate()
        for number in rounds:
            request.write_from(pages, first=number * job["pages"])
        request.close(aborted=True)


def _timed(call: Callable[..., Any], *arguments: Any) -> float:
    start = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - start


def _store(cache: ConnectedCache, prompt: Any, salt: str, pages: Any) -> Iterator[int]:
    """First step: all that storing needs. Second: the pages that were moved."""
    with cache.request(prompt, salt=salt, logits=False) as request:
        request.allocate()
        moved = request.write_from(pages, first=0)
        request.commit(ready=READY)
        yield 0
        yield moved


def _load(cache: ConnectedCache, prompt: Any, salt: str, pages: Any) -> Iterator[int]:
    with cache.request(prompt, salt=salt) as request:
        there = len(request.load())
        moved = request.read_into(pages.reshape(-1, cache.host.page_bytes)[:there], first=0)
        yield 0
        yield moved
