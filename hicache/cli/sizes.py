"""Tier sizes as the command line takes them: a plain number is pages, a number with a unit is bytes."""

from __future__ import annotations

import re

from hicache.errors import ConfigError
from hicache.units import format_size, parse_size

MOST_PAGES = 2**31  # slot numbers beyond it would need a day of traffic to be used; a typing error, not a wish

_PLAIN = re.compile(r"[+-]?[0-9]{1,20}")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|")


def parse_pages(text: str, *, option: str, page_bytes: int, least: int) -> int:
    """Pages of a tier.

    Args:
        text: "10000" (pages) or "2GiB" (bytes).
        option: the option's name, for messages.
        page_bytes: bytes of a page; 0 if pages hold none.
        least: smallest number of pages that is allowed.

    Raises:
        ConfigError: not a size, too small, absurdly large, or bytes where pages hold none.
    """
    if _PLAIN.fullmatch(text.strip()):
        pages = int(text)
        shown = text
    elif text == "unlimited":
        raise ConfigError(f"{option} {text}: only --device can be without limit; give pages, or a size such as 2GiB")
    else:
        size = tier_size(text, option=option)
        if page_bytes == 0:
            raise ConfigError(f"{option} {text}: pages hold no bytes here (--page-bytes 0), give a number of pages")
        pages = size // page_bytes
        shown = f"{text} ({pages} pages of {format_size(page_bytes)})"
    if pages < least:
        raise ConfigError(f"{option} {shown}: needs at least {least} page{'s' if least != 1 else ''}")
    if pages > MOST_PAGES:
        raise ConfigError(f"{option} {shown}: more than {MOST_PAGES} pages; check the number and its unit")
    return pages


def parse_bytes(text: str, *, option: str, most: int) -> int:
    """A number of bytes, with or without a unit.

    Raises:
        ConfigError: not a size, negative, or above `most`.
    """
    size = _size(text, option=option)
    if size > most:
        raise ConfigError(f"{option} {text}: more than {format_size(most)}; check the number and its unit")
    return size


def tier_size(text: str, *, option: str) -> int:
    """Bytes of what is no plain number, which would be pages.

    Raises:
        ConfigError: not a size; says that pages may be given too.
    """
    if _NUMBER.fullmatch(text.strip()):  # 0.5, or 1e9: no unit, and no whole number either
        raise ConfigError(f"{option} {text:.40}: give pages as a whole number, or a size such as 512MiB")
    return _size(text, option=option, more="; a plain number is pages")


def _size(text: str, *, option: str, more: str = "") -> int:
    if text.strip().startswith("-"):
        raise ConfigError(f"{option} {text:.40}: a size cannot be negative")
    try:
        return parse_size(text)
    except ConfigError as error:
        raise ConfigError(f"{option} {text:.40}: {str(error).removeprefix(f'size {text!r:.60} ')}{more}") from None
