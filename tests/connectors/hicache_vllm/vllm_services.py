"""What the tests of this folder share."""

from __future__ import annotations

from pathlib import Path

from hicache.config import Config, Drain, Host, Listen, Size, Storage
from hicache.testing.clients import PATIENCE
from hicache.testing.engine import prompt
from hicache.testing.serving import ServedApp


def service_config(folder: Path, *, host: int = 384 * 1024) -> Config:
    """384 KiB are 96 slots of 4 KiB; a page of the small engine has 1,536 bytes."""
    return Config(
        listen=Listen(addresses=(f"unix://{folder}/service.sock",)),
        host=Host(bytes=Size(host)),
        storage=Storage(url=f"file://{folder}/kv?capacity=64MiB"),
        drain=Drain(seconds=0.2),
    )


def small(seed: int, tokens: int) -> list[int]:
    """Tokens that fit into what the engine draws its answers from."""
    return [token % 1000 for token in prompt(seed, tokens)]


def flushed(service: ServedApp) -> None:
    """What storage should have is there."""
    for pool in list(service.app.service.pools):
        assert pool.cache.flush(PATIENCE)
