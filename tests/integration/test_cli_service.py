"""`hicache serve` and the commands that talk to it, each as its users run it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hicache
from hicache.cli import main
from hicache.testing.certificates import make_certificates

TOKEN = "an operator's token, which is long"
WRITER = "an engine's token, which is long too"
PROMPT = np.arange(70, dtype=np.uint32)


@dataclass
class Service:
    """One `hicache serve`, in a process of its own."""

    process: subprocess.Popen[str]
    folder: Path
    addresses: list[str]
    metrics: str | None

    @property
    def address(self) -> str:
        return self.addresses[0]

    def end(self, number: int = signal.SIGTERM) -> tuple[int, dict[str, Any], str]:
        """Send a signal, and wait for the exit code, what was dropped, and the log."""
        self.process.send_signal(number)
        out, log = self.process.communicate(timeout=60)
        return self.process.returncode, json.loads(out) if out else {}, log


def start(folder: Path, *arguments: str, host: str = "8MiB") -> Service:
    process = subprocess.Popen(
        [sys.executable, "-m", "hicache", "serve", "--json", "--host", host, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.communicate(timeout=60)[1]
    return Service(process, folder, **json.loads(line))


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("service")
    running = start(
        folder,
        "--listen",
        f"unix://{folder}/h.sock",
        "--storage",
        f"file://{folder}/store",
        "--set",
        "host.pool_bytes=64KiB",
    )
    try:
        yield running
    finally:
        code, ended, log = running.end()
        assert (code, ended) == (0, {"dropped": {}}), log


def namespace(model: str = "example/tiny") -> hicache.Namespace:
    geometry = hicache.KVGeometry.mha(layers=2, kv_heads=2, head_dim=8, dtype="float16")
    return hicache.Namespace(model=model, revision="1", geometry=geometry, page_size=16, hash="sha256")


def store(address: str, model: str, **secrets: Any) -> None:
    """Four pages of a prompt."""
    cache = hicache.connect(address, namespace(model), required=True, **secrets)
    with cache, cache.request(PROMPT) as request:
        pages = [bytes([number + 1]) * cache.host.page_bytes for number in range(len(request.allocate()))]
        assert request.write_from(pages) == len(pages)
        request.commit(ready=hicache.READY)


def called(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    code = main([*arguments, "--json"])
    captured = capsys.readouterr()
    return code, json.loads(captured.out) if captured.out else captured.err


def prompts(folder: Path, *lines: Any) -> str:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


# ---- the commands, against one service


def test_ping(service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    """Says that it is ready, and how long an answer takes."""
    code, answer = called(capsys, "ping", service.address)
    assert code == 0
    assert (answer["ready"], answer["degraded"], answer["tenant"]) == (True, [], None)
    assert 0 < answer["seconds"] < 10
    assert main(["ping", service.address]) == 0
    assert "ready" in capsys.readouterr().out


def test_pages_are_seen_pinned_and_cleared(
    service: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What an engine has stored is counted, can be pinned by its prompt, and is forgotten on demand."""
    store(service.address, "org/pinned")
    _, document = called(capsys, "stats", service.address)
    (pool,) = [pool for pool in document["pools"] if pool["model"] == "org/pinned"]
    assert pool["statistics"]["core"]["host"]["resident"] == 4
    file = prompts(tmp_path, PROMPT.tolist())
    target = ("--model", "org/pinned", "--prompts", file)
    code, pinned = called(capsys, "pin", service.address, *target, "--name", "system", "--hard", "--ttl", "600")
    assert code == 0
    assert pinned == {"pins": [{"name": "system", "pages": 4, "of_pages": 4, "bytes": 4 * pool["page_bytes"]}]}
    _, listed = called(capsys, "pins", service.address)
    (pin,) = listed["pins"]
    assert (pin["name"], pin["hard"], pin["pages"], pin["namespace"]) == ("system", True, 4, pool["namespace"])
    assert 590 < pin["seconds_left"] <= 600
    code, message = called(capsys, "pin", service.address, *target, "--name", "system")
    assert code == 2
    assert message.count("\n") == 1
    assert called(capsys, "unpin", service.address, "--name", "system") == (0, {"pins": 1})
    assert called(capsys, "unpin", service.address, "--all") == (0, {"pins": 0})
    assert called(capsys, "unpin", service.address, "--name", "system")[0] == 2
    assert called(capsys, "clear", service.address, "--namespace", pool["namespace"]) == (
        0,
        {"namespaces": 1, "unconfirmed": []},
    )
    code, pinned = called(capsys, "pin", service.address, *target)
    assert (code, pinned["pins"][0]["pages"], pinned["pins"][0]["of_pages"]) == (1, 0, 4)


def test_prompts_come_from_a_pipe(
    service: Service, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In both forms of a line; those that no tier has are counted, and the exit code says so."""
    import io

    store(service.address, "org/piped")
    lines = [{"tokens": PROMPT.tolist(), "more": 1}, [], list(range(5000, 5032))]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(map(json.dumps, lines)) + "\n\n"))
    code, warmed = called(capsys, "warm", service.address, "--model", "org/piped", "--prompts", "-")
    assert (code, warmed) == (1, {"prompts": 3, "host_pages": 4, "missed_pages": 2})


def test_tables(service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    """People get tables with the same content."""
    store(service.address, "org/tables")
    for command, words in (
        (["stats", service.address], ["sessions", "org/tables", "storage", "objects"]),
        (["stats", service.address, "--watch", "--every", "0.05", "--count", "2"], ["sessions"]),
        (["pins", service.address], ["name", "left"]),
        (["doctor", service.address], ["canary page of org/tables", "good"]),
    ):
        assert main(command) == 0
        out = capsys.readouterr().out
        assert all(word in out for word in words), out


def test_watching_prints_a_line_each(service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    """JSON that can be piped on."""
    assert main(["stats", service.address, "--watch", "--every", "0.05", "--count", "3", "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert all("service" in json.loads(line) for line in lines)


def test_doctor_of_a_service(service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    """A page goes through the running service and comes back."""
    store(service.address, "org/doctor")
    code, document = called(capsys, "doctor", service.address)
    assert code == 0, document
    assert "canary page of org/doctor" in {finding["check"] for finding in document["findings"]}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["ping", "nonsense"], "address 'nonsense' is none that is known"),
        (["ping", "unix:///nowhere/h.sock"], "no service answers at unix:///nowhere/h.sock"),
        (["ping", "127.0.0.1:1"], "127.0.0.1:1 is reached over TCP"),
        (["ping", "127.0.0.1:1", "--insecure"], "no service answers at 127.0.0.1:1"),
        (["ping", "SERVICE", "--timeout", "0"], "--timeout 0: give seconds"),
        (["stats", "SERVICE", "--every", "x", "--watch"], "--every x: give seconds"),
        (["stats", "SERVICE", "--count", "0", "--watch"], "--count 0: give 1 or more"),
        (["clear", "SERVICE"], "clear what?"),
        (["clear", "SERVICE", "--all", "--model", "m"], "clear what?"),
        (["clear", "SERVICE", "--salt", "s"], "--salt is of a model"),
        (["clear", "SERVICE", "--model", "nobody/knows"], "no pool of model 'nobody/knows' is here"),
        (["clear", "SERVICE", "--namespace", "xyz"], "--namespace: 'xyz' is not 32 hex digits"),
        (["clear", "SERVICE", "--model", "m", "--adapter", "a"], "--adapter: 'a' is not 64 hex digits"),
        (["unpin", "SERVICE"], "unpin what?"),
        (["unpin", "SERVICE", "--all", "--name", "x"], "unpin what?"),
        (["pin", "SERVICE", "--prompts", "/dev/null"], "whose pages?"),
        (["pin", "SERVICE", "--model", "m", "--prompts", "/dev/null"], "has no prompts"),
        (["warm", "SERVICE", "--model", "m", "--prompts", "/nowhere"], "prompts '/nowhere' cannot be read"),
        (["warm", "SERVICE", "--model", "m", "--prompts", "BAD"], "line 2 of"),
    ],
)
def test_bad_input(
    service: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    """One line, exit code 2."""
    names = {"SERVICE": service.address, "BAD": prompts(tmp_path, [1], [-1])}
    assert main([names.get(argument, argument) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("line", ["[1.5]", '["1"]', "[4294967296]", "[true]", "{}", "1", "[1", '{"tokens": null}'])
def test_lines_that_are_no_prompts(
    service: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    """Each is refused with its number."""
    (tmp_path / "bad").write_text(f"{line}\n")
    assert main(["warm", service.address, "--model", "m", "--prompts", str(tmp_path / "bad")]) == 2
    assert "line 1 of" in capsys.readouterr().err


# ---- starting and ending


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_pages_of_operators(tmp_path: Path) -> None:
    """Metrics, health and readiness are served; the log says where, as JSON if wanted."""
    running = start(tmp_path, "--listen", f"{tmp_path}/h.sock", "--metrics", "127.0.0.1:0", "--log-format", "json")
    try:
        store(running.address, "org/metrics")
        status, text = get(f"http://{running.metrics}/metrics")
        assert status == 200
        assert 'hicache_host_pages{model="org/metrics"' in text
        assert 'hicache_verb_seconds_count{tier="host",verb="commit"} 1.0' in text
        status, text = get(f"http://{running.metrics}/healthz")
        assert (status, json.loads(text)["status"]) == (200, "ok")
        assert get(f"http://{running.metrics}/readyz")[0] == 200
    finally:
        code, ended, log = running.end()
    assert (code, ended) == (0, {"dropped": {}})
    assert all("message" in json.loads(line) for line in log.splitlines())
    assert str(running.metrics) in log
    assert sorted(os.listdir(tmp_path)) == []


def test_warm_after_a_restart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What was drained to storage at SIGTERM is brought up by the next service."""
    arguments = ("--listen", f"{tmp_path}/h.sock", "--storage", f"file://{tmp_path}/store")
    running = start(tmp_path, *arguments)
    try:
        store(running.address, "org/warm")
    finally:
        assert running.end()[0] == 0
    running = start(tmp_path, *arguments)
    try:
        file = prompts(tmp_path, PROMPT.tolist())
        with hicache.connect(running.address, namespace("org/warm"), required=True):
            warmed = called(
                capsys, "warm", running.address, "--model", "org/warm", "--prompts", file, "--deadline", "30"
            )
        assert warmed == (0, {"prompts": 1, "host_pages": 4, "missed_pages": 0})
    finally:
        assert running.end()[0] == 0


def test_tls_and_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Over TCP a token says who calls and what they may do; SIGHUP reads the file again, a bad one changes nothing."""
    made = make_certificates(tmp_path / "tls")
    tokens = tmp_path / "tokens.toml"

    def write(text: str, mode: int = 0o600) -> None:
        tokens.write_text(text)
        tokens.chmod(mode)

    entry = '[[tokens]]\nname = "{}"\ntoken = "{}"\ntenant = "{}"\nrights = {}\n'
    operator = entry.format("operator", TOKEN, "", '["read", "write", "admin"]')
    write(operator + entry.format("engine", WRITER, "acme", '["read", "write"]'))
    running = start(
        tmp_path,
        *("--listen", "127.0.0.1:0", "--tokens", str(tokens)),
        *("--tls-certificate", str(made.server), "--tls-key", str(made.server_key)),
    )
    try:
        address = running.address.replace("127.0.0.1", "localhost")
        tls = ("--ca", str(made.ca))
        code, message = called(capsys, "ping", address, *tls)
        assert code == 2
        assert "token" in message
        monkeypatch.setenv("HICACHE_TOKEN", WRITER)
        assert called(capsys, "ping", address, *tls)[1]["tenant"] == "acme"
        assert called(capsys, "clear", address, *tls, "--all")[0] == 2
        assert called(capsys, "ping", address, "--insecure", "--timeout", "5")[0] == 2
        store(address, "org/tls", ca=str(made.ca), token=WRITER)
        monkeypatch.setenv("HICACHE_TOKEN", TOKEN)
        _, document = called(capsys, "stats", address, *tls)
        assert [pool["tenant"] for pool in document["pools"]] == ["acme"]
        write("[[", 0o600)
        running.process.send_signal(signal.SIGHUP)
        write(operator, 0o644)
        running.process.send_signal(signal.SIGHUP)
        assert called(capsys, "ping", address, *tls)[0] == 0
        write(operator)
        monkeypatch.setenv("HICACHE_TOKEN", WRITER)
        for _ in range(500):
            running.process.send_signal(signal.SIGHUP)
            if called(capsys, "ping", address, *tls)[0] == 2:
                break
        else:
            pytest.fail("the token that was taken out is still taken")
    finally:
        code, _, log = running.end()
    assert code == 0
    assert "tokens are kept as they were" in log
    assert TOKEN not in log
    assert WRITER not in log


def test_certificates_are_renewed_by_a_signal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """SIGHUP reads the files again; what is no certificate changes nothing, and is told."""
    made, renewed = make_certificates(tmp_path / "tls"), make_certificates(tmp_path / "renewed")
    running = start(
        tmp_path,
        *("--listen", "127.0.0.1:0", "--insecure"),
        *("--tls-certificate", str(made.server), "--tls-key", str(made.server_key)),
    )
    try:
        address = running.address.replace("127.0.0.1", "localhost")
        content = made.server.read_bytes()
        made.server.write_bytes(b"half a file")
        running.process.send_signal(signal.SIGHUP)
        assert called(capsys, "ping", address, "--ca", str(made.ca))[0] == 0
        made.server.write_bytes(content)
        made.server_key.write_bytes(renewed.server_key.read_bytes())
        made.server.write_bytes(renewed.server.read_bytes())
        for _ in range(500):
            running.process.send_signal(signal.SIGHUP)
            if called(capsys, "ping", address, "--ca", str(renewed.ca), "--timeout", "5")[0] == 0:
                break
        else:
            pytest.fail("the new certificate is not shown")
        assert called(capsys, "ping", address, "--ca", str(made.ca), "--timeout", "5")[0] == 2
    finally:
        code, _, log = running.end()
    assert code == 0
    assert "certificates are kept as they were: " in log


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What `hicache serve` says when it cannot start: one line, exit code 2."""
    assert main(["serve", "--host", "8MiB", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = [line for line in captured.err.splitlines() if line.startswith("hicache: ")]
    assert len(lines) == len(captured.err.splitlines()) == 1, captured.err
    return lines[0]


@pytest.mark.case("GRPC-3")
def test_addresses_that_cannot_be_had(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A taken socket, a port in use, a path that is too long, a folder that is missing, a file in its place."""
    with socket.socket(socket.AF_UNIX) as unix, socket.socket() as tcp:
        unix.bind(f"{tmp_path}/taken.sock")
        unix.listen()
        tcp.bind(("127.0.0.1", 0))
        tcp.listen()
        port = tcp.getsockname()[1]
        assert "is taken" in refused(capsys, "--listen", f"{tmp_path}/taken.sock")
        assert f"127.0.0.1:{port}" in refused(capsys, "--listen", f"127.0.0.1:{port}", "--insecure")
        words = refused(capsys, "--listen", f"{tmp_path}/a.sock", "--metrics", f"127.0.0.1:{port}")
        assert "cannot be listened on: " in words
    assert "at most 107 bytes" in refused(capsys, "--listen", "unix:///" + "x" * 120)
    assert "none' does not exist: make it" in refused(capsys, "--listen", f"{tmp_path}/none/h.sock")
    (tmp_path / "file").write_text("mine")
    assert "is no socket" in refused(capsys, "--listen", f"{tmp_path}/file")
    assert (tmp_path / "file").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "taken.sock"]


@pytest.mark.case("GRPC-3")
def test_two_services_on_one_socket(service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    """The second is refused with the first's process, and the first still answers."""
    words = refused(capsys, "--listen", service.address)
    assert f"process {service.process.pid}" in words
    assert called(capsys, "ping", service.address)[0] == 0


@pytest.mark.case("GRPC-3")
def test_a_stale_socket_is_taken_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """After a kill -9 the next service starts on the same path."""
    running = start(tmp_path, "--listen", f"{tmp_path}/h.sock")
    running.process.kill()
    running.process.communicate(timeout=60)
    assert (tmp_path / "h.sock").exists()
    running = start(tmp_path, "--listen", f"{tmp_path}/h.sock")
    try:
        assert called(capsys, "ping", running.address)[0] == 0
    finally:
        assert running.end()[0] == 0
    assert list(tmp_path.iterdir()) == []


def test_settings_that_cannot_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Certificates, tokens, typos, memory, storage: each in its own words."""
    made = make_certificates(tmp_path / "tls")
    readable = tmp_path / "tokens.toml"
    readable.write_text(f'[[tokens]]\nname = "a"\ntoken = "{TOKEN}"\ntenant = "b"\n')
    readable.chmod(0o644)
    config = tmp_path / "hicache.toml"
    config.write_text('[host]\nbytez = "1GiB"\n')
    listen = ("--listen", f"{tmp_path}/h.sock")
    tls = ("--tls-key", str(made.server_key))
    for arguments, words in (
        (("--tls-certificate", "/nowhere.pem", *tls), "tls.certificate '/nowhere.pem' cannot be read"),
        (("--tls-certificate", str(made.client), *tls), "is not the key of"),
        (("--tokens", "/nowhere"), "token file '/nowhere' cannot be read"),
        (("--tokens", str(readable)), "has mode 0644, so others may use it"),
        (("--config", str(config)), "unknown setting host.bytez (file"),
        (("--set", "host.bytez=1"), "did you mean host.bytes?"),
        (("--set", "host"), "write NAME=VALUE"),
        (("--host", "1024PiB"), "does not fit"),
        (("--host", "0"), "host.bytes is not set"),
        (("--storage", "nonsense://x"), "is served by no installed package"),
        (("--storage", f"file://{readable}"), "tokens.toml"),
        (("--listen", "0.0.0.0:7420"), "without TLS would show and give away everything"),
    ):
        assert words in refused(capsys, *listen, *arguments)
    assert not (tmp_path / "h.sock").exists()


def test_config(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every value is shown with its origin, without secrets; a file is checked without starting anything."""
    file = tmp_path / "hicache.toml"
    file.write_text('[host]\nbytes = "1MiB"\n[storage]\nurl = "redis://user:hunter2@nowhere/0"\n')
    monkeypatch.setenv("HICACHE_LOG__LEVEL", "debug")
    code, shown = called(capsys, "config", "show", str(file), "--drain", "3")
    assert code == 0
    assert shown["host.bytes"] == {"value": "1 MiB", "origin": f"file {file}"}
    assert shown["log.level"] == {"value": "debug", "origin": "environment HICACHE_LOG__LEVEL"}
    assert shown["drain.seconds"] == {"value": 3.0, "origin": "--drain"}
    assert shown["limits.pages"]["origin"] == "default"
    assert shown["storage.url"]["value"] == "redis://***@nowhere/0"
    assert main(["config", "show", str(file)]) == 0
    table = capsys.readouterr().out
    assert "hunter2" not in table
    assert f"file {file}" in table
    assert called(capsys, "config", "check", str(file)) == (0, {"good": True, "warnings": []})
    file.write_text("[tls]\nkey = 'x'\n")
    code, message = called(capsys, "config", "check", str(file))
    assert (code, f"tls.key (file {file}): needs tls.certificate too" in message) == (2, True)
    code, described = called(capsys, "config", "describe")
    assert set(described) == set(shown)
    assert all(entry["text"] for entry in described.values())
    assert main(["config", "show", str(file), "--config", str(file)]) == 2


def test_doctor_before_a_service(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 0 where all is well, 1 where something is not, with what."""
    settings = ("--listen", f"{tmp_path}/h.sock", "--storage", f"file://{tmp_path}/store")
    code, document = called(capsys, "doctor", "--host", "8MiB", *settings)
    assert code == 0
    assert all(finding["good"] for finding in document["findings"])
    code, document = called(capsys, "doctor", "--host", "1PiB", *settings)
    assert code == 1
    assert [finding["check"] for finding in document["findings"] if not finding["good"]] == ["memory"]
