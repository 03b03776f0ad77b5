"""Loads by layer as a random driver plays them: begun, read while their copies come, finished, or left as they are."""

from __future__ import annotations

from dataclasses import dataclass

from hicache.runtime.layered import LayeredLoad
from hicache.testing.cachelife import Engine
from hicache.testing.driverframe import DriverFrame
from hicache.testing.truth import require

__all__ = ["LayerSteps", "Reading"]


@dataclass(slots=True, eq=False)
class Reading:
    """A load by layer whose copies may still come.

    Attributes:
        load: the cache's side.
        until: behind that time nobody waits for it.
        seen: what its pages held when all copies had all layers; None before.
    """

    load: LayeredLoad
    until: float
    seen: list[bytes] | None = None


class LayerSteps(DriverFrame):
    """What engines do that compute a layer as soon as it has come. For `CacheDriver`."""

    def _load_by_layer(self) -> None:
        """An engine begins to load, and goes on to its other requests."""
        engine = self._engine()
        if engine is not None:
            self._load_by_layer_for(engine)

    def _load_by_layer_for(self, engine: Engine) -> None:
        until = self._end_of_load(engine)
        self._until = until
        engine.busy = True
        try:
            load = engine.request.load_by_layer()
        except BaseException:
            engine.busy = False
            raise
        engine.reading = Reading(load, until)
        self._note("loads by layer" if load.copies else "nothing came by layer")
        if not load.copies:
            self._finish_reading(engine)

    def _read_layers(self) -> None:
        """An engine reads what has come, or learns at the end what it was."""
        engines = [engine for engine in self._life.engines if engine.reading is not None]
        if not engines:
            return
        engine = self._pick(engines)
        reading = engine.reading
        assert isinstance(reading, Reading)
        copies, layers = reading.load.copies, self._life.pool.layers
        if reading.seen is None and all(copy.layers_done == layers for copy in copies):
            rows = self._life.pool.rows()
            reading.seen = [rows[slot].tobytes() for slot in reading.load.slots.tolist()]
        if all(copy.finished for copy in copies):
            self._finish_reading(engine)
        else:
            self._some_work()

    def _finish_reading(self, engine: Engine) -> None:
        reading, engine.reading = engine.reading, None
        assert isinstance(reading, Reading)
        load, lease, life = reading.load, engine.lease, self._life
        fresh = lease.start is None
        self._until = reading.until
        try:
            slots = load.finish()
        finally:
            engine.busy = False
        begun, found = load.slots.tolist(), slots.tolist()
        both = min(len(begun), len(found))
        require(found[:both] == begun[:both], "a load by layer ends with other slots than it began with")
        require(load.finish().tolist() == found, "a load by layer ends twice")
        if not fresh and engine.loaded is not None:
            require(found == engine.loaded, "a load by layer found more behind private slots")
        life.check_loaded(engine, slots)
        for page, content in enumerate((reading.seen or [])[:both]):
            require(content == engine.expected[found[page]], f"page {page} was read before it had come")
        explores = life.parts.options.prefill_tokens_per_second is not None
        require(not lease.waiting or not fresh or explores, "a load by layer left something that the request waits for")
        if load.copies:
            self._note("loaded by layer" if len(found) >= len(begun) else "less came by layer than was told")

    def _stop_reading(self, engine: Engine) -> None:
        """It ends while layers come, and never learns which pages did."""
        if engine.reading is not None:
            self._note("ended while layers came")
            engine.reading, engine.loaded = None, None

    def _end_of_load(self, engine: Engine) -> float:
        """Behind which time a load that begins now does not wait."""
        life, request = self._life, engine.request
        end = life.clock.now() + life.parts.options.longest_wait
        deadline = request._deadline
        return end if deadline is None else min(end, request._started + deadline)
