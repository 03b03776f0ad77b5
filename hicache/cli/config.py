"""`hicache config show|check|describe`: what a service would run with, and where each value comes from."""

from __future__ import annotations

import argparse
from typing import Any

from hicache.cli.output import Table, print_json, print_table
from hicache.cli.settings import add_setting_arguments, settings_of
from hicache.errors import ConfigError

HELP = "show or check the settings of a service"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parser.add_argument(
        "what",
        choices=["show", "check", "describe"],
        help="show: every value and its origin; check: whether a service could start with them, without starting one; "
        "describe: what each setting is",
    )
    parser.add_argument("file", nargs="?", metavar="FILE", help="settings in TOML, as --config")
    add_setting_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(options: argparse.Namespace) -> int:
    """Print, and return the exit code; what is wrong is an error, with exit code 2."""
    from hicache.cli.main import EXIT_FINE

    if options.what == "describe":
        _describe(as_json=options.json)
        return EXIT_FINE
    if options.file is not None:
        if options.config is not None:
            raise ConfigError(f"FILE {options.file!r:.200} and --config are the same: give one of them")
        options.config = options.file
    settings = settings_of(options)
    if options.what == "check":
        from hicache.sidecar.checks import check_files

        warnings = check_files(settings)
        if options.json:
            print_json({"good": True, "warnings": warnings})
        else:
            print_table(Table("settings are good", ("warnings",), [(text,) for text in warnings] or [("none",)]))
        return EXIT_FINE
    rows = list(settings.rows())
    if options.json:
        print_json({name: {"value": value, "origin": origin} for name, value, origin in rows})
    else:
        print_table(Table("settings", ("name", "value", "origin"), [(n, _cell(v), o) for n, v, o in rows], texts=3))
    return EXIT_FINE


def _describe(*, as_json: bool) -> None:
    from hicache.sidecar.settings import schema, shown

    described = [(setting.name, shown(setting.name, setting.default), setting.text) for setting in schema()]
    if as_json:
        print_json({name: {"default": default, "text": text} for name, default, text in described})
    else:
        rows = [(name, _cell(default), text) for name, default, text in described]
        print_table(Table("settings", ("name", "default", "what it is"), rows, texts=3))


def _cell(value: Any) -> str:
    if value is None or value in ("", [], {}):
        return "-"
    if isinstance(value, bool):
        return "true" if value else "false"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
