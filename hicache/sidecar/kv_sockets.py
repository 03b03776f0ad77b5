"""The ZeroMQ sockets of a KV event publisher, and the words in which they fail."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from hicache.errors import ConfigError

if TYPE_CHECKING:
    import zmq

LINGER_MS: Final = 1000
"""Milliseconds that the end waits for consumers to take what is queued for them."""

END: Final = -1
"""The number that ends a replay."""

_NUMBER: Final = 8


class KvSockets:
    """Both sockets. Made on one thread, then used by another alone.

    Args:
        publish, replay, topic, high_water, batches: as of `KvPublisher`.

    Attributes:
        endpoints: where they are bound.

    Raises:
        ConfigError: an endpoint that cannot be bound, or pyzmq is not installed.
    """

    def __init__(self, publish: str, replay: str | None, *, topic: str, high_water: int, batches: int) -> None:
        try:
            import zmq
        except ImportError:
            raise ConfigError("KV events need pyzmq: pip install 'hicache[server]'") from None
        self._zmq = zmq
        self._topic = topic.encode()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._replay: zmq.Socket[bytes] | None = None
        try:
            self._publish = self._bound(zmq.PUB, publish, high_water=high_water)
            if replay is not None:
                self._replay = self._bound(zmq.ROUTER, replay, high_water=batches + 16)
                self._replay.setsockopt(zmq.ROUTER_MANDATORY, 1)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self.endpoints = (_endpoint(self._publish), None if self._replay is None else _endpoint(self._replay))

    def _bound(self, kind: int, endpoint: str, *, high_water: int) -> zmq.Socket[bytes]:
        path = endpoint.removeprefix("ipc://")
        if path != endpoint and _answers(path):  # ZeroMQ would take the path over without a word
            raise ConfigError(f"KV events: {endpoint} is in use by another process: choose another endpoint")
        made = self._context.socket(kind)
        made.setsockopt(self._zmq.SNDHWM, high_water)
        made.setsockopt(self._zmq.LINGER, LINGER_MS)
        try:
            made.bind(endpoint)
        except self._zmq.ZMQError as error:
            raise ConfigError(
                f"KV events: {endpoint!r:.200} cannot be bound ({error.strerror}): "
                "use a free one such as tcp://127.0.0.1:5557 or ipc:///path"
            ) from None
        if path != endpoint:
            os.chmod(path, 0o600)
        return made

    def wait(self, woken: socket.socket) -> bool:
        """Wait until there is something to do; returns whether somebody wants a replay."""
        zmq = self._zmq
        poller = zmq.Poller()
        poller.register(woken, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        ready = dict(poller.poll())
        if woken.fileno() in ready:
            woken.recv(4096)
        return self._replay in ready

    def publish(self, number: int, payload: bytes) -> None:
        """Give a message to all who listen; those who are too slow miss it."""
        self._publish.send_multipart([self._topic, number.to_bytes(_NUMBER, "big"), payload])

    def request(self) -> tuple[list[bytes], int] | None:
        """The next request for a replay: what leads its answers, and the first number wanted; None: it is none."""
        assert self._replay is not None
        peer, *between, start = self._replay.recv_multipart()
        if between not in ([], [b""]) or len(start) != _NUMBER:
            return None
        return [peer, *between], int.from_bytes(start, "big")

    def answer(self, back: Sequence[bytes], number: int, payload: bytes) -> bool:
        """Send part of a replay. Returns whether the peer can take it."""
        assert self._replay is not None
        try:
            self._replay.send_multipart(
                [*back, number.to_bytes(_NUMBER, "big", signed=True), payload], self._zmq.NOBLOCK
            )
        except self._zmq.ZMQError:
            return False
        return True

    def close(self) -> None:
        """Send what is queued, at most for `LINGER_MS`, and end."""
        self._context.destroy()


def _answers(path: str) -> bool:
    """Whether a process listens on a Unix socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except (OSError, ValueError):
            return False
    return True


def _endpoint(bound: zmq.Socket[bytes]) -> str:
    found = bound.LAST_ENDPOINT
    return found.decode().rstrip("\0") if isinstance(found, bytes) else str(found)
