"""Sizes of tiers: pages without a unit, bytes with one."""

from __future__ import annotations

import pytest

from hicache.cli.sizes import parse_bytes, parse_pages
from hicache.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "pages"),
    [("10000", 10_000), ("0", 0), ("64KiB", 1), ("1MiB", 16), ("1.5 MiB", 24), ("131072B", 2), ("1MB", 15)],
)
def test_pages_or_bytes(text: str, pages: int) -> None:
    assert parse_pages(text, option="--host", page_bytes=65536, least=0) == pages


@pytest.mark.parametrize(
    ("text", "page_bytes", "problem"),
    [
        ("-5", 100, "--device -5: needs at least 1 page"),
        ("0", 100, "--device 0: needs at least 1 page"),
        ("-5GiB", 100, "--device -5GiB: a size cannot be negative"),
        ("50B", 100, r"--device 50B \(0 pages of 100 B\): needs at least 1 page"),
        ("5GiB", 0, "give a number of pages"),
        ("99999999999", 100, "check the number and its unit"),
        ("1EiB", 100, "--device 1EiB: is not a number with a unit"),
        ("1000000TiB", 100, "more than 2147483648 pages"),
        ("9" * 5000, 100, "--device 9+: give pages as a whole number"),
        ("many", 100, "--device many: is not a number with a unit"),
        ("", 100, "--device : give pages as a whole number"),
        ("abc", 0, "--device abc: is not a number with a unit.*; a plain number is pages"),
        (" ", 0, "--device  : give pages as a whole number"),
        ("1_000", 0, "--device 1_000: is not a number with a unit"),
        ("1.5", 0, "--device 1.5: give pages as a whole number, or a size such as 512MiB"),
        ("unlimited", 0, "only --device can be without limit"),
        ("1e9", 100, "--device 1e9: give pages as a whole number, or a size such as 512MiB"),
    ],
)
def test_bad_sizes_name_the_option(text: str, page_bytes: int, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_pages(text, option="--device", page_bytes=page_bytes, least=1)


def test_bytes() -> None:
    assert parse_bytes("64KiB", option="--page-bytes", most=2**20) == 65536
    assert parse_bytes("0", option="--page-bytes", most=2**20) == 0
    with pytest.raises(ConfigError, match="--page-bytes 2MiB: more than 1 MiB"):
        parse_bytes("2MiB", option="--page-bytes", most=2**20)
    with pytest.raises(ConfigError, match="cannot be negative"):
        parse_bytes("-1", option="--page-bytes", most=2**20)
