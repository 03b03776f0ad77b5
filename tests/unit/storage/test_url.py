from __future__ import annotations

import pytest

from hicache.errors import ConfigError
from hicache.storage.url import StorageUrl, redacted


def test_all_parts_are_decoded() -> None:
    url = StorageUrl.parse("redis://u%40:p%2F@host:6379/a%20b?x=1&y=&z=%26")
    assert (url.scheme, url.host, url.port, url.username, url.password) == ("redis", "host", 6379, "u@", "p/")
    assert url.path == "/a b"
    assert url.take("x", 0, int) == 1
    assert url.take("y", "?", str) == ""
    assert url.take("z", "?", str) == "&"
    assert url.take("absent", 7, int) == 7
    url.done()


@pytest.mark.parametrize(
    "text", ["", "plain", "/path", "file:/x", "://x", "1a://x", "file:///x#y", "file:///x?a=1&a=2", "file:///x?a",
             "file:///a%00b", "redis://h:port/", "redis://h:99999/", "redis://[::1/x"],
)  # fmt: skip
def test_what_is_no_storage_url_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        StorageUrl.parse(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["redis://user:secret@host:port/", "redis://:secret?x@host/0", "redis://:secret#x@host/0",
             "redis://:secret/x@host/0", "redis:user:secret@host", "redis://[::1:secret@host",
             "redis://host:port/0?password=secret", "redis://host/0?x=1&sentinel_password=secret&x=1"],
)  # fmt: skip
def test_a_password_is_never_shown(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        StorageUrl.parse(text)
    assert "secret" not in str(caught.value)
    assert "secret" not in redacted(text)


def test_what_is_no_secret_is_shown() -> None:
    for text in ("file:///a:b/c@d?capacity=1GiB", "redis://host:6379/0?password_file=/run/p", "memory://"):
        assert redacted(text) == text
    assert redacted("redis://u:p@host:1/0?prefix=x") == "redis://***@host:1/0?prefix=x"


def test_unknown_parameters_are_named_with_the_known_ones() -> None:
    url = StorageUrl.parse("file:///x?capacty=1GiB&fsync=1")
    url.take_size("capacity")
    url.take_flag("fsync")
    with pytest.raises(ConfigError, match="unknown parameter capacty; known are: capacity, fsync"):
        url.done()


def test_parameters_are_checked() -> None:
    for text, take in (
        ("f://?s=0", lambda u: u.take_size("s")),
        ("f://?s=-1", lambda u: u.take_size("s")),
        ("f://?b=maybe", lambda u: u.take_flag("b")),
        ("f://?n=x", lambda u: u.take("n", 0, int)),
    ):
        with pytest.raises(ConfigError, match="parameter"):
            take(StorageUrl.parse(text))
    assert StorageUrl.parse("f://?b=Yes").take_flag("b") is True
    assert StorageUrl.parse("f://").take_flag("b", default=True) is True
