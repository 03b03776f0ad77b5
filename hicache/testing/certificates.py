"""Certificates for tests of TLS: an authority, a server on 127.0.0.1 and localhost, a client. Needs `cryptography`."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Certificates", "make_certificates"]

_DAY = datetime.timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Certificates:
    """Paths of PEM files.

    Attributes:
        ca: the authority's certificate.
        server, server_key: of the server.
        client, client_key: of a client.
    """

    ca: Path
    server: Path
    server_key: Path
    client: Path
    client_key: Path


def make_certificates(folder: Path) -> Certificates:
    """Make an authority and what it signs, valid for a day from yesterday on."""
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

    folder.mkdir(parents=True, exist_ok=True)
    made = Certificates(*(folder / name for name in ("ca.pem", "server.pem", "server.key", "client.pem", "client.key")))
    authority = ec.generate_private_key(ec.SECP256R1())
    certificate = _sign("hicache test authority", authority.public_key(), authority, is_authority=True)
    _write(made.ca, certificate)
    for name, path, key_path in (("localhost", made.server, made.server_key), ("client", made.client, made.client_key)):
        key = ec.generate_private_key(ec.SECP256R1())
        hosts: list[Any] = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        _write(path, _sign(name, key.public_key(), authority, names=hosts if name == "localhost" else []))
        _write_key(key_path, key)
    return made


def _sign(name: str, key: Any, authority: Any, *, names: list[Any] | None = None, is_authority: bool = False) -> Any:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import NameOID

    def named(text: str) -> Any:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(named(name))
        .issuer_name(named("hicache test authority"))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _DAY)
        .not_valid_after(now + _DAY)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False)
    )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(authority, hashes.SHA256())


def _write(path: Path, certificate: Any) -> None:
    from cryptography.hazmat.primitives.serialization import Encoding

    path.write_bytes(certificate.public_bytes(Encoding.PEM))


def _write_key(path: Path, key: Any) -> None:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
