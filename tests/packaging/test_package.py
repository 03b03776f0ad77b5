"""What is shipped: light to import, typed, found by entry points, free of forbidden calls."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import hicache

SHIPPED = (
    "hicache",
    "storage_backends/hicache_file",
    "connectors/hicache_sglang",
    "connectors/hicache_transformers",
    "connectors/hicache_vllm",
)
HEAVY = {"torch", "cupy", "cuda", "grpc", "redis", "rich"}
LONGEST_MODULE = 500


def modules(repository: Path, *folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from sorted((repository / folder).rglob("*.py"))


def run_python(code: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "module",
    [
        "hicache",
        "hicache_file",
        "hicache_sglang",
        "hicache_transformers",
        "hicache_vllm",
        "hicache.cli",
        "hicache.cli.replay",
        "hicache.cuda.engine",
    ],
)
def test_import_is_light(module: str, tmp_path: Path) -> None:
    loaded = run_python(f"import sys, {module}; print(*sys.modules)", tmp_path).split()
    assert not HEAVY & {name.split(".", maxsplit=1)[0] for name in loaded}
    assert ("hicache.cuda" in loaded) == module.startswith("hicache.cuda")


def test_only_packages_are_importable(tmp_path: Path) -> None:
    code = (
        "import importlib.util as u; "
        "print([n for n in ('tests', 'storage_backends', 'connectors', 'benchmarks') if u.find_spec(n)])"
    )
    assert run_python(code, tmp_path).strip() == "[]"


def test_public_names_exist_and_are_documented() -> None:
    for name in hicache.__all__:
        assert getattr(hicache, name) is not None
    assert set(hicache.__all__) <= set(dir(hicache))


def test_packages_are_typed(repository: Path) -> None:
    for folder in SHIPPED:
        assert (repository / folder / "py.typed").is_file()


def test_backends_are_found_and_load() -> None:
    found = {entry.name: entry for entry in entry_points(group="hicache.storage_backends")}
    assert {"file", "memory"} <= set(found)
    for name in ("file", "memory"):
        assert hasattr(found[name].load(), "from_url")


def test_connectors_are_found_and_load_without_an_engine() -> None:
    found = {entry.name: entry for entry in entry_points(group="hicache.connectors")}
    assert found["sglang"].load().__all__ == ["HiCacheStorageBackend"]
    assert found["vllm"].load().__all__ == ["HiCacheConnector"]
    transformers = found["transformers"].load()
    assert dir(transformers) == sorted(transformers.__all__) == ["Prefix", "PrefixCache", "Statistics"]
    assert all(getattr(transformers, name) for name in transformers.__all__)
    with pytest.raises(AttributeError, match="nothing"):
        getattr(transformers, "nothing")  # noqa: B009


@pytest.mark.case("SEC-1")
def test_nothing_can_run_code_from_bytes(repository: Path) -> None:
    forbidden_modules = {"pickle", "cPickle", "dill", "marshal", "shelve", "jsonpickle", "cloudpickle"}
    forbidden_calls = {"eval", "exec", "torch.load", "np.load", "numpy.load", "yaml.load"}
    for path in modules(repository, *SHIPPED):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert not forbidden_modules & {alias.name for alias in node.names}, path
            elif isinstance(node, ast.ImportFrom):
                assert node.module not in forbidden_modules, path
            elif isinstance(node, ast.Call):
                assert ast.unparse(node.func) not in forbidden_calls, f"{path}:{node.lineno}"


def test_modules_stay_readable(repository: Path) -> None:
    long = {path: len(path.read_text().splitlines()) for path in modules(repository, *SHIPPED, "tests", "benchmarks")}
    assert not {path: lines for path, lines in long.items() if lines > LONGEST_MODULE}


def test_module_map_of_the_readme_is_true(repository: Path) -> None:
    readme = (repository / "README.md").read_text()
    folders = sorted(path.name for path in (repository / "hicache").iterdir() if (path / "__init__.py").is_file())
    rows = [line.split("`")[1] for line in readme.splitlines() if line.startswith("| `hicache/")]
    assert sorted(row.removeprefix("hicache/").rstrip("/") for row in rows if row.endswith("/")) == folders
