"""Logs are structured, and nothing gets into them that is not named."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from typing import Any, Literal

import pytest

from hicache.config import Log
from hicache.sidecar.logs import FIELDS, fields, set_up

_log = logging.getLogger("hicache.sidecar")


@pytest.fixture
def restored() -> Iterator[None]:
    logger = logging.getLogger("hicache")
    before = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.level, logger.propagate = before


def logged(form: Literal["text", "json"], level: Any = "info") -> io.StringIO:
    stream = io.StringIO()
    set_up(Log(format=form, level=level), stream)
    return stream


@pytest.mark.usefixtures("restored")
def test_json_lines() -> None:
    """A record is one JSON document: time in UTC, level, logger, message, and its fields as they are."""
    stream = logged("json")
    with fields(session=7, tenant="acme"), fields(request=12):
        _log.info("lease of %d pages\nin two lines", 5, extra={"pages": 5, "seconds": 0.25, "verb": "lease"})
    _log.info("outside", extra={"seconds": float("inf"), "boot": b"\x01\x02"})
    first, second = (json.loads(line) for line in stream.getvalue().splitlines())
    assert first.pop("time").endswith("Z")
    assert first == {
        "level": "info",
        "logger": "hicache.sidecar",
        "message": "lease of 5 pages\nin two lines",
        "session": 7,
        "tenant": "acme",
        "request": 12,
        "verb": "lease",
        "pages": 5,
        "seconds": 0.25,
    }
    assert (second["seconds"], second["boot"], "session" in second) == ("inf", "0102", False)


@pytest.mark.usefixtures("restored")
def test_lines_for_people() -> None:
    """A record is one line; values that would break it are quoted."""
    stream = logged("text")
    with fields(tenant="a b\nc"):
        _log.warning("two\nlines", extra={"session": 7, "group": None})
    (line,) = stream.getvalue().splitlines()
    assert line.endswith('Z warning two lines  tenant="a b\\nc" session=7')


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("form", ["text", "json"])
def test_nothing_else_is_written(form: Literal["text", "json"]) -> None:
    """Fields that are not named stay out, passwords of URLs too, and long texts are cut."""
    stream = logged(form)
    secret = "hunter2-hunter2"
    _log.info("opened redis://user:%s@host/0", secret, extra={"token": secret, "salt": secret, "prompt": [1, 2, 3]})
    _log.info("x" * 100_000)
    text = stream.getvalue()
    assert secret not in text
    assert "[1, 2, 3]" not in text
    assert "redis://***@host/0" in text
    assert max(len(line) for line in text.splitlines()) < 2200
    with pytest.raises(ValueError, match="no fields of logs"), fields(token=secret):
        pass


def test_secrets_are_no_fields() -> None:
    """No name under which one might travel is among those that are written."""
    assert not {"token", "salt", "prompt", "tokens", "key", "password", "authorization"} & set(FIELDS)


@pytest.mark.usefixtures("restored")
def test_levels_and_setting_up_again() -> None:
    """What is below the level is left out; a second call takes the place of the first."""
    first = logged("text")
    second = logged("text", "warning")
    _log.info("quiet")
    _log.error("loud")
    assert first.getvalue() == ""
    assert "loud" in second.getvalue()
    assert "quiet" not in second.getvalue()


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("form", ["text", "json"])
def test_tracebacks(form: Literal["text", "json"]) -> None:
    """An exception comes with its traceback; in JSON it stays within the line."""
    stream = logged(form)
    try:
        raise ZeroDivisionError("no")
    except ZeroDivisionError:
        _log.exception("failed")
    assert "ZeroDivisionError: no" in stream.getvalue()
    assert (len(stream.getvalue().splitlines()) == 1) == (form == "json")


@pytest.mark.usefixtures("restored")
def test_tasks_have_fields_of_their_own() -> None:
    """What one task puts into its records is not in those of another."""
    stream = logged("json")

    async def run() -> None:
        there = asyncio.Barrier(2)

        async def one(number: int) -> None:
            with fields(session=number):
                await there.wait()
                _log.info("of %d", number)

        await asyncio.gather(one(1), one(2))

    asyncio.run(run())
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert sorted((line["message"], line["session"]) for line in lines) == [("of 1", 1), ("of 2", 2)]


@pytest.mark.usefixtures("restored")
def test_a_closed_stream_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    """Who closed it wants to hear nothing."""
    stream = logged("text")
    stream.close()
    _log.info("unheard")
    assert capsys.readouterr() == ("", "")
