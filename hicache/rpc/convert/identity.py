"""Names of models, geometries, adapters and scopes, to messages and back.

Decoding checks what the records themselves check, and bounds what a hostile message could make expensive.
"""

from __future__ import annotations

from typing import Final

from google.protobuf.message import DecodeError

from hicache.core.identity import Adapter, Namespace
from hicache.core.layout import KVGeometry, LayerGroup
from hicache.errors import GeometryError, InvalidInput, NamespaceError
from hicache.rpc.service import RequestScope
from hicache.rpc.v1 import identity_pb2 as pb

_MAX_GROUPS: Final = 4096
_MAX_ROPE: Final = 65_536
_HASH: Final = "sha256"


def encode_geometry(geometry: KVGeometry) -> pb.Geometry:
    """The geometry as a message."""
    groups = [
        pb.LayerGroup(
            first_layer=group.layers[0],
            end_layer=group.layers[1],
            kv_heads=group.kv_heads,
            head_group=group.head_group,
            token_bytes=group.token_bytes,
            page_bytes=group.page_bytes,
            kind=group.kind,
            dtype=group.dtype,
            dims=group.dims,
        )
        for group in geometry.groups
    ]
    return pb.Geometry(groups=groups, format=geometry.format, layer_partition=geometry.layer_partition)


def decode_geometry(message: pb.Geometry) -> KVGeometry:
    """The geometry of a message.

    Raises:
        GeometryError: a value out of range, groups that leave a gap, more groups than there are sensible ones.
    """
    if len(message.groups) > _MAX_GROUPS:
        raise GeometryError(f"{len(message.groups)} layer groups: at most {_MAX_GROUPS}, join those that are alike")
    groups = tuple(
        LayerGroup(
            (group.first_layer, group.end_layer),
            group.kv_heads,
            group.head_group,
            group.token_bytes,
            group.page_bytes,
            group.kind,
            group.dtype,
            group.dims,
        )
        for group in message.groups
    )
    partition = message.layer_partition if message.HasField("layer_partition") else None
    return KVGeometry(groups, format=message.format, layer_partition=partition)


def encode_namespace(namespace: Namespace) -> pb.Namespace:
    """The namespace as a message."""
    rope = namespace.rope
    assert isinstance(rope, str | None)
    return pb.Namespace(
        model=namespace.model,
        revision=namespace.revision,
        geometry=encode_geometry(namespace.geometry),
        page_size=namespace.page_size,
        hash=namespace.hash,
        rope=rope,
        scales=namespace.scales,
        numerics=namespace.numerics,
    )


def decode_namespace(message: pb.Namespace) -> Namespace:
    """The namespace of a message.

    Raises:
        NamespaceError: what cannot name pages safely, or another hash than sha256.
        GeometryError: a geometry that does not fit.
    """
    if message.hash != _HASH:
        raise NamespaceError(
            f"hash {message.hash!r:.40}: a service sees page hashes without their tokens, so it needs hash={_HASH!r}"
        )
    if not message.HasField("geometry"):
        raise NamespaceError("the namespace has no geometry: give the shape of the model's KV")
    if len(message.rope) > _MAX_ROPE:
        raise NamespaceError(f"rope has {len(message.rope)} characters: at most {_MAX_ROPE}")
    return Namespace(
        message.model,
        revision=message.revision if message.HasField("revision") else None,
        geometry=decode_geometry(message.geometry),
        page_size=message.page_size,
        hash=_HASH,
        rope=message.rope if message.HasField("rope") else None,
        scales=message.scales if message.HasField("scales") else None,
        numerics=message.numerics if message.HasField("numerics") else None,
    )


def namespace_to_bytes(namespace: Namespace) -> bytes:
    """A namespace as it travels, as bytes."""
    return encode_namespace(namespace).SerializeToString()


def namespace_from_bytes(data: bytes) -> Namespace:
    """From bytes.

    Raises:
        InvalidInput: they are no namespace, or one that cannot be.
    """
    try:
        return decode_namespace(pb.Namespace.FromString(data))
    except DecodeError:
        raise InvalidInput("bytes that are no namespace") from None


def encode_scope(scope: RequestScope) -> pb.Scope:
    """The scope as a message."""
    adapter = scope.adapter
    return pb.Scope(
        adapter=None if adapter is None else pb.Adapter(name=adapter.name, digest=adapter.digest), salt=scope.salt
    )


_NO_SCOPE = RequestScope()


def decode_scope(message: pb.Scope) -> RequestScope:
    """The scope of a message.

    Raises:
        NamespaceError: an adapter without a name, or with a digest of another length.
    """
    salt = message.salt if message.HasField("salt") else None
    if not message.HasField("adapter"):
        return _NO_SCOPE if salt is None else RequestScope(salt=salt)
    adapter = message.adapter
    digest = adapter.digest if adapter.HasField("digest") else None
    return RequestScope(Adapter(adapter.name, digest), salt)
