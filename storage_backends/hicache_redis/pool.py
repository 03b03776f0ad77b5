"""The connections to one node, and the decision whether to try it at all."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

import redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from .aside import Aside
from .channel import Channel, Deadline, is_connected
from .settings import Address, RedisSettings
from .trouble import Trouble, reason_of_error

__all__ = ["Gate", "NodePool", "connection_of"]

T = TypeVar("T")

FIRST_PAUSE: Final = 0.05
FIRST_PAUSE_AFTER_TIMEOUT: Final = 0.5
"""More, since a try that times out costs its caller that long."""
LONGEST_PAUSE: Final = 2.0
_AWAY: Final = frozenset({"timeout", "connection", "protocol", "auth", "loading"})


class Gate:
    """Leaves a node alone for a while after it failed, longer each time, and then lets one caller try. Thread-safe.

    What is waited is drawn evenly between half of the pause and all of it, so that many clients do not come back
    together.

    Args:
        now: a monotonic clock in seconds.
        uniform: an even draw from [0, 1).
    """

    def __init__(self, *, now: Callable[[], float], uniform: Callable[[], float] = random.random) -> None:
        self._now = now
        self._uniform = uniform
        self._lock = threading.Lock()
        self._failures = 0
        self._until = 0.0
        self._probing = False
        self.reason = ""

    def enter(self) -> None:
        """Begin a call.

        Raises:
            Trouble: with the last reason; the node is left alone.
        """
        with self._lock:
            if self._failures == 0:
                return
            if self._probing or self._now() < self._until:
                raise Trouble(self.reason)
            self._probing = True

    def resting(self) -> bool:
        """Whether a call would not be let through now."""
        with self._lock:
            return self._failures > 0 and (self._probing or self._now() < self._until)

    def failed(self, reason: str) -> None:
        """The node did not answer."""
        with self._lock:
            now = self._now()
            if self._failures == 0 or now >= self._until:
                self._failures += 1
                first = FIRST_PAUSE_AFTER_TIMEOUT if reason == "timeout" else FIRST_PAUSE
                pause = min(first * 2 ** min(self._failures - 1, 16), LONGEST_PAUSE)
                self._until = now + pause * (0.5 + 0.5 * self._uniform())
            self._probing = False
            self.reason = reason

    def worked(self) -> None:
        """The node answered."""
        if self._failures:
            with self._lock:
                self._failures = 0
                self._probing = False
                self.reason = ""


def connection_of(settings: RedisSettings, address: Address) -> tuple[type[Any], dict[str, Any]]:
    """The class and arguments of redis-py's connections to an address. It repeats nothing by itself."""
    arguments: dict[str, Any] = {
        "username": settings.username,
        "password": settings.password,
        "db": settings.db,
        "socket_timeout": settings.timeout,
        "socket_connect_timeout": settings.connect_timeout,
        "retry": Retry(NoBackoff(), 0),
        "protocol": settings.protocol,
    }
    host, port = address
    if port == 0:
        del arguments["socket_connect_timeout"]  # connecting to a Unix socket takes the time of any other call
        return redis.UnixDomainSocketConnection, arguments | {"path": host}
    arguments |= {"host": host, "port": port, "socket_keepalive": True}
    if settings.tls is None:
        return redis.Connection, arguments
    arguments |= {
        "ssl_ca_certs": settings.tls.ca,
        "ssl_certfile": settings.tls.cert,
        "ssl_keyfile": settings.tls.key,
        "ssl_cert_reqs": "none" if settings.tls.verify == "none" else "required",
        "ssl_check_hostname": settings.tls.verify == "full",
    }
    return redis.SSLConnection, arguments


class NodePool:
    """Connections to one node: bulk ones, handed out a call at a time, and redis-py's own client. Thread-safe.

    A bulk connection is kept only after a call that read all of its replies; after anything else it is dropped, so no
    reply can ever answer a later question.

    Args:
        settings: of the backend.
        address: of the node.
        now: a monotonic clock in seconds.

    Attributes:
        address: of the node.
        client: redis-py's own client of this node.
        gate: whether the node is tried.
        aside: where connections are made and redis-py's own client works.
    """

    def __init__(self, settings: RedisSettings, address: Address, *, now: Callable[[], float]) -> None:
        self.address: Final = address
        self.gate: Final = Gate(now=now)
        self.aside: Final = Aside(2 * settings.connections)
        self._timeout = settings.timeout
        self._connect_timeout = settings.connect_timeout
        self._class, arguments = connection_of(settings, address)
        self._arguments = arguments | {"protocol": 2}
        self._slots = threading.BoundedSemaphore(settings.connections)
        self._lock = threading.Lock()
        self._free: list[Any] = []
        self._closed = False
        self.client: Final[Any] = redis.Redis(
            connection_pool=redis.ConnectionPool(connection_class=self._class, **arguments)
        )

    @contextlib.contextmanager
    def channel(self, deadline: Deadline) -> Iterator[Channel]:
        """A connection for one call.

        Raises:
            Trouble: it could not be had, or what was done with it broke off.
        """
        deadline.check()
        with self._judged(), self._taken(deadline) as connection:
            yield from self._use(connection, deadline)

    def own(self, work: Callable[[Any], T], deadline: Deadline) -> T:
        """What redis-py's own client of this node gives, under the same gate.

        Raises:
            Trouble: the call broke off.
        """
        deadline.check()
        with self._judged():
            return self.ask(work, deadline)

    def ask(self, work: Callable[[Any], T], deadline: Deadline) -> T:
        """The same past the gate, with redis-py's own errors.

        Raises:
            Trouble: not in time.
            OSError, redis.RedisError: as redis-py says.
        """
        return self.aside.run(lambda: work(self.client), deadline)

    def close(self) -> None:
        """Drop the connections; those in use are dropped when their call ends. Idempotent."""
        with self._lock:
            self._closed = True
            free, self._free = self._free, []
        for connection in free:
            connection.disconnect()
        self.client.connection_pool.disconnect()

    @contextlib.contextmanager
    def _judged(self) -> Iterator[None]:
        """Pass the gate, and tell it how the node did."""
        self.gate.enter()
        try:
            yield
        except (Trouble, OSError, RedisError) as error:
            reason = reason_of_error(error)
            if reason in _AWAY:
                self.gate.failed(reason)
            else:
                self.gate.worked()
            raise Trouble(reason) from error
        except BaseException:
            self.gate.worked()  # whatever it was, it was not the node
            raise
        self.gate.worked()

    def _use(self, connection: Any, deadline: Deadline) -> Iterator[Channel]:
        clean = False
        try:
            channel = Channel(connection, timeout=self._timeout, deadline=deadline)
            yield channel
            clean = channel.clean
            if clean:
                channel.restore()
        finally:
            if not clean:
                connection.disconnect()

    @contextlib.contextmanager
    def _taken(self, deadline: Deadline) -> Iterator[Any]:
        if not self._slots.acquire(timeout=deadline.check()):
            raise Trouble("no_connection")
        try:
            connection = self._connected(deadline)
            try:
                yield connection
            finally:
                self._give_back(connection)
        finally:
            self._slots.release()

    def _connected(self, deadline: Deadline) -> Any:
        """A connection on which the server has neither said nor closed anything."""
        with self._lock:
            connection = self._free.pop() if self._free else None
        if connection is None:
            connection = self._class(**self._arguments)
        left = deadline.check()
        connection.socket_timeout = min(self._timeout, left)
        if is_connected(connection):
            try:
                if not connection.can_read(timeout=0):
                    return connection
            except (OSError, RedisError):
                pass  # the server has closed it: that is no failure of this call
            connection.disconnect()
        if hasattr(connection, "socket_connect_timeout"):
            connection.socket_connect_timeout = min(self._connect_timeout, left)
        self.aside.run(connection.connect, deadline, late=lambda _: connection.disconnect())
        return connection

    def _give_back(self, connection: Any) -> None:
        with self._lock:
            if not self._closed:
                self._free.append(connection)
                return
        connection.disconnect()
