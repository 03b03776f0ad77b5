"""A look at the server at start: what cannot work is refused, what would hurt is told."""

from __future__ import annotations

import itertools
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from redis import exceptions as errors

from hicache.errors import ConfigError

from .settings import Mode, RedisSettings

__all__ = ["DEFAULT_BULK", "Facts", "look", "refuse", "refuse_sentinel", "warnings"]

DEFAULT_BULK: Final = 512 << 20
"""The server's own limit of one value, where it does not say another."""
OLDEST: Final = (6, 0)
_SMALL: Final = 256 << 20
_TOO_SHORT: Final = 600.0
_FEW: Final = 100
_SETTINGS: Final = ("client-output-buffer-limit", "proto-max-bulk-len", "save", "appendonly")


@dataclass(frozen=True, slots=True)
class Facts:
    """What one node says of itself.

    Attributes:
        version: of Redis that it is compatible with.
        mode: standalone, cluster or sentinel.
        replica: whether it is one.
        maxmemory: its limit in bytes; 0 = none.
        used: bytes that it uses now.
        policy: what it evicts at the limit.
        evicted: keys evicted since it started.
        keys: in the database.
        uptime: seconds since it started.
        settings: of `CONFIG`, where the user may read them.
    """

    version: str
    mode: str
    replica: bool
    maxmemory: int
    used: int
    policy: str
    evicted: int
    keys: int
    uptime: int
    settings: dict[str, str]

    @property
    def lasts(self) -> float | None:
        """Seconds that an object stays, by estimate: as many as there are, over those that were evicted a second.

        None while fewer were evicted than there are.
        """
        return self.keys * self.uptime / self.evicted if self.evicted > max(self.keys, _FEW) else None

    @property
    def largest_value(self) -> int:
        """Bytes of the longest value that it takes."""
        text = self.settings.get("proto-max-bulk-len", "")
        return int(text) if text.isdecimal() else DEFAULT_BULK


def look(client: Any, *, db: int, settings: bool = True) -> Facts:
    """Ask a node.

    Args:
        client: redis-py's, of this node.
        db: the database whose keys count.
        settings: whether to read its configuration too.

    Raises:
        OSError, redis.RedisError: it cannot be asked, or what it answers cannot be understood.
    """
    try:
        return _facts(client, db=db, settings=settings)
    except (AttributeError, LookupError, TypeError, ValueError) as error:  # redis-py parses what it is sent on trust
        raise errors.InvalidResponse("INFO and CONFIG GET answer nonsense") from error


def _facts(client: Any, *, db: int, settings: bool) -> Facts:
    info: dict[str, Any] = client.info()
    keyspace = info.get(f"db{db}", {})
    return Facts(
        version=str(info.get("redis_version", "0")),
        mode=str(info.get("redis_mode", info.get("server_mode", "standalone"))),
        replica=info.get("role", "master") != "master",
        maxmemory=int(info.get("maxmemory", 0)),
        used=int(info.get("used_memory", 0)),
        policy=str(info.get("maxmemory_policy", "noeviction")),
        evicted=int(info.get("evicted_keys", 0)),
        keys=int(keyspace.get("keys", 0)) if isinstance(keyspace, dict) else 0,
        uptime=int(info.get("uptime_in_seconds", 0)),
        settings=_configuration(client) if settings else {},
    )


def _configuration(client: Any) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in _SETTINGS:
        try:
            answer = client.config_get(name)
        except errors.ResponseError:
            return found  # not everybody may read it
        for key, value in answer.items():
            found[_text(key)] = _text(value)
    return found


def _text(value: object) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


# --- what is refused --------------------------------------------------------------------------------------------------


def refuse(settings: RedisSettings, facts: Facts) -> None:
    """Refuse a server that cannot serve this URL.

    Raises:
        ConfigError: says what it is, and what to write instead.
    """
    where = settings.shown
    if facts.mode == "sentinel" and settings.mode is not Mode.SENTINEL:
        raise ConfigError(f"{where} is a sentinel: write redis+sentinel://host:26379/service/0")
    if facts.mode == "cluster" and settings.mode is not Mode.CLUSTER:
        raise ConfigError(f"{where} is a node of a cluster: write redis+cluster:// instead of {settings.mode.value}://")
    if facts.mode != "cluster" and settings.mode is Mode.CLUSTER:
        raise ConfigError(f"{where} is no cluster: write redis://host:port/0 for a single server")
    numbers = tuple(int(part) for part in facts.version.split(".")[:2] if part.isdecimal())
    if numbers < OLDEST:
        raise ConfigError(f"{where} is Redis {facts.version:.20}: hicache needs {OLDEST[0]}.{OLDEST[1]} or newer")


def explain(settings: RedisSettings, error: BaseException) -> str:
    """Why a server that answered cannot be used; empty if the error may pass by itself."""
    where = settings.shown
    for cause in _causes(error):
        text = str(cause)
        if isinstance(cause, ssl.SSLError):
            reason = cause.reason or text
            return f"{where}: TLS failed ({reason:.120}): check ca=, cert=, key= and verify=, and that the port has TLS"
        if isinstance(cause, (errors.AuthenticationError, errors.AuthenticationWrongNumberOfArgsError)) or _says(
            text, "NOAUTH", "WRONGPASS", "Authentication required", "invalid username-password"
        ):
            return f"{where} refuses the user or password: write redis://user:password@host, or password_file=FILE"
        if isinstance(cause, errors.NoPermissionError):
            return f"{where}: the user may not do what is needed ({text:.160}): see the README for the ACL rules"
        if _says(text, "DB index is out of range", "invalid DB index", "Invalid Database", "SELECT is not allowed"):
            return f"{where}: there is no database {settings.db}: use one that the server has"
        if _says(text, "Cluster mode is not enabled", "cluster support disabled"):
            return f"{where} is no cluster: write redis://host:port/0 for a single server"
        if _says(text, "unknown command"):
            return f"{where} does not know a command that hicache needs ({text:.80}): it is too old, or no Redis"
    return ""


def refuse_sentinel(settings: RedisSettings, answers: list[object]) -> None:
    """Refuse a service that no sentinel knows.

    Args:
        settings: of the backend.
        answers: of the sentinels: an address, None, or the error of asking.

    Raises:
        ConfigError: they know no such service, or are no sentinels.
    """
    for answer in answers:
        if isinstance(answer, BaseException) and (text := explain(settings, answer)):
            what = f"{settings.shown} is no sentinel: write redis://host:6379/0 for a server"
            raise ConfigError(what if "unknown command" in str(answer) else text)
    known = [answer for answer in answers if not isinstance(answer, BaseException)]
    if known and all(answer is None for answer in known):
        raise ConfigError(f"{settings.shown}: the sentinels know no service {settings.service!r}: check the name")


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        found = found.__cause__ or found.__context__


def _says(text: str, *parts: str) -> bool:
    return any(part.lower() in text.lower() for part in parts)


# --- what is told -----------------------------------------------------------------------------------------------------


def warnings(settings: RedisSettings, facts: Facts) -> Iterator[str]:
    """What would hurt, each with what to do."""
    if facts.replica:
        yield "it is a replica: every write will fail; name the primary"
    yield from _about_memory(settings, facts)
    limit = _output_limit(facts.settings.get("client-output-buffer-limit", ""))
    if 0 < limit < settings.window + (1 << 20):
        yield (
            f"client-output-buffer-limit normal is {_mebibytes(limit)}, below the {_mebibytes(settings.window)} that "
            "may be under way: set it to 0, or give a smaller window="
        )
    if facts.largest_value < 64 << 20:
        yield f"proto-max-bulk-len is {_mebibytes(facts.largest_value)}: larger objects are refused"
    if facts.settings.get("save") or facts.settings.get("appendonly") == "yes":
        yield "it persists its data, at the price of forks and memory, and a cache need not: save '', appendonly no"


def _about_memory(settings: RedisSettings, facts: Facts) -> Iterator[str]:
    if facts.maxmemory == 0:
        yield "it has no maxmemory: it will grow until the machine is out of memory; set maxmemory and a policy"
        return
    if facts.policy == "noeviction":
        yield "maxmemory-policy is noeviction: once full, it refuses writes; use volatile-lru and ttl=, or allkeys-lru"
    elif facts.policy.startswith("volatile-") and settings.ttl is None:
        yield f"maxmemory-policy {facts.policy} evicts only what expires, and nothing does without ttl=: add ttl=7d"
    elif facts.policy.endswith("-random"):
        yield f"maxmemory-policy {facts.policy} evicts whatever it meets, starts of prompts too: use an lru or lfu one"
    if facts.lasts is not None and facts.lasts < _TOO_SHORT:
        yield (
            f"maxmemory {_mebibytes(facts.maxmemory)} is smaller than what is asked of it: by its evictions an object "
            f"lasts {facts.lasts:.0f} s, so a prompt that pauses for longer is lost; raise maxmemory"
        )
    if facts.maxmemory < _SMALL:
        yield f"maxmemory is {_mebibytes(facts.maxmemory)}: less than the pages of a few prompts"


def _output_limit(text: str) -> int:
    for kind, hard in itertools.pairwise(text.split()):
        if kind == "normal" and hard.isdecimal():
            return int(hard)
    return 0


def _mebibytes(size: int) -> str:
    return f"{size / (1 << 20):.4g} MiB"
