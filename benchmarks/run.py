"""`make bench`: every figure beside its reference, in one run. Writes benchmarks/out/bench.json and prints a table.

python benchmarks/run.py [NAME ...]     only the modules named, e.g. core hash
python benchmarks/run.py scale --large  sizes of up to 10 million pages: minutes, and about 10 GB of memory
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.measure import Row  # noqa: E402  the repository's root is not installed

MODULES = (
    "analytics",
    "core",
    "file",
    "hash",
    "memory",
    "observing",
    "progress",
    "redis",
    "replay",
    "scale",
    "sidecar",
    "start",
    "tables",
)
OUT = ROOT / "benchmarks" / "out" / "bench.json"


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def table(rows: list[Row]) -> str:
    lines = [("name", "value", "unit", "reference", "ratio", "bar", "", "reason")]
    for row in rows:
        mark = "ok" if row.ok else "MISSED"
        figures = (_cell(row.value), row.unit, _cell(row.reference), _cell(row.ratio), _cell(row.bar))
        lines.append((row.name, *figures, mark, row.reason))
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def main(arguments: list[str]) -> int:
    names = [name for name in arguments if name != "--large"]
    if len(names) < len(arguments):
        os.environ["BENCHMARKS_LARGE"] = "1"
    unknown = [name for name in names if name not in MODULES]
    if unknown:
        print(f"no benchmark {', '.join(unknown)}: one of {', '.join(MODULES)}", file=sys.stderr)
        return 2
    rows: list[Row] = []
    for name in names or MODULES:
        rows += importlib.import_module(f"benchmarks.bench_{name}").rows()
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps([row.as_dict() for row in rows], indent=1) + "\n", encoding="utf-8")
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}\n")
    print(table(rows))
    print(f"\nwritten to {OUT.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
