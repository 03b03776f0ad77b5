"""What settings mean together, checked before anything starts, and what they are for other parts of the service."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import quote, urlencode

from hicache.config import Config
from hicache.errors import ConfigError
from hicache.rpc.address import Address
from hicache.rpc.transport import TRANSPORT_BYTES
from hicache.runtime.accesslog.settings import LEAST_FILE, read_key
from hicache.sidecar.certificates import read_certificates
from hicache.sidecar.quotas import agreed_quotas
from hicache.sidecar.settings import Settings
from hicache.sidecar.tenants import read_tokens
from hicache.sidecar.wiring import access_log_of
from hicache.storage.registry import load_backend
from hicache.storage.url import StorageUrl
from hicache.units import format_size

__all__ = ["addresses", "check", "check_files", "storage_url"]

_ENDPOINTS = ("tcp://", "ipc:///", "ipc://@")
_SMALLEST_MESSAGE = 2**20
_SMALLEST_HOST = 4096  # a slot takes no less


class _Wrong(Exception):  # noqa: N818  never leaves this module
    def __init__(self, name: str, text: str) -> None:
        super().__init__(name, text)
        self.name = name
        self.text = text


def check(settings: Settings) -> None:
    """Look at everything that one value alone does not show. Opens nothing.

    Raises:
        ConfigError: names the value that does not fit, where it comes from, and what to do.
    """
    config = settings.config
    try:
        _check_listen(config)
        _check_tenants(config)
        _check_sizes(config)
        _check_others(config)
    except _Wrong as wrong:
        raise ConfigError(f"{wrong.name} ({settings.origin(wrong.name)}): {wrong.text}") from None


def check_files(settings: Settings) -> list[str]:
    """`check`, and the files that settings name: all that can be checked without starting.

    Returns:
        Warnings.

    Raises:
        ConfigError: a service would not start.
    """
    check(settings)
    config = settings.config
    if not config.host.bytes:
        raise ConfigError("host.bytes is not set: say how much memory engines may share, such as --host 8GiB")
    if (log := access_log_of(config)) is not None:
        read_key(log)
    certificates = read_certificates(config.tls)
    if config.tokens.file:
        agreed_quotas(config, read_tokens(config.tokens.file).quotas)
    return list(certificates.warnings) if certificates is not None else []


def addresses(config: Config) -> tuple[Address, ...]:
    """Where to listen, the service's own address first.

    Raises:
        ConfigError: an address that is none.
    """
    return tuple(Address.parse(text, listening=True) for text in config.listen.addresses)


def storage_url(config: Config) -> str | None:
    """The storage's URL with its options as parameters; None for no storage."""
    url, options = config.storage.url, config.storage.options
    if not url or not options:
        return url or None
    texts = {name: _text(value) for name, value in options.items()}
    return f"{url}{'&' if '?' in url else '?'}{urlencode(texts, quote_via=quote)}"


def _check_listen(config: Config) -> None:
    name = "listen.addresses"
    if not config.listen.addresses:
        raise _Wrong(name, "there is none: give at least one, such as unix:///run/hicache/hicache.sock")
    listening = [_parsed(name, text, listening=True) for text in config.listen.addresses]
    seen: set[Address] = set()
    for address in listening:
        if address in seen and (address.is_unix or address.port):  # port 0 is another one each time
            raise _Wrong(name, f"{address} is there twice")
        seen.add(address)
    tls = config.tls
    for one, other in (("certificate", "key"), ("key", "certificate"), ("client_ca", "certificate")):
        if getattr(tls, one) and not getattr(tls, other):
            raise _Wrong(f"tls.{one}", f"needs tls.{other} too")
    remote = [address for address in listening if not address.is_unix]
    if not remote or config.listen.insecure:
        return
    if not tls.certificate:
        raise _Wrong(
            name,
            f"{remote[0]} without TLS would show and give away everything: set tls.certificate and tls.key, "
            "or allow it by --insecure",
        )
    if not config.tokens.file:
        raise _Wrong(name, f"{remote[0]} would serve anyone: set tokens.file, or allow it by --insecure")


def _check_tenants(config: Config) -> None:
    tenants = config.tenants
    for uid in tenants.uids:
        if uid != "*" and not (uid.isascii() and uid.isdecimal() and int(uid) < 2**32):
            raise _Wrong("tenants.uids", f'{uid!r:.40} is no user id: give its number, or "*" for all others')
    sockets = {address.path for address in map(Address.parse, _unix(config))}
    for path in tenants.sockets:
        if _parsed("tenants.sockets", path).path not in sockets:
            raise _Wrong("tenants.sockets", f"{path!r:.120} is not among listen.addresses: nobody comes that way")
    rules = [*tenants.uids.values(), *tenants.sockets.values()]
    for tenant in [*(rule.tenant for rule in rules), *tenants.quotas]:
        if not tenant or len(tenant) > 256 or not tenant.isprintable():
            raise _Wrong("tenants", f"{tenant!r:.40} is no name of a tenant: 1 to 256 printable characters")


def _check_sizes(config: Config) -> None:
    host, limits = config.host, config.limits
    if 0 < host.bytes < _SMALLEST_HOST:
        raise _Wrong("host.bytes", f"{host.bytes} hold no page of any model: a number alone is bytes, so write 64GiB")
    if host.pool_bytes > host.bytes:
        raise _Wrong("host.pool_bytes", f"{host.pool_bytes} is more than host.bytes, which is {host.bytes}")
    log = config.access_log
    if log.folder and not LEAST_FILE <= log.file_bytes <= log.total_bytes // 2:
        raise _Wrong(
            "access_log.file_bytes",
            f"{log.file_bytes} is not between {format_size(LEAST_FILE)} and half of access_log.total_bytes, "
            f"{format_size(log.total_bytes // 2)}",
        )
    if not _SMALLEST_MESSAGE <= limits.message_bytes <= TRANSPORT_BYTES:
        raise _Wrong(
            "limits.message_bytes", f"{limits.message_bytes} is not between 1 MiB and {format_size(TRANSPORT_BYTES)}"
        )
    if not 4096 <= limits.chunk_bytes <= limits.message_bytes // 2:
        most = format_size(limits.message_bytes // 2)
        raise _Wrong("limits.chunk_bytes", f"{limits.chunk_bytes} is not between 4 KiB and half a message, {most}")


def _check_others(config: Config) -> None:
    address = config.metrics.address
    if address and (":" not in address or _parsed("metrics.address", address, listening=True).is_unix):
        raise _Wrong("metrics.address", f"{address!r:.80} is none: give host:port, such as 127.0.0.1:9400")
    for key in ("publish", "replay"):
        endpoint = getattr(config.events, key)
        if endpoint and not endpoint.startswith(_ENDPOINTS):
            raise _Wrong(f"events.{key}", f"{endpoint!r:.80} is no endpoint: write tcp://127.0.0.1:5557 or ipc:///path")
    if config.events.replay and not config.events.publish:
        raise _Wrong("events.replay", "replays what is published: set events.publish too")
    if config.storage.options and not config.storage.url:
        raise _Wrong("storage.options", "options of no storage: set storage.url")
    if url := storage_url(config):
        try:
            load_backend(StorageUrl.parse(url).scheme)
        except ConfigError as error:
            raise _Wrong("storage.url", str(error)) from None


def _unix(config: Config) -> Iterator[str]:
    return (text for text in config.listen.addresses if text.startswith(("/", "unix:")))


def _parsed(name: str, text: str, *, listening: bool = False) -> Address:
    try:
        return Address.parse(text, listening=listening)
    except ConfigError as error:
        raise _Wrong(name, str(error)) from None


def _text(value: str | float) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
