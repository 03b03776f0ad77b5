"""Looking through a store: is every object what its name says, whose is it, and can it be reached?"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import xxhash

from hicache.errors import ConfigError, StorageError
from hicache.storage.base import ListedObject, Listing, Manifests, ObjectKey, StorageBackend
from hicache.storage.codec import Header, Verdict, VerdictKind

__all__ = ["FsckResult", "NamespaceUse", "check_storage"]

_SHOWN: Final = 20
_BATCH: Final = 64
_WHOLE: Final = 2**64


@dataclass(slots=True)
class NamespaceUse:
    """What one namespace has in a store.

    Attributes:
        namespace: its digest in hex.
        model: as its manifest says; empty where there is none.
        generation: the current one.
        objects, bytes: of all generations.
        cleared: objects of generations that have ended.
        unreachable: objects of which a page before is not stored, so that no prompt gets to them until it is.
        corrupt: objects that are damaged.
    """

    namespace: str
    model: str = ""
    generation: int = 0
    objects: int = 0
    bytes: int = 0
    cleared: int = 0
    unreachable: int = 0
    corrupt: int = 0


@dataclass(slots=True)
class FsckResult:
    """What was found.

    Attributes:
        objects, bytes: listed, without what is foreign.
        checked: objects that were read and verified.
        ok: of those, what is what its name says.
        corrupt: damaged.
        cleared: of generations that have ended.
        unreachable: behind a page that is not stored; not known (None) when only a sample was read.
        foreign: names or contents that are none of this program's.
        newer: written by a newer version.
        removed: corrupt and cleared objects that were removed.
        examples: names of what is corrupt or foreign, some of them.
        namespaces: by namespace, largest first.
    """

    objects: int = 0
    bytes: int = 0
    checked: int = 0
    ok: int = 0
    corrupt: int = 0
    cleared: int = 0
    unreachable: int | None = 0
    foreign: int = 0
    newer: int = 0
    removed: int = 0
    examples: list[str] = field(default_factory=list)
    namespaces: list[NamespaceUse] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        """As a JSON document."""
        return asdict(self)


def check_storage(
    backend: StorageBackend,
    *,
    sample: float = 1.0,
    repair: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> FsckResult:
    """Look through everything under a backend's root or prefix.

    Needs about 200 bytes of memory an object. Objects that come and go meanwhile are no error.

    Args:
        backend: one that can list.
        sample: the share of objects that is read, 0 to 1; which ones is decided by their names.
        repair: remove what is damaged, and what is left of ended generations; never anything else.
        progress: told how many objects were seen, and of how many as far as known.

    Raises:
        ConfigError: the backend cannot list.
        StorageError: the store cannot be read any further.
    """
    if not isinstance(backend, Listing):
        raise ConfigError("this storage cannot list what it holds, so there is nothing to check")
    walk = _Walk(backend, sample=sample, repair=repair)
    expected = backend.statistics().objects
    for done, entry in enumerate(_once(backend.list_objects()), 1):
        walk.visit(entry)
        if progress is not None:
            progress(done, max(done, expected))
    return walk.finish()


def _once(entries: Iterator[ListedObject]) -> Iterator[ListedObject]:
    seen: set[int] = set()
    for entry in entries:
        mark = xxhash.xxh3_64_intdigest(entry.name.encode("utf-8", "surrogateescape"))
        if mark not in seen:
            seen.add(mark)
            yield entry


class _Walk:
    def __init__(self, backend: StorageBackend, *, sample: float, repair: bool) -> None:
        self._backend = backend
        self._limit = int(sample * _WHOLE)
        self._repair = repair
        self._result = FsckResult(unreachable=0 if sample >= 1.0 else None)
        self._uses: dict[bytes, NamespaceUse] = {}
        self._models = _models(backend)
        self._pages: dict[int, tuple[int, int, bytes]] = {}  # page -> depth, parent, namespace
        self._removing: list[ObjectKey] = []

    def visit(self, entry: ListedObject) -> None:
        if entry.key is None:
            self._foreign(entry.name)
            return
        use = self._use(entry.key.namespace)
        use.objects += 1
        use.bytes += entry.size
        self._result.objects += 1
        self._result.bytes += entry.size
        old = entry.key.generation < use.generation
        if old:
            use.cleared += 1
            self._result.cleared += 1
        if (old and self._repair) or xxhash.xxh3_64_intdigest(entry.key.page_hash) < self._limit:
            self._check(entry, use, old=old)

    def finish(self) -> FsckResult:
        self._flush()
        result = self._result
        if result.unreachable is not None:
            result.unreachable = self._count_unreachable()
        result.namespaces = sorted(self._uses.values(), key=lambda use: (-use.bytes, use.namespace))
        return result

    def _check(self, entry: ListedObject, use: NamespaceUse, *, old: bool) -> None:
        key = entry.key
        assert key is not None
        assert isinstance(self._backend, Listing)
        verdict = self._backend.check_object(key)
        if verdict is None:
            return  # gone meanwhile
        self._result.checked += 1
        self._judge(entry, verdict, use)
        mine = verdict.kind in (VerdictKind.OK, VerdictKind.CORRUPT)
        if self._repair and mine and (old or verdict.kind is VerdictKind.CORRUPT):
            self._removing.append(key)
            if len(self._removing) >= _BATCH:
                self._flush()
        elif verdict.ok and not old and verdict.header is not None:
            self._note(verdict.header)

    def _judge(self, entry: ListedObject, verdict: Verdict, use: NamespaceUse) -> None:
        if verdict.kind is VerdictKind.OK:
            self._result.ok += 1
        elif verdict.kind is VerdictKind.CORRUPT:
            self._result.corrupt += 1
            use.corrupt += 1
            self._example(f"{entry.name}: {verdict.reason}")
        elif verdict.kind is VerdictKind.NEWER:
            self._result.newer += 1
        else:
            self._foreign(entry.name)

    def _note(self, header: Header) -> None:
        key = header.key
        place = key.namespace + key.generation.to_bytes(8, "little")
        page = xxhash.xxh3_64_intdigest(place + key.page_hash)
        parent = xxhash.xxh3_64_intdigest(place + header.parent_hash) if header.parent_hash else 0
        self._pages[page] = (header.depth, parent, key.namespace)

    def _count_unreachable(self) -> int:
        """Pages, from the start of their chains on: one is reachable if it is a first one or its parent is."""
        reached: set[int] = set()
        lost = 0
        for page, (depth, parent, namespace) in sorted(self._pages.items(), key=lambda item: item[1][0]):
            if depth == 0 or parent in reached:
                reached.add(page)
            else:
                lost += 1
                self._uses[namespace].unreachable += 1
        return lost

    def _flush(self) -> None:
        if self._removing:
            self._result.removed += sum(self._backend.delete(self._removing))
            self._removing.clear()

    def _foreign(self, name: str) -> None:
        self._result.foreign += 1
        self._example(f"{name}: foreign, left alone")

    def _example(self, text: str) -> None:
        if len(self._result.examples) < _SHOWN:
            self._result.examples.append(text)

    def _use(self, namespace: bytes) -> NamespaceUse:
        use = self._uses.get(namespace)
        if use is None:
            generation = self._backend.generation(namespace)
            use = NamespaceUse(namespace.hex(), self._models.get(namespace, ""), generation)
            self._uses[namespace] = use
        return use


def _models(backend: StorageBackend) -> dict[bytes, str]:
    """The model of each namespace that has a manifest; only for people, so nothing of it is needed."""
    if not isinstance(backend, Manifests):
        return {}
    try:
        documents = backend.read_manifests()
    except StorageError:
        return {}
    return {namespace: _model(document) for namespace, document in documents.items()}


def _model(document: bytes) -> str:
    try:
        found = json.loads(document)
    except (ValueError, RecursionError):
        return ""
    model = found.get("model") if isinstance(found, dict) else None
    return "".join(c for c in model[:60] if c.isprintable()) if isinstance(model, str) else ""
