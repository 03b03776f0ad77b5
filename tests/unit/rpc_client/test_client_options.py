"""Settings of a client: checked before anything is connected, each mistake in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hicache
from hicache.errors import ConfigError, GeometryError, InvalidInput, NamespaceError
from hicache.rpc.address import Address
from hicache.rpc.client.options import Backoff, ClientOptions, Place, Secrets, check_namespace, stages_of
from hicache.testing.engine import small_namespace

UNIX, TCP = Address.parse("unix:///run/x.sock"), Address.parse("host:7420")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"deadline": -1}, "deadline=-1 is not a number of seconds"),
        ({"timeout": 0}, "timeout=0"),
        ({"required": "yes"}, "required='yes' is not True or False"),
        ({"window": 0}, "window=0"),
        ({"pool_size": "3 apples"}, "apples"),
        ({"name": ""}, "name=''"),
        ({"name": "x" * 257}, "257|256 bytes"),
        ({"backoff": 3}, "backoff=3 is no Backoff"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        ClientOptions(**options)


def test_a_size_is_read_as_people_write_it() -> None:
    assert ClientOptions(pool_size="2GiB").pool_size == 2**31


def test_an_option_that_does_not_exist_is_named() -> None:
    with pytest.raises(ConfigError, match="deadlin"):
        hicache.connect("unix:///run/x.sock", small_namespace(hash="sha256"), deadlin=3)


@pytest.mark.parametrize(
    ("secrets", "address", "text"),
    [
        (Secrets(), TCP, "ca= .* or insecure=True"),
        (Secrets(token="a", token_file="b"), UNIX, "give one of them"),
        (Secrets(cert="a"), TCP, "belong together"),
        (Secrets(ca="a", insecure=True), TCP, "do without"),
        (Secrets(ca="a"), UNIX, "do without"),
        (Secrets(ca="/no/such/file"), TCP, "ca='/no/such/file' cannot be read: No such file"),
        (Secrets(token_file="/no/such/file"), UNIX, "token_file='/no/such/file' cannot be read"),
        (Secrets(token="two\nlines"), UNIX, "printable"),
        (Secrets(token=""), UNIX, "empty"),
    ],
)
def test_secrets_that_do_not_fit_are_refused(secrets: Secrets, address: Address, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        secrets.check(address)


def test_a_token_is_read_again_each_time_and_never_shown(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("first-secret\n")
    secrets = Secrets(token_file=str(file))
    assert secrets.bearer() == "first-secret"
    file.write_text("second-secret")
    assert secrets.bearer() == "second-secret"
    assert "secret" not in repr(Secrets(token="third-secret"))


@given(st.integers(1, 10**6), st.floats(0, 1, exclude_max=True))
def test_a_wait_grows_up_to_its_bound_and_is_never_zero(failed: int, chance: float) -> None:
    backoff = Backoff(first=0.1, factor=2.0, most=1.0, jitter=0.5)
    seconds = backoff.seconds(failed, lambda: chance)
    assert 0.05 <= seconds <= 1.0
    assert seconds <= 0.1 * 2.0 ** min(failed - 1, 32)


@pytest.mark.parametrize(
    ("namespace", "text"),
    [(small_namespace(), 'hash="sha256"'), ("model", "must be a hicache.Namespace, not str")],
)
def test_a_namespace_that_a_service_cannot_take_is_refused(namespace: Any, text: str) -> None:
    with pytest.raises(NamespaceError, match=text):
        check_namespace(namespace)


def test_pages_of_all_ranks_together_are_the_whole_page() -> None:
    namespace = small_namespace(hash="sha256")
    whole = Place().page_bytes(namespace)
    ranks = [
        Place(tp_rank=tp, tp_size=2, pp_first_layers=(0, 1), pp_rank=pp).page_bytes(namespace)
        for tp in range(2)
        for pp in range(2)
    ]
    assert whole == namespace.geometry.page_bytes(namespace.page_size) == sum(ranks)


@pytest.mark.parametrize(
    ("place", "error"),
    [
        (Place(tp_rank=2, tp_size=2), GeometryError),
        (Place(tp_size=0), ConfigError),
        (Place(tp_size=3), GeometryError),
        (Place(pp_rank=1), ConfigError),
        (Place(worker="no"), ConfigError),  # type: ignore[arg-type]
    ],
)
def test_a_place_that_names_no_rank_is_refused(place: Place, error: type[Exception]) -> None:
    with pytest.raises(error):
        place.page_bytes(small_namespace(hash="sha256"))


@pytest.mark.parametrize("stages", [[1, 0], [0, 0], [0, -1], ["x"], [0.5]])
def test_stages_that_are_none_are_refused(stages: Any) -> None:
    with pytest.raises(InvalidInput, match="first layer of each stage"):
        stages_of(stages)


@pytest.mark.parametrize("address", [7, "nonsense", "unix://relative", "host:0"])
def test_an_address_that_is_none_is_refused(address: Any) -> None:
    with pytest.raises(ConfigError, match="address"):
        hicache.connect(address, small_namespace(hash="sha256"), insecure=True)
