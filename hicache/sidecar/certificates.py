"""TLS files of the service, looked at before it starts: a wrong one is one clear line, not a failed handshake."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from typing import Final

from hicache.config import Tls
from hicache.errors import ConfigError
from hicache.sidecar.files import read_file

__all__ = ["Certificates", "read_certificates"]

_NOT_YET_VALID: Final = 9  # X509_V_ERR_CERT_NOT_YET_VALID of OpenSSL, and the next
_EXPIRED: Final = 10


@dataclass(frozen=True, slots=True)
class Certificates:
    """What TLS needs, as PEM.

    Attributes:
        certificate: the service's, and its chain.
        key: its private key.
        client_ca: authorities of client certificates; None: clients need none.
        warnings: what works, but should not stay so.
    """

    certificate: bytes
    key: bytes = field(repr=False)
    client_ca: bytes | None = None
    warnings: tuple[str, ...] = ()


def read_certificates(tls: Tls) -> Certificates | None:
    """Read and check the files; None where none are configured.

    Raises:
        ConfigError: a file that is missing, cannot be read or is no PEM, a key with a password, or one of another
            certificate.
    """
    if not tls.certificate:
        return None
    certificate = read_file(f"tls.certificate {tls.certificate!r:.200}", tls.certificate)
    key = read_file(f"tls.key {tls.key!r:.200}", tls.key)
    client_ca = read_file(f"tls.client_ca {tls.client_ca!r:.200}", tls.client_ca) if tls.client_ca else None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(tls.certificate, tls.key, password=_refuse_password)
    except _Encrypted:
        raise ConfigError(
            f"tls.key {tls.key!r:.200} has a password: give it without one, readable by the service only"
        ) from None
    except (ssl.SSLError, ValueError) as error:
        if "KEY_VALUES_MISMATCH" in str(error):
            raise ConfigError(f"tls.key {tls.key!r:.200} is not the key of {tls.certificate!r:.200}") from None
        raise ConfigError(
            f"tls.certificate {tls.certificate!r:.200} and tls.key {tls.key!r:.200} are no PEM files of a certificate "
            f"and its key: {_reason(error)}"
        ) from None
    if client_ca is not None:
        try:
            context.load_verify_locations(cadata=client_ca.decode("ascii"))
        except (ssl.SSLError, ValueError) as error:
            raise ConfigError(f"tls.client_ca {tls.client_ca!r:.200} is no PEM file: {_reason(error)}") from None
    return Certificates(certificate, key, client_ca, _warnings(context, tls.certificate))


class _Encrypted(Exception):  # noqa: N818  never leaves this module
    pass


def _refuse_password() -> str:
    raise _Encrypted


def _warnings(server: ssl.SSLContext, certificate: str) -> tuple[str, ...]:
    """What a client that trusts exactly this certificate says of it, by a handshake in memory."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client.load_verify_locations(certificate)
    server.verify_mode = ssl.CERT_NONE
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(to_client, to_server, server_hostname="hicache"),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    for _ in range(4):  # flights of a handshake
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError as error:
                return (_words(certificate, error),)
    return ()


def _words(certificate: str, error: ssl.SSLCertVerificationError) -> str:
    if error.verify_code == _EXPIRED:
        return f"tls.certificate {certificate!r:.200} has expired: clients will refuse it; renew it"
    if error.verify_code == _NOT_YET_VALID:
        return f"tls.certificate {certificate!r:.200} is not valid yet: clients will refuse it; check the clock"
    return f"tls.certificate {certificate!r:.200} does not verify: {error.verify_message}"


def _reason(error: Exception) -> str:
    return error.reason or str(error) if isinstance(error, ssl.SSLError) else str(error)
