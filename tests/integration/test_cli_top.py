"""`hicache top` in a real terminal: what is seen, keys, sizes, and a service that goes and comes back."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import hicache
from hicache.cli import main, top_screen
from hicache.testing.sidecars import ServiceProcess, namespace_of

pytestmark = pytest.mark.slow

NAMESPACE = namespace_of(8192, model="org/watched")
PATIENCE = 60.0
_CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """A command in a pseudo-terminal, and the last screen that it has drawn whole."""

    def __init__(self, *command: str, columns: int = 100, lines: int = 40) -> None:
        self.own, theirs = pty.openpty()
        self.resize(columns, lines)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hicache", *command],
            stdin=theirs,
            stdout=theirs,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env={name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
            | {"TERM": "xterm-256color"},
        )
        os.close(theirs)
        self.output = ""

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self.own, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def press(self, keys: str) -> None:
        os.write(self.own, keys.encode())

    def read(self, seconds: float) -> bool:
        """Take what comes; False at the end."""
        ready, _, _ = select.select([self.own], [], [], seconds)
        if not ready:
            return True
        try:
            data = os.read(self.own, 65_536)
        except OSError:  # the other end was closed
            return False
        self.output += data.decode("utf-8", "replace")
        return bool(data)

    @property
    def screen(self) -> str:
        """The last frame that ends with the line of keys."""
        frames = [frame for frame in self.output.split("\x1b[H") if "q quit" in frame]
        return _CODES.sub("", frames[-1]).replace("\r", "") if frames else ""

    def until(self, seen: Callable[[str], bool]) -> str:
        """Read until a screen is as it should be."""
        end = time.monotonic() + PATIENCE
        while not seen(self.screen):
            assert time.monotonic() < end, self.output[-3000:]
            assert self.read(0.1), self.output[-3000:]
        return self.screen

    def end(self) -> int:
        """Read to the end; returns the exit code."""
        end = time.monotonic() + PATIENCE
        while self.read(0.1):
            assert time.monotonic() < end
        return self.process.wait(PATIENCE)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()
        os.close(self.own)


@pytest.fixture
def terminals() -> Iterator[list[Terminal]]:
    found: list[Terminal] = []
    yield found
    for terminal in found:
        terminal.close()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with ServiceProcess(tmp_path_factory.mktemp("s"), "--metrics", "127.0.0.1:0") as running:
        yield running


def store(address: str, first: int = 0) -> None:
    cache = hicache.connect(address, NAMESPACE, required=True)
    for _ in range(2):
        with cache.request(np.arange(first, first + 64, dtype=np.uint32)) as request:
            request.load()
            request.write_from([bytes(cache.host.page_bytes)] * len(request.allocate()))
            request.commit(ready=hicache.READY)
    cache.close()


def total(figures: dict[str, float], name: str, label: str = "") -> float:
    return sum(value for key, value in figures.items() if key.startswith(f"hicache_{name}{{") and label in key)


def test_a_session(tmp_path: Path, terminals: list[Terminal]) -> None:
    """Figures, sorting, a pause, another size, a service that is killed and comes back, and q."""
    with ServiceProcess(tmp_path) as service:
        store(service.address)
        terminals.append(top := Terminal("top", service.address, "--interval", "0.1"))
        screen = top.until(lambda text: "hottest prefixes, by requests" in text)
        assert "asked" in screen
        assert re.search(r"hit +\S+ +\S+ +48 +37\.5 %", screen)
        assert "watched" in screen
        assert max(map(len, screen.splitlines())) <= 100
        top.press("h")
        top.until(lambda text: "by hit rate" in text)
        top.press("\t")
        top.until(lambda text: not any(line.startswith("tokens") for line in text.splitlines()[:4]))
        top.press(" ")
        top.until(lambda text: "[paused]" in text)
        store(service.address, 1000)
        top.press("p")
        top.until(lambda text: "[paused]" not in text and "256" in text)
        top.resize(150, 20)
        top.until(lambda text: max(map(len, text.splitlines())) > 130)
        assert len(top.screen.splitlines()) <= 20
        service.kill()
        top.until(lambda text: "no answer for" in text)
    with ServiceProcess(tmp_path):
        top.until(lambda text: "no answer" not in text and "0 pools" in text)
        top.press("q")
        assert top.end() == 0
    assert top.output.count("\x1b[?1049h") == top.output.count("\x1b[?1049l") == 1
    assert "Traceback" not in top.output


@pytest.mark.parametrize("rich", [True, False])
def test_with_and_without_rich(rich: bool, service: ServiceProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same figures, keys and end on a terminal, whoever paints it; in this process."""
    monkeypatch.setattr(top_screen, "has_rich", lambda: rich)
    monkeypatch.setenv("TERM", "xterm-256color")
    own, theirs = pty.openpty()
    fcntl.ioctl(own, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 90, 0, 0))
    seen: list[str] = []

    def use() -> None:
        """Press keys one after the other, each when what the one before has done is seen."""
        for expected, key in (("every 0.05 s", "h"), ("a second", " "), ("[paused]", "q")):
            while expected not in "".join(seen):
                seen.append(os.read(own, 65_536).decode("utf-8", "replace"))
            os.write(own, key.encode())
        while "\x1b[?1049l" not in "".join(seen):
            seen.append(os.read(own, 65_536).decode("utf-8", "replace"))

    user = threading.Thread(target=use, daemon=True)
    with open(theirs, encoding="utf-8", closefd=False) as stdin, open(theirs, "w", encoding="utf-8") as stdout:
        monkeypatch.setattr(sys, "stdin", stdin)
        monkeypatch.setattr(sys, "stdout", stdout)
        user.start()
        assert main(["top", service.address, "--interval", "0.05"]) == 0
        user.join(PATIENCE)
    monkeypatch.undo()
    os.close(own)
    text = _CODES.sub("", "".join(seen))
    assert not user.is_alive()
    assert "tokens" in text
    assert "q quit" in text


def test_a_service_that_hangs_stops_no_key(service: ServiceProcess, terminals: list[Terminal]) -> None:
    """The service is stopped in the middle of an answer: the screen still lives, and q ends it at once."""
    terminals.append(top := Terminal("top", service.address, "--interval", "0.05", "--timeout", "30"))
    top.until(lambda text: "verbs" in text)
    service.process.send_signal(signal.SIGSTOP)
    try:
        top.press("n")
        top.press(" ")
        top.until(lambda text: "[paused]" in text)
        top.press("q")
        assert top.end() == 0
    finally:
        service.process.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_it(number: signal.Signals, service: ServiceProcess, terminals: list[Terminal]) -> None:
    """Ctrl-C and SIGTERM are how one ends it: the terminal is as it was."""
    terminals.append(top := Terminal("top", service.address))
    before = termios.tcgetattr(top.own)
    top.until(lambda text: "tokens" in text)
    assert termios.tcgetattr(top.own) != before
    top.process.send_signal(number)
    assert top.end() == 0
    assert termios.tcgetattr(top.own) == before
    assert top.output.count("\x1b[?1049l") == 1


def test_without_a_terminal(service: ServiceProcess, capsys: pytest.CaptureFixture[str]) -> None:
    """Tables or JSON, once or so many times; the figures are those of `hicache stats`, and of Prometheus."""
    store(service.address)
    assert main(["top", service.address, "--once"]) == 0
    shown = capsys.readouterr().out
    assert "what other sizes would hit, of pages asked" in shown
    assert main(["top", service.address, "--once", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert main(["stats", service.address, "--json"]) == 0
    (pool,) = json.loads(capsys.readouterr().out)["pools"]
    tokens = pool["statistics"]["tokens"]
    assert document["tokens"] == {name: tokens[name] for name in ("asked", "device", "host", "storage", "missed")}
    assert document["interval_seconds"] is None
    assert document["pools"][0]["what_if"] == pool["what_if"]
    with urllib.request.urlopen(f"http://{service.ready['metrics']}/metrics") as page:
        figures = dict(line.rsplit(" ", 1) for line in page.read().decode().splitlines() if line[:8] == "hicache_")
    found = {name: float(value) for name, value in figures.items()}
    assert total(found, "tokens_asked_total") == document["tokens"]["asked"] == 128
    assert total(found, "tokens_hit_total", 'tier="host"') == document["tokens"]["host"] == 48
    for point in pool["what_if"][0]["points"]:
        size = f'size="{point["factor"]:g}"'
        assert total(found, "what_if_missed_pages_total", size) == point["missed_pages"]
    assert main(["top", service.address, "--json", "--count", "3", "--interval", "0.05"]) == 0
    first, *others = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["interval_seconds"], len(others)) == (None, 2)
    assert all(each["interval_seconds"] > 0.04 for each in others)


@pytest.mark.parametrize("arguments", [["--once"], ["--json"], ["--plain"]])
def test_no_service(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It must be there at the start: else one line, and exit code 2."""
    assert main(["top", f"unix://{tmp_path}/none.sock", *arguments]) == 2
    message = capsys.readouterr().err
    assert (message.count("\n"), "no service answers" in message) == (1, True)


@pytest.mark.parametrize("arguments", [["--interval", "0"], ["--count", "0"], ["--interval", "soon"]])
def test_bad_options(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """One line each."""
    assert main(["top", "unix:///tmp/none.sock", *arguments]) == 2
    assert capsys.readouterr().err.count("\n") == 1
