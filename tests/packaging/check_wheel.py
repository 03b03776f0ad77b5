"""Builds the wheel and tries it in a new environment: `python check_wheel.py TRACE`.

The environment gets the wheel and what it requires, no extras, so that a hidden dependency on a development tool or
on the source tree fails here. Prints one line a step and exits with 1 at the first that fails.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
IMPORTS = """
import importlib.util, sys, hicache, hicache_file
heavy = {"torch", "cupy", "grpc", "redis", "rich"} & set(sys.modules)
assert not heavy, f"import hicache loads {heavy}"
assert importlib.util.find_spec("hicache_redis"), "the Redis backend is not in the wheel"
assert importlib.util.find_spec("hicache_sglang.engine"), "the SGLang plug-in is not in the wheel"
assert importlib.util.find_spec("hicache_transformers"), "the connector for transformers is not in the wheel"
"""


def run(*command: str | Path, cwd: Path) -> str:
    """Run and return what it printed; the step's name is the command."""
    print("wheel:", " ".join(Path(part).name if "/" in str(part) else str(part) for part in command)[:110], flush=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HICACHE_", "PYTHON"))}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def serve(hicache: Path, work: Path) -> None:
    """A service without any extra starts, answers and ends."""
    address = f"unix://{work}/h.sock"
    print("wheel: hicache serve", flush=True)
    command = [hicache, "serve", "--json", "--host", "8MiB", "--listen", address]
    service = subprocess.Popen(command, cwd=work, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert service.stdout is not None
        if not service.stdout.readline():
            sys.exit(service.communicate()[1])
        assert json.loads(run(hicache, "ping", address, "--json", cwd=work))["ready"]
    finally:
        service.terminate()
        out, log = service.communicate(timeout=60)
    assert (service.returncode, json.loads(out)) == (0, {"dropped": {}}), log


def main(trace: Path) -> None:
    """Build, install, import, ask for help, replay, serve."""
    with tempfile.TemporaryDirectory(prefix="hicache-wheel-") as folder:
        work = Path(folder)
        run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", work, ROOT, cwd=work)
        wheel = next(work.glob("hicache-*.whl"))
        venv.create(work / "env", with_pip=False)  # pip of this environment works on that one
        binaries = work / "env" / "bin"
        run(sys.executable, "-m", "pip", "--python", binaries / "python", "install", "--quiet", wheel, cwd=work)
        run(binaries / "python", "-c", IMPORTS, cwd=work)
        run(binaries / "hicache", "--help", cwd=work)
        sizes = ["--device", "200", "--host", "400", "--storage", f"file://{work}/store?capacity=64MiB"]
        content = ["--page-size", "trace", "--page-bytes", "4096", "--requests", "60", "--json"]
        result = json.loads(run(binaries / "hicache", "replay", trace, *sizes, *content, cwd=work))
        assert result["requests"] == 60, result
        assert result["pages_wrong"] == 0, result
        assert result["pages_verified"] > 0, result
        serve(binaries / "hicache", work)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
