"""`hicache plan` as users run it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hicache.cli import main


def test_json_has_all_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["llama-3.1-8b", "--tokens", "8192", "--requests", "32", "--shared", "4096", "--json", "--explain"]
    assert main(["plan", *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["token_bytes"] == 131_072
    assert found["request_bytes"] == 2**30
    assert (found["all_bytes"], found["all_bytes_shared"]) == (32 * 2**30, 33 * 2**29)
    assert found["gpu"] is None
    assert set(found["definitions"]) >= {"token_bytes", "all_bytes_shared", "most_requests"}
    assert all(step["source"] for step in found["explain"])


def test_tables_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["deepseek-v3", "--tp", "8", "--gpu-memory", "141GiB", "--requests", "8", "--shared", "1024"]
    assert main(["plan", *arguments, "--host", "1TiB", "--storage", "10TiB", "--explain"]) == 0
    text = capsys.readouterr().out
    for words in (
        "576 elements a token, the same on each rank",
        "68.62 KiB",
        "8 ranks (tp 8, pp 1, cp 1)",
        "the same, 1,024 tokens shared",
        "a GPU of 141 GiB, 90 % of it used",
        "layers * (latent + rope) * bits / 8",
        "kept by 8 ranks",
        "arXiv:2405.04434",
    ):
        assert words in text
    assert main(["plan", "gemma-3-27b", "--explain"]) == 0
    assert "pages of a sliding window" in capsys.readouterr().out
    assert main(["plan", "jamba-v0.1", "--dtype", "fp8", "--scale-bytes", "4", "--explain"]) == 0
    assert "+ scales of each row" in capsys.readouterr().out


def test_numbers_instead_of_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--layers", "32", "--kv-heads", "32", "--head-dim", "128", "--tokens", "4096", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["request_bytes"] == 2 * 2**30
    assert main(["plan", "--layers", "61", "--latent-dim", "512", "--rope-dim", "64", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["token_bytes"] == 70_272


def test_a_config_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 256}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["plan", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["token_bytes"] == 2 * 2 * 4 * 64 * 2


def test_presets_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--list"]) == 0
    assert "meta-llama/Llama-3.1-8B" in capsys.readouterr().out
    assert main(["plan", "--list", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["presets"]) >= 7


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "MODEL: is missing"),
        (["gpt-9"], "model gpt-9: is no preset and no file or folder; presets are llama-3.1-8b"),
        (["llama-3.1-8b", "--layers", "3"], "--layers: llama-3.1-8b says it already"),
        (["--layers", "3"], "--kv-heads: is missing"),
        (["--head-dim", "3"], "--layers: is missing"),
        (["--layers", "99999999", "--kv-heads", "1", "--head-dim", "1"], "more than 65535 layers"),
        (["llama-3.1-8b", "--tokens", "many"], "--tokens many: is not a whole number"),
        (["llama-3.1-8b", "--tokens", "0"], "--tokens 0: must be 1 to"),
        (["llama-3.1-8b", "--page-size", "-1"], "--page-size -1: must be 1 to"),
        (["llama-3.1-8b", "--dtype", "fp3"], "--dtype fp3: use one of float32"),
        (["llama-3.1-8b", "--gpu-memory", "big"], "--gpu-memory: size 'big' is not a number with a unit"),
        (["llama-3.1-8b", "--memory-share", "nan"], "--memory-share nan: is not a number above 0"),
        (["llama-3.1-8b", "--tp", "3"], "--tp 3: 8 kv heads cannot be shared out"),
    ],
)
def test_bad_options_are_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    assert main(["plan", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert err.count("\n") == 1
