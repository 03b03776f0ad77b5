"""A report in a real browser, where there is one: its policy lets its own script run, and nothing complains."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from hicache.cli import main

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_QUIET = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
]


@pytest.fixture
def browser() -> str:
    """A browser's binary."""
    found = next((path for name in _NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"none of {', '.join(_NAMES)} is here: the page is not opened in a browser")
    return found


@pytest.mark.slow
def test_the_page_lives(small_trace: Path, tmp_path: Path, browser: str) -> None:
    """Legends have become switches and drawings can be reached by keys, which only the script does."""
    out = tmp_path / "r.html"
    assert main(["report", str(small_trace), "--requests", "60", "--device", "300", "--out", str(out)]) == 0
    command = [browser, *_QUIET, f"--user-data-dir={tmp_path}/profile", "--dump-dom", out.as_uri() + "#theme-dark"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    drawings = len(re.findall('<div class="drawing"', done.stdout))
    assert drawings == out.read_text().count("<figure ")
    assert (
        len(re.findall(r'<div class="drawing"[^>]* aria-label="[^"]+: arrow keys tell its points"', done.stdout))
        == drawings
    )
    assert 'aria-pressed="true"' in done.stdout
    assert 'data-theme="dark"' in done.stdout
    assert "CONSOLE" not in done.stderr
