"""LoRA adapters by what is in them: the same name may stand for other weights tomorrow."""

from __future__ import annotations

import os
import threading
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from hicache.core.framing import frame, frame_text
from hicache.core.identity import Adapter

__all__ = ["Adapters"]

_CHUNK: Final = 2**20


class Adapters:
    """Digests of adapters' files, read once and again when a file has changed. Thread-safe; blocks on I/O."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[tuple[Any, ...], bytes] = {}

    def adapter(self, lora: Any) -> Adapter:
        """The adapter of vLLM's `LoRARequest`; without a digest, so past the cache, where its files cannot be read."""
        try:
            return Adapter(str(lora.lora_name), digest=self._digest(Path(lora.lora_path)))
        except (OSError, TypeError):
            return Adapter(str(lora.lora_name))

    def _digest(self, folder: Path) -> bytes | None:
        names = sorted(name for name in os.listdir(folder) if (folder / name).is_file())
        if "adapter_config.json" not in names:
            return None
        states = [(folder / name).stat() for name in names]
        key = (folder, *((name, state.st_size, state.st_mtime_ns) for name, state in zip(names, states, strict=True)))
        with self._lock:
            found = self._known.get(key)
        if found is None:
            found = _read(folder, names)
            with self._lock:
                self._known[key] = found
        return found


def _read(folder: Path, names: list[str]) -> bytes:
    whole = sha256()
    for name in names:
        content = sha256()
        with (folder / name).open("rb") as file:
            while chunk := file.read(_CHUNK):
                content.update(chunk)
        whole.update(frame_text(name) + frame(content.digest()))
    return whole.digest()
