"""Whatever stands in settings and token files, it is taken or refused in one line, and never anything else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.errors import ConfigError
from hicache.rpc.address import Address
from hicache.sidecar.checks import check
from hicache.sidecar.settings import load_settings, schema
from hicache.sidecar.tenants import read_tokens

NAMES = [setting.name for setting in schema()]
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["0600", "4GiB", "lru", "127.0.0.1:0", "unix:///run/h.sock", "memory://", "acme", "read"])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["tenant", "rights", "host", "storage", "7", "*"]) | st.text(max_size=5), inner
        )
    ),
    max_leaves=8,
)


def refusal(call: Callable[[], object]) -> str:
    """What a call is refused with, or nothing."""
    try:
        call()
    except ConfigError as error:
        return str(error)
    return ""


def settled(**sources: Any) -> bool:
    """Whether it is taken; what is refused is refused in one line."""

    def read() -> None:
        settings = load_settings(**sources)
        check(settings)
        json.dumps({name: value for name, value, _ in settings.rows()}, allow_nan=False)

    text = refusal(read)
    assert "\n" not in text
    return not text


@given(st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=10), VALUES, max_size=4))
def test_values_of_any_kind(values: dict[str, Any]) -> None:
    """As they come from a parsed file."""
    settled(flags={name: ("--set", value) for name, value in values.items()})


@given(
    st.dictionaries(
        st.sampled_from([setting.variable for setting in schema()]) | st.text(max_size=10).map("HICACHE_".__add__),
        st.text(max_size=30) | VALUES.map(lambda value: json.dumps(value, default=str)),
        max_size=4,
    )
)
def test_texts_of_any_kind(environment: dict[str, str]) -> None:
    """As they come from the environment."""
    settled(environment=environment)


def test_not_everything_is_refused() -> None:
    """The strategies reach settings that are taken."""
    assert settled(flags={"host.bytes": ("--host", "4GiB"), "tenants.uids": ("--set", {"7": "acme"})})


LINES = """[[tokens]]
name = "a"
name = "b"
tenant = "t"
token = "x y z x y z x y z"
sha256 = "00"
rights = ["read"]
rights = "read"
quota = { host = 1 }
quota = 5
[tokens]
tokens = 1
x = 1""".splitlines()
TOML = st.binary(max_size=200) | st.lists(
    st.sampled_from(LINES),
    max_size=8,
).map(lambda lines: "\n".join(lines).encode())


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("settings") / "file"
    path.touch(0o600)
    return path


@given(data=TOML)
def test_files_of_any_bytes(file: Path, data: bytes) -> None:
    """Settings and tokens alike; a token that is wrong is never in the message."""
    file.write_bytes(data)
    settled(file=str(file))
    text = refusal(lambda: read_tokens(str(file)))
    assert "\n" not in text
    assert "x y z" not in text


@given(st.text(max_size=40) | st.from_regex(r"(unix:)?/{0,3}[a-z.]{0,9}:?[0-9]{0,6}", fullmatch=True), st.booleans())
def test_addresses_of_any_form(text: str, listening: bool) -> None:
    """What is taken is read back the same from what is shown of it."""
    refused = refusal(lambda: Address.parse(text, listening=listening))
    assert "\n" not in refused
    if not refused:
        address = Address.parse(text, listening=listening)
        assert Address.parse(str(address), listening=listening) == address
