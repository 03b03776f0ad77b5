"""TLS files are looked at before the service starts."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest

from hicache.config import Tls
from hicache.errors import ConfigError
from hicache.sidecar.certificates import read_certificates
from hicache.testing.certificates import Certificates, make_certificates


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


def test_good_files(made: Certificates) -> None:
    """Are read as they are, without a word."""
    read = read_certificates(Tls(certificate=str(made.server), key=str(made.server_key), client_ca=str(made.ca)))
    assert read is not None
    assert (read.certificate, read.key) == (made.server.read_bytes(), made.server_key.read_bytes())
    assert read.client_ca == made.ca.read_bytes()
    assert read.warnings == ()
    assert "PRIVATE" not in repr(read)


def test_none_are_configured() -> None:
    """Then there are none."""
    assert read_certificates(Tls()) is None


def test_a_key_of_another_certificate(made: Certificates) -> None:
    """Is said to be that."""
    with pytest.raises(ConfigError, match=r"client\.key' is not the key of .*server\.pem'"):
        read_certificates(Tls(certificate=str(made.server), key=str(made.client_key)))


def test_files_that_are_none(made: Certificates, tmp_path: Path) -> None:
    """Missing ones, folders and other contents are told apart, each by the setting that names it."""
    garbage = tmp_path / "garbage.pem"
    garbage.write_text("no PEM at all")
    server, key = str(made.server), str(made.server_key)
    for tls, words in (
        (Tls(certificate="/nowhere/c.pem", key=key), "tls.certificate '/nowhere/c.pem' cannot be read: No such file"),
        (Tls(certificate=server, key="/nowhere/k.pem"), "tls.key '/nowhere/k.pem' cannot be read: No such file"),
        (Tls(certificate=str(tmp_path), key=key), "Is a directory"),
        (Tls(certificate=str(garbage), key=key), "are no PEM files of a certificate and its key"),
        (Tls(certificate=server, key=str(garbage)), "are no PEM files of a certificate and its key"),
        (Tls(certificate=server, key=key, client_ca=str(garbage)), "tls.client_ca .* is no PEM file"),
        (Tls(certificate=server, key=key, client_ca="/nowhere/a.pem"), "tls.client_ca '/nowhere/a.pem' cannot be read"),
    ):
        with pytest.raises(ConfigError, match=words) as caught:
            read_certificates(tls)
        assert "\n" not in str(caught.value)


def test_a_key_with_a_password(made: Certificates, tmp_path: Path) -> None:
    """Is refused instead of asking on the terminal."""
    from cryptography.hazmat.primitives import serialization as s

    key: Any = s.load_pem_private_key(made.server_key.read_bytes(), None)
    locked = tmp_path / "locked.key"
    locked.write_bytes(key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.BestAvailableEncryption(b"secret")))
    with pytest.raises(ConfigError, match="has a password"):
        read_certificates(Tls(certificate=str(made.server), key=str(locked)))


@pytest.mark.parametrize(("days", "words"), [(-3, "has expired"), (3, "is not valid yet")])
def test_dates(tmp_path: Path, days: int, words: str) -> None:
    """A certificate whose time is over, or has not come, starts with a warning: clients will refuse it."""
    certificate, key = self_signed(tmp_path, days)
    read = read_certificates(Tls(certificate=certificate, key=key))
    assert read is not None
    assert len(read.warnings) == 1
    assert words in read.warnings[0]


def self_signed(folder: Path, days: int) -> tuple[str, str]:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives import serialization as s
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "hicache")])
    middle = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
    day = datetime.timedelta(days=1)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(middle - day)
        .not_valid_after(middle + day)
        .sign(key, hashes.SHA256())
    )
    (folder / "c.pem").write_bytes(certificate.public_bytes(s.Encoding.PEM))
    (folder / "k.pem").write_bytes(key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption()))
    return str(folder / "c.pem"), str(folder / "k.pem")
