"""What settings mean together is checked before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from hicache.errors import ConfigError
from hicache.sidecar.checks import addresses, check, storage_url
from hicache.sidecar.settings import Settings, load_settings


def settings(**values: Any) -> Settings:
    return load_settings(flags={name.replace("__", "."): ("--set", value) for name, value in values.items()})


TLS = {"tls__certificate": "/c", "tls__key": "/k"}
TCP = {"listen__addresses": "0.0.0.0:7420"}


@pytest.mark.parametrize(
    "values",
    [
        {},
        {**TCP, "listen__insecure": "true"},
        {**TCP, **TLS, "tokens__file": "/t"},
        {"listen__addresses": "unix:///a/b,127.0.0.1:0,127.0.0.1:0", "listen__insecure": "true"},
        {"tenants__sockets": '{"/run/hicache/hicache.sock": "acme"}'},
        {"tenants__uids": '{"0": "a", "*": {"tenant": "b", "rights": ["read"]}}'},
        {"storage__url": "memory://", "storage__options": '{"capacity": "1GiB"}'},
        {"metrics__address": "127.0.0.1:9400"},
        {"events__publish": "tcp://127.0.0.1:5557", "events__replay": "ipc:///run/replay"},
    ],
)
def test_what_fits(values: dict[str, Any]) -> None:
    """Nothing is said against settings that go together."""
    check(settings(**values))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"listen__addresses": ""}, "listen.addresses (--set): there is none"),
        ({"listen__addresses": "nonsense"}, "listen.addresses (--set): address 'nonsense' is none"),
        ({"listen__addresses": "unix:///" + "x" * 120}, "at most 107 bytes"),
        ({"listen__addresses": "unix:///a,/a"}, "unix:///a is there twice"),
        (TCP, "without TLS would show and give away everything: set tls.certificate"),
        ({**TCP, **TLS}, "would serve anyone: set tokens.file"),
        ({"tls__certificate": "/c"}, "tls.certificate (--set): needs tls.key too"),
        ({"tls__key": "/k"}, "tls.key (--set): needs tls.certificate too"),
        ({"tls__client_ca": "/a"}, "tls.client_ca (--set): needs tls.certificate too"),
        ({"tenants__uids": '{"root": "a"}'}, "'root' is no user id"),
        ({"tenants__uids": '{"4294967296": "a"}'}, "is no user id"),
        ({"tenants__sockets": '{"/other": "a"}'}, "'/other' is not among listen.addresses"),
        ({"tenants__uids": '{"1": ""}'}, "'' is no name of a tenant"),
        ({"tenants__quotas": '{"a\\u0000": {"host": 1}}'}, "is no name of a tenant"),
        ({"host__bytes": "1GiB", "host__pool_bytes": "2GiB"}, "2 GiB is more than host.bytes, which is 1 GiB"),
        ({"limits__message_bytes": "1KiB"}, "1 KiB is not between 1 MiB and 64 MiB"),
        ({"limits__message_bytes": "2GiB"}, "2 GiB is not between"),
        ({"limits__chunk_bytes": "9MiB"}, "9 MiB is not between 4 KiB and half a message, 8 MiB"),
        ({"metrics__address": "/run/metrics"}, "give host:port"),
        ({"metrics__address": "unix:///run/metrics"}, "give host:port"),
        (
            {"metrics__address": "9400"},
            "metrics.address (--set): '9400' is none: give host:port, such as 127.0.0.1:9400",
        ),
        ({"metrics__address": "localhost:94000"}, "port 94000 is not between"),
        ({"events__publish": "127.0.0.1:5557"}, "events.publish (--set): '127.0.0.1:5557' is no endpoint"),
        ({"events__replay": "tcp://127.0.0.1:1"}, "set events.publish too"),
        ({"storage__options": '{"a": 1}'}, "options of no storage"),
        ({"storage__url": "nonsense"}, "storage.url (--set): storage URL 'nonsense' has no scheme"),
        ({"storage__url": "s3://bucket"}, "storage scheme 's3' is served by no installed package"),
    ],
)
def test_what_does_not_fit(values: dict[str, Any], words: str) -> None:
    """One line names the value, where it comes from, and what to do."""
    with pytest.raises(ConfigError) as caught:
        check(settings(**values))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_options_of_storage_are_parameters_of_its_url() -> None:
    """They are quoted and appended to those that stand there already."""
    both = settings(
        storage__url="file:///x?capacity=1GiB", storage__options='{"fsync": true, "shared": 2, "io": "a&b=c d"}'
    )
    assert storage_url(both.config) == "file:///x?capacity=1GiB&fsync=true&shared=2&io=a%26b%3Dc%20d"
    assert storage_url(settings(storage__url="memory://").config) == "memory://"
    assert storage_url(settings().config) is None


def test_addresses_in_their_order() -> None:
    """The first is the service's own."""
    assert [str(a) for a in addresses(settings(listen__addresses="127.0.0.1:0,/a").config)] == [
        "127.0.0.1:0",
        "unix:///a",
    ]
