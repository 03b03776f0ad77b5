"""Why a prompt misses in a store: which of its pages are there, whole and as they should be, and what is known else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hicache.analytics.explain.manifests import Manifest, Secrets, differences
from hicache.analytics.explain.records import Cause, Explanation, Other, nearest_first
from hicache.analytics.explain.words import page_tail, words_of
from hicache.core.hashing import PageHasher
from hicache.core.partition import ShardPlan, plan_shards
from hicache.core.symbols import symbols
from hicache.errors import ConfigError, InvalidInput, NotFound
from hicache.records import MissReason
from hicache.storage.base import Listing, Manifests, ObjectKey, StorageBackend
from hicache.storage.codec import Verdict, VerdictKind

__all__ = ["Asked", "Store", "explain_prompt"]

_OLDER = 8
"""Generations before the current one that are looked at for what a clear has taken."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Whose prompts: one model, by its name or the digest of its base namespace, and what separates its requests.

    Attributes:
        model: name, or empty.
        namespace: digest in hex, or empty.
        adapter: name and digest of its content in hex, or None.
        secrets: tenant and salt.
    """

    model: str = ""
    namespace: str = ""
    adapter: tuple[str, str] | None = None
    secrets: Secrets = Secrets()  # noqa: RUF009  frozen


class Store:
    """A store, and the manifests of the namespaces in it.

    Args:
        backend: the store; closed by its owner.

    Raises:
        ConfigError: one that keeps no manifests, or has none.
        StorageError: it cannot be read.
    """

    def __init__(self, backend: StorageBackend) -> None:
        if not isinstance(backend, Manifests):
            raise ConfigError("this storage keeps no manifests of namespaces, so nothing can be explained from it")
        self.backend = backend
        self.unread = 0
        self.manifests: list[Manifest] = []
        for _, document in sorted(backend.read_manifests().items()):
            try:
                self.manifests.append(Manifest.parse(document))
            except InvalidInput:
                self.unread += 1
        if not self.manifests:
            raise ConfigError(
                "no namespace is described in this store: nothing was ever stored, or not by this program"
            )

    def base(self, asked: Asked) -> Manifest:
        """A manifest of the base namespace that is asked about.

        Raises:
            NotFound: none is here; names those that are.
            InvalidInput: a model's name that several have.
        """
        found = [
            manifest
            for manifest in self.manifests
            if (manifest.base == asked.namespace if asked.namespace else manifest.model == asked.model)
        ]
        if not found:
            known = ", ".join(sorted({manifest.model for manifest in self.manifests}))
            raise NotFound(f"nothing of {asked.model or asked.namespace!r:.80} is in this store; it has: {known:.300}")
        bases = sorted({manifest.base for manifest in found})
        if len(bases) > 1:
            several = ", ".join(bases)
            raise InvalidInput(
                f"model {asked.model!r:.80} is here under several namespaces; name one by --namespace: {several}"
            )
        return found[0]


def explain_prompt(
    store: Store,
    asked: Asked,
    tokens: np.ndarray[tuple[int], np.dtype[np.uint32]],
    *,
    verify: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> Explanation:
    """Explain one prompt. Reads only; with `verify` every byte of the pages that are there.

    Args:
        store: where it should be.
        asked: whose it is.
        tokens: the prompt.
        verify: whether what is there is read and checked.
        progress: told how many pages were read, and of how many.

    Raises:
        NotFound, InvalidInput: no namespace, or several, or a manifest without a geometry.
        StorageError: the store cannot be read any further.
    """
    return _Explainer(store, asked, tokens).run(verify=verify, progress=progress)


class _Explainer:
    def __init__(self, store: Store, asked: Asked, tokens: np.ndarray[tuple[int], np.dtype[np.uint32]]) -> None:
        self._store, self._asked, self._tokens = store, asked, tokens
        self._like = store.base(asked)
        self._own = next(
            (
                manifest
                for manifest in store.manifests
                if manifest.base == self._like.base and manifest.is_of(asked.adapter, asked.secrets)
            ),
            None,
        )
        self._size = self._like.page_size
        self._hashes = _names(self._asked_hasher(), tokens)
        self._notes: list[str] = []
        if store.unread:
            self._notes.append(f"{store.unread} manifests were not understood, and their namespaces not looked at")

    def _asked_hasher(self) -> PageHasher:
        adapter = self._asked.adapter
        fields = dict(self._like.fields) | {"adapter": None if adapter is None else {"name": adapter[0], "digest": ""}}
        return Manifest(fields).hasher(self._asked.secrets.salt)

    def run(self, *, verify: bool, progress: Callable[[int, int], None] | None) -> Explanation:
        pages, size, own = len(self._hashes), self._size, self._own
        generation, usable, cause = None, 0, None
        if own is not None:
            held = _Held(self._store.backend, own, self._hashes)
            generation = held.generation
            usable, cause = held.reach(verify=verify, progress=progress)
            self._notes += held.notes(usable)
        others = self._others(usable) if usable < pages else ()
        causes = tuple(self._causes(usable, cause, others))
        return Explanation(
            model=self._like.model,
            namespace=self._like.base,
            derived="" if own is None else own.digest,
            generation=generation,
            page_size=size,
            tokens=len(self._tokens),
            pages=pages,
            tiers={"device": None, "host": None, "storage": usable},
            usable_pages=usable,
            usable_tokens=usable * size,
            causes=(*causes, *page_tail(len(self._tokens), size)),
            others=others,
            notes=tuple(self._notes),
        )

    def _causes(self, usable: int, cause: tuple[MissReason, str] | None, others: Sequence[Other]) -> Iterator[Cause]:
        pages = len(self._hashes)
        if usable == pages:
            return
        if cause is None and others and not usable:
            cause = (MissReason.OTHER_NAMESPACE, words_of(MissReason.OTHER_NAMESPACE, others=others))
        if cause is None:
            text = "never stored, or evicted since: a store does not remember what it had"
            cause = (MissReason.COLD, text)
        yield Cause(usable, pages, (pages - usable) * self._size, *cause)

    def _others(self, usable: int) -> tuple[Other, ...]:
        """Namespaces that have more of the prompt."""
        secrets, found, closed = self._asked.secrets, [], 0
        for manifest in self._store.manifests:
            if self._own is not None and manifest.digest == self._own.digest:
                continue
            if not manifest.names_pages(secrets):
                closed += 1
                continue
            salt = secrets.salt if manifest.fields.get("salt_digest") else None
            names = _names(manifest.hasher(salt), self._tokens)
            pages = _Held(self._store.backend, manifest, names).leading()
            if pages * manifest.page_size > usable * self._size:
                differs = differences(self._described(), manifest.fields, secrets)
                tokens = pages * manifest.page_size
                found.append(Other(manifest.model, manifest.base, manifest.digest, pages, tokens, differs))
        if closed:
            self._notes.append(f"{closed} namespaces have salts, without which nobody can look for a prompt in them")
        return nearest_first(found)

    def _described(self) -> Mapping[str, object]:
        adapter = self._asked.adapter
        shown = None if adapter is None else {"name": adapter[0], "digest": adapter[1]}
        return dict(self._like.fields) | {"adapter": shown}


class _Held:
    """What a store holds of one prompt in one namespace.

    Attributes:
        generation: the namespace's current one.
    """

    def __init__(self, backend: StorageBackend, manifest: Manifest, names: list[bytes]) -> None:
        self._backend, self._namespace, self._names = backend, bytes.fromhex(manifest.digest), names
        self.generation = backend.generation(self._namespace)
        self._plan: ShardPlan = plan_shards(manifest.geometry(), manifest.page_size)
        self._there = backend.contains([self._key(name) for name in names]) if names else []

    def _key(self, name: bytes, *, generation: int | None = None) -> ObjectKey:
        generation = self.generation if generation is None else generation
        return ObjectKey(self._namespace, generation, name, self._plan.anchor)

    def leading(self) -> int:
        """Leading pages that are there by their last object, which tells for the page."""
        return next((page for page, there in enumerate(self._there) if not there), len(self._there))

    def reach(
        self, *, verify: bool, progress: Callable[[int, int], None] | None
    ) -> tuple[int, tuple[MissReason, str] | None]:
        """Leading pages that a reader would get, and why it gets no more, where that is known."""
        pages = self.leading()
        for page in range(pages):
            if progress is not None:
                progress(page, pages)
            wrong = self._wrong(self._names[page], verify=verify)
            if wrong:
                return page, (MissReason.FAILED, f"page {page} is there and {wrong}")
        return pages, self._gone(pages) if pages < len(self._names) else None

    def _wrong(self, name: bytes, *, verify: bool) -> str:
        """What is wrong with a page whose last object is there; empty if nothing is."""
        keys = [ObjectKey(self._namespace, self.generation, name, part.shard) for part in self._plan.parts]
        missing = self._backend.contains(keys).count(False)
        if missing:
            return f"incomplete: {missing} of its {len(keys)} objects are missing"
        if not verify or not isinstance(self._backend, Listing):
            return ""
        for key in keys:
            verdict = self._backend.check_object(key)
            if verdict is None:
                return "incomplete: one of its objects went while it was read"
            if not verdict.ok:
                return _judged(key, verdict)
        return ""

    def _gone(self, page: int) -> tuple[MissReason, str] | None:
        behind = sum(self._there[page:])
        if behind:
            return MissReason.EVICTED, (
                f"evicted or removed: {behind} later pages of this prompt are here, so it was too; without it they are "
                "useless"
            )
        if not self.generation or not isinstance(self._backend, Listing):
            return None
        for generation in range(self.generation - 1, max(-1, self.generation - 1 - _OLDER), -1):
            if self._backend.check_object(self._key(self._names[page], generation=generation)) is not None:
                return MissReason.EXPIRED, (
                    f"stored in generation {generation} and cleared since: the namespace is at {self.generation} now"
                )
        return None

    def notes(self, usable: int) -> Iterable[str]:
        """What else there is to know of the namespace."""
        if self.generation and usable < len(self._names):
            yield f"the namespace was cleared: its generation is {self.generation}, and what was stored before is gone"


def _judged(key: ObjectKey, verdict: Verdict) -> str:
    if verdict.kind is VerdictKind.CORRUPT:
        return f"damaged ({verdict.reason} of {key.name}): a reader removes it, and the next commit stores it anew"
    if verdict.kind is VerdictKind.NEWER:
        return f"written by a newer version ({key.name}): upgrade this one, or give each its own store"
    return f"another one under its name ({key.name}): the next commit replaces it"


def _names(hasher: PageHasher, tokens: np.ndarray[tuple[int], np.dtype[np.uint32]]) -> list[bytes]:
    """Hashes of the whole pages of a prompt."""
    pages, size = len(tokens) // hasher.page_size, hasher.hash_size
    glued = hasher.extend(None, symbols(tokens, hasher.page_size), pages)
    return [glued[at * size : (at + 1) * size] for at in range(pages)]
