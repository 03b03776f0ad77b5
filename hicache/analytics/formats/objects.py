"""Traces of single objects, as libCacheSim reads them: records of 24 bytes (oracleGeneral), and tables (CSV, text).

Source: 1a1a11a/libCacheSim, traceReader/customizedReader/oracle/oracleGeneralBin.h, traceReader/generalReader/csv.c
and doc/quickstart_cachesim.md. Each record is a request of one page, which is the object; it has --unit tokens
(default: 1), as objects' own sizes differ and pages' do not. Read are the time (seconds) and the object's id.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from math import isfinite
from typing import BinaryIO, Final

import numpy as np

from hicache.analytics.formats.lines import LineReader, Reader, check_length
from hicache.analytics.packing import DamagedFile
from hicache.analytics.sources import Source
from hicache.analytics.trace import Interner, Reading, TraceRequest, pack_ids
from hicache.errors import TraceError

UNIT: Final = 1

RECORD: Final = np.dtype([("time", "<u4"), ("id", "<u8"), ("size", "<u4"), ("next", "<i8")])
"""A record of oracleGeneral; `next` is the number, from 1, of the next request of the same object, -1 for none."""
NEVER: Final = (-1, 2**63 - 1)
"""How writers say that there is no next one."""

_RECORDS: Final = 4096
_TIMES: Final = ("time", "timestamp", "clock_time", "real_time", "ts")
_IDS: Final = ("obj_id", "object_id", "obj", "id", "key", "lbn", "block_id")
_DELIMITERS: Final = "\t,|;:"
_COLUMNS: Final = re.compile(r"(time|id)(?:-col)?=([1-9][0-9]{0,3})|obj-id-col=([1-9][0-9]{0,3})")


class _ObjectReader(Reader):
    """Makes a request of a record."""

    def __init__(self, path: Source, reading: Reading | None = None, *, interner: Interner | None = None) -> None:
        super().__init__(path, reading, interner=interner)
        self._names = Interner() if interner is None else interner
        self._scope = str(path)
        self._unit = self._reading.unit or UNIT

    def _object(self, time: float, name: int | str, place: str) -> TraceRequest:
        return TraceRequest(
            time=time,
            ids=pack_ids(self._names.translate(self._scope, (name,))),
            unit=self._unit,
            input_tokens=self._unit,
            output_tokens=0,
            scope=self._scope,
            place=place,
        )


class OracleReader(_ObjectReader):
    """Requests of a file of 24-byte records."""

    def _requests(self, file: BinaryIO) -> Iterator[TraceRequest]:
        number = 0
        while data := file.read(_RECORDS * RECORD.itemsize):
            self._consumed += len(data)
            whole = len(data) // RECORD.itemsize
            records = np.frombuffer(data, RECORD, count=whole)
            for time, name in zip(records["time"].tolist(), records["id"].tolist(), strict=True):
                number += 1
                yield self._object(float(time), name, f"record {number}")
            if left := len(data) % RECORD.itemsize:
                raise DamagedFile(
                    f"{self.path}, record {number + 1}: the file breaks off, it has {left} of {RECORD.itemsize} bytes; "
                    "get the whole file, or read what is there of it with --skip-bad"
                )


class TableReader(_ObjectReader, LineReader):
    """Requests of a table: a line each, its columns between one of tab, comma, bar, semicolon and colon.

    Which columns are what is told by a first line with names, or else by how many there are: time, id and what else
    there may be; or the id alone.
    """

    def __init__(self, path: Source, reading: Reading | None = None, *, interner: Interner | None = None) -> None:
        super().__init__(path, reading, interner=interner)
        self._delimiter = ""
        self._time: int | None = None
        self._id = 0
        self._begun = False
        self._came = -1
        if self._reading.columns:
            self._id, self._time = columns_of(self._reading.columns)

    def _request(self, line: bytes, number: int) -> TraceRequest | None:
        check_length(line)
        try:
            text = line.decode().strip()
        except UnicodeDecodeError:
            raise TraceError("it is no text in UTF-8") from None
        if not text:
            return None
        if not self._begun:
            self._begun = True
            self._delimiter = _delimiter(text)
            if self._is_header(self._cells(text)):
                return None
        cells = self._cells(text)
        self._came += 1
        if max(self._id, self._time or 0) >= len(cells):
            need = max(self._id, self._time or 0) + 1
            raise TraceError(f"it has {len(cells)} columns and needs {need}")
        name = cells[self._id]
        if not name:
            raise TraceError("the object has no id")
        time = float(self._came) if self._time is None else _seconds(cells[self._time])
        return self._object(time, int(name) if _is_number(name) else name, f"line {number}")

    def _cells(self, text: str) -> list[str]:
        if not self._delimiter:
            return [text]
        if '"' not in text:
            return [cell.strip() for cell in text.split(self._delimiter)]
        try:
            return [cell.strip() for cell in next(csv.reader([text], delimiter=self._delimiter))]
        except csv.Error as error:
            raise TraceError(f"it is no line of a table: {error}") from None

    def _is_header(self, cells: list[str]) -> bool:
        """Whether these are names; takes over where columns are."""
        names = [cell.lower().replace(" ", "_") for cell in cells]
        named = any(name in _IDS for name in names) or not any(_is_number(name) for name in names)
        if self._reading.columns:
            return named
        if named and len(cells) > 1:
            found = next((name for name in _IDS if name in names), None)
            if found is None:
                raise TraceError(
                    f"none of its columns is called {', '.join(_IDS)}; say which it is, as in --columns time=1,id=2"
                )
            self._id = names.index(found)
            self._time = next((names.index(name) for name in _TIMES if name in names), None)
            return True
        if len(cells) > 1:
            self._id, self._time = 1, 0
        return named and names[0] in _IDS


def columns_of(text: str) -> tuple[int, int | None]:
    """Where --columns says that the id and the time are, from 0.

    Raises:
        TraceError: it says something else.
    """
    found: dict[str, int] = {}
    for part in text.split(","):
        told = _COLUMNS.fullmatch(part.strip())
        if told is None:
            raise TraceError(f"--columns {text:.60}: say it as time=1,id=2, counted from 1")
        found[told[1] or "id"] = int(told[2] or told[3]) - 1
    if "id" not in found:
        raise TraceError(f"--columns {text:.60}: say which column is the id, as in time=1,id=2")
    return found["id"], found.get("time")


def looks_like_records(head: bytes) -> bool:
    """Whether a file that begins so has records of oracleGeneral: times never go back, next uses are ahead."""
    count = len(head) // RECORD.itemsize
    if not count or b"\x00" not in head[: RECORD.itemsize]:
        return False
    records = np.frombuffer(head, RECORD, count=count)
    ahead = records["next"] > np.arange(1, count + 1)
    fine = ahead | np.isin(records["next"], NEVER)
    return bool(fine.all() and (np.diff(records["time"].astype(np.int64)) >= 0).all())


def looks_like_table(head: bytes) -> bool:
    """Whether a file that begins so is a table with an id, or of numbers alone."""
    line = head.lstrip().split(b"\n", 1)[0].strip()
    if not line.isascii() or line[:1] in b"{[<" or len(line) > 4096:
        return False
    text = line.decode().lower()
    delimiter = _delimiter(text)
    if not delimiter:
        return _is_number(text)
    cells = [cell.strip().strip('"') for cell in text.split(delimiter)]
    return any(cell.replace(" ", "_") in _IDS for cell in cells) or all(_is_float(cell) for cell in cells[:2])


def _delimiter(text: str) -> str:
    """What is between columns, the more usual one of two that are there equally often; "" with one column."""
    count, _, found = max((text.count(sign), -place, sign) for place, sign in enumerate(_DELIMITERS))
    return found if count else ""


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 20 and int(text) < 2**64


def _is_float(text: str) -> bool:
    return re.fullmatch(r"[0-9]{1,20}(\.[0-9]{0,20})?", text) is not None


def _seconds(text: str) -> float:
    try:
        time = float(text)
    except ValueError:
        time = -1.0
    if not (isfinite(time) and 0 <= time < 1e12):
        raise TraceError(f"its time {text!r:.40} is no number of seconds")
    return time
