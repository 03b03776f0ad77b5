"""Errors travel by one table, in both directions."""

from __future__ import annotations

import logging

import grpc
import pytest

from hicache import errors
from hicache.errors import (
    BackendUnavailableError,
    ConfigError,
    HicacheError,
    HicacheInternalError,
    InvalidInput,
    LimitExceeded,
    OutOfSlots,
    ProtocolMismatch,
    ResidencyError,
    ServiceUnavailable,
    StorageError,
    StorageUnavailable,
)
from hicache.rpc.status import TABLE, Row, decode_error, encode_error, from_status, row_of
from hicache.rpc.v1 import error_pb2


def made(kind: type[HicacheError]) -> HicacheError:
    if kind is OutOfSlots:
        return OutOfSlots(asked=5, free=1, evictable=2, capacity=3)
    return kind("lease 7 has expired: take another")


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.error.__name__)
def test_an_error_comes_back_as_what_it_was(row: Row) -> None:
    """Class, text and numbers survive the way there and back; the advice is a note."""
    error = made(row.error)
    back = decode_error(encode_error(error))
    first = next(other for other in TABLE if other.reason == row.reason)  # a closed cache is an unavailable service
    assert type(back) is first.error
    assert str(back) == str(error)
    assert getattr(back, "__notes__", []) == ([row.advice] if row.advice else [])


def test_out_of_slots_keeps_its_numbers() -> None:
    back = decode_error(encode_error(OutOfSlots(asked=5, free=1, evictable=2, capacity=3)))
    assert isinstance(back, OutOfSlots)
    assert (back.asked, back.free, back.evictable, back.capacity) == (5, 1, 2, 3)


def test_every_reason_of_the_protocol_is_in_the_table() -> None:
    reasons = {value for name, value in error_pb2.Reason.items() if name != "REASON_UNSPECIFIED"}
    assert {row.reason for row in TABLE} == reasons


def test_no_status_code_of_the_table_is_ok() -> None:
    assert grpc.StatusCode.OK not in {row.code for row in TABLE}


@pytest.mark.parametrize(
    ("kind", "ancestor"),
    [
        (BackendUnavailableError, InvalidInput),
        (ConfigError, InvalidInput),
        (StorageUnavailable, StorageError),
        (ResidencyError, HicacheInternalError),
    ],
)
def test_a_class_that_is_not_in_the_table_travels_as_its_ancestor(
    kind: type[HicacheError], ancestor: type[HicacheError]
) -> None:
    assert row_of(kind("x")).error is ancestor
    assert type(decode_error(encode_error(kind("x")))) is ancestor


def test_every_error_of_the_package_but_the_bases_has_a_row_of_its_own_kind() -> None:
    """A new class must not silently travel as a bug."""
    kinds = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, HicacheError)}
    bugs = {kind for kind in kinds if row_of(kind.__new__(kind)).error is HicacheInternalError}
    assert bugs == {HicacheError, errors.ServiceError, HicacheInternalError, ResidencyError}


@pytest.mark.parametrize("error", [KeyError("a secret"), OSError(5, "a secret"), TimeoutError("a secret")])
def test_foreign_text_never_leaves_the_service(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    """What is no error of ours is a bug: logged in full, told as one."""
    with caplog.at_level(logging.ERROR, "hicache.rpc"):
        message = encode_error(error)
    assert "secret" not in message.message
    assert message.reason == error_pb2.REASON_INTERNAL
    assert "a secret" in caplog.text
    assert isinstance(decode_error(message), HicacheInternalError)


def test_text_that_is_no_utf8_is_sent_escaped() -> None:
    """A path with bytes that are no text must not turn an error into another one."""
    assert encode_error(InvalidInput("file 'a\udcff' is gone")).message == "file 'a\\udcff' is gone"


def test_a_reason_of_a_newer_service_is_an_error_all_the_same() -> None:
    back = decode_error(error_pb2.Error(reason=9999, message="something new"))  # type: ignore[arg-type]
    assert type(back) is HicacheInternalError
    assert str(back) == "something new"


def test_a_status_with_details_is_what_the_details_say() -> None:
    details = encode_error(LimitExceeded("300 pages, the limit is 256")).SerializeToString()
    back = from_status(grpc.StatusCode.RESOURCE_EXHAUSTED, "anything", details)
    assert type(back) is LimitExceeded
    assert str(back) == "300 pages, the limit is 256"


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, ServiceUnavailable),
        (grpc.StatusCode.CANCELLED, ServiceUnavailable),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, LimitExceeded),
        (grpc.StatusCode.UNIMPLEMENTED, ProtocolMismatch),
        (grpc.StatusCode.INVALID_ARGUMENT, InvalidInput),
        (grpc.StatusCode.DATA_LOSS, HicacheInternalError),
    ],
)
@pytest.mark.parametrize("details", [None, b"\xff\xff\xff"])
def test_a_status_that_grpc_made_is_read_by_its_code(
    code: grpc.StatusCode, kind: type[HicacheError], details: bytes | None
) -> None:
    """Also where the details cannot be read."""
    back = from_status(code, "connection refused", details)
    assert type(back) is kind
    assert str(back) == "connection refused"
    assert str(from_status(code, "", details))
