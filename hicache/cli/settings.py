"""Settings of a service as options of commands: the common ones have options of their own, `--set` reaches all."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any, Final

from hicache.errors import ConfigError

if TYPE_CHECKING:
    from hicache.sidecar.settings import Settings

_OPTIONS: Final = (
    ("--host", "host.bytes", "BYTES", "host memory that engines share, such as 8GiB"),
    ("--storage", "storage.url", "URL", "the store, such as file:///var/cache/hicache?capacity=100GiB (default: none)"),
    ("--metrics", "metrics.address", "HOST:PORT", "serve /metrics, /healthz and /readyz there (default: not)"),
    (
        "--access-log",
        "access_log.folder",
        "FOLDER",
        "write what requests ask for and get there, page hashes only, for `hicache analyze FOLDER` (default: not)",
    ),
    ("--tokens", "tokens.file", "FILE", "tokens of remote callers; only its owner may read it"),
    ("--tls-certificate", "tls.certificate", "FILE", "certificate for TCP, PEM"),
    ("--tls-key", "tls.key", "FILE", "its private key, PEM"),
    ("--tls-client-ca", "tls.client_ca", "FILE", "authorities of client certificates; makes those required"),
    ("--write-policy", "policies.write", "NAME", "write_through, write_through_selective or write_back"),
    ("--drain", "drain.seconds", "SECONDS", "time for clients and storage to finish after SIGTERM"),
    ("--log-level", "log.level", "LEVEL", "debug, info, warning or error"),
    ("--log-format", "log.format", "FORMAT", "text or json"),
)


def add_setting_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that stand for settings. None has a default, so that the other sources count."""
    parser.add_argument(
        "--config", metavar="FILE", help="settings in TOML (default: what HICACHE_CONFIG names, or none)"
    )
    parser.add_argument(
        "--listen",
        action="append",
        metavar="ADDRESS",
        help="unix:///path or host:port; may be repeated (default: unix:///run/hicache/hicache.sock)",
    )
    for option, name, metavar, text in _OPTIONS:
        parser.add_argument(option, dest=_dest(name), metavar=metavar, help=text)
    parser.add_argument(
        "--insecure", action="store_true", help="allow TCP without TLS and tokens: anyone may do anything"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="any setting of `hicache config describe`, such as host.numa_node=0; may be repeated",
    )


def settings_of(options: argparse.Namespace) -> Settings:
    """Settings from all sources, each checked by itself.

    Raises:
        ConfigError: a source that is wrong.
    """
    from hicache.sidecar.settings import load_settings

    flags: dict[str, tuple[str, Any]] = {}
    for text in options.set:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--set {text!r:.80}: write NAME=VALUE, such as host.numa_node=0")
        flags[name.strip()] = (f"--set {name.strip():.80}", value)
    if options.listen:
        flags["listen.addresses"] = ("--listen", tuple(options.listen))
    for option, name, _, _ in _OPTIONS:
        value = getattr(options, _dest(name))
        if value is not None:
            flags[name] = (option, value)
    if options.insecure:
        flags["listen.insecure"] = ("--insecure", True)
    return load_settings(options.config, environment=os.environ, flags=flags)


def _dest(name: str) -> str:
    return "setting_" + name.replace(".", "_")
