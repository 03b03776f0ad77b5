"""Who callers are and what they may do: tokens from a file, and tenants of local callers by socket or uid.

What a client claims about itself is never looked at: only its token, its certificate as TLS has verified it, the socket
it came in by, and the uid that the kernel gives for its lifeline.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import stat
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from hicache.config import READ_WRITE, Config, Quota, Right, Size, TenantRule
from hicache.errors import ConfigError, PermissionDenied, Unauthenticated
from hicache.rpc.address import Address
from hicache.rpc.service import Caller, Peer
from hicache.sidecar.files import read_open

__all__ = ["Authenticator", "TokenFile", "TokenTable", "read_tokens"]

_log = logging.getLogger("hicache.sidecar")

SHORTEST_TOKEN: Final = 16
"""Characters below which a token can be guessed."""

_DIGEST: Final = re.compile(r"[0-9a-fA-F]{64}")


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A token as its file has it; either the token itself or its sha256."""

    name: str
    tenant: str
    token: str | None = None
    sha256: str | None = None
    rights: tuple[Right, ...] = READ_WRITE
    quota: Quota | None = None


class _Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tokens: tuple[_Entry, ...] = ()


@dataclass(frozen=True, slots=True)
class Token:
    """What one token stands for.

    Attributes:
        name: for logs.
        digest: sha256 of the token.
        tenant: whose pages it sees; None for pages of no tenant and, with the right to administer, all tenants.
        rights: what it may do.
    """

    name: str
    digest: bytes = field(repr=False)
    tenant: str | None
    rights: tuple[Right, ...]


@dataclass(frozen=True, slots=True)
class TokenTable:
    """Tokens of one file. Immutable.

    Attributes:
        tokens: all of them.
        quotas: hard limits by tenant, as the file has them.
    """

    tokens: tuple[Token, ...] = ()
    quotas: Mapping[str, Quota] = field(default_factory=dict)

    def find(self, token: str) -> Token | None:
        """The token's entry, or None. Takes the same time whatever is given, and whether it is there or not."""
        digest = hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
        found: Token | None = None
        for known in self.tokens:  # all of them, always
            if hmac.compare_digest(known.digest, digest):
                found = known
        return found


class TokenFile:
    """The tokens of a file, read again when asked. Used by one thread.

    Args:
        path: the file.

    Attributes:
        table: what it had when it was last good.

    Raises:
        ConfigError: as `read_tokens`.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self.table = read_tokens(path)

    def reload(self) -> frozenset[str] | None:
        """Read the file again; a bad one is logged, and the old tokens stay.

        Returns:
            Names of tokens that are gone or stand for something else now, whose sessions should end; None if the
            file is bad.
        """
        try:
            table = read_tokens(self._path)
        except ConfigError as error:
            _log.error("tokens are kept as they were: %s", error)
            return None
        before, self.table = self.table, table
        now = set(table.tokens)
        _log.info("%d tokens read again", len(table.tokens))
        return frozenset(token.name for token in before.tokens if token not in now)


class Authenticator:
    """Says who a client is; implements `hicache.rpc.service.Authenticate`. Used on the loop's thread.

    - A token decides wherever one is given and tokens are configured; one that is not known is refused.
    - TCP needs a token where tokens are configured. Without them (`--insecure`) anyone may do anything.
    - On a Unix socket its rule decides, else the rule of the uid, else (no uids are configured) the rights of the
      socket's file were enough: all may be done, of no tenant.

    Args:
        config: has the rules.
        tokens: the tokens, or None.
        uid_of: uid of the process behind a lifeline's key; None for a key that is not known.
    """

    def __init__(self, config: Config, tokens: TokenFile | None, *, uid_of: Callable[[bytes], int | None]) -> None:
        self._tokens = tokens
        self._uid_of = uid_of
        self._uids = dict(config.tenants.uids)
        self._sockets = {Address.parse(path).path: rule for path, rule in config.tenants.sockets.items()}

    def __call__(self, peer: Peer) -> Caller:
        """Who calls.

        Raises:
            Unauthenticated: no token, an unknown one, or a local caller whose uid is not known and would decide.
            PermissionDenied: a local caller for whose uid there is no rule.
        """
        listener = Address.parse(peer.listener, listening=True)
        if self._tokens is not None and (peer.token is not None or not listener.is_unix):
            return self._by_token(peer, self._tokens.table)
        if not listener.is_unix:
            return Caller(name=peer.certificate or peer.address, lifeline_key=peer.lifeline_key)
        if listener.path in self._sockets:
            return _local(self._sockets[listener.path], f"socket {listener.path}", peer)
        if self._uids:
            return self._by_uid(peer)
        return Caller(name="local", lifeline_key=peer.lifeline_key)

    def _by_token(self, peer: Peer, table: TokenTable) -> Caller:
        if not peer.token:
            raise Unauthenticated(
                "this service needs a token: --token-file PATH, connect(..., token_file=PATH), or HICACHE_TOKEN"
            )
        token = table.find(peer.token)
        if token is None:
            raise Unauthenticated("the token is not known here: ask whoever runs the service for one")
        return _caller(token.tenant, token.rights, token.name, peer)

    def _by_uid(self, peer: Peer) -> Caller:
        uid = self._uid_of(peer.lifeline_key) if peer.lifeline_key else None
        if uid is None:
            raise Unauthenticated("tenants are told apart by uid here: give a token, or the key of an open lifeline")
        rule = self._uids.get(str(uid)) or self._uids.get("*")
        if rule is None:
            raise PermissionDenied(f"uid {uid} has no tenant here: add it to tenants.uids")
        return _local(rule, f"uid {uid}", peer)


def read_tokens(path: str) -> TokenTable:
    """Read a file of tokens.

        [[tokens]]
        name = "acme-engine"                 # for logs
        sha256 = "9f86d081884c7d65..."       # printf %s "$TOKEN" | sha256sum; or: token = "the token itself"
        tenant = "acme"                      # "": no tenant, and with the right to administer all of them
        rights = ["read", "write"]           # and "admin"
        quota = { host = "8GiB", storage = "1TiB" }

    Raises:
        ConfigError: it cannot be read, others can read it, or something in it is wrong. The text never has a token.
    """
    data = _read_private(path)
    shown = f"token file {path!r:.200}"
    try:
        document = msgspec.convert(tomllib.loads(data.decode("utf-8")), _Document, dec_hook=_parse)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError):
        raise ConfigError(f"{shown} is no TOML: it has a [[tokens]] table for each token") from None
    except (msgspec.ValidationError, ConfigError) as error:
        raise ConfigError(f"{shown}: {str(error).replace('`', '').replace(' - at $', ' at ')}") from None
    tokens: list[Token] = []
    quotas: dict[str, Quota] = {}
    for entry in document.tokens:
        token = _token(entry, shown)
        if any(token.name == other.name or token.digest == other.digest for other in tokens):
            raise ConfigError(f"{shown}: token {token.name!r:.80} is there twice, by its name or by itself")
        tokens.append(token)
        if entry.quota is not None and quotas.setdefault(entry.tenant, entry.quota) != entry.quota:
            raise ConfigError(f"{shown}: tokens of tenant {entry.tenant!r:.80} have different quotas: give one")
    if not tokens:
        raise ConfigError(f"{shown} has no tokens: nobody could come in")
    return TokenTable(tuple(tokens), quotas)


def _token(entry: _Entry, shown: str) -> Token:
    if not entry.name or len(entry.name) > 128 or not entry.name.isprintable():
        raise ConfigError(f"{shown}: {entry.name!r:.40} is no name of a token: 1 to 128 printable characters")
    if (entry.token is None) == (entry.sha256 is None):
        raise ConfigError(f"{shown}: token {entry.name!r} needs either token or sha256")
    if entry.token is not None:
        if len(entry.token) < SHORTEST_TOKEN:
            raise ConfigError(f"{shown}: token {entry.name!r} is shorter than {SHORTEST_TOKEN} characters")
        digest = hashlib.sha256(entry.token.encode()).digest()
    elif _DIGEST.fullmatch(entry.sha256 or ""):
        digest = bytes.fromhex(entry.sha256 or "")
    else:
        raise ConfigError(f"{shown}: sha256 of token {entry.name!r} is not 64 hex digits")
    if len(entry.tenant) > 256 or not entry.tenant.isprintable():
        raise ConfigError(f"{shown}: token {entry.name!r} names no tenant: at most 256 printable characters")
    if entry.quota is not None and not entry.tenant:
        raise ConfigError(f"{shown}: token {entry.name!r} has a quota, but no tenant to which it applies")
    return Token(entry.name, digest, entry.tenant or None, tuple(dict.fromkeys(entry.rights)))


def _read_private(path: str) -> bytes:
    """Bytes of a file that only its owner, who must be this user or root, can read. What is checked is what is read."""
    shown = f"token file {path!r:.200}"
    try:
        # Without O_NONBLOCK a pipe in its place would hang the service.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{shown} cannot be read: {reason}") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{shown} is no regular file")
        if status.st_mode & 0o077:
            raise ConfigError(f"{shown} has mode {status.st_mode & 0o777:04o}, so others may use it: chmod 600 it")
        if status.st_uid not in (os.geteuid(), 0):
            raise ConfigError(f"{shown} belongs to uid {status.st_uid}: chown it to uid {os.geteuid()}, the service's")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return read_open(shown, file)
    finally:
        os.close(descriptor)


def _parse(kind: Any, given: Any) -> Any:
    if kind is Size:
        return Size.parse(given)
    raise NotImplementedError(kind)


def _local(rule: TenantRule, name: str, peer: Peer) -> Caller:
    return _caller(rule.tenant, rule.rights, name, peer)


def _caller(tenant: str | None, rights: tuple[Right, ...], name: str, peer: Peer) -> Caller:
    return Caller(
        tenant=tenant,
        read="read" in rights,
        write="write" in rights,
        admin="admin" in rights,
        name=name,
        lifeline_key=peer.lifeline_key,
    )
