"""What a user may write into `kv_connector_extra_config`, checked once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from hicache.errors import ConfigError
from hicache.rpc.address import Address
from hicache.units import parse_size

__all__ = ["Settings", "read_settings"]


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The connector's part of the configuration.

    Attributes:
        address: of a running service, `unix:///run/hicache/hicache.sock` or `host:port`; or, without it,
        host: memory of a private service that this engine starts and ends, such as "8GiB".
        storage: URL of that service's storage, such as `file:///var/cache/hicache?capacity=100GiB`.
        serve: further flags of that service, as `hicache serve` takes them.
        token_file, ca, cert, key, insecure: as in `hicache.connect`.
        pool_size: host memory for this model, where the service has none of it yet; by default as it is configured.
        page_size: tokens a page, a multiple of vLLM's block size; by default the smallest of at least 64.
        model: name under which pages are shared; by default vLLM's.
        revision: commit or digest of its weights; by default vLLM's, or made from a local folder.
        numerics: which kernel families may share pages; by default made from attention backend and dtypes.
        scales: digest of static KV quantisation scales, 32 to 128 hex digits.
        head_group: kv heads an object; by default those of a rank. Ranks of several TP sizes share what they agree on.
        layer_partition: layers an object; by default all.
        deadline: seconds by which a request is delayed at most for what the cache may have.
        load: "async": the engine computes others while pages come; "sync": it waits, layer by layer.
        layerwise_stores: "on": a prompt's pages are copied while the step that completes them goes on, layer by layer;
            "off": during the step after that; "auto": on where the engine's tensors are on a GPU.
        audit_probability: share of hits whose last page is computed again and compared.
        audit_tolerance: relative difference above which such a page is another; by default what the dtype allows.
    """

    address: str | None = None
    host: str | None = None
    storage: str | None = None
    serve: tuple[str, ...] = ()
    token_file: str | None = None
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    insecure: bool = False
    pool_size: str | int = 0
    page_size: int | None = None
    model: str | None = None
    revision: str | None = None
    numerics: str | None = None
    scales: str | None = None
    head_group: int | None = None
    layer_partition: int | None = None
    deadline: float = 0.5
    load: Literal["async", "sync"] = "async"
    layerwise_stores: Literal["auto", "on", "off"] = "auto"
    audit_probability: float = 0.0
    audit_tolerance: float | None = None

    @property
    def scales_digest(self) -> bytes | None:
        """The scales' digest as bytes."""
        return None if self.scales is None else bytes.fromhex(self.scales)


def read_settings(document: Mapping[str, Any] | None) -> Settings:
    """The connector's settings.

    Raises:
        ConfigError: says which key is wrong, and what to write.
    """
    try:
        settings = msgspec.convert(dict(document or {}), Settings)
    except msgspec.ValidationError as error:
        known = ", ".join(Settings.__struct_fields__)
        raise ConfigError(f"kv_connector_extra_config is wrong: {error}; known keys are {known}") from None
    _check_where(settings)
    _check_numbers(settings)
    try:
        assert settings.scales_digest is None or settings.scales_digest
    except ValueError:
        raise ConfigError("scales must be a digest as hex digits, such as a sha256") from None
    return settings


def _check_where(settings: Settings) -> None:
    if settings.address is not None:
        Address.parse(settings.address)
        given = [name for name in ("host", "storage", "serve") if getattr(settings, name)]
        if given:
            raise ConfigError(
                f"{', '.join(given)} and address are both given: address means a service that runs already; "
                "leave it out for one that this engine starts"
            )
    elif settings.host is None:
        raise ConfigError(
            'neither address nor host is given: write "address": "unix:///run/hicache/hicache.sock" for a running '
            'service, or "host": "8GiB" for one that this engine starts'
        )
    else:
        parse_size(settings.host)


def _check_numbers(settings: Settings) -> None:
    for name in ("page_size", "head_group", "layer_partition"):
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}, must be 1 or more")
    if not 0 < settings.deadline <= 60:
        raise ConfigError(f"deadline is {settings.deadline:g} seconds, must be above 0 and at most 60")
    if not 0 <= settings.audit_probability <= 1:
        raise ConfigError(f"audit_probability is {settings.audit_probability:g}, must be between 0 and 1")
    if settings.audit_tolerance is not None and not 0 <= settings.audit_tolerance < 1:
        raise ConfigError(f"audit_tolerance is {settings.audit_tolerance:g}, must be 0 or more and below 1")
