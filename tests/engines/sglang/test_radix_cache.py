"""SGLang's own radix cache over the plug-in: device, host, storage, a second process, and back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import radix_caches
from radix_caches import PAGE, radix_cache

from hicache.testing.sidecars import ServiceProcess

PROMPT = list(range(1, 6 * PAGE + 1))


def in_another_process(storage: str, layout: str, kind: str) -> list[str]:
    """Tokens of the prompt that came to another engine's device memory, and a digest of their bytes."""
    command = [sys.executable, str(Path(radix_caches.__file__)), storage, layout, kind, ",".join(map(str, PROMPT))]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    return done.stdout.split()[-2:]


@pytest.mark.parametrize(
    ("layout", "kind"), [("layer_first", "full"), ("page_first", "full"), ("page_first", "window")]
)
def test_a_prompt_comes_back_in_another_process(layout: str, kind: str, storage: str) -> None:
    """What one engine computed and wrote back is in another engine's device memory, bit for bit."""
    with radix_cache(storage, layout, kind) as writer:
        stored = writer.compute(PROMPT)
        counts = writer.backend.statistics()
        assert counts.written == counts.given >= len(PROMPT) // PAGE
    assert in_another_process(storage, layout, kind) == [str(len(PROMPT)), stored]


def test_a_prompt_comes_back_through_a_service(short: Path) -> None:
    """The same with the pages in a service that both engines are clients of."""
    with ServiceProcess(short, "--log-level", "error") as service:
        with radix_cache(service.address, "page_first") as writer:
            stored = writer.compute(PROMPT)
            assert writer.backend.statistics().write_failures == {}
        assert in_another_process(service.address, "page_first", "full") == [str(len(PROMPT)), stored]
        with radix_cache(service.address, "layer_first") as reader:
            assert reader.fetch(PROMPT) == len(PROMPT)
            assert reader.digest(PROMPT) == stored


def test_an_engine_goes_on_without_its_service(short: Path) -> None:
    """Killed between write-back and prefetch: nothing is found, nothing fails, and prompts are computed and kept."""
    with ServiceProcess(short, "--log-level", "error") as service, radix_cache(service.address, "page_first") as one:
        one.compute(PROMPT)
        service.kill()
        other = [token + 500 for token in PROMPT]
        assert one.fetch(other) == 0
        one.compute(other)
        assert one.fetch(other) == len(other)
        assert one.backend.statistics().write_failures["away"] >= len(other) // PAGE


def test_a_window_is_restored_where_it_was_stored(storage: str) -> None:
    """A prompt that parts earlier has full attention's pages there and no window: none of it is used."""
    with radix_cache(storage, "page_first", "window") as one:
        one.compute(PROMPT)
        one.compute(longer := [*PROMPT, *range(700, 700 + 2 * PAGE)])
    with radix_cache(storage, "page_first", "window") as two:
        assert two.fetch([*longer, *range(900, 900 + PAGE)]) == len(longer)
    with radix_cache(storage, "page_first", "window") as three:
        assert three.fetch([*PROMPT, *range(900, 900 + 2 * PAGE)]) == len(PROMPT)
    with radix_cache(storage, "page_first", "window") as four:
        assert four.fetch([*PROMPT[: 2 * PAGE], *range(900, 900 + 2 * PAGE)]) == 0


def test_a_recurrent_pool_is_not_half_stored(storage: str, caplog: pytest.LogCaptureFixture) -> None:
    """A model with a state that is no pages runs without storage: one line says so."""
    with radix_cache(storage, "page_first", "recurrent") as one:
        assert "pool mamba beside its KV cache: host pool MambaPoolHost is not understood" in caplog.text
        assert one.backend.batch_exists(["0" * 64]) == 0


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
