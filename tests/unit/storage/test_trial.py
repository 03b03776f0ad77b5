"""The figures of `hicache bench storage`, on stores that take no time."""

from __future__ import annotations

import pytest

from hicache.errors import ConfigError
from hicache.storage.base import ObjectResult, ObjectStatus
from hicache.storage.memory import MemoryBackend
from hicache.storage.trial import TrialOptions, run_trial
from hicache.testing.faults import FaultyStorage, answer

OPTIONS = TrialOptions(sizes=(1000, 3000), threads=2, batch=4, total=20_000, rounds=2)


class RawMemory(MemoryBackend):
    def raw_loop(self, payloads: list[memoryview], buffers: list[memoryview]) -> tuple[float, float]:
        assert [payload.nbytes for payload in payloads] == [buffer.nbytes for buffer in buffers]
        return 0.5, 0.25


def test_every_size_has_its_figures_and_leaves_nothing_behind() -> None:
    store = RawMemory()
    told: list[tuple[int, int]] = []
    results = list(run_trial(store, OPTIONS, progress=lambda done, total: told.append((done, total))))
    assert [result.size for result in results] == [1000, 3000]
    for result in results:
        assert result.wrong == 0
        assert result.put.gigabytes_per_second > 0 < result.get.gigabytes_per_second
        assert 0 < result.get.p50 <= result.get.p99
        assert result.put.failed == result.get.failed == result.contains.failed == {}
        moved = 20_000 // result.size // 4 * 4 * result.size if result.size < 3000 else 8 * result.size
        assert result.put.reference == moved / 0.5 / 1e9
        assert result.get.reference == moved / 0.25 / 1e9
        assert result.contains.reference is None
        assert result.document()["put"]["ratio"] == result.put.ratio
    assert told[-1] == (4, 4)
    assert store.statistics().objects == 0


def test_failures_and_wrong_bytes_are_told() -> None:
    store = FaultyStorage(MemoryBackend())
    store.always("get_into", answer([ObjectResult(ObjectStatus.OK)] * 4))  # says so, and reads nothing
    (result,) = run_trial(store, TrialOptions(sizes=(1000,), batch=4, total=4000, rounds=1))
    assert result.wrong == 4
    store.always("get_into", answer([ObjectResult(ObjectStatus.FAILED, "timeout")] * 4))
    (result,) = run_trial(store, TrialOptions(sizes=(1000,), batch=4, total=4000, rounds=1))
    assert result.get.failed == {"timeout": 8}
    assert result.get.reference is None


@pytest.mark.parametrize("wrong", [{"threads": 0}, {"batch": 0}, {"rounds": 0}, {"sizes": ()}, {"sizes": (0,)}])
def test_options_that_cannot_work(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="bench:"):
        TrialOptions(**wrong)  # type: ignore[arg-type]
