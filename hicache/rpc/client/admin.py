"""Administration of a service from outside: blocking calls, as command lines and scripts want them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, Final, Self, TypeVar

import grpc
import numpy as np

from hicache.errors import HicacheError, HicacheInternalError, InvalidInput, ServiceUnavailable
from hicache.rpc.address import Address
from hicache.rpc.client.options import Secrets
from hicache.rpc.convert.admin import (
    decode_batch,
    decode_finding,
    decode_held,
    decode_ping,
    decode_pinned,
    encode_target,
)
from hicache.rpc.service import EventBatch, Finding, Ping, Pinned, Target
from hicache.rpc.status import DETAILS_KEY, from_status
from hicache.rpc.transport import CHANNEL_OPTIONS
from hicache.rpc.v1 import admin_pb2 as pb
from hicache.rpc.v1 import admin_pb2_grpc

__all__ = ["AdminClient"]

T = TypeVar("T")

_PROMPT_BYTES: Final = 2**20
"""Token bytes of one call of `warm`: far below any limit, and often enough a word on how far it is."""

_LONGEST_PROMPT: Final = 4 * 2**20
"""Tokens of one prompt: 16 MiB, what a message may have."""

_PATIENCE: Final = 10.0


class AdminClient:
    """Calls into one service. Used by one thread; close it, best by `with`.

    Args:
        address: where it is.
        secrets: what it is shown, and by what it is known.
        timeout: seconds that a call may take, unless it says otherwise.

    Raises:
        ConfigError: secrets that do not fit the address, or files that cannot be read.
    """

    def __init__(self, address: Address, secrets: Secrets | None = None, *, timeout: float = _PATIENCE) -> None:
        secrets = Secrets() if secrets is None else secrets
        secrets.check(address)
        self.address = address
        self._timeout = timeout
        token = secrets.bearer()
        self._metadata: list[tuple[str, str | bytes]] = [] if token is None else [("authorization", f"Bearer {token}")]
        self._undo = contextlib.ExitStack()
        if address.is_unix:
            self._open_lifeline()
        options = list(CHANNEL_OPTIONS)
        if secrets.tls:
            credentials = grpc.ssl_channel_credentials(secrets.read("ca"), secrets.read("key"), secrets.read("cert"))
            channel = grpc.secure_channel(address.target, credentials, options)
        else:
            channel = grpc.insecure_channel(address.target, options)
        self._undo.callback(channel.close)
        self._stub = admin_pb2_grpc.AdminServiceStub(channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the connection. Idempotent."""
        self._undo.close()

    def _open_lifeline(self) -> None:
        """Its key tells the service this process's uid, which may decide what it may do."""
        from hicache.rpc.client.lifeline import Lifeline

        with contextlib.suppress(HicacheError, OSError):  # without one the service decides, or is not there at all
            lifeline = Lifeline(self.address.lifeline, timeout=self._timeout)
            self._undo.callback(lifeline.close)
            self._undo.callback(lifeline.finish)
            self._metadata.append(("hicache-lifeline-bin", lifeline.key))

    def ping(self) -> Ping:
        """Whether the service answers, and what it is."""
        return decode_ping(self._call(self._stub.Ping, pb.PingRequest()))

    def statistics(self) -> dict[str, Any]:
        """Everything it counts, as far as this caller may see it."""
        document: dict[str, Any] = json.loads(self._call(self._stub.GetStatistics, pb.GetStatisticsRequest()).json)
        return document

    def clear(self, target: Target | None = None) -> tuple[int, tuple[str, ...]]:
        """Forget the pages of one model's prompts, or all: the namespaces cleared, and what storage did not confirm."""
        request = pb.ClearRequest() if target is None else pb.ClearRequest(target=encode_target(target))
        reply = self._call(self._stub.Clear, request, seconds=3 * self._timeout)
        return reply.namespaces, tuple(reply.unconfirmed)

    def pin(
        self,
        target: Target,
        tokens: np.ndarray,
        *,
        hard: bool = False,
        ttl_seconds: float = 0.0,
        name: str = "",
    ) -> Pinned:
        """Keep a prompt's pages in host memory."""
        request = pb.PinRequest(
            target=encode_target(target), tokens=_glued(tokens), hard=hard, ttl_seconds=ttl_seconds, name=name
        )
        return decode_pinned(self._call(self._stub.Pin, request, seconds=3 * self._timeout))

    def unpin(self, name: str = "") -> int:
        """End a pin, or all of the caller's tenant; returns how many ended."""
        return int(self._call(self._stub.Unpin, pb.UnpinRequest(name=name)).pins)

    def pins(self) -> tuple[Pinned, ...]:
        """Pins that are held."""
        return tuple(map(decode_held, self._call(self._stub.ListPins, pb.ListPinsRequest()).pins))

    def warm(
        self,
        target: Target,
        prompts: Iterable[np.ndarray],
        *,
        deadline_seconds: float = 0.0,
    ) -> Iterator[tuple[int, int, int]]:
        """Bring prompts into host memory; yields (prompts done, their pages there, pages missed) as it goes."""
        done = host = missed = 0
        for batch in _batches(prompts):
            request = pb.WarmRequest(
                target=encode_target(target),
                prompts=[_glued(prompt) for prompt in batch],
                deadline_seconds=deadline_seconds,
            )
            step = None
            for step in self._stream(self._stub.Warm, request):
                yield done + step.prompts, host + step.host_pages, missed + step.missed_pages
            if step is not None:
                done, host, missed = done + step.prompts, host + step.host_pages, missed + step.missed_pages

    def diagnose(self) -> tuple[Finding, ...]:
        """What the service finds when it looks at itself."""
        reply = self._call(self._stub.Diagnose, pb.DiagnoseRequest(), seconds=6 * self._timeout)
        return tuple(map(decode_finding, reply.findings))

    def explain(self, target: Target, tokens: np.ndarray, *, storage_seconds: float = 0.0) -> dict[str, Any]:
        """Why a prompt misses: `{"explanations": [...]}`, one for each pool of the model.

        Raises:
            InvalidInput: more tokens than a call takes.
        """
        if len(tokens) > _LONGEST_PROMPT:
            raise InvalidInput(
                f"explain: a prompt of {len(tokens):,} tokens is longer than the {_LONGEST_PROMPT:,} that a call takes"
            )
        request = pb.ExplainRequest(
            target=encode_target(target), tokens=_glued(tokens), storage_seconds=storage_seconds
        )
        reply = self._call(self._stub.Explain, request, seconds=self._timeout + storage_seconds)
        document: dict[str, Any] = json.loads(reply.json)
        return document

    def watch_events(self, from_sequence: int = 0) -> Generator[EventBatch, None, None]:
        """Residency events from a number on, without end; 0 begins with a snapshot. Close it to leave."""
        request = pb.WatchEventsRequest(from_sequence=from_sequence)
        with contextlib.closing(self._stream(self._stub.WatchEvents, request)) as messages:
            for message in messages:
                yield decode_batch(message)

    def _call(self, call: Callable[..., T], request: Any, *, seconds: float | None = None) -> T:
        try:
            return call(request, timeout=seconds or self._timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            raise self._error(error) from None

    def _stream(self, call: Callable[..., Any], request: Any) -> Generator[Any, None, None]:
        replies = call(request, metadata=self._metadata)
        try:
            yield from replies
        except grpc.RpcError as error:
            raise self._error(error) from None
        finally:
            replies.cancel()

    def _error(self, error: Any) -> HicacheError:
        code, text = error.code(), error.details() or ""
        details = dict(error.trailing_metadata() or ()).get(DETAILS_KEY)
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return ServiceUnavailable(f"the service at {self.address} does not know this call: upgrade it ({text})")
        found = from_status(code, text, details if isinstance(details, bytes) else None)
        if details is None and isinstance(found, ServiceUnavailable | HicacheInternalError):
            return ServiceUnavailable(f"no service answers at {self.address}: {_reason(text, code)}")
        if details is None and code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return type(found)(f"the service at {self.address} has not answered within {self._timeout:g} s")
        return found


def _reason(text: str, code: grpc.StatusCode) -> str:
    """The last part of gRPC's text: the system's own words."""
    last = text.rpartition("last error: ")[2].rpartition(" error: ")[2]
    last = last.removeprefix("UNKNOWN: ").removeprefix("UNAVAILABLE: ")
    if "CERTIFICATE_VERIFY_FAILED" in text:
        why = last.rpartition("CERTIFICATE_VERIFY_FAILED")[2].strip(": ").removesuffix(": OK")
        return f"its certificate is not trusted ({why or 'it cannot be verified'}): give the authority that signed it"
    return last or code.name.lower().replace("_", " ")


def _glued(tokens: np.ndarray) -> bytes:
    return np.ascontiguousarray(tokens, dtype="<u4").tobytes()


def _batches(prompts: Iterable[np.ndarray]) -> Iterator[Sequence[np.ndarray]]:
    batch: list[np.ndarray] = []
    size = 0
    for prompt in prompts:
        if batch and size + 4 * len(prompt) > _PROMPT_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(prompt)
        size += 4 * len(prompt)
    if batch:
        yield batch
