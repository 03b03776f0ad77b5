"""Records the connector interface of a vLLM that lies unpacked in a folder: `python record.py FOLDER RELEASE > FILE`.

Nothing of it is imported, so any wheel will do, also one that this machine cannot run. The files are `vllm_*.json` in
`tests/data`, against which `tests/connectors/hicache_vllm` holds the connector.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any

CONNECTOR = "distributed/kv_transfer/kv_connector/v1"
CLASSES = {
    f"{CONNECTOR}/base.py": ("KVConnectorBase_V1", "SupportsHMA", "KVConnectorMetadata", "KVConnectorWorkerMetadata"),
    f"{CONNECTOR}/metrics.py": ("KVConnectorStats", "KVConnectorPromMetrics"),
}
EVENTS = ("BlockStored", "BlockRemoved")
FUNCTIONS = {
    "v1/attention/backends/cpu_attn.py": ("_get_attn_isa",),
    "_custom_ops.py": ("cpu_attn_reshape_and_cache",),
    "distributed/utils.py": ("get_pp_indices",),
    f"{CONNECTOR.removesuffix('/v1')}/utils.py": ("get_current_attn_backend",),
    "forward_context.py": ("get_forward_context", "is_forward_context_available"),
}
"""What `hicache_vllm.compat` calls besides."""

DECORATED = ("property", "classmethod", "staticmethod")


def record(package: Path, release: str) -> dict[str, Any]:
    """Signatures as text: names of parameters, "=" behind those with a default."""
    found = {path: body_of(package / path) for path in (*CLASSES, *FUNCTIONS)}
    events = body_of(package / "distributed/kv_events.py")
    sources = body_of(package / "v1/metrics/cache_hit_source.py")
    steps = body_of(package / "v1/core/sched/output.py")
    hooks = body_of(package / "model_executor/layers/attention/kv_transfer_utils.py")
    modes = body_of(package / "config/compilation.py")
    return {
        "release": release,
        "classes": {name: methods(found[path][name]) for path, names in CLASSES.items() for name in names},
        "events": {name: fields(events[name]) for name in EVENTS},
        "functions": {name: signature(found[path][name]) for path, names in FUNCTIONS.items() for name in names},
        "hit_sources": values(sources["CacheHitSource"]) if "CacheHitSource" in sources else None,
        "step": fields(steps["SchedulerOutput"]),
        "forward": fields(found["forward_context.py"]["ForwardContext"]),
        "graphs": values(modes["CUDAGraphMode"]),
        "hooks": calls(hooks["maybe_transfer_kv_layer"], "connector"),
        "asks_for_piecewise": "requires_piecewise_for_cudagraph" in (package / "config/vllm.py").read_text("utf-8"),
    }


def body_of(path: Path) -> dict[str, Any]:
    """Classes and functions of a module by name; none where there is no such module."""
    if not path.is_file():
        return {}
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}


def methods(node: ast.ClassDef) -> dict[str, str]:
    found = {}
    for member in node.body:
        if isinstance(member, ast.FunctionDef):
            marks = [ast.unparse(mark) for mark in member.decorator_list]
            kind = next((mark for mark in DECORATED if mark in marks), "method")
            abstract = "abstract " if "abstractmethod" in marks else ""
            found[member.name] = f"{abstract}{kind}: {signature(member)}"
    return dict(sorted(found.items()))


def signature(node: ast.FunctionDef) -> str:
    given = node.args
    plain = [*given.posonlyargs, *given.args]
    needed = len(plain) - len(given.defaults)
    names = [one.arg + "=" * (at >= needed) for at, one in enumerate(plain)]
    names += [f"*{given.vararg.arg}"] if given.vararg else []
    names += [
        f"kw:{one.arg}" + "=" * (had is not None) for one, had in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    ]
    names += [f"**{given.kwarg.arg}"] if given.kwarg else []
    return " ".join(names)


def calls(node: ast.FunctionDef, name: str) -> list[str]:
    """What a function calls of an object, in order."""
    found = [one for one in ast.walk(node) if isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute)]
    found.sort(key=lambda one: (one.lineno, one.col_offset))
    return [ast.unparse(one) for one in found if ast.unparse(one.func).startswith(f"{name}.")]


def fields(node: ast.ClassDef) -> list[str]:
    return [
        f"{ast.unparse(one.target)}{'=' * (one.value is not None)}"
        for one in node.body
        if isinstance(one, ast.AnnAssign)
    ]


def values(node: ast.ClassDef) -> dict[str, Any]:
    return {
        ast.unparse(one.targets[0]): ast.literal_eval(one.value)
        for one in node.body
        if isinstance(one, ast.Assign) and isinstance(one.value, ast.Constant)
    }


if __name__ == "__main__":
    print(json.dumps(record(Path(sys.argv[1]) / "vllm", sys.argv[2]), indent=1))
