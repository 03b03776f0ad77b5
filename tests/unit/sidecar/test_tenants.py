"""Who callers are comes from tokens, sockets and uids, never from what they claim."""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from hicache.config import Quota
from hicache.errors import ConfigError, PermissionDenied, Unauthenticated
from hicache.rpc.service import Caller, Peer
from hicache.sidecar import tenants
from hicache.sidecar.settings import load_settings
from hicache.sidecar.tenants import Authenticator, TokenFile, read_tokens

SECRET = "correct horse battery staple"
OTHER = "another token of 32 characters.."
SOCKET = "unix:///run/hicache/hicache.sock"
REMOTE = "0.0.0.0:7420"

FILE = f"""
[[tokens]]
name = "engine"
token = "{SECRET}"
tenant = "acme"
quota = {{ host = "8GiB", storage = 1000 }}

[[tokens]]
name = "operator"
sha256 = "{hashlib.sha256(OTHER.encode()).hexdigest()}"
tenant = ""
rights = ["read", "admin"]
"""


def token_file(folder: Path, text: str = FILE, mode: int = 0o600) -> str:
    path = folder / "tokens.toml"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def authenticator(
    tokens: TokenFile | None = None, uids: dict[bytes, int] | None = None, **values: Any
) -> Authenticator:
    flags = {name.replace("__", "."): ("--set", value) for name, value in values.items()}
    return Authenticator(load_settings(flags=flags).config, tokens, uid_of=(uids or {}).get)


def test_a_token_gives_tenant_and_rights(tmp_path: Path) -> None:
    """By itself or by its sha256, over TCP and over Unix sockets."""
    who = authenticator(TokenFile(token_file(tmp_path)))
    for listener in (REMOTE, SOCKET):
        engine = who(Peer(listener, token=SECRET, lifeline_key=b"k"))
        assert engine == Caller("acme", read=True, write=True, admin=False, name="engine", lifeline_key=b"k")
        operator = who(Peer(listener, token=OTHER))
        assert operator == Caller(None, read=True, write=False, admin=True, name="operator")


@pytest.mark.parametrize(
    "token", [None, "", "wrong", SECRET + " ", SECRET[:-1], SECRET.upper(), "\ud800", "x" * 100_000]
)
def test_no_token_or_a_wrong_one(tmp_path: Path, token: str | None) -> None:
    """Is refused over TCP with a word on what to do, and without the token in it."""
    who = authenticator(TokenFile(token_file(tmp_path)))
    with pytest.raises(Unauthenticated) as caught:
        who(Peer(REMOTE, token=token))
    assert not token or token not in str(caught.value)


def test_a_wrong_token_on_a_socket(tmp_path: Path) -> None:
    """Is refused too: it is never taken for none."""
    with pytest.raises(Unauthenticated):
        authenticator(TokenFile(token_file(tmp_path)))(Peer(SOCKET, token="wrong"))


def test_every_token_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look-up compares digests with all tokens in constant time, wherever the right one stands."""
    table = read_tokens(token_file(tmp_path))
    compared: list[tuple[bytes, bytes]] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return one == other

    monkeypatch.setattr(tenants.hmac, "compare_digest", compare)
    for token in (SECRET, OTHER, "neither"):
        compared.clear()
        found = table.find(token)
        assert (found is not None) == (token != "neither")
        assert len(compared) == 2
        assert all(len(one) == len(other) == 32 for one, other in compared)


def test_insecure_tcp_is_open() -> None:
    """Without tokens, which `--insecure` allows, anyone may do anything; a certificate names the caller."""
    who = authenticator(listen__insecure="true")
    assert who(Peer(REMOTE, address="ipv4:10.0.0.7:4", certificate="engine-1")) == Caller(name="engine-1")
    assert who(Peer(REMOTE, address="ipv4:10.0.0.7:4")).name == "ipv4:10.0.0.7:4"


def test_a_socket_without_rules() -> None:
    """The rights of its file were enough."""
    assert authenticator()(Peer(SOCKET)) == Caller(name="local")


def test_the_rule_of_a_socket_goes_before_those_of_uids() -> None:
    """All its callers are one tenant, whoever they are."""
    who = authenticator(
        uids={b"k": 7},
        listen__addresses=f"{SOCKET},/run/other.sock",
        tenants__sockets='{"/run/other.sock": {"tenant": "batch", "rights": ["read"]}}',
        tenants__uids='{"7": "acme"}',
    )
    other = who(Peer("/run/other.sock", lifeline_key=b"k"))
    assert (other.tenant, other.read, other.write, other.admin) == ("batch", True, False, False)
    assert who(Peer(SOCKET, lifeline_key=b"k")).tenant == "acme"


def test_tenants_by_uid() -> None:
    """The lifeline tells the uid; unlisted uids are refused, unless there is a rule for all others."""
    uids = {b"seven": 7, b"eight": 8}
    who = authenticator(uids=uids, tenants__uids='{"7": "acme"}')
    assert who(Peer(SOCKET, lifeline_key=b"seven")).tenant == "acme"
    with pytest.raises(PermissionDenied, match="uid 8 has no tenant here"):
        who(Peer(SOCKET, lifeline_key=b"eight"))
    for key in (b"", b"forged"):
        with pytest.raises(Unauthenticated, match="lifeline"):
            who(Peer(SOCKET, lifeline_key=key))
    open_to_all = authenticator(uids=uids, tenants__uids='{"7": "acme", "*": "others"}')
    assert open_to_all(Peer(SOCKET, lifeline_key=b"eight")).tenant == "others"


WRONG = [
    ("", "has no tokens"),
    ("x", "is no TOML"),
    ("[[tokens]]\nname = 'a'\n", "missing required field tenant"),
    ("[[tokens]]\nname = 'a'\ntenant = 'b'\n", "needs either token or sha256"),
    (f"[[tokens]]\nname = 'a'\ntenant = 'b'\ntoken = '{SECRET}'\nsha256 = '{'0' * 64}'\n", "needs either"),
    ("[[tokens]]\nname = 'a'\ntenant = 'b'\ntoken = 'guessable'\n", "shorter than 16 characters"),
    ("[[tokens]]\nname = 'a'\ntenant = 'b'\nsha256 = 'xyz'\n", "is not 64 hex digits"),
    (f"[[tokens]]\nname = ''\ntenant = 'b'\ntoken = '{SECRET}'\n", "is no name of a token"),
    (f"[[tokens]]\nname = 'a'\ntenant = \"b\\u0000\"\ntoken = '{SECRET}'\n", "names no tenant"),
    (f"[[tokens]]\nname = 'a'\ntenant = ''\ntoken = '{SECRET}'\nquota = {{ host = 1 }}\n", "no tenant to which"),
    (f"[[tokens]]\nname = 'a'\ntenant = 'b'\ntoken = '{SECRET}'\nright = []\n", "unknown field right"),
    (f"[[tokens]]\nname = 'a'\ntenant = 'b'\ntoken = '{SECRET}'\nrights = ['root']\n", "Invalid enum value 'root'"),
    (f"[[tokens]]\nname = 'a'\ntenant = 'b'\ntoken = '{SECRET}'\nquota = {{ host = 'x' }}\n", "size 'x'"),
    (FILE + FILE.replace("engine", "e2").replace("operator", "o2"), "is there twice"),
    (FILE + f"[[tokens]]\nname = 'engine'\ntenant = 'acme'\nsha256 = '{'0' * 64}'\n", "is there twice"),
    (
        FILE + f"[[tokens]]\nname = 'e2'\ntenant = 'acme'\nsha256 = '{'0' * 64}'\nquota = {{ host = 1 }}\n",
        "tokens of tenant 'acme' have different quotas",
    ),
]


@pytest.mark.parametrize(("text", "words"), WRONG)
def test_wrong_files(tmp_path: Path, text: str, words: str) -> None:
    """One line says what is wrong; it never has a token in it."""
    with pytest.raises(ConfigError) as caught:
        read_tokens(token_file(tmp_path, text))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert SECRET not in str(caught.value)
    assert "guessable" not in str(caught.value)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o602])
def test_a_file_that_others_may_use(tmp_path: Path, mode: int) -> None:
    """Is refused with its mode and the command that mends it."""
    with pytest.raises(ConfigError, match=f"mode {mode:04o}, so others may use it: chmod 600 it"):
        read_tokens(token_file(tmp_path, mode=mode))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    """A missing file, a folder, a pipe without a writer and a huge file are refused at once."""
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "huge").write_bytes(b"#" * (2**20 + 1))
    (tmp_path / "huge").chmod(0o600)
    for path, words in (("none", "No such file"), ("pipe", "no regular file"), ("huge", "larger than 1 MiB")):
        with pytest.raises(ConfigError, match=words):
            read_tokens(str(tmp_path / path))
    with pytest.raises(ConfigError, match="no regular file"):
        read_tokens(str(tmp_path))


def test_reloading(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A good new file counts at once and tells whose sessions should end; a bad one keeps the old, and is logged."""
    caplog.set_level(logging.INFO)
    tokens = TokenFile(token_file(tmp_path))
    who = authenticator(tokens)
    token_file(tmp_path, FILE.replace('["read", "admin"]', '["read"]'))
    assert tokens.reload() == {"operator"}
    assert not who(Peer(REMOTE, token=OTHER)).admin
    token_file(tmp_path, "[[tokens]")
    assert tokens.reload() is None
    token_file(tmp_path, mode=0o644)
    assert tokens.reload() is None
    assert who(Peer(REMOTE, token=SECRET)).name == "engine"
    assert caplog.text.count("tokens are kept as they were") == 2
    token_file(tmp_path, FILE)
    assert tokens.reload() == {"operator"}
    assert tokens.reload() == frozenset()
    assert SECRET not in caplog.text
    assert OTHER not in caplog.text


def test_tokens_are_in_no_text(tmp_path: Path) -> None:
    """Nor are their digests: whoever prints a table or a peer shows nothing that helps."""
    tokens = TokenFile(token_file(tmp_path))
    text = (
        repr(tokens.table) + repr(Peer(REMOTE, token=SECRET)) + repr(authenticator(tokens)(Peer(REMOTE, token=SECRET)))
    )
    assert SECRET not in text
    assert hashlib.sha256(SECRET.encode()).hexdigest()[:16] not in text
    assert "digest" not in text


def test_quotas_of_the_file(tmp_path: Path) -> None:
    """They belong to the tenant."""
    table = read_tokens(token_file(tmp_path))
    quota = table.quotas["acme"]
    assert isinstance(quota, Quota)
    assert (quota.host, quota.storage) == (8 << 30, 1000)
