"""Opens what a cache keeps its pages in: tiers of this process, or a service; with the model's GPU where it has one."""

from __future__ import annotations

from typing import Any, Final

from hicache.core.identity import Namespace
from hicache.errors import ConfigError
from hicache_transformers.convert import PageShape
from hicache_transformers.counters import Counters
from hicache_transformers.model import ModelShape
from hicache_transformers.pages import ConnectedPages, EmbeddedPages
from hicache_transformers.sources import PageSource
from hicache_transformers.tiers import open_tier, open_window

__all__ = ["open_connected", "open_embedded"]

DEVICE: Final = "256MiB"
HOST: Final = "1GiB"


def open_embedded(
    namespace: Namespace,
    pages: PageShape,
    model: ModelShape,
    *,
    device: str | int | None,
    longest: int | None,
    options: dict[str, Any],
) -> tuple[PageSource, list[str]]:
    """A cache of this process.

    Args:
        namespace: names the pages.
        pages: their sizes.
        model: what the model keeps.
        device: size of the device tier.
        longest: tokens of the longest prompt that the model takes, where that is known.
        options: for `hicache.open`.

    Returns:
        It, and what deserves a word.

    Raises:
        ConfigError, StorageError: as `hicache.open`.
    """
    tier, why = open_tier(namespace, pages, model, size=device or DEVICE)
    source = EmbeddedPages(namespace, pages, tier, options={"host": HOST} | options)
    warnings = [] if why is None else [why]
    held = source.capacity * pages.tokens
    if longest is not None and held < longest:
        warnings.append(
            f"the device tier holds {held} tokens, the model takes {longest}: of longer prompts only the beginning is "
            "reused; give device= more"
        )
    return source, warnings


def open_connected(
    address: str,
    namespace: Namespace,
    pages: PageShape,
    model: ModelShape,
    *,
    device: str | int | None,
    longest: int | None,
    counters: Counters,
    options: dict[str, Any],
) -> tuple[PageSource, list[str]]:
    """The cache of a service.

    Args:
        address: of the service.
        namespace: names the pages.
        pages: their sizes.
        model: what the model keeps.
        device: size of the memory on the model's GPU through which pages pass.
        longest: tokens of the longest prompt that the model takes, where that is known.
        counters: for what is counted later.
        options: for `hicache.connect`.

    Returns:
        It, and what deserves a word.

    Raises:
        ConfigError, ServiceError: as `hicache.connect`.
    """
    window, why = open_window(pages, model, size=device or DEVICE)
    if window is None:
        if device is not None and model.on_gpu is None:
            raise ConfigError("device= is the service's business where address= is given: leave it out")
        return ConnectedPages(address, namespace, pages, model, options=options), [] if why is None else [why]
    from hicache_transformers.connected import ConnectedGpuPages

    source = ConnectedGpuPages(address, namespace, window, counters=counters, options=options)
    held = source.capacity * pages.tokens
    if longest is None or held >= longest:
        return source, []
    return source, [
        f"pages of {held} tokens fit into the memory through which they pass on the GPU, the model takes {longest}: "
        "those of longer prompts come in pieces, for which the call waits; give device= more"
    ]
