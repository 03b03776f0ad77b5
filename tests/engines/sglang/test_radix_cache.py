"""SGLang's own radix cache over the plug-in: device, host, storage, a second process, and back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import radix_caches
from radix_caches import PAGE, radix_cache

PROMPT = list(range(1, 6 * PAGE + 1))


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_a_prompt_comes_back_in_another_process(layout: str, storage: str) -> None:
    """What one engine computed and wrote back is in another engine's device memory, bit for bit."""
    with radix_cache(storage, layout) as writer:
        stored = writer.compute(PROMPT)
        counts = writer.backend.statistics()
        assert counts.written == counts.given >= len(PROMPT) // PAGE
    command = [sys.executable, str(Path(radix_caches.__file__)), storage, layout, ",".join(map(str, PROMPT))]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.split()[-2:] == [str(len(PROMPT)), stored]


def test_only_the_shared_prefix_comes_back(storage: str) -> None:
    """A prompt that goes on otherwise finds the pages before it parts, and no page of another chain."""
    other = [*PROMPT[: 4 * PAGE], *range(500, 500 + 2 * PAGE)]
    with radix_cache(storage, "page_first") as one:
        one.compute(PROMPT)
    with radix_cache(storage, "page_first") as two:
        assert two.fetch(other) == 4 * PAGE
        counts = two.backend.statistics()
        assert (counts.looked_up, counts.found, counts.read) == (6, 4, 4)
        assert two.fetch(list(range(900, 900 + 2 * PAGE))) == 0
