"""Namespaces: everything besides tokens that decides whether stored state may be reused.

Two namespaces that differ anywhere never share a page. Fields are framed (present or not, length, bytes, in a fixed
order, under a versioned tag); the first 16 bytes of the sha256 are the digest that stored names and headers carry.

**Model names** are compared as text, byte for byte, case included; nothing is looked up and no Unicode form is
changed. Trailing slashes are dropped. Names written as paths, that begin with `/`, `./`, `../` or `~/`, also lose
doubled slashes and `.` segments behind their beginning. So "/models/x", "/models/x/" and "/models//./x" are one model;
"./models/x", "models/x", "org/x" and "Org/X" are four others. Names that might mean different things stay different:
the worst that can follow is a miss. What a folder holds is told apart by `revision`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from math import isfinite
from typing import Any, Final

from hicache.core.framing import ABSENT, digest16, frame, frame_number, frame_text
from hicache.core.hashing import HASH_ALGORITHMS, HashAlgorithm, PageHasher, hash_seed
from hicache.core.layout import KVGeometry
from hicache.core.symbols import check_page_size
from hicache.errors import InvalidInput, NamespaceError

__all__ = ["Adapter", "DerivedNamespace", "Namespace", "can_cache", "normal_model_name", "secret_digest"]

_TAG: Final = b"hicache-namespace-v1"
_SECRET_TAG: Final = b"hicache-secret-v1"
_MAX_NAME: Final = 4096
_MAX_SECRET: Final = 65_536
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_PATH_LIKE = re.compile(r"(/|\./|\.\./|~/)")


def _text(value: object, what: str, *, most: int, printable: bool) -> str:
    """The value as plain text that has UTF-8 bytes, or an error that says what is wrong with it."""
    if not isinstance(value, str):
        raise NamespaceError(f"{what} must be text, not {type(value).__name__}")
    text = str.__str__(value)  # an enum member is its value, never its class and name
    if not text.strip():
        raise NamespaceError(f"{what} is empty: give a name, or None where it may be left out")
    try:
        size = len(text.encode("utf-8"))
    except UnicodeEncodeError:
        raise NamespaceError(f"{what} has a lone surrogate at position {_surrogate(text)}: give valid text") from None
    if size > most:
        raise NamespaceError(f"{what} has {size} bytes: use at most {most}")
    if printable and (found := _CONTROL.search(text)):
        raise NamespaceError(f"{what} has the control character {found[0]!r} at position {found.start()}: remove it")
    return text


def _surrogate(text: str) -> int:
    return next(at for at, letter in enumerate(text) if "\ud800" <= letter <= "\udfff")


def normal_model_name(name: str) -> str:
    """The one spelling of a model's name, by the rule in this module's description.

    Raises:
        NamespaceError: empty, only slashes, not valid text, control characters, or above 4,096 bytes.
    """
    text = _text(name, "model", most=_MAX_NAME, printable=True)
    found = _PATH_LIKE.match(text)
    if found is None:
        return text.rstrip("/")
    segments = [segment for segment in text[found.end() :].split("/") if segment not in ("", ".")]
    if not segments and found[0] == "/":
        raise NamespaceError(f"model {text!r:.60} names the root folder: give the model's name or folder")
    return (found[0] + "/".join(segments)).rstrip("/")


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA or another change to the weights that a request asks for.

    Attributes:
        name: the name under which it is served.
        digest: digest of its content, 16 to 64 bytes; None where it cannot be had. Its requests then bypass the
            cache, since the same name may stand for other weights tomorrow.
    """

    name: str
    digest: bytes | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", _text(self.name, "adapter name", most=_MAX_NAME, printable=True))
        if self.digest is not None:
            _check_digest(self.digest, f"digest of adapter {self.name!r:.60}")


def can_cache(adapter: Adapter | None) -> bool:
    """Whether requests with this adapter may use the cache at all."""
    return adapter is None or adapter.digest is not None


@dataclass(frozen=True, slots=True)
class Namespace:
    """One model as served, with all that its KV depends on. Immutable, hashable, compared by value.

    Attributes:
        model: its name, normalised by `normal_model_name`.
        revision: commit, tag or content digest of its weights; None where the name says all. For a local folder
            `hicache.runtime.fingerprint.revision_of` makes one.
        geometry: shape and format of its KV.
        page_size: tokens a page.
        hash: "xxh3_128" where every reader compares the tokens themselves, "sha256" where a reader sees hashes only.
        rope: position settings (rope theta, scaling, ...), as a mapping of JSON values; kept as canonical JSON text.
        scales: digest of static quantisation scales, 16 to 64 bytes; None without any.
        numerics: which kernel families may share state, without the parallel topology, such as
            "vllm/flash-attn/bfloat16"; by default "any/any/" and the geometry's dtype.
        causal: must stay True. Under a prefix-LM mask a page depends on what comes after it.
        digest: 16 bytes, that of requests without adapter, tenant and salt.

    Raises:
        NamespaceError: what cannot name pages safely.
    """

    model: str
    _: KW_ONLY
    revision: str | None = None
    geometry: KVGeometry
    page_size: int
    hash: HashAlgorithm = "xxh3_128"
    rope: Mapping[str, Any] | str | None = None
    scales: bytes | None = None
    numerics: str | None = None
    causal: bool = True
    digest: bytes = field(init=False, compare=False)
    _frames: bytes = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.causal is not True:
            raise NamespaceError(
                "causal must be True: where a mask lets pages depend on later tokens (prefix-LM) nothing can be reused"
            )
        if not isinstance(self.geometry, KVGeometry):
            raise NamespaceError(
                f"geometry must be a KVGeometry, not {type(self.geometry).__name__}: use KVGeometry.mha(...)"
            )
        if self.hash not in HASH_ALGORITHMS:
            raise NamespaceError(f"hash {self.hash!r:.40} is unknown: use one of {', '.join(HASH_ALGORITHMS)}")
        try:
            self._set("page_size", check_page_size(self.page_size))
        except InvalidInput as error:
            raise NamespaceError(str(error)) from None
        if self.scales is not None:
            _check_digest(self.scales, "scales")
        revision = None if self.revision is None else _text(self.revision, "revision", most=_MAX_NAME, printable=True)
        numerics = f"any/any/{self.geometry.dtype}" if self.numerics is None else self.numerics
        self._set("model", normal_model_name(self.model))
        self._set("revision", revision)
        self._set("rope", _canonical_json(self.rope))
        self._set("numerics", _text(numerics, "numerics", most=_MAX_NAME, printable=True))
        self._set("_frames", self._framed())
        self._set("digest", digest16(self._frames + 4 * ABSENT))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _framed(self) -> bytes:
        rope, numerics = self.rope, self.numerics
        assert isinstance(rope, str | None)
        return b"".join(
            (
                frame(_TAG),
                frame_text(self.model),
                frame_text(self.revision),
                frame_number(self.page_size),
                frame(self.geometry.record(self.page_size)),
                frame_text(self.hash),
                frame_text(rope),
                frame(self.scales),
                frame_text(numerics),
            )
        )

    def derive(
        self, *, adapter: Adapter | None = None, tenant: str | None = None, salt: str | None = None
    ) -> DerivedNamespace:
        """The namespace of one request.

        Args:
            adapter: changes the weights; must have a digest (`can_cache`).
            tenant: who may share; others never see its pages.
            salt: a request's own separation, as in an engine's cache_salt.

        Raises:
            NamespaceError: an adapter without a digest, or text that is empty or invalid.
        """
        return DerivedNamespace(self, adapter=adapter, tenant=tenant, salt=salt)

    @property
    def geometry_digest(self) -> str:
        """Digest text of the geometry at this page size."""
        return self.geometry.digest(self.page_size)

    def describe(self) -> dict[str, Any]:
        """The manifest: every field that decides about reuse; JSON types only, nothing secret."""
        return {
            "version": 1,
            "digest": self.digest.hex(),
            "model": self.model,
            "revision": self.revision,
            "page_size": self.page_size,
            "geometry_digest": self.geometry_digest,
            "geometry": self.geometry.describe(),
            "hash": self.hash,
            "rope": self.rope,
            "scales": None if self.scales is None else self.scales.hex(),
            "numerics": self.numerics,
        }


@dataclass(frozen=True, slots=True)
class DerivedNamespace:
    """The namespace of requests with one adapter, tenant and salt. Made by `Namespace.derive`.

    Attributes:
        base: the model as served.
        adapter: adapter with its digest, or None.
        tenant: or None. Not in the text form.
        salt: or None. Not in the text form.
        digest: 16 bytes; the base's digest where all three are None.
        seed: what stands before the first page in its hash chain, or None.
    """

    base: Namespace
    _: KW_ONLY
    adapter: Adapter | None = None
    tenant: str | None = field(default=None, repr=False)
    salt: str | None = field(default=None, repr=False)
    digest: bytes = field(init=False, compare=False)
    seed: bytes | None = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        adapter = self.adapter
        if adapter is not None and not isinstance(adapter, Adapter):
            raise NamespaceError(f"adapter must be an Adapter(name, digest), not {type(adapter).__name__}")
        if adapter is not None and adapter.digest is None:
            raise NamespaceError(
                f"adapter {adapter.name!r:.60} has no content digest: give one, or let its requests bypass the cache"
            )
        for what in ("tenant", "salt"):
            value = getattr(self, what)
            if value is not None:
                object.__setattr__(self, what, _text(value, what, most=_MAX_SECRET, printable=False))
        name, content = (None, None) if adapter is None else (adapter.name, adapter.digest)
        request = frame_text(name) + frame(content) + frame_text(self.tenant) + frame_text(self.salt)
        object.__setattr__(self, "digest", digest16(self.base._frames + request))
        object.__setattr__(self, "seed", hash_seed(self.base.hash, adapter_name=name, salt=self.salt))

    def hasher(self) -> PageHasher:
        """The page hasher of this namespace."""
        return PageHasher(self.base.hash, page_size=self.base.page_size, seed=self.seed)

    def describe(self) -> dict[str, Any]:
        """The base's manifest and the request's part of it; tenant and salt only as digests."""
        adapter = self.adapter
        return self.base.describe() | {
            "digest": self.digest.hex(),
            "base_digest": self.base.digest.hex(),
            "adapter": None if adapter is None else {"name": adapter.name, "digest": (adapter.digest or b"").hex()},
            "tenant_digest": self._secret("tenant", self.tenant),
            "salt_digest": self._secret("salt", self.salt),
        }

    def _secret(self, what: str, value: str | None) -> str | None:
        return None if value is None else secret_digest(self.base.digest, what, value)


def secret_digest(base: bytes, what: str, value: str) -> str:
    """What stands for a tenant or a salt (`what`) in the manifests of a base namespace, by its digest.

    It is bound to the namespace, so that a salt that is used with two models is not recognised.
    """
    return digest16(_SECRET_TAG + base + frame_text(what) + frame_text(value)).hex()


def _check_digest(value: object, what: str) -> None:
    if type(value) is not bytes or not 16 <= len(value) <= 64:
        raise NamespaceError(f"{what} must be 16 to 64 bytes, such as a sha256")


def _canonical_json(value: Mapping[str, Any] | str | None) -> str | None:
    """Sorted keys, no spaces, whole floats as integers: equal settings are equal text."""
    if not value:
        return None
    try:
        plain = _plain(json.loads(value) if isinstance(value, str) else value)
        if not isinstance(plain, dict):
            raise TypeError("not a mapping")
        return json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise NamespaceError(f"rope must be a mapping of JSON values: {error}") from None


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise TypeError("a key is not text")
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and isfinite(value) and value.is_integer():
        return int(value)
    return value
