"""`hicache replay --device-memory cuda`: device pages in GPU memory, here a fake's, every returned byte checked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hicache.cli.main import main
from hicache.cuda.look import found
from hicache.testing.cuda import FakeCuda
from hicache.testing.cudacopy import KERNELS


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    made = FakeCuda(memory=1 << 22, kernels=KERNELS)
    monkeypatch.setattr("hicache.cuda.pool.open_device", lambda device: made)
    return made


def test_a_trace_is_replayed_with_device_pages_on_a_gpu(
    cuda: FakeCuda, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three prompts in turn, of which the device holds one: the others come up again from the host."""
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": at, "input_length": 10 * 512, "output_length": 1, "hash_ids": list(range(first, first + 10))}
        for at, first in enumerate([0, 10, 20] * 3)
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ["--page-size", "trace", "--page-bytes", "512", "--device", "12", "--host", "64"]
    assert main(["replay", str(trace), *options, "--device-memory", "cuda:0", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["pages_wrong"] == 0
    assert document["pages_verified"] > 0
    assert document["bytes_host_to_device"] > 0
    assert not cuda.registered
    assert not cuda.allocated


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--device-memory", "hbm", "--page-bytes", "64"], 'use "main", "cuda" or "cuda:N"'),
        (["--device-memory", "cuda"], "needs --page-bytes above 0"),
        (["--device-memory", "cuda", "--page-bytes", "64", "--page-size", "trace"], "pip install 'hicache[cuda]'"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(
    options: list[str], said: str, small_trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(small_trace), *options]) == 2
    error = capsys.readouterr().err.strip()
    assert said in error
    assert error.count("\n") == 0


def test_doctor_says_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU is well; a driver without cupy is named; with both, the device is described."""
    assert found(root=tmp_path) == (True, "no GPU: no NVIDIA driver and no cupy")
    version = tmp_path / "proc/driver/nvidia/version"
    version.parent.mkdir(parents=True)
    version.write_text("NVRM version: ...")
    good, text = found(root=tmp_path)
    assert good
    assert "pip install 'hicache[cuda]'" in text
    monkeypatch.setattr("hicache.cuda.look.find_spec", lambda name: object())
    assert found(root=tmp_path)[0] is False  # a driver, and a cupy that cannot be imported
    monkeypatch.setattr("hicache.cuda.cupy_driver.open_driver", lambda: FakeCuda(numa_node=1))
    good, text = found(root=tmp_path)
    assert good
    assert "fake, capability 9.0, 256 MiB of 256 MiB free, NUMA node 1, driver for CUDA 13.0" in text
