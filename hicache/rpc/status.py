"""Errors as they travel: one table for both directions.

The server makes an `Error` of an exception and the client the same exception of the `Error`, with the same text. A
class that is not in the table travels as its nearest ancestor that is; what is no error of ours is a bug of the
service, whose text stays in the service's log.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

import grpc
from google.protobuf.message import DecodeError

from hicache.errors import (
    CacheClosed,
    DeadlineExceeded,
    GeometryError,
    HashMismatch,
    HicacheError,
    HicacheInternalError,
    InvalidInput,
    LeaseExpired,
    LimitExceeded,
    NamespaceError,
    NotFound,
    OutOfSlots,
    PermissionDenied,
    ProtocolMismatch,
    ServiceUnavailable,
    StorageError,
    Unauthenticated,
)
from hicache.rpc.v1 import error_pb2

__all__ = ["DETAILS_KEY", "TABLE", "Row", "decode_error", "details_of", "encode_error", "from_status", "row_of"]

DETAILS_KEY: Final = "hicache-error-bin"
"""Trailing metadata of a unary call that failed: the `Error`, serialised."""

_log = logging.getLogger("hicache.rpc")
_Code = grpc.StatusCode
_Reason = error_pb2.Reason


class Row(NamedTuple):
    """One kind of trouble.

    Attributes:
        error: the class that is raised on both sides.
        reason: in an `Error`.
        code: of a unary call, and of a stream that ends by it.
        advice: what to do, where the text of the error does not say it.
    """

    error: type[HicacheError]
    reason: error_pb2.Reason.ValueType
    code: grpc.StatusCode
    advice: str = ""


TABLE: Final = (
    Row(InvalidInput, _Reason.REASON_INVALID, _Code.INVALID_ARGUMENT),
    Row(NamespaceError, _Reason.REASON_NAMESPACE, _Code.INVALID_ARGUMENT),
    Row(GeometryError, _Reason.REASON_GEOMETRY, _Code.INVALID_ARGUMENT),
    Row(HashMismatch, _Reason.REASON_HASH_MISMATCH, _Code.INVALID_ARGUMENT),
    Row(ProtocolMismatch, _Reason.REASON_PROTOCOL, _Code.FAILED_PRECONDITION, "upgrade the older side"),
    Row(LeaseExpired, _Reason.REASON_EXPIRED, _Code.FAILED_PRECONDITION, "release it, and take a new lease"),
    Row(NotFound, _Reason.REASON_NOT_FOUND, _Code.NOT_FOUND, "ids mean nothing after a restart or a release"),
    Row(LimitExceeded, _Reason.REASON_RESOURCE_LIMIT, _Code.RESOURCE_EXHAUSTED, "ask for less, or raise the limit"),
    Row(OutOfSlots, _Reason.REASON_OUT_OF_SLOTS, _Code.RESOURCE_EXHAUSTED),
    Row(Unauthenticated, _Reason.REASON_UNAUTHENTICATED, _Code.UNAUTHENTICATED, "give a token that the service knows"),
    Row(PermissionDenied, _Reason.REASON_PERMISSION, _Code.PERMISSION_DENIED, "use a token with this right"),
    Row(ServiceUnavailable, _Reason.REASON_UNAVAILABLE, _Code.UNAVAILABLE, "go on without the cache, try again later"),
    Row(CacheClosed, _Reason.REASON_UNAVAILABLE, _Code.UNAVAILABLE, "go on without the cache, try again later"),
    Row(StorageError, _Reason.REASON_STORAGE, _Code.UNAVAILABLE, "see `hicache doctor` for the storage's state"),
    Row(DeadlineExceeded, _Reason.REASON_DEADLINE, _Code.DEADLINE_EXCEEDED, "give more time, or go on without"),
    Row(HicacheInternalError, _Reason.REASON_INTERNAL, _Code.INTERNAL, "report it, with the service's log"),
)
"""Every row. Where two have one reason or one code, the first is what a client raises."""

_ROW_OF_ERROR: Final = {row.error: row for row in TABLE}
_ERROR_OF_REASON: Final = {row.reason: row.error for row in reversed(TABLE)}
_ERROR_OF_CODE: Final = {row.code: row.error for row in reversed(TABLE)} | {
    # What gRPC itself says, without an `Error`. A proxy or another program behind the address answers UNIMPLEMENTED.
    _Code.UNIMPLEMENTED: ProtocolMismatch,
    _Code.FAILED_PRECONDITION: ServiceUnavailable,
    _Code.RESOURCE_EXHAUSTED: LimitExceeded,
    _Code.UNAVAILABLE: ServiceUnavailable,
    _Code.CANCELLED: ServiceUnavailable,
}


def row_of(error: BaseException) -> Row:
    """The row by which an exception travels; that of a bug for whatever is not ours."""
    for kind in type(error).__mro__:
        if (row := _ROW_OF_ERROR.get(kind)) is not None:
            return row
    return _ROW_OF_ERROR[HicacheInternalError]


def encode_error(error: BaseException, *, fields: Mapping[str, object] | None = None) -> error_pb2.Error:
    """The error as it travels. A bug is logged here with its traceback; foreign text never leaves the service.

    Args:
        error: any exception.
        fields: what logs shall say of the request, such as its id.
    """
    row = row_of(error)
    if row.error is HicacheInternalError:
        _log.error("a request failed by a bug", exc_info=error, extra=fields)
        ours = isinstance(error, HicacheInternalError)
        text = _sendable(str(error)) if ours else "an unexpected error, see the service's log"
        return error_pb2.Error(reason=row.reason, message=text, advice=row.advice)
    message = error_pb2.Error(reason=row.reason, message=_sendable(str(error)), advice=row.advice)
    if isinstance(error, OutOfSlots):
        message.slots.asked, message.slots.free = error.asked, error.free
        message.slots.evictable, message.slots.capacity = error.evictable, error.capacity
    return message


def _sendable(text: str) -> str:
    """The text without what protobuf refuses: a path that is no UTF-8 has lone surrogates."""
    return text.encode("utf-8", "backslashreplace").decode()


def decode_error(message: error_pb2.Error) -> HicacheError:
    """The exception that the other side raised. Its advice is a note of it."""
    error: HicacheError
    if message.reason == _Reason.REASON_OUT_OF_SLOTS:
        slots = message.slots
        error = OutOfSlots(asked=slots.asked, free=slots.free, evictable=slots.evictable, capacity=slots.capacity)
    else:
        error = _ERROR_OF_REASON.get(message.reason, HicacheInternalError)(message.message)
    if message.advice:
        error.add_note(message.advice)
    return error


def details_of(trailing: Iterable[tuple[str, str | bytes]] | None) -> bytes | None:
    """The serialised `Error` in the trailing metadata of a call; None without one.

    Metadata of grpc.aio are pairs by iteration in every version, but no mapping of which a dict could be made in older.
    """
    return next((value for key, value in trailing or () if key == DETAILS_KEY and isinstance(value, bytes)), None)


def from_status(code: grpc.StatusCode, text: str, details: bytes | None = None) -> HicacheError:
    """The exception of a call that failed.

    Args:
        code: status of the call.
        text: what came with it.
        details: value of the trailing metadata `DETAILS_KEY`, None without it: then gRPC or a proxy has spoken.
    """
    if details is not None:
        try:
            return decode_error(error_pb2.Error.FromString(details))
        except DecodeError:
            _log.debug("details of an error that cannot be read; its status still tells")
    return _ERROR_OF_CODE.get(code, HicacheInternalError)(text or code.name.lower().replace("_", " "))
