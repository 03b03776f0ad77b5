"""The service's words to systemd, against a socket that stands for it."""

from __future__ import annotations

import array
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache.sidecar import notify


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[tuple[socket.socket, dict[str, str]]]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "notify"))
        listening.settimeout(10)
        yield listening, {"NOTIFY_SOCKET": str(tmp_path / "notify")}


def received(listening: socket.socket) -> tuple[str, list[int]]:
    data, ancillary, _, _ = listening.recvmsg(4096, 4096)
    descriptors = array.array("i")
    for _, _, part in ancillary:
        descriptors.frombytes(part)
    return data.decode(), list(descriptors)


def test_words(supervisor: tuple[socket.socket, dict[str, str]]) -> None:
    """Each call is one datagram with its lines."""
    listening, environment = supervisor
    assert notify.is_supervised(environment)
    assert notify.notify("READY=1", "STATUS=two pools", environment=environment)
    assert received(listening) == ("READY=1\nSTATUS=two pools", [])
    assert notify.reloading(environment)
    first, moment = received(listening)[0].split("\n")
    assert first == "RELOADING=1"
    assert moment.removeprefix("MONOTONIC_USEC=").isdecimal()


def test_an_abstract_socket() -> None:
    """A path that begins with @ is one without a file."""
    name = f"hicache-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind("\0" + name)
        assert notify.notify("STOPPING=1", environment={"NOTIFY_SOCKET": "@" + name})
        assert listening.recv(100) == b"STOPPING=1"


class Supervisor(threading.Thread):
    """Stands for systemd where it has to take something: it reads until a barrier, whose descriptor it closes."""

    def __init__(self, listening: socket.socket, *, closes: bool = True) -> None:
        super().__init__()
        self._listening = listening
        self._closes = closes
        self.messages: list[tuple[str, list[int]]] = []

    def run(self) -> None:
        while not self.messages or self.messages[-1][0] != "BARRIER=1":
            self.messages.append(received(self._listening))
        if self._closes:
            os.close(self.messages[-1][1].pop())

    def __enter__(self) -> Supervisor:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.join(10)


def test_descriptors_are_given(supervisor: tuple[socket.socket, dict[str, str]], tmp_path: Path) -> None:
    """What arrives are the same files, storing keeps them open here, and ends when they were taken."""
    listening, environment = supervisor
    (tmp_path / "file").write_text("content")
    with (tmp_path / "file").open("rb") as file, Supervisor(listening) as systemd:
        assert notify.store("arena-1", [file.fileno()], environment)
        assert os.fstat(file.fileno())
    (text, descriptors), (barrier, _) = systemd.messages
    assert (text, barrier) == ("FDSTORE=1\nFDNAME=arena-1", "BARRIER=1")
    with os.fdopen(descriptors[0], "rb") as same:
        assert same.read() == b"content"
    assert notify.unstore("arena-1", environment)
    assert received(listening)[0] == "FDSTOREREMOVE=1\nFDNAME=arena-1"


def test_descriptors_that_are_not_taken(
    supervisor: tuple[socket.socket, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A supervisor that does not get to it in time is not waited for, and nothing is said to be kept."""
    monkeypatch.setattr(notify, "_PATIENCE", 0.05)
    listening, environment = supervisor
    before = set(os.listdir("/proc/self/fd"))
    with open(os.devnull, "rb") as file, Supervisor(listening, closes=False) as systemd:
        assert not notify.store("arena-1", [file.fileno()], environment)
    assert not notify.store("arena-1", [0], {"NOTIFY_SOCKET": "/nowhere/notify"})
    for _, descriptors in systemd.messages:
        for descriptor in descriptors:
            os.close(descriptor)
    assert set(os.listdir("/proc/self/fd")) == before


def test_more_descriptors_than_a_message_takes(supervisor: tuple[socket.socket, dict[str, str]]) -> None:
    """They come in several, none is lost."""
    listening, environment = supervisor
    with open(os.devnull, "rb") as file, Supervisor(listening) as systemd:
        assert notify.store("many", [file.fileno()] * 300, environment)
    arrived = [descriptor for _, descriptors in systemd.messages for descriptor in descriptors]
    assert len(arrived) == 300
    for descriptor in arrived:
        os.close(descriptor)


@pytest.mark.parametrize("where", ["", "/nowhere/notify", "relative", "vsock:1:2"])
def test_nobody_listens(where: str) -> None:
    """Then nothing happens, and nothing is raised."""
    assert not notify.notify("READY=1", environment={"NOTIFY_SOCKET": where})
    assert not notify.notify("READY=1", environment={})
    assert not notify.is_supervised({})


def test_a_supervisor_that_does_not_read(supervisor: tuple[socket.socket, dict[str, str]]) -> None:
    """Its full socket costs words, never time."""
    _, environment = supervisor
    sent = [notify.notify("STATUS=" + "x" * 1000, environment=environment) for _ in range(2000)]
    assert sent[0]
    assert not sent[-1]


def test_what_was_kept_is_taken_over(tmp_path: Path) -> None:
    """A new process gets names and descriptors in order, once, and no child of it inherits them."""
    (tmp_path / "a").write_text("first")
    (tmp_path / "b").write_text("second")
    code = """
import os, sys
os.environ["LISTEN_PID"] = str(os.getpid())
for number, name in enumerate(("a", "b"), 3):
    fd = os.open(os.path.join(sys.argv[1], name), os.O_RDONLY)
    os.dup2(fd, 10 + number)
os.dup2(13, 3); os.dup2(14, 4)
from hicache.sidecar import notify
kept = notify.stored()
print([(name, fd, os.read(fd, 100).decode(), os.get_inheritable(fd)) for name, fd in kept], notify.stored(),
      sorted(name for name in os.environ if name.startswith("LISTEN")))
"""
    environment = {**os.environ, "LISTEN_FDS": "2", "LISTEN_FDNAMES": "arena-1:words"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stdout.strip() == "[('arena-1', 3, 'first', False), ('words', 4, 'second', False)] [] []", done.stderr


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"LISTEN_PID": "1", "LISTEN_FDS": "1"},
        {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "many"},
        {"LISTEN_PID": str(os.getpid())},
    ],
)
def test_nothing_was_kept(environment: dict[str, str]) -> None:
    """Nothing is taken that was meant for another process, or that is no number."""
    assert notify.stored(environment) == []
    assert environment == {}
