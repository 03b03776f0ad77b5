"""Errors that hicache raises, as one tree.

    HicacheError
    ├── InvalidInput                 the caller's fault: says what, where and what to do; the CLI exits with 2
    │   ├── NamespaceError           a namespace that cannot name pages safely
    │   ├── GeometryError            a geometry, layout or tensor that does not fit
    │   ├── ConfigError              sizes, policies, URLs, limits
    │   │   └── BackendUnavailableError   a storage scheme that nothing here serves; names the `pip install`
    │   ├── TraceError               a trace that cannot be read; names the line
    │   └── HashMismatch             tokens of a commit that are not those of their page hashes
    ├── OutOfSlots                   a tier cannot give what was asked; has the numbers, nothing was evicted
    ├── StorageError                 a storage backend's trouble as a whole (one key's trouble is a result)
    │   └── StorageUnavailable       it cannot be reached, or its folder is gone
    ├── ServiceError                 a service's refusal, or its absence
    │   ├── ServiceUnavailable       it is starting, draining, or cannot be reached
    │   ├── NotFound                 no such lease, attachment, model or pin
    │   ├── LeaseExpired             nothing new may be done with this lease
    │   ├── LimitExceeded            a limit of the service, or a quota of the tenant
    │   ├── Unauthenticated          no token, or one that is not known
    │   ├── PermissionDenied         a token, or a session, without the right that this needs
    │   ├── DeadlineExceeded         the deadline passed before anything could be answered
    │   └── ProtocolMismatch         client and service have no protocol version in common
    ├── CacheClosed                  the object is closed, or the process has forked
    └── HicacheInternalError         a bug of ours: an invariant is broken
        └── ResidencyError           an illegal event for a slot's state; nothing was changed

`InvalidInput` is also raised for what comes from files and the network, where a reader can act on it. Trouble
with single pages is never an exception: results are per page.
"""

from __future__ import annotations


class HicacheError(Exception):
    """Base of all errors of this package; catch it to catch them all."""


class InvalidInput(HicacheError):  # noqa: N818  reads better than InvalidInputError at every use
    """Something the caller gave is wrong. The text says what, where and what to do."""


class NamespaceError(InvalidInput):
    """A namespace that cannot name pages safely: an empty model, a mask that is not causal, ..."""


class GeometryError(InvalidInput):
    """A geometry, layout, shard agreement or tensor that does not fit."""


class ConfigError(InvalidInput):
    """A size, policy, URL or limit that cannot work here."""


class BackendUnavailableError(ConfigError):
    """No installed package serves this storage scheme, or its needs are missing."""


class TraceError(InvalidInput):
    """A trace that cannot be read."""


class HashMismatch(InvalidInput):
    """Tokens of a commit that are not those of their page hashes. Nothing was published."""


class OutOfSlots(HicacheError):  # noqa: N818  the design's word
    """A tier cannot give the slots that were asked. Nothing was evicted.

    Attributes:
        asked: slots asked for.
        free: slots free.
        evictable: resident slots that nothing pins.
        capacity: slots of the tier.
    """

    def __init__(self, *, asked: int, free: int, evictable: int, capacity: int) -> None:
        self.asked = asked
        self.free = free
        self.evictable = evictable
        self.capacity = capacity
        super().__init__(
            f"{asked} slots asked, {free} free and {evictable} evictable of {capacity}: "
            + (
                "more than the whole tier, make it larger"
                if asked > capacity
                else "close requests that hold pages, wait for copies under way by allocate(deadline=SECONDS), "
                "or make the tier larger"
            )
        )


class StorageError(HicacheError):
    """A storage backend's trouble as a whole."""


class StorageUnavailable(StorageError):  # noqa: N818  the field's word
    """The backend cannot be reached, or its folder is gone."""


class ServiceError(HicacheError):
    """A service's refusal, or its absence."""


class ServiceUnavailable(ServiceError):  # noqa: N818  the field's word
    """The service is starting, draining, or cannot be reached."""


class NotFound(ServiceError):  # noqa: N818  a state, not a fault
    """No such lease, attachment, model or pin; or one of another group, or of an earlier life of the service."""


class LeaseExpired(ServiceError):  # noqa: N818  a state, not a fault
    """Nothing new may be done with this lease: its time is over, or it was revoked."""


class LimitExceeded(ServiceError):  # noqa: N818  the field's word
    """A limit of the service, or a quota of the tenant. The text has the number."""


class Unauthenticated(ServiceError):  # noqa: N818  the field's word
    """No token, or one that is not known."""


class PermissionDenied(ServiceError):  # noqa: N818  the field's word
    """A token, or a session, without the right that this needs."""


class DeadlineExceeded(ServiceError):  # noqa: N818  the field's word
    """The deadline passed before anything could be answered."""


class ProtocolMismatch(ServiceError):  # noqa: N818  says what it is
    """Client and service have no protocol version in common."""


class CacheClosed(HicacheError):  # noqa: N818  a state, not a fault
    """The object is closed, or this process is a fork of the one that opened it."""


class HicacheInternalError(HicacheError):
    """A bug of ours: an invariant is broken. Please report it."""


class ResidencyError(HicacheInternalError):
    """An event that is illegal in a slot's state. Nothing was changed."""
