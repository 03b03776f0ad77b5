from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import hicache


def test_every_public_name_is_there_and_comes_from_the_place_the_type_checker_sees() -> None:
    tree = ast.parse(Path(hicache.__file__).read_text(encoding="utf-8"))
    (checked,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {}
    for statement in checked.body:
        assert isinstance(statement, ast.ImportFrom)
        for alias in statement.names:
            seen[alias.asname or alias.name] = (statement.module, alias.name)
    assert sorted(seen) == sorted(hicache.__all__)
    for name, (module, attribute) in seen.items():
        assert getattr(hicache, name) is getattr(sys.modules[str(module)], attribute)
    assert set(dir(hicache)) == set(hicache.__all__)


def test_errors_are_all_public() -> None:
    from hicache import errors

    names = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert names <= set(hicache.__all__)


def test_what_is_not_public_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="nothing"):
        _ = hicache.nothing  # type: ignore[attr-defined]


def test_importing_and_opening_load_nothing_heavy() -> None:
    program = """
import sys
import hicache
assert "numpy" not in sys.modules
geometry = hicache.KVGeometry.mha(layers=1, kv_heads=1, head_dim=4, dtype="float16")
namespace = hicache.Namespace(model="m", geometry=geometry, page_size=4)
with hicache.open(namespace, device=4, host=4, storage="memory://") as cache, cache.request([1, 2, 3, 4, 5]) as request:
    request.load(), request.allocate(), request.commit()
loaded = {"torch", "cupy", "grpc", "redis", "rich"} & set(sys.modules)
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
