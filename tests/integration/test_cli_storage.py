"""`hicache fsck` and `hicache bench storage`, on files and on Redis."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hicache.cli import main
from hicache.storage.base import StorageBackend
from hicache.storage.registry import load_backend, open_storage
from hicache.storage.url import StorageUrl
from hicache.testing.objects import NAMESPACE, make_chain
from hicache.testing.servers import Server, binaries, free_port

SIZE = 10_000


@pytest.fixture(params=["file", pytest.param("redis", marks=pytest.mark.redis)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "file":
        yield f"file://{tmp_path}/root"
        return
    options = {"maxmemory": "1gb", "maxmemory-policy": "allkeys-lru"}
    with Server(next(iter(binaries().values())), tmp_path / "server", options) as server:
        yield f"redis://127.0.0.1:{server.port}/0"


def bare(url: str) -> StorageBackend:
    parsed = StorageUrl.parse(url)
    return load_backend(parsed.scheme).from_url(parsed)


def run(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> tuple[Any, str]:
    assert main(list(arguments)) == code
    captured = capsys.readouterr()
    return (json.loads(captured.out) if "--json" in arguments else captured.out), captured.err


def spoil(url: str, tmp_path: Path) -> None:
    if url.startswith("file"):
        victim = max(tmp_path.rglob("*_hg1-*"))
        with victim.open("r+b") as file:
            file.seek(5000)
            file.write(b"spoilt")
        return
    from hicache.testing.servers import call

    port = StorageUrl.parse(url).port
    assert port is not None
    name = f"hicache:{make_chain(1, SIZE)[0].key.name}"
    call(("127.0.0.1", port), "SETRANGE", name, 5000, "spoilt")


def test_fsck_makes_no_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A path that is mistyped holds no objects, and is not made to."""
    _, told = run(capsys, "fsck", f"file://{tmp_path}/mistyped", code=2)
    assert f"there is no folder '{tmp_path}/mistyped': nothing was checked" in told
    assert list(tmp_path.iterdir()) == []


@pytest.mark.case("FAIL-8")
def test_fsck_finds_and_repairs(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    backend = open_storage(url)
    backend.put(make_chain(6, SIZE))
    backend.close()
    found, _ = run(capsys, "fsck", url, "--json")
    assert (found["objects"], found["ok"], found["corrupt"], found["foreign"]) == (6, 6, 0, 0)
    assert found["namespaces"][0]["namespace"] == NAMESPACE.hex()
    assert found["bytes"] >= 6 * SIZE
    spoil(url, tmp_path)
    found, told = run(capsys, "fsck", url, "--json", code=1)
    assert (found["corrupt"], found["removed"]) == (1, 0)
    assert "payload_checksum" in told
    shown, _ = run(capsys, "fsck", url, "--repair")
    assert "damaged" in shown
    assert NAMESPACE.hex() in shown
    found, _ = run(capsys, "fsck", url, "--json", "--sample", "100%")
    assert (found["objects"], found["corrupt"]) == (5, 0)


def test_bench_prints_every_verb_and_leaves_nothing(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--sizes", "4KiB,64KiB", "--rounds", "1", "--total", "1MiB", "--threads", "2"]
    found, _ = run(capsys, "bench", "storage", url, *options, "--json")
    assert [each["size"] for each in found["sizes"]] == [4096, 65_536]
    for each in found["sizes"]:
        assert each["wrong"] == 0
        assert each["put"]["ratio"] > 0 < each["get"]["ratio"]
    shown, _ = run(capsys, "bench", "storage", url, *options)
    assert "raw loop" in shown
    found, _ = run(capsys, "fsck", url, "--json")
    assert found["objects"] == 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["fsck", "memory://"], "cannot list"),
        (["fsck", "file:///tmp/x", "--sample", "0"], "--sample 0"),
        (["fsck", "file:///tmp/x", "--sample", "many"], "--sample many"),
        (["bench", "storage", "memory://", "--threads", "0"], "threads"),
        (["bench", "storage", "memory://", "--sizes", "1PB"], "--sizes"),
        (["bench", "storage", "memory://", "--sizes", "1GiB", "--batch", "1000"], "--batch 1000"),
        (["bench", "storage", "s4://x"], "s4"),
        (["fsck", "redis://u:hunter2@h:port"], "cannot be read"),
        (["fsck", "redis://host?prefix=a%20b"], "prefix"),
    ],
)
def test_wrong_arguments_are_one_line(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, told = run(capsys, *arguments, code=2)
    assert told.count("\n") == 1
    assert text in told
    assert "hunter2" not in told


def test_a_server_that_is_not_there_is_one_error(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["fsck"], ["bench", "storage"]):
        _, told = run(capsys, *command, f"redis://127.0.0.1:{free_port()}/0?connect_timeout=1", code=2)
        assert "cannot be" in told
