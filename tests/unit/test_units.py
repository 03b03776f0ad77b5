from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.errors import ConfigError
from hicache.units import LARGEST_SIZE, format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        ("20GiB", 20 * 2**30),
        (" 1.5 GiB ", 3 * 2**29),
        ("1kB", 1000),
        ("2mb", 2_000_000),
        ("0.5KiB", 512),
        ("1.1KiB", 1126),
        ("1EiB", None),
        ("7B", 7),
        ("1024PiB", 2**60),
    ],
)
def test_sizes_are_read(text: str, size: int | None) -> None:
    if size is None:
        with pytest.raises(ConfigError):
            parse_size(text)
    else:
        assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    ["", "GiB", "-1", "-1GiB", "1G", "1.5", "1e9", "0x10", "1 GiB GiB", "nan", "inf", "1025PiB", "9" * 400, "١GiB"],
)
def test_what_is_no_size_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_size(text)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**30, "1 GiB"), (-3, "-3 B"), (2**60, "1024 PiB")],
)
def test_sizes_are_shown(size: int, text: str) -> None:
    assert format_size(size) == text


@given(st.integers(0, LARGEST_SIZE))
def test_what_is_shown_reads_back_within_its_precision(size: int) -> None:
    assert abs(parse_size(format_size(size)) - size) <= max(1, size // 180)
