"""The contract and the code made of it: what may not change unseen, and with which runtimes it loads."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def generator(repository: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", repository / "proto" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


def lowest(repository: Path, package: str) -> tuple[int, ...]:
    """The oldest version of a package that pyproject.toml allows."""
    dependencies = tomllib.loads((repository / "pyproject.toml").read_text())["project"]["dependencies"]
    found = next(re.match(r".*>=([0-9.]+)", line) for line in dependencies if line.startswith(f"{package}>"))
    assert found is not None
    return numbers(found[1])


@pytest.mark.case("PLUG-5")
def test_generated_code_needs_no_newer_runtime_than_the_metadata_allows(repository: Path) -> None:
    """`make wheel` loads it with the oldest and the newest ones, and makes calls with them."""
    files = sorted((repository / "hicache" / "rpc" / "v1").glob("*_pb2.py"))
    made = {numbers(re.search(r"Protobuf Python Version: ([0-9.]+)", file.read_text())[1]) for file in files}  # type: ignore[index]
    assert len(files) == 5
    assert max(made) <= lowest(repository, "protobuf")
    stubs = "".join(file.read_text() for file in (repository / "hicache" / "rpc" / "v1").glob("*_pb2_grpc.py"))
    assert {numbers(found) for found in re.findall(r"GRPC_GENERATED_VERSION = '([0-9.]+)'", stubs)} == {
        lowest(repository, "grpcio")
    }
    assert numbers(version("protobuf")) >= max(made)


def test_a_file_that_was_edited_or_forgotten_is_seen(generator: ModuleType) -> None:
    committed = {"a_pb2.py": "one\n", "b_pb2.py": "two\n"}
    assert generator.differences(committed, dict(committed)) == []
    assert "-two" in generator.differences(committed, {"a_pb2.py": "one\n"})
    assert "+edited" in generator.differences(committed, {**committed, "a_pb2.py": "edited\n"})
    assert "+three" in generator.differences(committed, {**committed, "c_pb2.py": "three\n"})


def buf(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = (Path(sys.executable).parent / "buf", *arguments)
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("uint64 lease = 1;", "uint64 lease = 99;"),
        ("uint64 lease = 1;", "string lease = 1;"),
        ("uint64 lease = 1;", "uint64 renamed = 1;"),
        ("rpc Open(", "rpc Begin("),
    ],
    ids=["number", "type", "name", "call"],
)
def test_a_change_that_breaks_clients_is_seen(repository: Path, tmp_path: Path, old: str, new: str) -> None:
    """By what was released, not by what was there a minute ago."""
    shutil.copytree(repository / "proto", tmp_path / "proto")
    released = repository / "proto" / "released.json"
    assert buf("breaking", tmp_path / "proto", "--against", released).returncode == 0
    path = tmp_path / "proto" / "hicache" / "rpc" / "v1" / "session.proto"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    broken = buf("breaking", tmp_path / "proto", "--against", released)
    assert broken.returncode != 0
    assert "session.proto" in broken.stdout


def test_every_call_of_the_contract_says_what_it_does(repository: Path) -> None:
    for path in sorted((repository / "proto" / "hicache" / "rpc" / "v1").glob("*.proto")):
        for before, line in pairwise(path.read_text().splitlines()):
            if line.startswith("  rpc "):
                assert before.startswith("  // "), f"{path.name}: {line}"


@pytest.mark.parametrize("module", ["hicache", "hicache.rpc", "hicache.rpc.service", "hicache.rpc.address"])
def test_the_plain_contract_loads_without_grpc(module: str, tmp_path: Path) -> None:
    code = f"import sys, {module}; print({{'grpc', 'google.protobuf'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
