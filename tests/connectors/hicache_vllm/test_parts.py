"""Parts of the connector by themselves: names of pages, the private service, adapters, clocks and counts."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hicache.errors import ConfigError, GeometryError, ServiceUnavailable
from hicache.events import Cleared, Removed, Stored
from hicache.records import Tier
from hicache.rpc.client.options import Backoff
from hicache.rpc.service import EventBatch
from hicache.testing.clients import PATIENCE, until
from hicache_vllm.absent import AbsentWorker
from hicache_vllm.adapters import Adapters
from hicache_vllm.comparing import Comparison
from hicache_vllm.compat import Facts
from hicache_vllm.copier import Copier
from hicache_vllm.events import Gone, Kept, PageFeed
from hicache_vllm.identity import Identity, identify
from hicache_vllm.logs import adopt_logs
from hicache_vllm.lookups import Scope
from hicache_vllm.plans import Report
from hicache_vllm.prefill import MOST_PENDING, PrefillRate
from hicache_vllm.scopes import Scopes
from hicache_vllm.service import PrivateService, private_address, refuses
from hicache_vllm.settings import read_settings
from hicache_vllm.tasks import Tasks


def facts(**changed: Any) -> Facts:
    """Of an engine with 8 kv heads in 4 layers."""
    found: dict[str, Any] = {
        "version": "0.32.0", "engine": "e", "model": "example/tiny", "revision": "1", "folder": None,
        "dtype": "bfloat16", "kv_dtype": "bfloat16", "quantization": "", "overrides": "", "backend": "FLASH_ATTN",
        "isa": "", "layers": 4, "kv_heads": 8, "width": 64, "rope": 0, "local_heads": 8, "row": 256, "item": 2,
        "block": 16,
    }  # fmt: skip
    return Facts(**(found | changed))


def named(proves: bool = True, **changed: Any) -> Identity:
    settings = {name: changed.pop(name) for name in list(changed) if name not in Facts.__dataclass_fields__}
    return identify(facts(**changed), read_settings({"host": "1GiB", **settings}), lambda _: proves)


class TestIdentity:
    def test_a_page_is_the_smallest_multiple_of_at_least_64_tokens(self) -> None:
        assert [named(block=block).namespace.page_size for block in (16, 32, 48, 64, 128)] == [64, 64, 96, 64, 128]

    @pytest.mark.parametrize(
        "change",
        [
            {"revision": "2"},
            {"dtype": "float32"},
            {"quantization": "awq"},
            {"overrides": "rope"},
            {"backend": "CPU_ATTN", "isa": "vec"},
            {"kv_dtype": "float16"},
            {"scales": "ab" * 16},
            {"numerics": "agreed"},
            {"page_size": 128},
            {"model": "other"},
        ],
    )
    @pytest.mark.case("PLUG-2")
    def test_what_decides_about_reuse_is_in_the_name(self, change: dict[str, Any]) -> None:
        assert named(**change).namespace.digest != named().namespace.digest

    def test_ranks_of_one_engine_have_one_name(self) -> None:
        parts = [named(tp=4, tp_rank=rank, local_heads=2) for rank in range(4)]
        assert len({part.namespace.digest for part in parts}) == 1
        assert {part.page_bytes for part in parts} == {4 * 2 * 2 * 64 * 64 * 2}

    @pytest.mark.case("PLUG-4")
    def test_sizes_share_names_where_they_agree_on_head_groups(self) -> None:
        one, four = named(head_group=2), named(tp=4, local_heads=2)
        assert one.namespace.digest == four.namespace.digest
        assert named().namespace.digest != four.namespace.digest

    def test_more_ranks_than_heads_hold_copies(self) -> None:
        assert named(tp=16, tp_rank=3, local_heads=1).page_bytes == 4 * 2 * 64 * 64 * 2

    def test_stages_hold_their_layers(self) -> None:
        first, last = (
            named(pp=2, pp_rank=rank, stages=(0, 3), layer_partition=1, backend="FLASH_ATTN") for rank in range(2)
        )
        assert (first.form.layers, last.form.layers) == (3, 1)
        assert first.page_bytes == 3 * last.page_bytes

    @pytest.mark.parametrize(
        ("change", "why"),
        [
            ({"kv_heads": 0, "local_heads": 1, "row": 1152, "width": 576}, "FLASH_ATTN, bfloat16"),
            ({"kv_dtype": "fp8_e4m3", "item": 1, "row": 128}, "fp8_e4m3"),
            ({"backend": "FLASHINFER"}, "FLASHINFER"),
            ({"proves": False}, "writes otherwise"),
        ],
    )
    def test_what_is_not_described_or_proven_is_opaque(self, change: dict[str, Any], why: str) -> None:
        found = named(**change)
        assert not found.canonical
        assert found.namespace.geometry.format.startswith("opaque:vllm/")
        assert found.page_bytes == found.form.page_bytes
        assert why in found.warnings[0]

    def test_weights_in_a_folder_are_told_apart_by_what_is_in_it(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "model.safetensors").write_bytes(b"one")
        one = named(revision=None, folder=str(tmp_path)).namespace
        (tmp_path / "model.safetensors").write_bytes(b"two")
        assert named(revision=None, folder=str(tmp_path)).namespace.revision != one.revision
        assert "told apart by name only" in named(revision=None).warnings[0]

    def test_head_groups_that_do_not_fit_are_refused_with_one_that_does(self) -> None:
        with pytest.raises(GeometryError, match="use head_group=2"):
            named(tp=4, local_heads=2, head_group=4)


class TestPrivateService:
    SCRIPT = "import sys; open({!r}, 'a').write(' '.join(sys.argv[1:]) + chr(10)); sys.stdin.read()"

    @pytest.fixture
    def service(self, tmp_path: Path) -> Iterator[Callable[..., PrivateService]]:
        made: list[PrivateService] = []

        def make(script: str, *more: str) -> PrivateService:
            settings = read_settings({"host": "1GiB", "storage": "file:///x?capacity=1GiB", "serve": ["--insecure"]})
            made.append(
                PrivateService(
                    f"unix://{tmp_path}/private/hicache.sock",
                    settings,
                    backoff=Backoff(first=0.001, most=0.01),
                    command=[sys.executable, "-c", script, *more],
                )
            )
            return made[-1]

        yield make
        for one in made:
            one.close()

    def test_is_started_again_when_it_dies_and_ended_at_the_end(
        self, service: Callable[..., PrivateService], tmp_path: Path
    ) -> None:
        log = tmp_path / "log"
        one = service(self.SCRIPT.format(str(log)))
        for starts in (1, 2, 3):
            until(partial(_has_lines, log, starts))
            assert one.pid is not None
            if starts < 3:
                os.kill(one.pid, signal.SIGKILL)
        assert log.read_text().splitlines()[0] == (
            f"serve --listen unix://{tmp_path}/private/hicache.sock --host 1GiB --drain 5.0 --log-level warning "
            "--storage file:///x?capacity=1GiB --insecure"
        )
        assert one.starts == 3
        one.close()
        one.close()
        assert one.wait(PATIENCE)
        assert one.pid is None

    def test_folder_of_somebody_else_is_refused(self, tmp_path: Path, service: Callable[..., PrivateService]) -> None:
        (tmp_path / "private").mkdir(mode=0o777)
        (tmp_path / "private").chmod(0o777)
        with pytest.raises(ConfigError, match="belongs to somebody else or is open to others"):
            service("")

    def test_address_is_the_same_in_every_process_of_an_engine(self) -> None:
        assert private_address("one") == private_address("one") != private_address("two")
        assert len(private_address("x" * 500).encode()) < 107

    def test_a_command_that_is_not_there_is_tried_again(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        settings = read_settings({"host": "1GiB"})
        address = f"unix://{tmp_path}/private/hicache.sock"
        one = PrivateService(address, settings, backoff=Backoff(first=0.001, most=0.01), command=["/nowhere/python"])
        until(lambda: caplog.text.count("could not be started, and is started again") > 1)
        one.close()
        assert one.wait(PATIENCE)

    def test_one_that_ended_in_order_is_started_again(
        self, service: Callable[..., PrivateService], tmp_path: Path
    ) -> None:
        """As by `kill`: it has taken its folder along."""
        log = tmp_path / "log"
        script = (
            "import os, signal, sys\n"
            f"folder = {str(tmp_path / 'private')!r}\n"
            "signal.signal(signal.SIGTERM, lambda *_: (os.rmdir(folder), os._exit(0)))\n"
            f"open({str(log)!r}, 'a').write(str(os.path.isdir(folder)) + chr(10))\n"
            "sys.stdin.read()"
        )
        one = service(script)
        for starts in (1, 2):
            until(partial(_has_lines, log, starts))
            assert one.pid is not None
            os.kill(one.pid, signal.SIGTERM)
        until(partial(_has_lines, log, 3))
        assert log.read_text().split() == 3 * ["True"]

    def test_one_that_refuses_its_settings_is_not_started_again(
        self, service: Callable[..., PrivateService], tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        address = f"unix://{tmp_path}/private/hicache.sock"
        one = service("import sys; sys.exit(2)")
        assert one.wait(PATIENCE)
        assert (one.starts, refuses(address)) == (1, True)
        assert caplog.text.count("its own line says what to change") == 1
        one.close()
        assert not (tmp_path / "private").exists()
        again = service(self.SCRIPT.format(str(tmp_path / "log")))
        assert not refuses(address)
        again.close()

    def test_it_ends_in_order_with_its_input_and_takes_its_folder_along(self) -> None:
        """As when the engine dies: the pipe's end is all that the service hears."""
        with tempfile.TemporaryDirectory(prefix="hc") as name:
            folder = Path(name) / "private"
            folder.mkdir(mode=0o700)
            command = [sys.executable, "-m", "hicache_vllm.launch", str(folder), "serve", "--host", "1MiB"]
            command += ["--listen", f"unix://{folder}/hicache.sock", "--log-level", "error"]
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=_environment()
            )
            assert process.stdout is not None
            assert process.stdout.readline().startswith("serving on")
            output, _ = process.communicate(timeout=PATIENCE)
            assert output.startswith("ended")
            assert process.returncode == 0
            assert not folder.exists()


def _has_lines(log: Path, lines: int) -> bool:
    return log.exists() and log.read_text().count("\n") == lines


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


class TestAdapters:
    def test_content_makes_the_digest(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        """Other weights under the same name and path are another adapter; what is not known for sure has no digest."""
        adapters = Adapters()
        lora = SimpleNamespace(lora_name="sql", lora_path=str(tmp_path))
        assert adapters.adapter(lora).digest is None  # no adapter in there
        (tmp_path / "adapter_config.json").write_text("{}")
        (tmp_path / "adapter_model.safetensors").write_bytes(b"1")
        first = adapters.adapter(lora)
        assert first.digest is not None
        assert adapters.adapter(lora) == first
        (tmp_path / "adapter_model.safetensors").write_bytes(b"22")
        assert adapters.adapter(lora).digest is None  # the engine may have read either
        (tmp_path / "adapter_model.safetensors").write_bytes(b"1")
        assert adapters.adapter(lora).digest is None
        (line,) = caplog.messages
        assert "files of adapter sql" in line
        assert Adapters().adapter(lora) == first
        (tmp_path / "adapter_model.safetensors").write_bytes(b"22")
        assert Adapters().adapter(lora).digest not in (None, first.digest)
        assert adapters.adapter(SimpleNamespace(lora_name="sql", lora_path="/nowhere")).digest is None


class TestPrefillRate:
    def test_only_steps_that_are_all_prompt_are_told(self) -> None:
        told: list[tuple[int, float]] = []
        times = iter([0.0, 2.0, 10.0, 11.0, 12.0, 13.0, 14.0, 20.0])
        rate = PrefillRate(lambda: next(times), lambda tokens, seconds: told.append((tokens, seconds)))
        rate.begun([500])
        rate.ended()
        rate.begun([500, *[1] * 100])
        rate.ended()
        rate.begun([200, 300])
        rate.begun([1])
        rate.ended()
        rate.ended()
        assert told == [(500, 2.0), (500, 2.0)]

    def test_steps_whose_ends_are_not_told_are_forgotten(self) -> None:
        told: list[int] = []
        rate = PrefillRate(iter(range(100)).__next__, lambda tokens, _: told.append(tokens))
        rate.ended()
        for _ in range(MOST_PENDING + 1):
            rate.begun([1000])
        rate.ended()
        rate.ended()
        assert told == [1000]


class TestComparison:
    @pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
    def test_rounding_is_close_and_other_numbers_are_different(self, dtype: str) -> None:
        import torch

        one = torch.randn(512, generator=torch.Generator().manual_seed(1))
        kind = getattr(torch, dtype)
        pages = [page.to(kind).view(torch.uint8).numpy() for page in (one, one * 1.0005, one.flip(0))]
        compare = Comparison(dtype).outcome
        assert [compare(pages[0], page) for page in pages] == ["equal", "close", "different"]
        assert Comparison(dtype, 0.0).outcome(pages[0], pages[2]) == "different"

    def test_numbers_that_are_none_are_different(self) -> None:
        page = np.full(4, np.nan, np.float32).view(np.uint8)
        assert Comparison("float32").outcome(page, np.zeros(16, np.uint8)) == "different"
        with pytest.raises(ConfigError, match="fp8 cannot be compared"):
            Comparison("fp8")


class TestScopes:
    def test_more_than_are_remembered_cannot_be_cleared(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr("hicache_vllm.scopes.MOST", 3)
        cleared: list[str | None] = []
        cache: Any = SimpleNamespace(clear=lambda adapter, salt, deadline: cleared.append(salt))
        scopes = Scopes(cache, _now_tasks())
        scopes.seen(None)
        for salt in ("a", "b"):
            scopes.seen(Scope(salt=salt))
            scopes.seen(Scope(salt=salt, extras=((b"x", 0, 1),)))
        assert scopes.clear()
        assert cleared == [None, "a", "b"]
        scopes.seen(Scope(salt="c"))
        assert not scopes.clear()
        assert scopes.stale
        assert "cannot be forgotten" in caplog.text

    def test_what_could_not_be_cleared_is_tried_until_it_is(self) -> None:
        answers = iter([ServiceUnavailable("away"), ServiceUnavailable("away"), None])

        def clear(adapter: Any, salt: Any, deadline: float) -> None:
            error = next(answers)
            if error is not None:
                raise error

        paused: list[float] = []
        scopes = Scopes(SimpleNamespace(clear=clear), _now_tasks(), pause=paused.append)  # type: ignore[arg-type]
        assert not scopes.clear()
        assert (scopes.stale, len(paused)) == (False, 1)


def _now_tasks() -> Any:
    """Runs everything at once."""
    return SimpleNamespace(begin=lambda task: (task(), True)[1])


class TestTasks:
    def test_full_queue_refuses_and_close_ends_the_threads(self, caplog: pytest.LogCaptureFixture) -> None:
        gate = threading.Event()
        tasks = Tasks(threads=1, most=1)
        assert tasks.begin(gate.wait)
        until(lambda: tasks.begin(lambda: None))
        assert not tasks.begin(lambda: None)
        gate.set()
        until(lambda: tasks.begin(_fails))
        tasks.close(5.0)
        tasks.close(5.0)
        assert not tasks.begin(lambda: None)
        assert "a call to the service has failed" in caplog.text

    def test_loads_go_before_stores(self) -> None:
        copier = Copier()
        gate, order = threading.Event(), []
        copier.store(gate.wait)
        copier.store(lambda: order.append("store"))
        copier.load(lambda: order.append("load"))
        gate.set()
        assert copier.wait_for(lambda: len(order) == 2, 10.0)
        assert order == ["load", "store"]
        copier.close()


def _fails() -> None:
    raise RuntimeError("deliberately")


def test_reports_of_ranks_are_added_up() -> None:
    report = Report(lost={1})
    report.done.update([1, 2])
    other = AbsentWorker("why").take_report()
    other.done.update([2, 3])
    report.add(other)
    assert (dict(report.done), report.lost, report.refused) == ({1: 1, 2: 2, 3: 1}, {1}, "why")
    assert report
    assert not Report()


class TestPageFeed:
    """What vLLM's publisher hears of the service's pages."""

    MINE, OTHER = b"m" * 16, b"o" * 16

    def feed(self) -> PageFeed:
        return PageFeed(lambda: (), lambda digest: (None, "s") if digest == self.MINE else None, wait=lambda _: True)

    def stored(self, *pages: bytes, tier: Tier = Tier.HOST, namespace: bytes = MINE) -> Stored:
        tokens = np.arange(2 * len(pages), dtype="<u4").tobytes()
        return Stored(namespace, 1, tier, pages, None, 0, b"", tokens)

    def test_pages_come_once_and_leave_once(self) -> None:
        feed = self.feed()
        feed.apply(EventBatch(1, 0, (self.stored(b"1", b"2"), self.stored(b"1", tier=Tier.STORAGE))))
        feed.apply(EventBatch(2, 0, (self.stored(b"1", b"2"), self.stored(b"9", namespace=self.OTHER))))
        feed.apply(EventBatch(3, 0, (self.stored(b"8", tier=Tier.DEVICE),)))
        feed.apply(EventBatch(4, 0, (Removed(self.MINE, 1, Tier.HOST, (b"2", b"7"), "evicted"),)))
        assert feed.take() == [
            Kept("CPU", (b"1", b"2"), None, (0, 1, 2, 3), None, "s"),
            Kept("FS", (b"1",), None, (0, 1), None, "s"),
            Gone("CPU", (b"2",)),
        ]
        feed.apply(EventBatch(5, 0, (Cleared(self.MINE, 1), Cleared(self.OTHER, 1))))
        assert feed.take() == [Gone("CPU", (b"1",)), Gone("FS", (b"1",))]
        assert feed.take() == []

    def test_snapshot_tells_what_was_missed(self) -> None:
        feed = self.feed()
        feed.apply(EventBatch(1, 0, (self.stored(b"1"), self.stored(b"2"))))
        feed.take()
        feed.apply(EventBatch(7, 0, (self.stored(b"2"), self.stored(b"3")), snapshot=True))
        feed.apply(EventBatch(7, 0, (), snapshot=True, snapshot_end=True))
        kept, gone = feed.take()
        assert (kept.hashes, gone) == ((b"3",), Gone("CPU", (b"1",)))

    def test_watching_begins_again_until_it_is_closed(self, caplog: pytest.LogCaptureFixture) -> None:
        answers: list[Any] = [ServiceUnavailable("away"), [EventBatch(1, 0, (self.stored(b"1"),))], RuntimeError("bug")]
        waited: list[float] = []

        def watch() -> Any:
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

        feed = PageFeed(watch, lambda _: (None, None), wait=lambda seconds: bool(waited.append(seconds)))
        until(lambda: not answers)
        feed.close()
        assert [kept.hashes for kept in feed.take()] == [(b"1",)]
        until(lambda: "events are not told any more" in caplog.text)
        assert len(waited) == 2


def test_warnings_of_hicache_are_lines_of_the_engines_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where nobody else has given them handlers, and once."""
    ours = logging.getLogger("hicache")
    monkeypatch.setattr(ours, "propagate", False)  # as with vLLM, whose handlers are not the root's
    monkeypatch.setattr(ours, "handlers", [])
    for _ in range(2):
        adopt_logs()
    logging.getLogger("hicache.client").warning("going on without the %s", "cache")
    assert [(record.name, record.getMessage()) for record in caplog.records] == [
        ("vllm.hicache", "hicache: going on without the cache")
    ]
    monkeypatch.setattr(ours, "handlers", [logging.NullHandler()])
    adopt_logs()
    assert len(ours.handlers) == 1
