"""Addresses are read in a few forms, and everything else is refused with one line."""

from __future__ import annotations

import pytest

from hicache.errors import ConfigError
from hicache.rpc.address import Address


@pytest.mark.parametrize(
    ("text", "address", "target", "shown"),
    [
        ("unix:///run/h.sock", Address(path="/run/h.sock"), "unix:/run/h.sock", "unix:///run/h.sock"),
        ("unix:/run/h.sock", Address(path="/run/h.sock"), "unix:/run/h.sock", "unix:///run/h.sock"),
        ("/run/h.sock", Address(path="/run/h.sock"), "unix:/run/h.sock", "unix:///run/h.sock"),
        ("cache.example:7420", Address(host="cache.example", port=7420), "cache.example:7420", "cache.example:7420"),
        ("[::1]:7420", Address(host="::1", port=7420), "[::1]:7420", "[::1]:7420"),
        ("127.0.0.1:1", Address(host="127.0.0.1", port=1), "127.0.0.1:1", "127.0.0.1:1"),
    ],
)
def test_known_forms(text: str, address: Address, target: str, shown: str) -> None:
    """Each form gives its parts, gRPC's name for it, and one text for people that is read back the same."""
    assert Address.parse(text) == address
    assert address.target == target
    assert str(address) == shown
    assert Address.parse(shown) == address


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "none that is known"),
        ("host", "none that is known"),
        ("::1:7420", "none that is known"),
        ("http://host:80", "none that is known"),
        ("user@host:80", "none that is known"),
        ("host:0", "port 0"),
        ("host:65536", "port 65536"),
        ("unix:relative.sock", "absolute path"),
        ("unix:///run/", "absolute path"),
        ("unix:///a\0b", "absolute path"),
        ("unix:///run/\udcff/x.sock", "is not UTF-8: use another one"),
        ("/" + "x" * 98, "at most 107 bytes, and this one has 108"),
    ],
)
def test_others_are_refused(text: str, words: str) -> None:
    """What is wrong is said in one line."""
    with pytest.raises(ConfigError, match=words) as caught:
        Address.parse(text)
    assert "\n" not in str(caught.value)


@pytest.mark.case("GRPC-3")
def test_longest_path() -> None:
    """The longest path is the one whose lifeline still fits into 107 bytes."""
    assert len(Address.parse("/" + "x" * 97).lifeline) == 107


def test_listening_on_any_port() -> None:
    """Port 0 is for listening only."""
    assert Address.parse("127.0.0.1:0", listening=True).port == 0


def test_loopback() -> None:
    """Unix sockets, localhost and loopback addresses are the machine's own."""
    assert all(Address.parse(text).is_loopback for text in ("/a", "localhost:1", "127.9.9.9:1", "[::1]:1"))
    assert not any(Address.parse(text).is_loopback for text in ("0.0.0.0:1", "cache:1", "[::]:1"))
