"""SGLang's tree cores as a reference, run by the interpreter of `.engines/sglang` beside ours."""

from __future__ import annotations

import json
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PYTHON = ROOT / ".engines" / "sglang" / "bin" / "python"


@cache
def reference() -> dict[str, float]:
    """Microseconds by benchmark name; empty where that environment was not made, or cannot run."""
    if not PYTHON.exists():
        return {}
    script = Path(__file__).parent / "sglang_reference.py"
    done = subprocess.run([PYTHON, script], capture_output=True, text=True, check=False, cwd=ROOT, timeout=300)
    if done.returncode:
        print(f"SGLang's tree cores did not run: {done.stderr.strip().splitlines()[-1:]}")
        return {}
    return json.loads(done.stdout.strip().splitlines()[-1])
