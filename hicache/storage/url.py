"""Storage URLs, taken apart once, so that every backend reads and refuses them the same way."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

from hicache.errors import ConfigError
from hicache.units import parse_size

__all__ = ["StorageUrl", "redacted"]

T = TypeVar("T")

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")
_SECRET = re.compile(r"^([^:/]*):(?://)?(?!/).*@", re.DOTALL)
_SECRET_PARAMETER = re.compile(r"([?&]\w*(?:password|passwd|secret)=)[^&]*", re.IGNORECASE)
_BOOLEANS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


def redacted(url: str) -> str:
    """A URL for messages: without user and password, and not longer than a line bears."""
    return _SECRET_PARAMETER.sub(r"\1***", _SECRET.sub(r"\1://***@", url))[:200]


class StorageUrl:
    """`scheme://[user[:password]@]host[:port]/path?name=value&...`, decoded.

    A backend takes the parameters it knows and then calls `done()`, which refuses what is left by name. Not shared
    between threads.

    Attributes:
        scheme: lower case.
        host, port, username, password: what stands before the path; None or "" where absent.
        path: percent-decoded, with its leading slash.
    """

    def __init__(self, scheme: str, path: str, *, host: str = "", parameters: dict[str, str] | None = None) -> None:
        self.scheme = scheme
        self.path = path
        self.host = host
        self.port: int | None = None
        self.username: str | None = None
        self.password: str | None = None
        self._parameters = dict(parameters or {})
        self._known: list[str] = []

    @classmethod
    def parse(cls, text: str) -> StorageUrl:
        """Take a URL apart.

        Raises:
            ConfigError: no scheme, a fragment, a repeated parameter, a NUL, or a port that is no number.
        """
        shown = redacted(text)
        try:
            parts = urlsplit(text)
            port = parts.port
            pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        except ValueError as error:
            # What cannot be read may be a piece of a password, which nobody shall see.
            what = f" ({error}): write scheme://path?name=value"
            if "@" in text:
                what = ": check host and port, and write / ? # [ ] in a password as %2F %3F %23 %5B %5D"
            raise ConfigError(f"storage URL {shown!r} cannot be read{what}") from None
        if _SCHEME.fullmatch(parts.scheme) is not None and "://" not in text:
            raise ConfigError(
                f"storage URL {shown!r} lacks '//' behind {parts.scheme}: write {parts.scheme}://..., as in file:///path"
            )
        if _SCHEME.fullmatch(parts.scheme) is None:
            raise ConfigError(f"storage URL {shown!r} has no scheme: write file:///path?capacity=20GiB or memory://")
        if parts.fragment or "\0" in unquote(text):
            raise ConfigError(f"storage URL {shown!r} has a '#' or a NUL: write '#' in a path as %23")
        url = cls(parts.scheme, unquote(parts.path), host=parts.hostname or "")
        for name, value in pairs:
            if name in url._parameters:
                raise ConfigError(f"storage URL {shown!r} has the parameter {name!r} twice")
            url._parameters[name] = value
        url.port = port
        url.username = None if parts.username is None else unquote(parts.username)
        url.password = None if parts.password is None else unquote(parts.password)
        return url

    def take(self, name: str, default: T, parse: Callable[[str], T]) -> T:
        """The parameter, parsed, or the default where it is absent.

        Raises:
            ConfigError: `parse` raised `ConfigError` or `ValueError`.
        """
        self._known.append(name)
        value = self._parameters.pop(name, None)
        if value is None:
            return default
        try:
            return parse(value)
        except (ConfigError, ValueError) as error:
            raise ConfigError(f"{self.scheme} storage: parameter {name}={value!r:.60} is wrong: {error}") from None

    def take_size(self, name: str, default: int | None = None) -> int | None:
        """A parameter in bytes, written like 20GiB; zero is refused."""
        size = self.take(name, default, parse_size)
        if size == 0:
            raise ConfigError(f"{self.scheme} storage: parameter {name} must be above zero, or left out for no limit")
        return size

    def take_flag(self, name: str, *, default: bool = False) -> bool:
        """A parameter that is 1, true, yes, 0, false or no."""

        def parse(text: str) -> bool:
            if text.lower() not in _BOOLEANS:
                raise ConfigError("use 1 or 0")
            return _BOOLEANS[text.lower()]

        return self.take(name, default, parse)

    def done(self) -> None:
        """End of reading.

        Raises:
            ConfigError: parameters are left that nobody took; names them and the known ones.
        """
        if self._parameters:
            unknown = ", ".join(sorted(self._parameters))
            known = ", ".join(sorted(self._known)) or "none"
            raise ConfigError(f"{self.scheme} storage: unknown parameter {unknown:.200}; known are: {known}")
