"""Pages of one rank in a hicache service: a `PageStore` over its HOST tier, and whatever lies below that.

SGLang gives hashes and no tokens, so pages are asked for and published by their hashes. A service keeps prompts from
their first page on; so each call names the whole chain, and pages whose beginning the service has lost cannot be put
behind it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

import hicache
from hicache_sglang.calls import Complaints
from hicache_sglang.counters import Counters
from hicache_sglang.identity import Identity
from hicache_sglang.pool import Bytes
from hicache_sglang.settings import Settings
from hicache_sglang.store import BATCH_BYTES, PageChain

if TYPE_CHECKING:
    from hicache import ConnectedCache, ConnectedRequest

__all__ = ["ServicePages", "connect"]

_HASH: Final = 32


def connect(settings: Settings, identity: Identity) -> ConnectedCache:
    """A client of the service that the settings name; one that is away is looked for in the background.

    Raises:
        HicacheError: an address that cannot be, or a service that refuses this model or this client.
    """
    assert settings.address is not None
    return hicache.connect(
        settings.address,
        identity.namespace,
        name="hicache_sglang",
        deadline=settings.timeout,
        timeout=settings.timeout,
        pool_size=settings.pool_size,
        token_file=settings.token_file,
        ca=settings.ca,
        cert=settings.cert,
        key=settings.key,
        insecure=settings.insecure,
    )


class ServicePages:
    """A `PageStore` over a service. Thread-safe; owns and closes the client.

    No call takes much longer than the client's deadline, whatever the service does, and nothing of the engine's memory
    is touched once it has returned.

    Args:
        cache: attached to this rank's namespace.
        counters: told of every page.
        complaints: told of trouble.
        now: a monotonic clock in seconds.
    """

    def __init__(
        self,
        cache: ConnectedCache,
        *,
        counters: Counters,
        complaints: Complaints,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache = cache
        self._page_bytes = cache.host.page_bytes
        self._batch = max(1, BATCH_BYTES // self._page_bytes)
        self._counters = counters
        self._complaints = complaints
        self._now = now

    def found(self, chain: PageChain) -> int:
        """See `PageStore`. What the service's storage has is brought up, as it is asked for next."""
        count = 0
        try:
            with self._request(chain) as request:
                count = max(len(request.load()) - _first(chain), 0)
        except Exception as error:
            self._trouble("lookup", error, len(chain))
        self._counters.looked_up(len(chain), count)
        return count

    def read(self, chain: PageChain, pages: Sequence[Bytes | None]) -> list[bool]:
        """See `PageStore`."""
        started, done = self._now(), 0
        try:
            with self._request(chain) as request:
                usable = max(len(request.load()) - _first(chain), 0)
                done = self._copy_out(request, _first(chain), pages[:usable])
                self._missed("read", request, len(chain) - done)
        except Exception as error:
            self._trouble("read", error, len(chain))
        self._counters.read(len(chain), done, self._page_bytes, self._now() - started)
        return [i < done for i in range(len(chain))]

    def write(self, chain: PageChain, pages: Sequence[Bytes | None]) -> list[bool]:
        """See `PageStore`. Pages behind one that fails are not stored: nothing could find them."""
        started, done = self._now(), 0
        try:
            with self._request(chain) as request:
                usable = len(request.load()) - _first(chain)
                if usable >= 0:
                    done = usable + self._copy_in(request, _first(chain) + usable, pages[usable:])
                    self._missed("write", request, len(chain) - done)
                else:
                    self._counters.failed("write", "away" if request.bypassed else "prefix", len(chain))
        except Exception as error:
            self._trouble("write", error, len(chain) - done)
        self._counters.wrote(len(chain), done, self._page_bytes, self._now() - started)
        return [i < done for i in range(len(chain))]

    def clear(self) -> None:
        """See `PageStore`. The service must let this client administer."""
        self._cache.clear()

    def close(self) -> None:
        """See `PageStore`."""
        self._cache.close()

    # ---- copies

    def _copy_out(self, request: ConnectedRequest, first: int, pages: Sequence[Bytes | None]) -> int:
        """Pages of a request into views of the engine's memory; how many, from the first on."""
        done = 0
        while done < len(pages):
            part = pages[done : done + self._batch]
            buffer = np.empty((len(part), self._page_bytes), np.uint8)
            good = request.read_into(buffer, first=first + done)
            for row, page in zip(buffer[:good], part, strict=False):
                if page is None:
                    return done
                np.copyto(page, row.reshape(page.shape))
                done += 1
            if good < len(part):
                break
        return done

    def _copy_in(self, request: ConnectedRequest, first: int, pages: Sequence[Bytes | None]) -> int:
        """Views of the engine's memory into slots of their own, and publish them; how many, from the first on."""
        whole = next((i for i, page in enumerate(pages) if page is None), len(pages))
        if not whole or not len(request.allocate(whole)):
            return 0
        done = 0
        while done < whole:
            part = [page for page in pages[done : min(done + self._batch, whole)] if page is not None]
            buffer = np.empty((len(part), self._page_bytes), np.uint8)
            for row, page in zip(buffer, part, strict=True):
                np.copyto(row.reshape(page.shape), page)
            written = request.write_from(buffer, first=first + done)
            done += written
            if written < len(part):
                break
        request.commit(upto=(first + done) * self._cache.page_size)
        return 0 if request.lost else done

    # ---- tools

    def _request(self, chain: PageChain) -> ConnectedRequest:
        return self._cache.request_by_hash(chain.before + b"".join(name.hash for name in chain.names))

    def _missed(self, kind: str, request: ConnectedRequest, pages: int) -> None:
        if pages:
            reason = (
                "away" if request.bypassed else "lost" if request.lost else "missing" if kind == "read" else "slots"
            )
            self._counters.failed(kind, reason, pages)

    def _trouble(self, kind: str, error: Exception, pages: int) -> None:
        self._counters.failed(kind, type(error).__name__, pages)
        self._complaints.say(f"{kind} in the service failed", error)


def _first(chain: PageChain) -> int:
    return len(chain.before) // _HASH
