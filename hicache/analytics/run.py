"""From options to a finished replay: opens the cache, drives it, closes it, adds up."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import hicache
from hicache.analytics import verdict
from hicache.analytics.content import PageContent
from hicache.analytics.pace import Pace, Show, wait_until_quiet
from hicache.analytics.prefill import PrefillModel, check_option
from hicache.analytics.prompts import IdPages, TokenPages, Tokens
from hicache.analytics.replay import Replay
from hicache.analytics.result import ReplayResult
from hicache.analytics.trace import TraceRequest
from hicache.analytics.traces import Trace
from hicache.core.eviction import policy_named
from hicache.core.residency import SLOT_BYTES
from hicache.core.symbols import MAX_PAGE_SIZE
from hicache.errors import ConfigError, HicacheInternalError, InvalidInput
from hicache.memory.limits import check_memory
from hicache.runtime.options import PREFETCH_MODES, write_policies

CLOSE_SECONDS = 120.0  # to write what is still queued at the end
HURRIED_SECONDS = 5.0  # the same after an interrupt
_DEVICE = re.compile(r"cuda(:[0-9]{1,3})?")
MANY_PAGES = 2**23  # whose tables alone are checked against the memory that there is


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """How to replay. All checked here, before anything is opened.

    Attributes:
        device_pages: slots of the device tier; None is unlimited, which needs pages without bytes.
        device_memory: where they are: "main" for main memory, "cuda" or "cuda:N" for a GPU's.
        host_pages: slots of the host tier; 0 leaves it out.
        storage: URL of the storage tier, or None.
        page_tokens: tokens of a page, or None: each id of the trace is one page.
        page_bytes: bytes of a page; 0: pages hold none.
        eviction, write_policy, prefetch: as `hicache.open` takes them.
        prefill_rate: tokens a second that the engine computes; pages are then brought up only where that pays.
        requests: how many to replay, or None for all.
        speed: None for as fast as the tiers keep up: each request begins when the copies and writes of those before
            have ended, so that the same trace gives the same numbers on any machine. Else the factor to the trace's
            own times, and what is too slow is late or shed, as in production.
        seed: part of the namespace, so another seed is other content and shares nothing.

    Raises:
        ConfigError: what cannot work; says which option and what to do.
    """

    device_pages: int | None = None
    device_memory: str = "main"
    host_pages: int = 0
    storage: str | None = None
    page_tokens: int | None = None
    page_bytes: int = 0
    eviction: str = "lru"
    write_policy: str = "write_through"
    prefetch: str = "wait_complete"
    prefill_rate: float | None = None
    requests: int | None = None
    speed: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        policy_named(self.eviction)
        check_option(self.prefill_rate)
        write_policies(self.write_policy)
        if self.prefetch not in PREFETCH_MODES:
            raise ConfigError(f"--prefetch {self.prefetch!r:.60} is not one of {', '.join(PREFETCH_MODES)}")
        if self.page_tokens is not None and not 1 <= self.page_tokens <= MAX_PAGE_SIZE:
            raise ConfigError(f'--page-size {self.page_tokens}: use "trace" or 1 to {MAX_PAGE_SIZE} tokens')
        if self.device_pages is None and self.page_bytes:
            raise ConfigError("--device unlimited needs --page-bytes 0: bytes need memory, give a number of pages")
        if self.device_memory != "main":
            if _DEVICE.fullmatch(self.device_memory) is None:
                raise ConfigError(f'--device-memory {self.device_memory!r:.40}: use "main", "cuda" or "cuda:N"')
            if not self.page_bytes:
                raise ConfigError("--device-memory cuda needs --page-bytes above 0: without bytes nothing is copied")
        if self.storage is not None and not self.page_bytes:
            raise ConfigError("--storage needs --page-bytes above 0: without bytes there is nothing to store")
        if self.storage is not None and not self.host_pages:
            raise ConfigError("--storage needs a host tier, through which its pages go: give --host above 0")

    def namespace(self) -> hicache.Namespace:
        """What the pages are; equal options on one store share pages, others never do."""
        geometry = hicache.KVGeometry.opaque(
            engine="hicache", backend="replay", version="1", shape="pages", page_bytes=max(self.page_bytes, 1)
        )
        return hicache.Namespace(
            model="hicache-replay",
            revision=f"seed-{self.seed}",
            geometry=geometry,
            page_size=self.page_tokens or 1,
        )


def replay(
    trace: Trace, options: ReplayOptions, *, stop: threading.Event | None = None, progress: Show | None = None
) -> ReplayResult:
    """Replay a trace through a cache made for it.

    Args:
        trace: an open trace; it is read to its end or as far as `options` say.
        options: how.
        stop: set it (from a signal handler or another thread) to end after the request under way.
        progress: called now and then with (done, total).

    Raises:
        InvalidInput: the trace, or what the options name, cannot be used.
        StorageError: the storage cannot be opened.
    """
    prompts = IdPages() if options.page_tokens is None else TokenPages(options.page_tokens)
    requests = itertools.islice(trace, options.requests)
    first = next(requests, None)
    step = 1
    if first is not None:
        step = prompts.prompt(first).step  # an unfit page size is found before anything is opened
    with contextlib.ExitStack() as stack:
        cache = stack.enter_context(contextlib.closing(_open(options, step, stack)))
        storage = cache.statistics().storage
        if options.storage is not None and storage is not None:
            verdict.check_capacity(options.storage, storage.capacity, options.page_bytes)
        driver = _driver(cache, options, prompts)
        keeps_up = options.speed is None and options.page_bytes > 0
        pace = Pace(
            trace,
            stop=threading.Event() if stop is None else stop,
            speed=options.speed,
            settle=functools.partial(wait_until_quiet, cache) if keeps_up else None,
            requests=options.requests,
            show=progress,
        )
        return _run(driver, cache, pace, itertools.chain(() if first is None else (first,), requests), options.storage)


def _open(options: ReplayOptions, step: int, stack: contextlib.ExitStack) -> hicache.EmbeddedCache:
    """The cache; `step` is the number of real tokens that one of its pages stands for. `stack` closes its device."""
    rate, tokens = options.prefill_rate, options.namespace().page_size
    on_gpu = options.device_memory != "main"
    pages = (0 if on_gpu else options.device_pages or 0) + options.host_pages
    if options.page_bytes or pages > MANY_PAGES:
        check_memory(pages * (options.page_bytes + SLOT_BYTES), "device and host pools together")
    return hicache.open(
        options.namespace(),
        device=stack.enter_context(contextlib.closing(_gpu_pool(options))) if on_gpu else options.device_pages,
        host=options.host_pages,
        storage=options.storage,
        eviction=options.eviction,
        write_policy=options.write_policy,
        prefetch=options.prefetch,
        prefill_tokens_per_second=None if rate is None else rate * tokens / step,
        bytes=options.page_bytes > 0,
    )


def _gpu_pool(options: ReplayOptions) -> hicache.DevicePool:
    from hicache.cuda.pool import CudaDevicePool

    namespace, number = options.namespace(), options.device_memory.partition(":")[2]
    assert options.device_pages is not None, "pages with bytes have a number"
    return CudaDevicePool.allocate(
        namespace.geometry,
        page_size=namespace.page_size,
        slots=options.device_pages,
        device=int(number) if number else None,
    )


def _driver(cache: hicache.EmbeddedCache, options: ReplayOptions, prompts: IdPages | TokenPages) -> Replay:
    content = None
    if options.page_bytes:
        namespace = options.namespace()
        content = PageContent(
            namespace=namespace.digest, page_tokens=namespace.page_size, page_bytes=options.page_bytes
        )

    def ask(tokens: Tokens) -> hicache.Request:
        return cache.request(tokens, logits=False)  # published figures count prompts that came whole

    prefill = None if options.prefill_rate is None else PrefillModel(options.prefill_rate)
    return Replay(ask, prompts=prompts, content=content, pages=cache.device, prefill=prefill)


def _run(
    driver: Replay, cache: hicache.EmbeddedCache, pace: Pace, requests: Iterable[TraceRequest], url: str | None
) -> ReplayResult:
    started = time.perf_counter()
    ended, bad_input = False, ""
    try:
        ended = driver.run(requests, before=pace)
    except InvalidInput as error:
        bad_input = str(error)  # what was reached so far is not lost
    found = [] if pace.stopped else _broken(cache)
    report = cache.close(deadline=HURRIED_SECONDS if pace.stopped else CLOSE_SECONDS)
    seconds = time.perf_counter() - started
    statistics = cache.statistics()
    return driver.result(
        bytes_device_to_host=statistics.bytes_device_to_host,
        bytes_host_to_device=statistics.bytes_host_to_device,
        bytes_to_storage=statistics.bytes_to_storage,
        bytes_from_storage=statistics.bytes_from_storage,
        shed_by_reason=dict(statistics.shed_by_reason),
        storage_trouble_by_reason=verdict.trouble(statistics),
        entries_skipped=pace.trace.skipped,
        interrupted=pace.stopped and not ended,
        bad_input=bad_input or verdict.refusal(statistics, url),
        seconds=seconds,
        problems=(*found, *verdict.problems(statistics)),
        warnings=(*_empty(pace), *verdict.warnings(statistics, report, url)),
    )


def _empty(pace: Pace) -> Iterator[str]:
    """Says so when there was nothing to replay, which is no error but seldom what was meant."""
    if not pace.seen and not pace.stopped:
        skipped = f" (all {pace.trace.skipped} entries were broken)" if pace.trace.skipped else ""
        yield f"{', '.join(map(str, pace.trace.paths)):.200}: {pace.trace.why_nothing}{skipped}"


def _broken(cache: hicache.EmbeddedCache) -> list[str]:
    """What a check of every tier and tree finds."""
    try:
        cache.check()
    except HicacheInternalError as error:
        return [f"broken invariant: {error}"]
    return []
