"""Addresses of services as people write them: `unix:///run/hicache/hicache.sock`, `host:port`, `[::1]:7420`."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from hicache.errors import ConfigError

LONGEST_PATH = 107
"""Bytes of a Unix socket's path that Linux takes; one more is the NUL behind it."""

LIFELINE_SUFFIX = ".lifeline"
"""What stands behind a service's socket path in the path of its lifeline."""

_HOST_PORT = re.compile(r"(?:\[([0-9A-Fa-f:.%a-z]+)\]|([^\s:/\[\]@?#]+)):([0-9]{1,5})")
_FORMS = "write unix:///run/hicache/hicache.sock, or host:port"


@dataclass(frozen=True, slots=True)
class Address:
    """Where a service is.

    Attributes:
        path: of its Unix socket, absolute; empty for TCP.
        host, port: for TCP; port 0 only where one listens: any free port.
    """

    path: str = ""
    host: str = ""
    port: int = 0

    @classmethod
    def parse(cls, text: str, *, listening: bool = False) -> Address:
        """Read an address.

        Args:
            text: in one of the forms above.
            listening: whether it is to listen on, where port 0 is any free port.

        Raises:
            ConfigError: another form, a relative or too long path, a port out of range.
        """
        if text.startswith("/"):
            return cls(path=_checked_path(text, text))
        if text.startswith("unix:"):
            rest = text.removeprefix("unix:")
            return cls(path=_checked_path(rest.removeprefix("//"), text))
        found = _HOST_PORT.fullmatch(text)
        if found is None:
            raise ConfigError(f"address {text!r:.200} is none that is known: {_FORMS}")
        host, port = found[1] or found[2], int(found[3])
        if not (0 if listening else 1) <= port <= 65535:
            raise ConfigError(f"address {text!r:.200}: port {port} is not between 1 and 65535")
        return cls(host=host, port=port)

    @property
    def is_unix(self) -> bool:
        """Whether it is a Unix socket."""
        return bool(self.path)

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches it."""
        if self.is_unix or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def lifeline(self) -> str:
        """Path of the lifeline's socket; empty for TCP."""
        return self.path + LIFELINE_SUFFIX if self.path else ""

    @property
    def target(self) -> str:
        """As gRPC names it: `unix:/path`, `host:port`, `[::1]:port`."""
        return f"unix:{self.path}" if self.is_unix else f"{_bracketed(self.host)}:{self.port}"

    def __str__(self) -> str:
        return f"unix://{self.path}" if self.is_unix else f"{_bracketed(self.host)}:{self.port}"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _checked_path(path: str, text: str) -> str:
    if not path.startswith("/") or path.endswith("/") or "\0" in path:
        raise ConfigError(f"address {text!r:.200} has no absolute path of a socket: {_FORMS}")
    try:
        size = len(path.encode()) + len(LIFELINE_SUFFIX)
    except UnicodeEncodeError:  # a name that the file system takes, and gRPC does not
        raise ConfigError(f"address {text!a:.200}: the path is not UTF-8: use another one") from None
    if size > LONGEST_PATH:
        raise ConfigError(
            f"address {text!r:.200}: a Unix socket's path has at most {LONGEST_PATH} bytes, and this one has {size} "
            f"with {LIFELINE_SUFFIX} behind it: use a shorter path, such as /run/hicache/hicache.sock"
        )
    return path
