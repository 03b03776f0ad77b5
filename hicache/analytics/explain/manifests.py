"""Namespaces by their manifests: what a manifest names, and in which fields two of them differ."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hicache.analytics.explain.records import Difference
from hicache.core.hashing import PageHasher, hash_seed
from hicache.core.identity import secret_digest
from hicache.core.layout import KVGeometry, LayerGroup
from hicache.errors import HicacheError, InvalidInput

__all__ = ["Manifest", "Secrets", "differences"]

_FIELDS = ("model", "revision", "page_size", "hash", "rope", "scales", "numerics", "adapter")
_SECRETS = ("tenant", "salt")


@dataclass(frozen=True, slots=True)
class Secrets:
    """What manifests have as digests only, and whoever asks knows.

    Attributes:
        tenant: or None.
        salt: or None.
    """

    tenant: str | None = None
    salt: str | None = None

    def digest(self, what: str, base: str) -> str | None:
        """How the manifests of a base namespace would show the tenant or the salt."""
        value: str | None = getattr(self, what)
        return None if value is None else secret_digest(bytes.fromhex(base), what, value)


@dataclass(frozen=True, slots=True)
class Manifest:
    """The manifest of a derived namespace: that of its base has no adapter, tenant and salt.

    Attributes:
        fields: as `DerivedNamespace.describe` writes them.
    """

    fields: Mapping[str, Any]

    @classmethod
    def parse(cls, document: bytes) -> Manifest:
        """Read one.

        Raises:
            InvalidInput: it is none that this version understands.
        """
        try:
            fields = json.loads(document)
            found = cls(fields)
            digests = (found.base, found.digest, fields["geometry_digest"])
            if not all(isinstance(digest, str) for digest in digests) or fields["version"] != 1:
                raise ValueError("another version")
            bytes.fromhex(found.base + found.digest)
            found.hasher(None)
        except (ValueError, KeyError, TypeError, HicacheError, RecursionError) as error:
            raise InvalidInput(f"a manifest that this version does not understand: {error!r:.200}") from None
        return found

    @property
    def base(self) -> str:
        """Digest of the base namespace, in hex."""
        base: str = self.fields.get("base_digest", self.fields["digest"])
        return base

    @property
    def digest(self) -> str:
        """Digest of the derived namespace, in hex."""
        digest: str = self.fields["digest"]
        return digest

    @property
    def model(self) -> str:
        """The model's name."""
        return str(self.fields["model"])

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        size: int = self.fields["page_size"]
        return size

    @property
    def adapter(self) -> tuple[str, str] | None:
        """Name of the adapter, and digest of its content in hex."""
        adapter = self.fields.get("adapter")
        return None if adapter is None else (adapter["name"], adapter["digest"])

    def is_of(self, adapter: tuple[str, str] | None, secrets: Secrets) -> bool:
        """Whether requests with this adapter, tenant and salt fall into it."""
        return self.adapter == adapter and all(
            self.fields.get(f"{what}_digest") == secrets.digest(what, self.base) for what in _SECRETS
        )

    def names_pages(self, secrets: Secrets) -> bool:
        """Whether the names of its pages can be known: a salt is part of them, and manifests do not tell it."""
        salt = self.fields.get("salt_digest")
        return salt is None or salt == secrets.digest("salt", self.base)

    def hasher(self, salt: str | None) -> PageHasher:
        """What names its pages."""
        algorithm, adapter = self.fields["hash"], self.adapter
        seed = hash_seed(algorithm, adapter_name=None if adapter is None else adapter[0], salt=salt)
        return PageHasher(algorithm, page_size=self.page_size, seed=seed)

    def geometry(self) -> KVGeometry:
        """The shape of its pages.

        Raises:
            InvalidInput: it cannot be had from what the manifest says.
        """
        try:
            described = self.fields["geometry"]
            groups = tuple(LayerGroup(**(group | {"layers": tuple(group["layers"])})) for group in described["groups"])
            geometry = KVGeometry(groups, format=described["format"], layer_partition=described["layer_partition"])
        except (KeyError, TypeError, HicacheError) as error:
            raise InvalidInput(
                f"the manifest of {self.model!r:.60} has no geometry that can be read: {error}"
            ) from None
        if geometry.digest(self.page_size) != self.fields["geometry_digest"]:
            raise InvalidInput(f"the manifest of {self.model!r:.60} has another geometry than its digest says")
        return geometry


def differences(asked: Mapping[str, Any], found: Mapping[str, Any], secrets: Secrets) -> tuple[Difference, ...]:
    """Every field in which the manifest of a namespace that was asked about differs from another one.

    Args:
        asked: its manifest; adapter, tenant and salt may be left out where there are none.
        found: the other one's.
        secrets: tenant and salt of whoever asks; manifests of different bases show the same ones differently.
    """
    return tuple(_differences(asked, found, secrets))


def _differences(asked: Mapping[str, Any], found: Mapping[str, Any], secrets: Secrets) -> Iterator[Difference]:
    for field in _FIELDS:
        if asked.get(field) != found.get(field):
            yield Difference(field, _shown(asked.get(field)), _shown(found.get(field)))
    for what in _SECRETS:
        ours = secrets.digest(what, found.get("base_digest", found["digest"]))
        theirs = found.get(f"{what}_digest")
        if ours != theirs:
            yield Difference(what, _secret(ours), _secret(theirs))
    mine, others = dict(_leaves("geometry", asked["geometry"])), dict(_leaves("geometry", found["geometry"]))
    for name in dict.fromkeys((*mine, *others)):
        if mine.get(name) != others.get(name):
            yield Difference(name, _shown(mine.get(name)), _shown(others.get(name)))


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The parts of a geometry, each by its path."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(f"{name}.{key}", item)
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for number, item in enumerate(value):
            yield from _leaves(f"{name}[{number}]", item)
    else:
        yield name, value


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, Mapping) and set(value) == {"name", "digest"}:  # an adapter
        return f"{value['name']}={value['digest']}"
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _secret(digest: str | None) -> str:
    return "none" if digest is None else f"digest {digest}"
