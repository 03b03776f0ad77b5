"""Clients that know nothing but the .proto files."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hicache.config import Config, Host, Listen
from hicache.testing.serving import ServedApp
from hicache.units import parse_size


def run_example(repository: Path, folder: Path, address: str) -> subprocess.CompletedProcess[str]:
    """Run it where of hicache there is only a copy of the generated code."""
    package = folder / "hicache" / "rpc" / "v1"
    package.mkdir(parents=True)
    for path in (repository / "hicache" / "rpc" / "v1").glob("*.py"):
        shutil.copy(path, package)
    shutil.copy(repository / "proto" / "example_client.py", folder)
    alone = "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in repr(f)]; "
    code = alone + "import runpy, hicache; assert hicache.__file__ is None; sys.argv = sys.argv[1:]; "
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    return subprocess.run(
        [sys.executable, "-c", code, "example_client.py", address],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.slow
def test_the_commands_that_the_example_gives_make_it_run(repository: Path, tmp_path: Path) -> None:
    """A copy of proto/ and the compiler are all that its reader needs."""
    compiler = repository / "build" / "proto-env" / "bin" / "python"
    if not compiler.exists():
        pytest.skip("there is no compiler: proto/generate.py makes its environment")
    folder = tmp_path / "proto"
    shutil.copytree(repository / "proto", folder)
    given = ast.get_docstring(ast.parse((folder / "example_client.py").read_text())) or ""
    _, generate, run = [line.strip() for line in given.splitlines() if line.startswith("    python")]
    config = Config(listen=Listen(addresses=(f"unix://{tmp_path}/s",)), host=Host(bytes=parse_size("4MiB")))
    with ServedApp(config):
        commands = f"{generate} && {run}".replace("python -", f"{compiler} -").replace("python e", f"{compiler} e")
        commands = commands.replace("/run/hicache/hicache.sock", f"{tmp_path}/s")
        done = subprocess.run(
            ["sh", "-c", commands], cwd=folder, capture_output=True, text=True, check=False, timeout=60
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "16384 bytes came back as they were\n"


@pytest.mark.slow
def test_a_page_is_stored_and_loaded_by_generated_code_alone(repository: Path, tmp_path: Path) -> None:
    """Forty lines against a whole service: the bytes of a page go in and come out as they were."""
    config = Config(listen=Listen(addresses=(f"unix://{tmp_path}/s",)), host=Host(bytes=parse_size("4MiB")))
    with ServedApp(config):
        done = run_example(repository, tmp_path / "client", f"unix:{tmp_path}/s")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "16384 bytes came back as they were\n"
