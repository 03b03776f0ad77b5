from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def golden(repository: Path) -> dict[str, Any]:
    """The golden vectors of all byte formats, freshly read."""
    return json.loads((repository / "tests" / "data" / "golden_vectors.json").read_text(encoding="utf-8"))
