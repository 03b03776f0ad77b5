"""What can go wrong with a server, as one short word each: the words of counters, breakers and the README.

timeout        nothing came for too long, or the call's deadline passed
connection     refused, reset, closed or not found; also while waiting before the next try to connect
no_connection  all connections to the node stayed in use until the deadline
oom            the server has reached maxmemory and its policy evicts nothing (more)
readonly       a replica
loading        the server reads its data set from disk
busy_script    a script or function blocks the server
misconf        writes are refused because the server's snapshots fail
noreplicas     writes are refused because too few replicas are there
acl            the user may not do this, or not with these keys
auth           the password or user is wrong, or one is needed
too_large      above the server's proto-max-bulk-len
moved, ask, tryagain, clusterdown, masterdown   the cluster is changing, or has lost a part
protocol       bytes that are no reply, or a reply to another question
refused        any other error reply
"""

from __future__ import annotations

from typing import Final

from redis import exceptions as errors

__all__ = ["Trouble", "reason_of_error", "reason_of_reply", "told"]

_WORDS: Final = {
    b"OOM": "oom",
    b"READONLY": "readonly",
    b"LOADING": "loading",
    b"BUSY": "busy_script",
    b"MISCONF": "misconf",
    b"NOREPLICAS": "noreplicas",
    b"NOPERM": "acl",
    b"NOAUTH": "auth",
    b"WRONGPASS": "auth",
    b"WRONGTYPE": "wrongtype",
    b"MOVED": "moved",
    b"ASK": "ask",
    b"TRYAGAIN": "tryagain",
    b"CLUSTERDOWN": "clusterdown",
    b"MASTERDOWN": "masterdown",
}
# redis-py's classes lose the word; some of them are younger than the oldest version that works.
_CLASSES: Final = (
    ("OutOfMemoryError", "oom"),
    ("ReadOnlyError", "readonly"),
    ("BusyLoadingError", "loading"),
    ("NoPermissionError", "acl"),
    ("AuthenticationError", "auth"),
    ("AuthorizationError", "auth"),
    ("AuthenticationWrongNumberOfArgsError", "auth"),
    ("MovedError", "moved"),
    ("AskError", "ask"),
    ("TryAgainError", "tryagain"),
    ("MasterDownError", "masterdown"),
    ("ClusterDownError", "clusterdown"),
    ("SlotNotCoveredError", "clusterdown"),
    ("InvalidResponse", "protocol"),
    ("TimeoutError", "timeout"),
    ("ConnectionError", "connection"),
    ("RedisClusterException", "clusterdown"),
)


class Trouble(Exception):  # noqa: N818  it is turned into results, never shown
    """A call to one node broke off.

    Attributes:
        reason: the word.
        healthy: whether the node answered, so that there is no cause to leave it alone.
    """

    def __init__(self, reason: str, *, healthy: bool = False) -> None:
        self.reason = reason
        self.healthy = healthy
        super().__init__(reason)


def told(reason: str) -> str:
    """The word for people, with what to look at first."""
    return f"{reason} (is it running, and reachable?)" if reason in ("connection", "timeout") else reason


def reason_of_reply(line: bytes) -> str:
    """The word for an error reply, without its leading minus."""
    word = line.split(b" ", 1)[0]
    if word in _WORDS:
        return _WORDS[word]
    lower = line.lower()
    if b"invalid bulk length" in lower or b"maximum allowed size" in lower:
        return "too_large"
    return "refused"


def reason_of_error(error: BaseException) -> str:
    """The word for an exception of redis-py or of a socket."""
    if isinstance(error, Trouble):
        return error.reason
    if isinstance(error, TimeoutError):
        return "timeout"
    if isinstance(error, OSError):
        return "connection"
    for name, word in _CLASSES:
        known = getattr(errors, name, None)
        if known is not None and isinstance(error, known):
            return word
    if isinstance(error, errors.ResponseError):
        return reason_of_reply(str(error).encode("utf-8", "replace"))
    return "refused"
