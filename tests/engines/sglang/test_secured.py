"""SGLang's controller over a service in TLS that asks for a token: pages come back, and a wrong secret is no cache."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo
from sglang.srt.mem_cache.utils import get_hash_str
from sglang_pools import PAGE, Engine, bytes_at, make_mha

from hicache.testing.certificates import make_certificates
from hicache.testing.sidecars import ServiceProcess

PAGES = 3
KEYS = get_hash_str(list(range(100, 100 + PAGES * PAGE)), None, page_size=PAGE)
SOURCE, TARGET = torch.arange(0, PAGES * PAGE), torch.arange(8 * PAGE, (8 + PAGES) * PAGE)
ROOT = HiCacheStorageExtraInfo(prefix_keys=[])
SECRETS = {"right": "a token of the engine with enough letters", "wrong": "another token with as many letters as that"}
TABLE = '[[tokens]]\nname = "engine"\ntoken = "{}"\ntenant = "acme"\nrights = ["read", "write"]\n'


@pytest.fixture(scope="module")
def secured() -> Iterator[dict[str, str]]:
    """What an engine's operator writes into the extra config, for a service with a certificate of its own."""
    with tempfile.TemporaryDirectory(prefix="hc") as name:
        folder = Path(name)
        made = make_certificates(folder / "tls")
        for file, text in {"tokens.toml": TABLE.format(SECRETS["right"]), **SECRETS}.items():
            (folder / file).touch(0o600)
            (folder / file).write_text(text)
        options = ["--listen", "127.0.0.1:0", "--tokens", str(folder / "tokens.toml"), "--log-level", "error"]
        options += ["--tls-certificate", str(made.server), "--tls-key", str(made.server_key)]
        with ServiceProcess(folder, *options, "--set", "host.pool_bytes=4MiB", listen=False) as service:
            address = f"localhost:{service.ready['addresses'][0].rpartition(':')[2]}"
            yield {"address": address, "ca": str(made.ca), "token_file": str(folder / "right"), "revision": "1"}


def test_pages_come_back_over_tls_with_a_token(secured: dict[str, str]) -> None:
    pool, other = make_mha("page_first"), make_mha("page_first")
    first, second = Engine(pool, secured), Engine(other, secured)
    try:
        assert first.store(KEYS, SOURCE, zero_copy=True, extra_info=ROOT)
        other.kv_buffer.zero_()
        assert second.load(KEYS, TARGET, zero_copy=True, extra_info=ROOT) == PAGES
        assert all(
            torch.equal(bytes_at(pool, page * PAGE), bytes_at(other, (8 + page) * PAGE)) for page in range(PAGES)
        )
    finally:
        first.backend.close()
        second.backend.close()


@pytest.mark.parametrize("changed", ["token", "authority"])
def test_wrong_secrets_are_no_cache(
    secured: dict[str, str], changed: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another token, or a certificate of an authority that is not trusted: nothing is stored, and the log says why."""
    wrong = {"token_file": str(Path(secured["token_file"]).with_name("wrong"))}
    if changed == "authority":
        wrong = {"ca": str(make_certificates(tmp_path).ca)}
    engine = Engine(make_mha(), secured | wrong)
    try:
        assert not engine.store(KEYS, SOURCE, zero_copy=True, extra_info=ROOT)
        assert engine.load(KEYS, TARGET, zero_copy=True, extra_info=ROOT) == 0
        assert "hicache" in caplog.text
    finally:
        engine.backend.close()
