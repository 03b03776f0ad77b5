"""What a user may write into `--hicache-storage-backend-extra-config`, checked once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from hicache.errors import ConfigError

__all__ = ["Settings", "read_settings"]

ENGINE_KEYS: Final = frozenset(
    {
        *("backend_name", "module_path", "class_name", "interface_v1", "tp_lcm_size"),
        *("prefetch_threshold", "prefetch_timeout_base", "prefetch_timeout_per_ki_token"),
        *("hicache_storage_pass_prefix_keys",),
    }
)
"""Keys of the same document that SGLang reads; some of them it takes away before we see the rest."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Our part of the document.

    Attributes:
        storage: URL of a storage backend, such as `file:///var/cache/hicache?capacity=100GiB`.
        address: of a hicache service instead, such as `unix:///run/hicache/hicache.sock` or `host:7420`.
        pool_size: host memory of this model in the service, if nobody has made its pool yet.
        token_file, ca, cert, key, insecure: for a service over TCP; as in `hicache.connect`.
        model: name under which pages are shared; by default the one that SGLang serves.
        revision: commit or digest of its weights; by default SGLang's, or made from a local folder.
        numerics: which kernel families may share pages; by default made from attention backend and dtype.
        kv_dtype: the elements' type where the host pool keeps plain bytes (FP8), such as "fp8_e4m3".
        scales: digest of static quantisation scales, 32 to 128 hex digits.
        kv_heads: key-value heads of the whole model; by default those of a rank times the ranks.
        head_group: kv heads an object; by default those of a rank. Ranks of several TP sizes share what they agree on.
        layers: layers of the whole model; by default those of the stage.
        layer_partition: layers an object; by default those of the stage.
        timeout: seconds after which one storage call is given up.
    """

    storage: str | None = None
    address: str | None = None
    pool_size: int | str = 0
    token_file: str | None = None
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    insecure: bool = False
    model: str | None = None
    revision: str | None = None
    numerics: str | None = None
    kv_dtype: str | None = None
    scales: str | None = None
    kv_heads: int | None = None
    head_group: int | None = None
    layers: int | None = None
    layer_partition: int | None = None
    timeout: float = 5.0


def read_settings(document: Mapping[str, Any] | None) -> Settings:
    """Our part of SGLang's extra configuration.

    Raises:
        ConfigError: says which key is wrong, and what to write.
    """
    own = {name: value for name, value in (document or {}).items() if name not in ENGINE_KEYS}
    if not (own.get("storage") or own.get("address")):
        raise ConfigError(
            'extra config lacks "storage": add "storage": "file:///path?capacity=100GiB" to it, or the "address" of a '
            "hicache service"
        )
    try:
        settings = msgspec.convert(own, Settings)
    except msgspec.ValidationError as error:
        known = ", ".join(Settings.__struct_fields__)
        raise ConfigError(f"extra config is wrong: {error}; known keys are {known}") from None
    if not 0 < settings.timeout <= 600:
        raise ConfigError(f"extra config: timeout is {settings.timeout} seconds, must be above 0 and at most 600")
    _check_places(settings)
    if settings.address and not (document or {}).get("interface_v1"):
        raise ConfigError(
            'extra config: pages in a service need "interface_v1": 1, which tells what stands before them'
        )
    for name in ("kv_heads", "head_group", "layers", "layer_partition"):
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise ConfigError(f"extra config: {name} is {value}, must be 1 or more")
    return settings


_OF_A_SERVICE: Final = ("pool_size", "token_file", "ca", "cert", "key", "insecure")
_OF_A_STORAGE: Final = ("kv_heads", "head_group", "layers", "layer_partition")


def _check_places(settings: Settings) -> None:
    if settings.storage and settings.address:
        raise ConfigError('extra config has "storage" and "address": a service has its own storage, so leave out one')
    strange = _OF_A_STORAGE if settings.address else _OF_A_SERVICE
    for name in strange:
        if getattr(settings, name):
            where = "a service, where each rank has its own pages" if settings.address else "storage without a service"
            raise ConfigError(f"extra config: {name} has no meaning for {where}: leave it out")


def scales_digest(settings: Settings) -> bytes | None:
    """The scales' digest as bytes.

    Raises:
        ConfigError: it is no hex text.
    """
    if settings.scales is None:
        return None
    try:
        return bytes.fromhex(settings.scales)
    except ValueError:
        raise ConfigError("extra config: scales must be a digest as hex digits, such as a sha256") from None
