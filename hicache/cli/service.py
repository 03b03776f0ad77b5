"""What commands that talk to a service have in common: its address, what it is shown, and the prompts of one model."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, TextIO

from hicache.cli.values import undisturbed
from hicache.errors import ConfigError, InvalidInput

if TYPE_CHECKING:
    import numpy as np

    from hicache.rpc.client.admin import AdminClient
    from hicache.rpc.client.options import Secrets
    from hicache.rpc.service import Target

_LONGEST_LINE: Final = 64 * 2**20
_DIGEST: Final = 16
_SHA256: Final = 32


def add_service_arguments(parser: argparse.ArgumentParser, *, required: bool = True, insecure: bool = True) -> None:
    """The address, and what goes with it; `--insecure` only where nothing else has an option of that name."""
    parser.add_argument(
        "address",
        nargs=None if required else "?",
        metavar="ADDRESS",
        help="of the service: unix:///run/hicache/hicache.sock or host:port",
    )
    add_secret_arguments(parser, insecure=insecure)
    parser.add_argument("--timeout", default="10", metavar="SECONDS", help="for one call (default: 10)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def add_secret_arguments(parser: argparse.ArgumentParser, *, insecure: bool = True) -> None:
    """What a service over TCP is shown, and by what it is known."""
    group = parser.add_argument_group("over TCP")
    group.add_argument("--token-file", metavar="FILE", help="file that has the token (default: HICACHE_TOKEN)")
    group.add_argument("--ca", metavar="FILE", help="authority of the service's certificate, PEM")
    group.add_argument("--cert", metavar="FILE", help="certificate to show, PEM")
    group.add_argument("--key", metavar="FILE", help="its private key, PEM")
    if insecure:
        group.add_argument(
            "--insecure", action="store_true", help="without TLS: anyone on the way may read and change it"
        )


@contextmanager
def connected(options: argparse.Namespace) -> Iterator[AdminClient]:
    """A connection for the block.

    Raises:
        ConfigError: an address, a file or a time that does not work.
    """
    from hicache.rpc.address import Address

    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # else gRPC writes lines of its own before ours, such as about TLS
    from hicache.rpc.client.admin import AdminClient

    address, secrets = Address.parse(options.address), secrets_of(options)
    if not (address.is_unix or secrets.tls or secrets.insecure):
        raise ConfigError(
            f"{address} is reached over TCP: give --ca for TLS, or --insecure if anyone on the way may read and "
            "change it"
        )
    client = AdminClient(address, secrets, timeout=seconds_of(options.timeout, "--timeout"))
    try:
        yield client
    finally:
        with undisturbed():
            client.close()


def secrets_of(options: argparse.Namespace) -> Secrets:
    """What the service is shown, and by what it is known; the token may come from HICACHE_TOKEN."""
    from hicache.rpc.client.options import Secrets

    token = os.environ.get("HICACHE_TOKEN") if options.token_file is None else None
    return Secrets(
        token=token or None,
        token_file=options.token_file,
        ca=options.ca,
        cert=options.cert,
        key=options.key,
        insecure=options.insecure,
    )


def seconds_of(text: str, option: str, *, least: float = 0.001) -> float:
    """A number of seconds.

    Raises:
        ConfigError: it is none, or below `least`.
    """
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not least <= seconds <= 1e9:
        raise ConfigError(f"{option} {text:.40}: give seconds, {least:g} or more")
    return seconds


def add_target_arguments(parser: argparse.ArgumentParser) -> None:
    """Whose prompts."""
    group = parser.add_argument_group("whose pages")
    group.add_argument("--model", metavar="NAME", help="the model, where only one namespace has it")
    group.add_argument("--namespace", metavar="HEX", help="the base namespace, as `hicache stats` shows it")
    group.add_argument("--adapter", metavar="NAME=SHA256", help="adapter and digest of its weights")
    group.add_argument("--salt", help="salt of the requests")
    group.add_argument("--tenant", metavar="NAME", help="for callers who may administer all tenants")


def add_prompts_argument(parser: argparse._ActionsContainer, *, required: bool = True) -> None:
    """Where prompts are read from, by `read_prompts`."""
    parser.add_argument(
        "--prompts",
        required=required,
        metavar="FILE",
        help="a prompt a line, as token ids [1, 2, ...]; - is standard input",
    )


def target_of(options: argparse.Namespace) -> Target | None:
    """Whose prompts; None where nothing was said.

    Raises:
        ConfigError: a digest that is none, or an adapter, salt or tenant without a model.
    """
    from hicache.core.identity import Adapter
    from hicache.rpc.service import RequestScope, Target

    rest = [name for name in ("adapter", "salt", "tenant") if getattr(options, name) is not None]
    if options.model is None and options.namespace is None:
        if rest:
            raise ConfigError(f"--{rest[0]} is of a model: name it by --model or --namespace")
        return None
    if options.model is not None and options.namespace is not None:
        raise ConfigError("--model and --namespace name the same: give one of them")
    adapter = None
    if options.adapter is not None:
        name, _, digest = options.adapter.rpartition("=")
        adapter = Adapter(name, digest=_hex(digest, "--adapter", _SHA256))
    return Target(
        namespace_digest=_hex(options.namespace, "--namespace", _DIGEST) if options.namespace is not None else b"",
        model=options.model or "",
        scope=RequestScope(adapter, options.salt),
        tenant=options.tenant,
    )


def required_target(options: argparse.Namespace) -> Target:
    """Whose prompts.

    Raises:
        ConfigError: nothing was said, or something wrong.
    """
    target = target_of(options)
    if target is None:
        raise ConfigError("whose pages? name the model by --model or --namespace")
    return target


def read_prompts(path: str) -> Iterator[np.ndarray]:
    """Prompts of a file of JSON lines, each `[1, 2, ...]` or `{"tokens": [1, 2, ...], ...}`; `-` is standard input.

    Raises:
        InvalidInput: a file that cannot be read, or a line that is no prompt; names the line.
    """
    if path == "-":
        yield from _prompts(sys.stdin, "standard input")
        return
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            yield from _prompts(file, f"{path!r:.200}")
    except OSError as error:
        raise InvalidInput(f"prompts {path!r:.200} cannot be read: {error.strerror}") from None
    except ValueError as error:  # a NUL in the path
        raise InvalidInput(f"prompts {path!r:.200} cannot be read: {error}") from None


def _prompts(lines: TextIO, shown: str) -> Iterator[np.ndarray]:
    import msgspec
    import numpy as np

    from hicache.core.symbols import symbols

    class Line(msgspec.Struct):
        tokens: list[int]

    decode = msgspec.json.Decoder(list[int] | Line).decode
    number = 0
    while line := lines.readline(_LONGEST_LINE):
        number += 1
        if not line.strip():
            continue
        try:
            found = decode(line)
            ids = symbols(found.tokens if isinstance(found, Line) else found, 1)
        except (msgspec.MsgspecError, InvalidInput) as error:
            raise InvalidInput(
                f'line {number} of {shown} is no prompt ({error}): write token ids as [1, 2, 3] or {{"tokens": [...]}}'
            ) from None
        yield np.frombuffer(ids, "<u4")


def _hex(text: str, option: str, size: int) -> bytes:
    try:
        data = bytes.fromhex(text)
    except ValueError:
        data = b""
    if len(data) != size:
        raise ConfigError(f"{option}: {text!r:.80} is not {2 * size} hex digits")
    return data
