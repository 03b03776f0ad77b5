"""What a Redis URL says, checked before anything is opened, and shown without its secrets."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from hicache.errors import ConfigError
from hicache.storage.base import StorageUrl

__all__ = ["Address", "Mode", "RedisSettings", "Tls"]

Address = tuple[str, int]
"""Host and port; a Unix socket is its path and 0."""

DEFAULT_PREFIX: Final = "hicache"
MAX_PREFIX: Final = 64
_PORT: Final = 6379
_SENTINEL_PORT: Final = 26379
_PREFIX = re.compile(r"[!-~]+")
_HOST = re.compile(r"[^\s/@]+")
_SERVICE = re.compile(r"[A-Za-z0-9._-]{1,128}")


class Mode(StrEnum):
    """How the server is found."""

    SINGLE = "redis"
    SENTINEL = "redis+sentinel"
    CLUSTER = "redis+cluster"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """How a TLS server is trusted, and how this client proves itself.

    Attributes:
        ca: file of certificates that sign servers; None = those of the system.
        cert, key: this client's certificate and key files.
        verify: "full" checks chain and host name, "ca" the chain alone, "none" nothing.
    """

    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    verify: str = "full"


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisSettings:
    """Everything that decides how the backend works. The password is not in its `repr`.

    Attributes:
        mode: one server, Sentinel or Cluster.
        addresses: the server, the sentinels, or some nodes of the cluster.
        service: the name under which sentinels know the primary.
        username, password: for `AUTH`.
        sentinel_username, sentinel_password: the same for the sentinels.
        db: number of the database; 0 in a cluster.
        tls: None = without TLS.
        prefix: begins every key.
        ttl: seconds that an object stays unused; None = for ever.
        timeout: most seconds between two pieces of a reply.
        connect_timeout: most seconds to connect.
        deadline: most seconds of one call; what came by then is kept.
        connections: most bulk connections to one node.
        window: most bytes that are under way on one connection.
        protocol: RESP version of everything but the bulk path.
    """

    mode: Mode = Mode.SINGLE
    addresses: tuple[Address, ...] = (("localhost", _PORT),)
    service: str = ""
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    sentinel_username: str | None = None
    sentinel_password: str | None = field(default=None, repr=False)
    db: int = 0
    tls: Tls | None = None
    prefix: str = DEFAULT_PREFIX
    ttl: int | None = None
    timeout: float = 1.0
    connect_timeout: float = 1.0
    deadline: float = 3.0
    connections: int = 8
    window: int = 8 << 20
    protocol: int = 2

    @property
    def shown(self) -> str:
        """The place for people: no user, no password."""
        scheme = "rediss" if self.tls and self.mode is Mode.SINGLE else self.mode.value
        if self.addresses[0][1] == 0:
            return f"{scheme}:///{self.db}?socket={self.addresses[0][0]}&prefix={self.prefix}"
        hosts = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.addresses)
        path = {Mode.SINGLE: f"/{self.db}", Mode.SENTINEL: f"/{self.service}/{self.db}", Mode.CLUSTER: "/"}[self.mode]
        return f"{scheme}://{hosts}{path}?prefix={self.prefix}"

    @classmethod
    def from_url(cls, url: StorageUrl) -> RedisSettings:
        """Read a URL of any of the schemes; see the package's README for their forms.

        Raises:
            ConfigError: says which part is wrong and what to write instead.
        """
        mode = Mode.SINGLE if url.scheme in ("redis", "rediss") else _mode(url.scheme)
        service, db = _path(url, mode)
        settings = cls(
            mode=mode,
            addresses=_addresses(url, mode),
            service=service,
            username=url.username or None,
            password=_password(url, url.password, "password_file"),
            sentinel_username=url.take("sentinel_username", None, str) if mode is Mode.SENTINEL else None,
            sentinel_password=_password(url, None, "sentinel_password_file") if mode is Mode.SENTINEL else None,
            db=db,
            tls=_tls(url, mode),
            prefix=url.take("prefix", DEFAULT_PREFIX, check_prefix),
            ttl=url.take("ttl", None, _ttl),
            timeout=url.take("timeout", 1.0, _seconds),
            connect_timeout=url.take("connect_timeout", 1.0, _seconds),
            deadline=url.take("deadline", 3.0, _seconds),
            connections=url.take("connections", 8, _whole(1, 256)),
            window=url.take_size("window", 8 << 20) or 8 << 20,
            protocol=url.take("protocol", 2, _whole(2, 3)),
        )
        url.done()
        return settings


def check_prefix(text: str) -> str:
    """A prefix that can begin a key.

    Raises:
        ConfigError: empty, too long, or with a space, a brace or what is not printable ASCII.
    """
    if not 1 <= len(text) <= MAX_PREFIX or _PREFIX.fullmatch(text) is None or "{" in text or "}" in text:
        raise ConfigError(
            f"use 1 to {MAX_PREFIX} printable ASCII characters without spaces and braces (braces would put all "
            "keys into one slot of a cluster)"
        )
    return text


def _mode(scheme: str) -> Mode:
    try:
        return Mode(scheme)
    except ValueError:
        raise ConfigError(f"redis storage: unknown scheme {scheme!r:.40}") from None


def _path(url: StorageUrl, mode: Mode) -> tuple[str, int]:
    """Service and database."""
    parts = [part for part in url.path.split("/") if part]
    service = ""
    if mode is Mode.SENTINEL:
        if not parts or _SERVICE.fullmatch(parts[0]) is None:
            raise ConfigError("redis storage: write redis+sentinel://host:26379/service/0, with the primary's name")
        service = parts.pop(0)
    if mode is Mode.CLUSTER and parts and parts != ["0"]:
        raise ConfigError("redis storage: a cluster has only database 0: write redis+cluster://host:6379")
    if len(parts) > 1:
        raise ConfigError(f"redis storage: path {url.path!r:.60} is not a database: write redis://host:6379/0")
    text = parts[0] if parts else "0"
    if not (text.isascii() and text.isdecimal() and len(text) <= 5):
        raise ConfigError(f"redis storage: database {text!r:.60} is not a number: write redis://host:6379/0")
    return service, int(text)


def _addresses(url: StorageUrl, mode: Mode) -> tuple[Address, ...]:
    socket = url.take("socket", "", str)
    if socket:
        if url.host not in ("", "localhost") or url.port or mode is not Mode.SINGLE or url.scheme == "rediss":
            raise ConfigError("redis storage: a Unix socket stands alone: write redis:///0?socket=/run/redis.sock")
        if not socket.startswith("/"):
            raise ConfigError(f"redis storage: socket {socket!r:.60} must be an absolute path")
        return ((socket, 0),)
    if not url.host:
        raise ConfigError("redis storage: no host: write redis://host:6379/0, or redis:///0?socket=/run/redis.sock")
    if _HOST.fullmatch(url.host) is None:
        raise ConfigError(f"redis storage: {url.host!r:.60} is no host: write redis://host:6379/0")
    default = _SENTINEL_PORT if mode is Mode.SENTINEL else _PORT
    first = (url.host, _port(url.port, default))
    if mode is Mode.SINGLE:
        return (first,)
    others: list[Address] = []
    others = url.take("nodes", others, lambda text: [_host_port(part, default) for part in text.split(",")])
    return (first, *others)


def _port(port: int | None, default: int) -> int:
    if port == 0:
        raise ConfigError(f"redis storage: port 0 cannot be connected to: write the server's, such as {default}")
    return default if port is None else port


def _host_port(text: str, default: int) -> Address:
    host, colon, port = text.strip().rpartition(":")
    if not colon:
        host, port = port, str(default)
    if _HOST.fullmatch(host) is None or not (port.isascii() and port.isdecimal() and 0 < int(port) < 65_536):
        raise ConfigError("write host:port,host:port")
    return host.strip("[]"), int(port)


def _password(url: StorageUrl, given: str | None, parameter: str) -> str | None:
    path = url.take(parameter, "", str)
    if not path:
        return given or None
    if given:
        raise ConfigError(f"redis storage: a password in the URL and {parameter}: give one of them")
    try:
        with open(path, encoding="utf-8") as file:
            return file.read(4096).strip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        what = getattr(error, "strerror", None) or "not text"
        raise ConfigError(f"redis storage: {parameter} {path!r:.120} cannot be read: {what}") from None


def _tls(url: StorageUrl, mode: Mode) -> Tls | None:
    wanted = url.scheme == "rediss" or (mode is not Mode.SINGLE and url.take_flag("tls"))
    if not wanted:
        return None
    tls = Tls(
        ca=url.take("ca", None, _file),
        cert=url.take("cert", None, _file),
        key=url.take("key", None, _file),
        verify=url.take("verify", "full", _verify),
    )
    if (tls.cert is None) != (tls.key is None):
        raise ConfigError("redis storage: a client certificate needs both cert=FILE and key=FILE")
    return tls


def _file(text: str) -> str:
    if not os.access(text, os.R_OK):
        raise ConfigError("this file cannot be read")
    return text


def _verify(text: str) -> str:
    if text not in ("full", "ca", "none"):
        raise ConfigError("use full, ca or none")
    return text


def _ttl(text: str) -> int:
    units = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
    number, unit = (text[:-1], units[text[-1]]) if text[-1:] in units else (text, 1)
    if not (number.isascii() and number.isdecimal() and len(number) <= 9 and 1 <= int(number) * unit <= 2**31):
        raise ConfigError("use seconds, or a number with s, m, h or d, such as 7d")
    return int(number) * unit


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.001 <= value <= 3600:
        raise ConfigError("use seconds from 0.001 to 3600")
    return value


class _whole:  # noqa: N801  used like a function
    def __init__(self, least: int, most: int) -> None:
        self.least, self.most = least, most

    def __call__(self, text: str) -> int:
        if not (text.isascii() and text.isdecimal() and len(text) < 10 and self.least <= int(text) <= self.most):
            raise ConfigError(f"use a number from {self.least} to {self.most}")
        return int(text)
