"""One cache behind several doors, for the behaviour that all of them share: in process, or a service's, four ways.

A `Subject` knows what differs: where pages lie, how their bytes are read and written, which tier is the top one.
"""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, Self

import numpy as np

import hicache
from hicache.config import Config, Drain, Host, Listen, Policies, Storage
from hicache.config import Size as Bytes
from hicache.core.reasons import RequestCounts
from hicache.records import Match
from hicache.rpc.client.admin import AdminClient
from hicache.testing.engine import small_namespace
from hicache.testing.serving import ServedApp
from hicache.testing.sidecars import ServiceProcess

__all__ = ["PAGE", "PROFILES", "SLOT_BYTES", "Subject", "content_of", "open_subject"]

PAGE: Final = 4
"""Tokens of a page."""

SLOT_BYTES: Final = 4096
"""What a slot takes of a service's memory, however small its page is."""


_PREFETCH: Final = "wait_complete"  # the tests say how long to wait, by their requests' deadlines


def content_of(tokens: Sequence[int], page: int, size: int) -> bytes:
    """The bytes of a page: a function of all tokens up to its end."""
    past = repr(list(map(int, tokens[: (page + 1) * PAGE]))).encode()
    return hashlib.shake_128(past).digest(size)


class Subject:
    """A cache to look at.

    Attributes:
        cache: with the verbs of `hicache.EmbeddedCache`, as far as its profile has them.
        slots: pages of the top tier. size: bytes of a page.
    """

    def __init__(self, cache: Any, *, slots: int, size: int) -> None:
        self.cache = cache
        self.slots = slots
        self.size = size

    def top(self, match: Match) -> int:
        """Pages that are usable without storage."""
        return match.device + match.host

    def read(self, request: Any, slots: Any) -> list[bytes]:
        """The bytes of the usable pages whose slots `load` gave."""
        del request
        return [self.cache.device.read_page(slot).tobytes() for slot in slots.tolist()]

    def write(self, request: Any, slots: Any, pages: Sequence[bytes], first: int) -> None:
        """Write pages into slots that `allocate` gave, of which the first is the page `first`."""
        del request, first
        for slot, page in zip(slots.tolist(), pages, strict=True):
            self.cache.device.write_page(slot, page)

    def settle(self) -> None:
        """Wait until storage has what it should have."""
        assert self.cache.flush()

    # ---- what an engine does, once for all

    def check(self, request: Any, tokens: Sequence[int]) -> int:
        """Load a request's pages and compare every byte; returns how many there are."""
        slots = request.load()
        for page, found in enumerate(self.read(request, slots)):
            assert found == content_of(tokens, page, self.size), f"page {page} holds other bytes"
        return len(slots)

    def compute(self, request: Any, tokens: Sequence[int], slots: Any, first: int) -> None:
        """Write what belongs into fresh slots, a partial last page as if it were whole."""
        pages = [content_of(tokens, page, self.size) for page in range(first, first + len(slots))]
        self.write(request, slots, pages, first)

    def run(self, tokens: Sequence[int], **options: Any) -> RequestCounts:
        """One whole request: look, load, compare, compute, commit."""
        with self.cache.request(tokens, **options) as request:
            found = self.check(request, tokens)
            self.compute(request, tokens, request.allocate(deadline=10.0), found)
            request.commit(ready=hicache.READY)
        counts: RequestCounts = request.counts
        return counts


class ConnectedSubject(Subject):
    """Behind `hicache.connect`: pages are copied by their place in the prompt."""

    def settle(self) -> None:
        """As `Subject.settle`."""
        pause = threading.Event()
        with AdminClient(self.cache.address) as admin:
            while any(pool["statistics"]["core"]["transfers"] for pool in admin.statistics()["pools"]):
                pause.wait(0.005)

    def read(self, request: Any, slots: Any) -> list[bytes]:
        """As `Subject.read`."""
        buffers = np.zeros((len(slots), self.size), np.uint8)
        good = request.read_into(buffers)
        assert good == len(slots), f"{good} of {len(slots)} pages could be read"
        return [buffer.tobytes() for buffer in buffers]

    def write(self, request: Any, slots: Any, pages: Sequence[bytes], first: int) -> None:
        """As `Subject.write`."""
        assert request.write_from([np.frombuffer(page, np.uint8) for page in pages], first=first) == len(slots)


class ZeroCopySubject(ConnectedSubject):
    """Behind `hicache.connect`, where pages are used as they lie in shared memory."""

    def read(self, request: Any, slots: Any) -> list[bytes]:
        """As `Subject.read`."""
        for page, slot in enumerate(slots.tolist()):
            assert request.page(page).ctypes.data == self.cache.host.page(slot).ctypes.data
        return [self.cache.host.page(slot).tobytes() for slot in slots.tolist()]

    def write(self, request: Any, slots: Any, pages: Sequence[bytes], first: int) -> None:
        """As `Subject.write`."""
        del request, first
        for slot, page in zip(slots.tolist(), pages, strict=True):
            self.cache.host.page(slot)[:] = np.frombuffer(page, np.uint8)


class _Blocking:
    """An object of the asyncio client with its methods called from outside its loop."""

    def __init__(self, inner: Any, call: Callable[[Any], Any]) -> None:
        self._inner = inner
        self._call = call

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not asyncio.iscoroutinefunction(found):
            return found
        return lambda *args, **options: self._wrapped(self._call(found(*args, **options)))

    def _wrapped(self, value: Any) -> Any:
        return _Blocking(value, self._call) if hasattr(value, "__aenter__") else value

    def __enter__(self) -> Self:
        self._call(self._inner.__aenter__())
        return self

    def __exit__(self, *exception: Any) -> None:
        self._call(self._inner.__aexit__(*exception))


class _Loop:
    """An event loop in a thread, as an asyncio engine has one."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="engine-loop")
        self._thread.start()

    def call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60.0)

    def close(self) -> None:
        self.call(self.loop.shutdown_default_executor())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


PROFILES: Final = ("embedded", "mapped", "zero copy", "streamed", "asyncio", "process")
"""In process; a service in this process, over shared memory by copies, by views, and over the stream; for asyncio; and
a service in a process of its own."""


def open_subject(
    profile: str,
    stack: ExitStack,
    *,
    slots: int = 64,
    storage: str | None = None,
    extras: bool = False,
    address: str = "",
) -> Subject:
    """Open a cache of tiny pages behind one of the doors; the stack ends all of it.

    Args:
        profile: of `PROFILES`.
        stack: owns what is opened.
        slots: pages of the top tier.
        storage: URL of a store behind it.
        extras: whether prompts may carry non-text input.
        address: of a service that runs already; empty: one is started, where the profile needs one.
    """
    namespace = small_namespace(hash="sha256", page_size=PAGE)
    size = namespace.geometry.page_bytes(PAGE)
    if profile == "embedded":
        host = slots if storage is not None else 0
        cache = hicache.open(namespace, device=slots, host=host, storage=storage, extras=extras, prefetch=_PREFETCH)
        return Subject(stack.enter_context(cache), slots=slots, size=size)
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hc")))
    address = address or _serve(profile, folder, stack, slots=slots, storage=storage)
    options: dict[str, Any] = {"streamed": profile == "streamed", "extras": extras, "required": True}
    if profile == "asyncio":
        engine = _Loop()
        stack.callback(engine.close)
        inner = engine.call(hicache.connect_async(address, namespace, **options))
        opened: Any = stack.enter_context(_Blocking(inner, engine.call))
    else:
        opened = stack.enter_context(hicache.connect(address, namespace, **options))
    kind = ZeroCopySubject if profile == "zero copy" else ConnectedSubject
    return kind(opened, slots=slots, size=size)


def _serve(profile: str, folder: Path, stack: ExitStack, *, slots: int, storage: str | None) -> str:
    if profile == "process":
        more = () if storage is None else ("--storage", storage, "--set", f"policies.prefetch={_PREFETCH}")
        return stack.enter_context(ServiceProcess(folder, *more, host=str(slots * SLOT_BYTES))).address
    config = Config(
        listen=Listen(addresses=(f"unix://{folder}/s.sock",)),
        host=Host(bytes=Bytes(slots * SLOT_BYTES)),
        storage=Storage(url=storage or ""),
        policies=Policies(prefetch=_PREFETCH),
        drain=Drain(seconds=1.0),
    )
    return stack.enter_context(ServedApp(config)).address
