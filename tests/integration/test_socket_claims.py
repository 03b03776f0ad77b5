"""Who may use a Unix socket's path: living servers are never displaced, dead ones never in the way."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import grpc
import pytest

from hicache.errors import ConfigError
from hicache.sidecar.sockets import bind, claim

GRPC_SERVER = """
import sys
from concurrent.futures import ThreadPoolExecutor
import grpc
from hicache.sidecar.sockets import claim
claimed = claim(sys.argv[1])
server = grpc.server(ThreadPoolExecutor(1))
server.add_insecure_port("unix:" + sys.argv[1])
server.start()
print("up", flush=True)
sys.stdin.read()
server.stop(0)
claimed.release()
"""

SERVER = """
import socket, sys
from hicache.sidecar.sockets import bind, claim
claimed = claim(sys.argv[1])
listeners = [bind(path, socket.SOCK_STREAM) for path in (sys.argv[1], sys.argv[1] + ".lifeline")]
print("up", flush=True)
sys.stdin.read()
"""


class Server:
    """A server in a process of its own."""

    def __init__(self, path: Path, code: str = SERVER) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.said = self.process.stdout.readline().strip()

    def kill(self) -> str:
        self.process.send_signal(signal.SIGKILL)
        return self.process.communicate(timeout=30)[1]


def answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


@pytest.mark.case("GRPC-3")
def test_a_path_that_a_killed_server_left_is_reclaimed(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    for _ in range(2):
        server = Server(path)
        assert server.said == "up"
        server.kill()
        assert sorted(file.name for file in tmp_path.iterdir()) == ["s.sock", "s.sock.lifeline", "s.sock.lock"]
    claimed = claim(str(path))
    assert [file.name for file in tmp_path.iterdir()] == ["s.sock.lock"]
    claimed.release()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.case("GRPC-3")
def test_a_living_server_is_never_displaced(tmp_path: Path) -> None:
    """The second is refused with the first's number, and the first still answers, also when the second has ended."""
    path = tmp_path / "s.sock"
    first = Server(path)
    with pytest.raises(ConfigError, match=rf"is taken: a server runs there \(process {first.process.pid}\); stop it"):
        claim(str(path))
    second = Server(path)
    assert second.said == ""
    assert "is taken" in second.kill()
    assert answers(path)
    os.kill(first.process.pid, signal.SIGSTOP)  # also one that hangs
    with pytest.raises(ConfigError, match="is taken"):
        claim(str(path))
    first.kill()


@pytest.mark.case("GRPC-3")
def test_grpc_itself_displaces_nobody_and_takes_over_from_the_dead(tmp_path: Path) -> None:
    """gRPC removes what lies at its path, so it must not get that far: killed, refused, and ended in order."""
    path = tmp_path / "s.sock"

    def ready() -> bool:
        with grpc.insecure_channel(f"unix:{path}") as channel:
            grpc.channel_ready_future(channel).result(30)
            return True

    Server(path, GRPC_SERVER).kill()
    assert path.is_socket()
    first = Server(path, GRPC_SERVER)
    assert first.said == "up"
    second = Server(path, GRPC_SERVER)
    assert second.said == ""
    assert "is taken" in second.kill()
    assert ready()
    assert first.process.communicate("", timeout=30)[1] == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.case("GRPC-3")
@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_SEQPACKET, socket.SOCK_DGRAM])
@pytest.mark.parametrize("suffix", ["", ".lifeline"])
def test_other_programs_sockets_are_not_displaced_either(tmp_path: Path, kind: socket.SocketKind, suffix: str) -> None:
    """They know nothing of the lock: what answers, or is of another kind, lives."""
    path = tmp_path / "s.sock"
    other = socket.socket(socket.AF_UNIX, kind)
    other.bind(str(path) + suffix)
    if kind != socket.SOCK_DGRAM:
        other.listen()
    with pytest.raises(ConfigError, match="is taken: another program listens there"):
        claim(str(path))
    assert Path(str(path) + suffix).is_socket()
    other.close()
    claim(str(path)).release()


def test_a_busy_socket_lives(tmp_path: Path) -> None:
    """Its queue is full, so that nobody gets through; it is not taken for stale."""
    path = tmp_path / "s.sock"
    other = socket.socket(socket.AF_UNIX)
    other.bind(str(path))
    other.listen(0)
    waiting = socket.socket(socket.AF_UNIX)
    waiting.connect(str(path))
    with pytest.raises(ConfigError, match="is taken"):
        claim(str(path))
    waiting.close()
    other.close()


@pytest.mark.case("GRPC-3")
def test_a_path_that_is_too_long_is_refused_with_the_numbers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"at most 107 bytes, and this one has 129 with \.lifeline behind it"):
        claim("/" + "x" * 119)
    path = str(tmp_path / "x")
    fits = path + "y" * (107 - len(".lifeline") - len(path))
    claimed = claim(fits)
    bind(fits + ".lifeline", socket.SOCK_SEQPACKET).close()
    claimed.release()
    with pytest.raises(ConfigError, match="this one has 108"):
        claim(fits + "y")
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    path.write_text("precious")
    with pytest.raises(ConfigError, match="is no socket: remove it, or use another path"):
        claim(str(path))
    path.unlink()
    path.mkdir()
    with pytest.raises(ConfigError, match="is no socket"):
        claim(str(path))
    path.rmdir()
    claim(str(path)).release()


def test_a_lock_file_that_leads_elsewhere_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "s.sock.lock").symlink_to(victim)
    with pytest.raises(ConfigError, match=r"lock file .* cannot be opened"):
        claim(str(tmp_path / "s.sock"))
    assert victim.read_text() == "precious"


def test_a_missing_folder_is_told(tmp_path: Path) -> None:
    """By its name, and what to do."""
    with pytest.raises(ConfigError, match=rf"folder '{tmp_path}/no' does not exist: make it, or .*--listen"):
        claim(str(tmp_path / "no" / "s.sock"))


def test_releasing_removes_only_what_is_dead(tmp_path: Path) -> None:
    """What another program put in the place meanwhile, and still answers at, stays."""
    path = tmp_path / "s.sock"
    claimed = claim(str(path))
    bind(str(path), socket.SOCK_STREAM).close()
    other = bind(str(path) + ".lifeline", socket.SOCK_STREAM)
    claimed.release()
    claimed.release()
    assert [file.name for file in tmp_path.iterdir()] == ["s.sock.lifeline"]
    other.close()


def test_many_who_want_one_path_have_it_one_at_a_time(tmp_path: Path) -> None:
    """Claims and releases as fast as can be: never do two have it, and each gets it in the end."""
    path, holders, most = str(tmp_path / "s.sock"), [0], [0]
    got, guard = [0] * 4, threading.Lock()

    def work(number: int) -> None:
        while got[number] < 50:
            try:
                claimed = claim(path)
            except ConfigError:
                continue
            with guard:
                holders[0] += 1
                most[0] = max(most[0], holders[0])
            with guard:
                holders[0] -= 1
            got[number] += 1
            claimed.release()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert got == [50] * 4
    assert most == [1]
    assert list(tmp_path.iterdir()) == []


def test_who_locked_a_file_that_is_no_longer_there_tries_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder lets go, and its lock file with it, between another's opening that file and locking it."""
    path = str(tmp_path / "s.sock")
    first = claim(path)
    flock = fcntl.flock

    def late(fd: int, operation: int) -> None:
        first.release()
        flock(fd, operation)

    monkeypatch.setattr("hicache.sidecar.sockets.fcntl.flock", late)
    second = claim(path)
    with pytest.raises(ConfigError, match="is taken"):
        claim(path)
    second.release()


@pytest.mark.parametrize("mode", [0o600, 0o660])
def test_a_socket_has_its_rights_from_its_first_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    """Before anything could be changed about it, under any umask; the process's own umask is as before."""
    seen = []
    monkeypatch.setattr(Path, "chmod", lambda self, mode: seen.append((self.stat().st_mode & 0o777, mode)))
    before = os.umask(0)
    try:
        listener = bind(str(tmp_path / "s"), socket.SOCK_STREAM, mode=mode)
        assert os.umask(0) == 0
    finally:
        os.umask(before)
    assert seen == [(mode, mode)]
    assert answers(tmp_path / "s")
    listener.close()


def test_a_path_that_is_bound_already_cannot_be_bound_again(tmp_path: Path) -> None:
    first = bind(str(tmp_path / "s"), socket.SOCK_STREAM)
    with pytest.raises(ConfigError, match="cannot be bound: Address already in use"):
        bind(str(tmp_path / "s"), socket.SOCK_STREAM)
    first.close()
