"""SGLang's tree cores as a reference, run by the interpreter of `.engines/sglang` beside ours."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PYTHON = ROOT / ".engines" / "sglang" / "bin" / "python"
SCRIPT = Path(__file__).parent / "sglang_reference.py"


@dataclass(frozen=True, slots=True)
class Reference:
    """What SGLang takes on this machine.

    Attributes:
        core: the class of its fastest tree core that runs there.
        version: SGLang's.
        microseconds: medians by benchmark name; `NAME_python` for the core written in Python.
    """

    core: str
    version: str
    microseconds: dict[str, float]

    def said(self, name: str) -> str:
        """What a reader of the row should know about its reference."""
        slow = self.microseconds[f"{name}_python"]
        return f"reference: {self.core} of SGLang {self.version} (its Python core: {slow:.4g} us)"


@cache
def reference() -> Reference | None:
    """None where that environment was not made, or cannot run; the latter is said on the terminal."""
    if not PYTHON.exists():
        return None
    try:
        done = subprocess.run([PYTHON, SCRIPT], capture_output=True, text=True, check=False, cwd=ROOT, timeout=300)
    except subprocess.TimeoutExpired:
        print("SGLang's tree cores did not run: not done within 300 s")
        return None
    if done.returncode:
        print(f"SGLang's tree cores did not run: {done.stderr.strip().splitlines()[-1:]}")
        return None
    result = json.loads(done.stdout.strip().splitlines()[-1])
    return Reference(result.pop("core"), result.pop("version"), result)
