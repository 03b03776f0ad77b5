"""Redis URLs: every form, every refusal, and secrets that are never shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from hicache.errors import ConfigError
from hicache.storage.base import StorageUrl
from hicache_redis import RedisSettings
from hicache_redis.settings import Mode, Tls


def parse(url: str) -> RedisSettings:
    return RedisSettings.from_url(StorageUrl.parse(url))


def test_what_is_left_out_has_a_default() -> None:
    settings = parse("redis://host")
    assert settings == RedisSettings(addresses=(("host", 6379),))
    assert settings.shown == "redis://host:6379/0?prefix=hicache"


def test_everything_can_be_said() -> None:
    settings = parse(
        "redis://us%40er:p%2Fw@host:7000/5?prefix=kv.a&ttl=7d&timeout=0.5&connect_timeout=2&deadline=10"
        "&connections=3&window=1MiB&protocol=3"
    )
    assert (settings.username, settings.password, settings.db) == ("us@er", "p/w", 5)
    assert (settings.prefix, settings.ttl, settings.protocol) == ("kv.a", 7 * 86_400, 3)
    assert (settings.timeout, settings.connect_timeout, settings.deadline) == (0.5, 2.0, 10.0)
    assert (settings.connections, settings.window) == (3, 1 << 20)
    assert "p/w" not in repr(settings) + settings.shown


def test_other_ways_to_servers(tmp_path: Path) -> None:
    unix = parse("redis:///2?socket=/run/redis.sock")
    assert (unix.addresses, unix.db) == ((("/run/redis.sock", 0),), 2)
    assert unix.shown == "redis:///2?socket=/run/redis.sock&prefix=hicache"

    secret = tmp_path / "secret"
    secret.write_text("word\n")
    sentinel = parse(f"redis+sentinel://one/main/3?nodes=two:5,[::1]:6&sentinel_password_file={secret}&tls=1")
    assert sentinel.mode is Mode.SENTINEL
    assert sentinel.addresses == (("one", 26379), ("two", 5), ("::1", 6))
    assert (sentinel.service, sentinel.db, sentinel.sentinel_password) == ("main", 3, "word")
    assert sentinel.tls == Tls()
    assert sentinel.shown == "redis+sentinel://one:26379,two:5,[::1]:6/main/3?prefix=hicache"
    assert "word" not in repr(sentinel)

    cluster = parse("redis+cluster://:pw@a:1?nodes=b")
    assert (cluster.mode, cluster.addresses, cluster.tls) == (Mode.CLUSTER, (("a", 1), ("b", 6379)), None)
    assert cluster.shown == "redis+cluster://a:1,b:6379/?prefix=hicache"

    tls = parse(f"rediss://host/0?ca={secret}&cert={secret}&key={secret}&verify=ca")
    assert tls.tls == Tls(ca=str(secret), cert=str(secret), key=str(secret), verify="ca")
    assert tls.shown.startswith("rediss://host:6379/0")


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("redis://", "no host"),
        ("redis://host/zero", "not a number"),
        ("redis://host/0/1", "not a database"),
        ("redis://host:0/0", "port 0"),
        ("redis://host?prefix=a%20b", "without spaces and braces"),
        ("redis://host?prefix=a%7Bb%7D", "without spaces and braces"),
        ("redis://host?prefix=", "prefix"),
        ("redis://host?prefix=" + "x" * 65, "prefix"),
        ("redis://host?ttl=0", "ttl"),
        ("redis://host?ttl=1w", "ttl"),
        ("redis://host?timeout=nan", "timeout"),
        ("redis://host?timeout=0", "timeout"),
        ("redis://host?deadline=inf", "deadline"),
        ("redis://host?connections=0", "connections"),
        ("redis://host?window=0", "window"),
        ("redis://host?protocol=4", "protocol"),
        ("redis://host?ca=/nonexistent", "unknown parameter ca"),
        ("rediss://host?ca=/nonexistent", "cannot be read"),
        ("rediss://host?verify=maybe", "full, ca or none"),
        ("rediss://host?socket=/s", "stands alone"),
        ("redis://other?socket=/s", "stands alone"),
        ("redis:///0?socket=s", "absolute path"),
        ("redis://host?password_file=/nonexistent", "password_file"),
        ("redis://:pw@host?password_file=/nonexistent", "give one of them"),
        ("redis://host?capacity=1GiB", "unknown parameter capacity"),
        ("redis+cluster://host/1", "only database 0"),
        ("redis+cluster://host?nodes=a:b", "host:port,host:port"),
        ("redis+sentinel://host", "the primary's name"),
        ("redis+sentinel://host/a%20b/0", "the primary's name"),
        ("redis+other://host", "unknown scheme"),
        ("redis://user@host name/0", "'host name' is no host"),
        ("redis+cluster://host?nodes=a%20b:1", "host:port,host:port"),
        ("redis://host?timeout=soon", "use seconds from 0.001 to 3600"),
    ],
)
def test_what_cannot_work_is_one_line(url: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(url)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_client_certificate_needs_its_key(tmp_path: Path) -> None:
    file = tmp_path / "c.pem"
    file.touch()
    with pytest.raises(ConfigError, match="both cert=FILE and key=FILE"):
        parse(f"rediss://host?cert={file}")


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:hunter2@host:port/0",
        "redis://user:hunter2@@host:port/0",
        "redis://user:hun/ter2@host/0",
        "redis://user:hunter2@host/0#fragment",
        "redis://user:hunter2@host/0?a=1&a=2",
    ],
)
def test_a_url_that_cannot_be_read_does_not_show_its_secret(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(url)
    assert "hunter2" not in str(caught.value)
    assert "ter2" not in str(caught.value)
