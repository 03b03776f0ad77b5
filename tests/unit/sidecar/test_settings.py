"""Settings come from four sources, each value knows which, and nothing wrong is let through."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from hicache.config import Config, FileMode, Policies, Size
from hicache.core.config import PROTECTED_SHARE, WRITE_POLICIES
from hicache.core.eviction import POLICIES
from hicache.errors import ConfigError
from hicache.runtime.options import PREFETCH_MODES
from hicache.sidecar.settings import load_settings, schema


def written(folder: Path, text: str) -> str:
    path = folder / "hicache.toml"
    path.write_text(text)
    return str(path)


def test_defaults() -> None:
    """Without any source, all is as the sections say, and says so."""
    settings = load_settings()
    assert settings.config == Config()
    assert {origin for _, _, origin in settings.rows()} == {"default"}


def test_flag_over_environment_over_file_over_default(tmp_path: Path) -> None:
    """Each source wins over those behind it, and the origin is the one that won."""
    file = written(tmp_path, '[host]\nbytes = "1GiB"\npopulate = false\nnuma_node = 1\n')
    environment = {"HICACHE_HOST__BYTES": "2GiB", "HICACHE_HOST__NUMA_NODE": "0", "PATH": "/bin"}
    settings = load_settings(file, environment=environment, flags={"host.bytes": ("--host", "3GiB")})
    host = settings.config.host
    assert (host.bytes, host.numa_node, host.populate, host.huge_pages) == (3 << 30, 0, False, False)
    assert settings.origin("host.bytes") == "--host"
    assert settings.origin("host.numa_node") == "environment HICACHE_HOST__NUMA_NODE"
    assert settings.origin("host.populate") == f"file {file}"
    assert settings.origin("host.huge_pages") == "default"


def test_every_setting_is_reached_by_its_variable() -> None:
    """What is shown of a setting, put into its variable, gives the same again."""
    config = Config()
    for setting in schema():
        value = getattr(getattr(config, setting.section), setting.key)
        if value is None or setting.is_table:
            continue
        text = ",".join(value) if isinstance(value, tuple) else str(value)
        settings = load_settings(environment={setting.variable: text})
        assert getattr(getattr(settings.config, setting.section), setting.key) == value, setting.name
        assert settings.origin(setting.name) == f"environment {setting.variable}"


def test_every_setting_says_what_it_is() -> None:
    """The text of each is the help that people see."""
    assert [setting.name for setting in schema() if not setting.text or setting.text.endswith(".")] == []


def test_entries_of_tables_are_set_one_by_one(tmp_path: Path) -> None:
    """An entry joins those of the file; a whole table takes their place; a record may be given as its one field."""
    file = written(tmp_path, '[tenants.uids]\n1000 = "acme"\n7 = { tenant = "b", rights = ["read"] }\n')
    settings = load_settings(file, environment={"HICACHE_TENANTS__UIDS__8": "c"})
    uids = settings.config.tenants.uids
    assert {uid: (rule.tenant, rule.rights) for uid, rule in uids.items()} == {
        "1000": ("acme", ("read", "write")),
        "7": ("b", ("read",)),
        "8": ("c", ("read", "write")),
    }
    assert settings.origin("tenants.uids") == f"file {file}, environment HICACHE_TENANTS__UIDS__8"
    replaced = load_settings(file, flags={"tenants.uids": ("--set", '{"9": "d"}')})
    assert list(replaced.config.tenants.uids) == ["9"]
    assert replaced.origin("tenants.uids") == "--set"


def test_file_named_by_the_environment(tmp_path: Path) -> None:
    """HICACHE_CONFIG names the file where no flag does."""
    file = written(tmp_path, '[log]\nlevel = "debug"\n')
    assert load_settings(environment={"HICACHE_CONFIG": file}).config.log.level == "debug"
    assert load_settings(written(tmp_path, ""), environment={"HICACHE_CONFIG": "/nowhere"}).config.log.level == "info"


def test_variables_of_others() -> None:
    """What Kubernetes sets for a service called hicache, and the client's token, are no settings."""
    others = {
        "HICACHE_SERVICE_HOST": "10.0.0.1",
        "HICACHE_SERVICE_PORT": "7420",
        "HICACHE_SERVICE_PORT_GRPC": "7420",
        "HICACHE_PORT": "tcp://10.0.0.1:7420",
        "HICACHE_PORT_7420_TCP_ADDR": "10.0.0.1",
        "HICACHE_TOKEN": "a secret",
    }
    assert load_settings(environment=others).origins == {}


WRONG: list[tuple[dict[str, str], str]] = [
    (
        {"HICACHE_HOST__BYTE": "1"},
        "unknown setting HICACHE_HOST__BYTE (environment): did you mean HICACHE_HOST__BYTES?",
    ),
    ({"HICACHE_DRAIN": "1"}, "did you mean HICACHE_DRAIN__SECONDS?"),
    ({"HICACHE_ZZZZZZ": "1"}, "known are: HICACHE_"),
    ({"HICACHE_HOST__BYTES": "4GX"}, "host.bytes='4GX' (environment HICACHE_HOST__BYTES): size '4GX' is not a number"),
    ({"HICACHE_HOST__BYTES": "-1"}, "host.bytes='-1'"),
    ({"HICACHE_LIMITS__PAGES": "0"}, "limits.pages='0' (environment HICACHE_LIMITS__PAGES): expected int >= 1"),
    ({"HICACHE_LIMITS__PAGES": "many"}, "expected int, got str"),
    ({"HICACHE_DRAIN__SECONDS": "-1"}, "expected float >= 0.0"),
    ({"HICACHE_DRAIN__SECONDS": "nan"}, "drain.seconds='nan'"),
    ({"HICACHE_DRAIN__SECONDS": "inf"}, "drain.seconds='inf'"),
    (
        {"HICACHE_POLICIES__WRITE": "x"},
        "there is no 'x'; use one of write_through, write_through_selective, write_back",
    ),
    ({"HICACHE_LISTEN__INSECURE": "maybe"}, "expected bool"),
    ({"HICACHE_LISTEN__SOCKET_MODE": "rw"}, 'such as "0600"'),
    ({"HICACHE_LISTEN__SOCKET_MODE": "0400"}, "the owner must read and write"),
    ({"HICACHE_TENANTS__UIDS": "acme"}, "give a JSON object, or set entries one by one as tenants.uids.NAME=VALUE"),
    ({"HICACHE_TENANTS__UIDS": '{"5": {"tenant": "a", "right": []}}'}, "unknown field right"),
    ({"HICACHE_TENANTS__UIDS": '{"5": {"tenant": "a", "rights": ["x"]}}'}, "use one of read, write, admin"),
    ({"HICACHE_TENANTS__QUOTAS": '{"a": {"host": "x"}}'}, "size 'x' is not a number"),
]


@pytest.mark.parametrize(("environment", "words"), WRONG)
def test_wrong_variables(environment: dict[str, str], words: str) -> None:
    """One line says which value is wrong, where it stands and what would be right."""
    with pytest.raises(ConfigError) as caught:
        load_settings(environment=environment)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[host\n", "is no TOML: Expected ']'"),
        ("[hosts]\nbytes = 1\n", "unknown setting hosts (file FILE): did you mean host?"),
        ("host = 1\n", "unknown setting host (file FILE): did you mean host?"),
        ("[host]\nbite = 1\n", "unknown setting host.bite (file FILE): did you mean host.bytes?"),
        ("[host]\nseconds = 1\n", "did you mean"),
        ("[host]\nbytes = 1.5\n", "host.bytes=1.5 (file FILE): give bytes"),
        ("[host]\nbytes = true\n", "give bytes"),
        ("[limits]\npages = '5'\n", "limits.pages='5' (file FILE): expected int, got str"),
        ("[listen]\nsocket_mode = 600\n", 'in quotes, such as "0600"'),
        ("[listen]\naddresses = [1]\n", "expected str, got int"),
        ("[tenants.quota]\na = 1\n", "did you mean tenants.quotas?"),
    ],
)
def test_wrong_files(tmp_path: Path, text: str, words: str) -> None:
    """A file has kinds of its own: a number in quotes is a text."""
    file = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_settings(file)
    assert words.replace("FILE", file) in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    """A missing file, a folder, bytes that are no text and a huge file are each told apart."""
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")
    huge = tmp_path / "huge"
    huge.write_bytes(b"#" * (2**20 + 1))
    for path, words in (
        (str(tmp_path / "none"), "No such file"),
        (str(tmp_path), "Is a directory"),
        (str(binary), "is no TOML"),
        (str(huge), "larger than 1 MiB"),
        ("a\0b", "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=words):
            load_settings(path)


def test_secrets_are_not_shown() -> None:
    """Passwords of URLs and options that look like secrets are masked, in what is shown and in messages."""
    secret = "hunter2-hunter2"
    settings = load_settings(
        environment={
            "HICACHE_STORAGE__URL": f"redis://user:{secret}@host/0?password={secret}&timeout=1",
            "HICACHE_STORAGE__OPTIONS__SENTINEL_PASSWORD": secret,
        }
    )
    assert settings.config.storage.options == {"sentinel_password": secret}
    text = json.dumps(list(settings.rows()))
    assert secret not in text
    assert "redis://***@host/0?password=***&timeout=1" in text
    with pytest.raises(ConfigError) as caught:
        load_settings(environment={"HICACHE_STORAGE__OPTIONS": json.dumps({"password": [secret]})})
    assert secret not in str(caught.value)


def test_sizes_and_modes_are_shown_as_they_are_given() -> None:
    """People see units and octal digits."""
    settings = load_settings(flags={"host.bytes": ("--host", "1536MiB"), "listen.socket_mode": ("--set", "660")})
    shown = {name: value for name, value, _ in settings.rows()}
    assert (shown["host.bytes"], shown["listen.socket_mode"]) == ("1.5 GiB", "0660")
    assert isinstance(settings.config.host.bytes, Size)
    assert settings.config.listen.socket_mode == FileMode(0o660)


def test_choices_are_those_of_the_runtime() -> None:
    """Policies that can be configured are exactly those that exist."""
    kinds: dict[str, Any] = get_type_hints(Policies)
    assert set(get_args(kinds["write"])) == set(WRITE_POLICIES)
    assert set(get_args(kinds["eviction"])) == set(POLICIES)
    assert set(get_args(kinds["prefetch"])) == set(PREFETCH_MODES)
    assert Policies().protected_share == PROTECTED_SHARE
