"""A router, as far as it listens to KV events, for tests of publishers. Needs pyzmq."""

from __future__ import annotations

from typing import Any, Final

import zmq

from hicache.sidecar.kv_wire import decode_batch
from hicache.testing.kvevents import BlockMirror

PATIENCE_MS: Final = 20_000
"""Real milliseconds for whatever must come."""


class Router:
    """A consumer: it listens, and asks for a replay where it missed something, also at its beginning.

    Args:
        context: of its sockets.
        endpoints: of the publisher, and of the replay socket.
        topic: of the messages it wants.
        high_water: messages that may wait for it here; 0: any number.

    Attributes:
        mirror: what it knows.
        last: number of the last message, None before the first.
        numbers: of all messages, as they were applied; `replayed`: how many of them a replay gave.
        socket: the one on which it listens.
    """

    def __init__(
        self, context: zmq.Context[Any], endpoints: tuple[str, str | None], *, topic: str = "", high_water: int = 0
    ) -> None:
        endpoint, self._replay = endpoints
        self.context = context
        self.mirror = BlockMirror()
        self.last: int | None = None
        self.numbers: list[int] = []
        self.replayed = 0
        self.socket = context.socket(zmq.SUB)
        self.socket.setsockopt(zmq.RCVHWM, high_water)
        self.socket.setsockopt(zmq.SUBSCRIBE, topic.encode())
        self.socket.setsockopt(zmq.RCVTIMEO, PATIENCE_MS)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(endpoint)

    def receive(self) -> int:
        """The next message, behind all those that were missed before it, also before the first."""
        _topic, number, payload = self.socket.recv_multipart()
        at = int.from_bytes(number, "big")
        if self.last is None or at != self.last + 1:
            for missed, content in self.replay(0 if self.last is None else self.last + 1):
                if missed < at:
                    self._apply(missed, content)
                    self.replayed += 1
        self._apply(at, payload)
        return at

    def _apply(self, number: int, payload: bytes) -> None:
        self.numbers.append(number)
        self.mirror.apply(decode_batch(payload))
        self.last = number

    def replay(self, start: int, *, between: tuple[bytes, ...] = ()) -> list[tuple[int, bytes]]:
        """Messages from a number on, as the replay socket gives them; `between` stands in front of the number."""
        assert self._replay is not None
        dealer = self.context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.RCVTIMEO, PATIENCE_MS)
        dealer.setsockopt(zmq.RCVHWM, 0)
        dealer.setsockopt(zmq.LINGER, 0)
        try:
            dealer.connect(self._replay)
            dealer.send_multipart([*between, start.to_bytes(8, "big")])
            found: list[tuple[int, bytes]] = []
            while True:
                *before, number, payload = dealer.recv_multipart()
                assert tuple(before) == between
                at = int.from_bytes(number, "big", signed=True)
                if at == -1:
                    assert payload == b""
                    return found
                found.append((at, payload))
        finally:
            dealer.close()

    def poll(self, milliseconds: int) -> bool:
        """Whether there is a message, now or so soon."""
        return bool(self.socket.poll(milliseconds))

    def close(self) -> None:
        """Listen no more."""
        self.socket.close()
