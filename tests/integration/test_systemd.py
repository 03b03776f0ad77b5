"""The unit for systemd, and a service under a supervisor that does what systemd does."""

from __future__ import annotations

import array
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import hicache
from hicache.cli import main
from hicache.cli.main import _COMMANDS

pytestmark = pytest.mark.slow

PROMPT = np.arange(70, dtype=np.uint32)


@pytest.mark.systemd
def test_the_unit_is_one_that_systemd_takes(repository: Path, tmp_path: Path) -> None:
    """`systemd-analyze verify` finds nothing, with a command that is there in the place of the installed one."""
    text = (repository / "deploy" / "systemd" / "hicache.service").read_text()
    command = Path(sys.executable).with_name("hicache")
    assert text.count("/opt/hicache/bin/hicache ") == 2
    (tmp_path / "hicache.service").write_text(text.replace("/opt/hicache/bin/hicache ", f"{command} "))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / "hicache.service")],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    ours = [line for line in (done.stdout + done.stderr).splitlines() if "hicache" in line]
    assert (done.returncode, ours) == (0, [])


def test_the_example_of_settings_is_good(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A service could start with it, and its drain ends before the unit's patience does."""
    folder = repository / "deploy" / "systemd"
    assert main(["config", "check", str(folder / "hicache.toml")]) == 0
    capsys.readouterr()
    seconds = float((folder / "hicache.toml").read_text().partition("[drain]\nseconds = ")[2].split()[0])
    assert seconds < float((folder / "hicache.service").read_text().partition("TimeoutStopSec=")[2].split()[0])


class Supervisor:
    """Reads what the service says, and keeps what it stores."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "notify")
        self.kept: list[int] = []
        self.name = ""
        self.said: list[str] = []
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._listening.bind(self.path)
        self._listening.settimeout(60)

    def until(self, line: str) -> None:
        """Read until a message has this line."""
        while True:
            data, ancillary, _, _ = self._listening.recvmsg(4096, 4096)
            lines = data.decode().split("\n")
            descriptors = array.array("i")
            for _, _, part in ancillary:
                descriptors.frombytes(part)
            self.said += lines
            if "FDSTORE=1" in lines:
                self.kept += descriptors
                self.name = next(text.removeprefix("FDNAME=") for text in lines if text.startswith("FDNAME="))
            else:
                for descriptor in descriptors:  # of a barrier
                    os.close(descriptor)
            if line in lines:
                return

    def close(self) -> None:
        for descriptor in self.kept:
            os.close(descriptor)
        self._listening.close()


@contextmanager
def running(supervisor: Supervisor, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A service that was given what the one before has stored; ready when the block begins."""
    kept, supervisor.kept = supervisor.kept, []
    environment = {**os.environ, "NOTIFY_SOCKET": supervisor.path, "FDSTORE": "512"}
    serve = f'exec "{sys.executable}" -m hicache serve --host 4MiB --listen "{folder}/h.sock"'
    if kept:
        # As systemd does: descriptors from 3 on, and the number of the process that they are for.
        environment |= {"LISTEN_FDS": str(len(kept)), "LISTEN_FDNAMES": ":".join([supervisor.name] * len(kept))}
        high = [os.dup(descriptor) for descriptor in kept]  # so that none of them is overwritten on the way
        moves = " ".join(f"{3 + number}<&{descriptor}" for number, descriptor in enumerate(high))
        serve = f"export LISTEN_PID=$$; {serve} {moves}"
    else:
        high = []
    process = subprocess.Popen(
        ["bash", "-c", serve],
        env=environment,
        pass_fds=high,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    for descriptor in [*kept, *high]:
        os.close(descriptor)
    try:
        supervisor.until("READY=1")
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        supervisor.until("BARRIER=1")
        log = process.communicate(timeout=60)[1]
    assert process.returncode == 0, log


def test_pages_outlive_a_restart(tmp_path: Path) -> None:
    """Memory that the supervisor keeps goes to the next service, which finds the same bytes in it, without storage."""
    geometry = hicache.KVGeometry.mha(layers=2, kv_heads=2, head_dim=8, dtype="float16")
    namespace = hicache.Namespace(model="example/tiny", revision="1", geometry=geometry, page_size=16, hash="sha256")
    supervisor = Supervisor(tmp_path)
    try:
        with running(supervisor, tmp_path):
            cache = hicache.connect(f"{tmp_path}/h.sock", namespace, required=True)
            with cache, cache.request(PROMPT) as request:
                pages = [bytes([number + 1]) * cache.host.page_bytes for number in range(len(request.allocate()))]
                request.write_from(pages)
                request.commit(ready=hicache.READY)
        assert {"READY=1", "STOPPING=1", "FDSTORE=1"} <= set(supervisor.said)
        assert len(supervisor.kept) >= 2
        with running(supervisor, tmp_path):
            cache = hicache.connect(f"{tmp_path}/h.sock", namespace, required=True)
            with cache, cache.request(PROMPT, deadline=30) as request:
                assert len(request.load()) == 4
                found = np.zeros((4, cache.host.page_bytes), np.uint8)
                assert request.read_into(found) == 4
        assert [bytes(page) for page in found] == pages[:4]
        assert f"FDNAME={supervisor.name}" in supervisor.said
        assert "FDSTOREREMOVE=1" in supervisor.said
    finally:
        supervisor.close()


def test_what_operators_read_is_true(repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Settings and commands that the text names exist, and its token file is one."""
    from hicache.sidecar.settings import schema
    from hicache.sidecar.tenants import read_tokens

    text = (repository / "deploy" / "README.md").read_text()
    sections = {setting.section for setting in schema()}
    named = {name for name in re.findall(r"`(\w+\.\w+)`", text) if name.partition(".")[0] in sections}
    assert len(named) >= 5
    assert named <= {setting.name for setting in schema()}
    assert set(re.findall(r"hicache (\w+)", " ".join(re.findall(r"`(hicache [^`]*)`", text)))) <= set(_COMMANDS)
    tokens = tmp_path / "tokens.toml"
    block = text[text.index("    [[tokens]]") : text.index("## Watching")]
    tokens.write_text(textwrap.dedent(block).replace("9f86d081884c7d65...", "0" * 64))
    tokens.chmod(0o600)
    assert read_tokens(str(tokens)).tokens[0].tenant == "acme"
