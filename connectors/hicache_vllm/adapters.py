"""LoRA adapters by what is in them: the same name may stand for other weights tomorrow."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Any

from hicache.core.identity import Adapter
from hicache.runtime.fingerprint import contents_digest

__all__ = ["Adapters"]

_log = logging.getLogger("vllm.hicache")


class Adapters:
    """Digests of adapters' files, read once and again when a file has changed. Thread-safe; blocks on I/O.

    Where files change while the engine runs, nobody can tell which weights it computes with: it may have read them
    before, or again, and its own blocks of before keep their names. So that adapter goes past the cache from then on.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[tuple[Any, ...], bytes] = {}
        self._first: dict[tuple[str, str], bytes] = {}
        self._changed: set[tuple[str, str]] = set()

    def adapter(self, lora: Any) -> Adapter:
        """The adapter of vLLM's `LoRARequest`; without a digest, so past the cache, where its weights are not known."""
        name = str(lora.lora_name)
        try:
            digest = self._digest(Path(lora.lora_path))
        except (OSError, TypeError):
            digest = None
        return Adapter(name, digest=digest if self._is_first(name, str(lora.lora_path), digest) else None)

    def _is_first(self, name: str, path: str, digest: bytes | None) -> bool:
        """Whether an adapter's files are what they were when this engine asked first, and at all times since."""
        adapter = (name, path)
        with self._lock:
            if digest is not None and self._first.setdefault(adapter, digest) == digest:
                return adapter not in self._changed
            if adapter not in self._first or adapter in self._changed:
                return False
            self._changed.add(adapter)
        _log.warning(
            "hicache: files of adapter %s in %s have changed: its requests go past the cache; load changed weights "
            "from another path",
            name,
            path,
        )
        return False

    def _digest(self, folder: Path) -> bytes | None:
        names = sorted(name for name in os.listdir(folder) if (folder / name).is_file())
        if "adapter_config.json" not in names:
            return None
        states = [(folder / name).stat() for name in names]
        key = (folder, *((name, state.st_size, state.st_mtime_ns) for name, state in zip(names, states, strict=True)))
        with self._lock:
            found = self._known.get(key)
        if found is None:
            found = contents_digest(folder, names)
            with self._lock:
                self._known[key] = found
        return found
