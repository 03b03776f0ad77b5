"""Clients over TCP: TLS in both directions, tokens, tenants that see nothing of each other, rights."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hicache
from hicache.config import Config, Drain, Host, Listen, Size, Tls, Tokens
from hicache.errors import ConfigError, PermissionDenied, ServiceUnavailable, Unauthenticated
from hicache.testing.certificates import Certificates, make_certificates
from hicache.testing.engine import prompt, small_namespace
from hicache.testing.serving import ServedApp

NAMESPACE = small_namespace(hash="sha256")
SIZE = NAMESPACE.geometry.page_bytes(4)
FILE = """
[[tokens]]
name = "acme-writer"
tenant = "acme"
token = "acme-writes-and-administers"
rights = ["read", "write", "admin"]

[[tokens]]
name = "acme-reader"
tenant = "acme"
token = "acme-reads-and-no-more"
rights = ["read"]

[[tokens]]
name = "other"
tenant = "other"
token = "another-tenants-token"
"""


@pytest.fixture(scope="module")
def certificates() -> Iterator[Certificates]:
    with tempfile.TemporaryDirectory() as folder:
        yield make_certificates(Path(folder))


def config(folder: Path, certificates: Certificates, *, mutual: bool) -> Config:
    tokens = folder / "tokens.toml"
    tokens.write_text(FILE)
    tokens.chmod(0o600)
    tls = Tls(
        certificate=str(certificates.server),
        key=str(certificates.server_key),
        client_ca=str(certificates.ca) if mutual else "",
    )
    return Config(
        listen=Listen(addresses=("127.0.0.1:0",)),
        host=Host(bytes=Size.parse("1MiB"), pool_bytes=Size.parse("256KiB")),
        tokens=Tokens(file=str(tokens)),
        tls=tls,
        drain=Drain(seconds=0.2),
    )


def connected(served: ServedApp, certificates: Certificates, token: str, **options: Any) -> hicache.ConnectedCache:
    return hicache.connect(
        served.address, NAMESPACE, **({"ca": str(certificates.ca), "token": token, "required": True} | options)
    )


def store(cache: hicache.ConnectedCache, tokens: list[int]) -> np.ndarray[Any, Any]:
    with cache.request(tokens, logits=False) as request:
        request.load()
        count = len(request.allocate())
        pages = np.frombuffer(np.random.default_rng(1).bytes(count * SIZE), np.uint8).reshape(count, SIZE)
        assert request.write_from(pages) == count
        request.commit()
    return pages


def test_a_tenant_reads_over_tls_what_it_has_stored_and_nobody_else_does(
    tmp_path: Path, certificates: Certificates
) -> None:
    tokens = prompt(1, 16)
    with (
        ServedApp(config(tmp_path, certificates, mutual=False)) as served,
        connected(served, certificates, "acme-writes-and-administers") as writer,
    ):
        pages = store(writer, tokens)
        with connected(served, certificates, "acme-reads-and-no-more") as reader:
            buffer = np.zeros((4, SIZE), np.uint8)
            with reader.request(tokens, logits=False) as request:
                assert len(request.load()) == 4
                assert request.read_into(buffer) == 4
            assert np.array_equal(buffer, pages)
            with reader.request(prompt(2, 8)) as request, pytest.raises(PermissionDenied, match="write"):
                request.allocate()
            with pytest.raises(PermissionDenied, match="admin"):
                reader.clear()
        with connected(served, certificates, "another-tenants-token") as stranger:
            assert stranger.match(tokens, logits=False).pages == 0
        writer.clear()
        assert writer.match(tokens, logits=False).pages == 0


def test_who_shows_no_token_or_a_wrong_one_is_refused(tmp_path: Path, certificates: Certificates) -> None:
    with ServedApp(config(tmp_path, certificates, mutual=False)) as served:
        with pytest.raises(Unauthenticated):
            connected(served, certificates, "a-token-that-nobody-has-given")
        with pytest.raises(Unauthenticated):
            hicache.connect(served.address, NAMESPACE, ca=str(certificates.ca), required=True)


def test_a_token_file_is_read_at_each_connection(tmp_path: Path, certificates: Certificates) -> None:
    file = tmp_path / "own-token"
    file.write_text("acme-writes-and-administers\n")
    with (
        ServedApp(config(tmp_path, certificates, mutual=False)) as served,
        hicache.connect(
            served.address, NAMESPACE, ca=str(certificates.ca), token_file=str(file), required=True
        ) as cache,
    ):
        store(cache, prompt(1, 8))
    with pytest.raises(ConfigError, match="token_file"):
        hicache.connect("host:1", NAMESPACE, ca=str(certificates.ca), token_file=str(tmp_path / "none"))


def test_a_service_that_asks_for_certificates_takes_those_of_its_authority_only(
    tmp_path: Path, certificates: Certificates
) -> None:
    with ServedApp(config(tmp_path, certificates, mutual=True)) as served:
        with pytest.raises(ServiceUnavailable):
            connected(served, certificates, "acme-writes-and-administers", timeout=1.0)
        own = {"cert": str(certificates.client), "key": str(certificates.client_key)}
        with connected(served, certificates, "acme-writes-and-administers", **own) as cache:
            store(cache, prompt(1, 8))


def test_a_service_of_an_unknown_authority_is_not_trusted(tmp_path: Path, certificates: Certificates) -> None:
    others = make_certificates(tmp_path / "others")
    with ServedApp(config(tmp_path, certificates, mutual=False)) as served:
        with pytest.raises(ServiceUnavailable):
            connected(served, others, "acme-writes-and-administers", timeout=1.0)
        with pytest.raises(ConfigError, match="insecure=True"):
            hicache.connect(served.address, NAMESPACE)
