"""Writes single blocks, as libCacheSim reads them."""

from __future__ import annotations

from abc import abstractmethod
from typing import BinaryIO, Final

import numpy as np

from hicache.analytics.convert.writers import Writer
from hicache.analytics.formats import objects
from hicache.analytics.formats.objects import RECORD
from hicache.analytics.trace import TraceRequest
from hicache.errors import TraceError


class _ObjectWriter(Writer):
    """Each block is an object, each of a request's an access at its time."""

    unit = objects.UNIT
    keeps = True
    chained = True
    wall = True

    _LOST: Final = "what belongs to one request, of {} requests, as each block is an access of its own,"

    def _write(self, request: TraceRequest) -> None:
        unit = self.blocks.unit_of(request)
        ids = self.blocks.ids(request)
        time = self.time(request)
        if time != int(time):
            self.lose("parts of a second of the times of {} requests")
        if len(ids) != 1 or request.output_tokens:
            self.lose(self._LOST)
        elif request.input_tokens != unit:
            self.lose("lengths of {} prompts")
        self.lose_details(request, "request", "session", "parent", "turn", "kind", "model")
        self._accesses(int(time), ids, unit)

    @abstractmethod
    def _accesses(self, time: int, ids: list[int], unit: int) -> None:
        """Write accesses."""


class TableWriter(_ObjectWriter):
    """A table of time, id and size, which is the tokens of a block."""

    def __init__(self, file: BinaryIO, unit: int | None) -> None:
        super().__init__(file, unit)
        file.write(b"time,obj_id,obj_size\n")

    def _accesses(self, time: int, ids: list[int], unit: int) -> None:
        self._file.write("".join(f"{time},{name},{unit}\n" for name in ids).encode())


class OracleWriter(_ObjectWriter):
    """Records of 24 bytes. The next use of an object is put in when it comes: 100 bytes for each object."""

    def __init__(self, file: BinaryIO, unit: int | None) -> None:
        super().__init__(file, unit)
        self._number = 0
        self._places: dict[int, int] = {}
        self._next: dict[int, int] = {}

    def _accesses(self, time: int, ids: list[int], unit: int) -> None:
        if time >= 2**32:
            raise TraceError("its time does not fit into 32 bits of seconds")
        records = np.empty(len(ids), RECORD)
        records["time"], records["size"], records["next"] = time, unit, -1
        records["id"] = ids
        begin = self._number
        for place, name in enumerate(ids, start=begin):
            before = self._places.get(name)
            self._places[name] = place
            if before is None:
                continue
            if before >= begin:
                records["next"][before - begin] = place + 1
            else:
                self._next[before] = place + 1
        self._file.write(records.tobytes())
        self._number += len(ids)
        if len(self._next) >= _PATCHES:
            self._patch()

    def _patch(self) -> None:
        """Write the next uses that were found for records that are written already."""
        offset, size = RECORD.fields["next"][1], RECORD.itemsize  # type: ignore[index]
        end = self._file.tell()
        for place in sorted(self._next):
            self._file.seek(place * size + offset)
            self._file.write(self._next[place].to_bytes(8, "little"))
        self._file.seek(end)
        self._next.clear()

    def end(self) -> None:
        """Write the next uses that are not yet written."""
        self._patch()


_PATCHES: Final = 1 << 16
