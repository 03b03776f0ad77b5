"""Settings of a client, checked before anything is connected."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from hicache.core.arenas import ArenaPlan
from hicache.core.identity import Namespace
from hicache.core.partition import plan_shards
from hicache.errors import ConfigError, InvalidInput, NamespaceError
from hicache.rpc.address import Address
from hicache.runtime.arguments import flag, number_of_seconds, whole
from hicache.units import parse_size, whole_number

LONGEST_NAME = 256
"""Bytes of the name by which a client calls itself."""


@dataclass(frozen=True, slots=True)
class Secrets:
    """What a client shows a service, and by what it knows it.

    Attributes:
        token: says who calls; or None.
        token_file: a file that has it, read again at each connection.
        ca, cert, key: files in PEM form for TLS: who signed the service's certificate, and this client's own.
        insecure: whether TCP without TLS is wanted.
    """

    token: str | None = field(default=None, repr=False)
    token_file: str | None = None
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    insecure: bool = False

    @property
    def tls(self) -> bool:
        """Whether the connection is to be encrypted."""
        return any(name is not None for name in (self.ca, self.cert, self.key))

    def check(self, address: Address) -> None:
        """See that they fit together, and that the files can be read.

        Raises:
            ConfigError: they do not, or a file that cannot be.
        """
        flag("insecure", self.insecure)
        if self.token is not None and self.token_file is not None:
            raise ConfigError("token and token_file are both given: give one of them")
        if (self.cert is None) != (self.key is None):
            raise ConfigError("cert and key belong together: give both, or neither")
        if self.tls and (self.insecure or address.is_unix):
            raise ConfigError("ca, cert and key are for TLS, which a Unix socket and insecure=True do without")
        if not (address.is_unix or self.tls or self.insecure):
            raise ConfigError(
                f"{address} is reached over TCP: give ca= (and a token) for TLS, or insecure=True if everybody on the "
                "way may read and change the pages"
            )
        for name in ("ca", "cert", "key"):
            self.read(name)
        self.bearer()

    def read(self, name: str) -> bytes | None:
        """What is in one of the files, or None.

        Raises:
            ConfigError: it cannot be read.
        """
        path = getattr(self, name)
        if path is None:
            return None
        try:
            return Path(path).read_bytes()
        except OSError as error:
            raise ConfigError(f"{name}={path!r:.200} cannot be read: {error.strerror}") from None

    def bearer(self) -> str | None:
        """The token now, or None.

        Raises:
            ConfigError: it cannot be read, or is nothing that fits into a header.
        """
        text = self.token
        if self.token_file is not None:
            text = (self.read("token_file") or b"").decode("ascii", "replace").strip()
        if text is None:
            return None
        if not text or not text.isascii() or not text.isprintable():
            raise ConfigError("the token is empty or has characters that no token has: use printable ASCII")
        return text


@dataclass(frozen=True, slots=True)
class Backoff:
    """How long to wait before the next attempt to connect. Pure, but for the jitter's random numbers.

    Attributes:
        first: seconds before the second attempt.
        factor: by which each wait is longer than the one before.
        most: seconds at most, with the jitter: a service that is back is found within so long.
        jitter: share of a wait by which it is shortened at random, so that not all clients come at once.
    """

    first: float = 0.02
    factor: float = 2.0
    most: float = 1.0
    jitter: float = 0.5

    def seconds(self, failed: int, random_number: Callable[[], float] = random.random) -> float:
        """The wait after so many attempts that failed in a row, 1 or more."""
        longest = min(self.most, self.first * self.factor ** min(failed - 1, 32))
        return longest * (1 - self.jitter * random_number())


@dataclass(frozen=True, slots=True)
class Place:
    """This process's part of the pages of its group.

    Attributes:
        group: name of the ranks that serve one instance of the model; empty: this process alone is one.
        tp_rank, tp_size: its place among those that share the heads.
        pp_first_layers, pp_rank: first layer of each pipeline stage, and its stage.
        worker: whether it reads and writes pages, or only schedules.
    """

    group: str = ""
    tp_rank: int = 0
    tp_size: int = 1
    pp_first_layers: tuple[int, ...] = ()
    pp_rank: int = 0
    worker: bool = True

    def page_bytes(self, namespace: Namespace) -> int:
        """Bytes of this rank's part of a page.

        Raises:
            GeometryError: the ranks' ranges are no unions of shards.
            ConfigError: numbers that name no rank.
        """
        flag("worker", self.worker)
        for name in ("tp_rank", "pp_rank"):
            whole(name, getattr(self, name), least=0)
        whole("tp_size", self.tp_size, least=1)
        stages = self.pp_first_layers
        if self.pp_rank >= max(len(stages), 1):
            raise ConfigError(f"pp_rank={self.pp_rank}, but there are {max(len(stages), 1)} pipeline stages")
        layers = None
        if stages:
            end = stages[self.pp_rank + 1] if self.pp_rank + 1 < len(stages) else namespace.geometry.layers[1]
            layers = (stages[self.pp_rank], end)
        plan = plan_shards(
            namespace.geometry, namespace.page_size, tp_rank=self.tp_rank, tp_size=self.tp_size, pp_layers=layers
        )
        return plan.page_bytes

    def writes(self, namespace: Namespace) -> bool:
        """Whether this process writes any part of the pages; of what several ranks have, one does.

        Raises:
            GeometryError: the ranks' ranges are no unions of shards.
        """
        plan = ArenaPlan.of(
            namespace.geometry, namespace.page_size, tp_size=self.tp_size, pp_first_layers=self.pp_first_layers
        )
        return self.worker and any(arena.writes for arena in plan.rank(self.tp_rank, self.pp_rank).arenas)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """How a client behaves; the names are those of `hicache.connect`.

    Attributes:
        name: by which the service's logs call it.
        streamed: whether page bytes go over the connection even where memory could be shared. Always so over TCP.
        populate: whether the service's memory is made ready for this process in the background, so that first touches
            do not cost half of the speed; it takes some 50 ms and 2 MiB of page tables a GiB.
        extras: whether prompts may carry non-text input.
        pool_size: host memory that the model's pool shall have if this client makes it, in bytes or as "20GiB";
            0: as the service is configured.
        deadline: seconds for a request that names none, and for every other call.
        grace: seconds beyond a deadline in which an answer may still arrive; without one the service counts as away
            until it is heard again.
        timeout: seconds for one attempt to connect and attach.
        required: whether `connect` fails where no service answers within `timeout`, instead of going on without.
        backoff: waits between attempts.
        window: bytes of pages that are on their way at once where they are streamed.
        pause: how to wait between attempts; for tests.
    """

    name: str = "hicache"
    streamed: bool = False
    populate: bool = True
    extras: bool = False
    pool_size: int | str = 0
    deadline: float = 5.0
    grace: float = 0.25
    timeout: float = 10.0
    required: bool = False
    backoff: Backoff = field(default_factory=Backoff)
    window: int = 8 * 2**20
    pause: Callable[[float], Awaitable[None]] | None = None

    def __post_init__(self) -> None:
        for name in ("streamed", "populate", "extras", "required"):
            flag(name, getattr(self, name))
        for name in ("deadline", "grace", "timeout"):
            object.__setattr__(self, name, number_of_seconds(name, getattr(self, name)))
        if not self.timeout:
            raise ConfigError("timeout=0 does not work: give seconds above 0")
        size = parse_size(self.pool_size) if isinstance(self.pool_size, str) else self.pool_size
        object.__setattr__(self, "pool_size", whole("pool_size", size, least=0))
        whole("window", self.window, least=1)
        if not 0 < len(str(self.name).encode()) <= LONGEST_NAME:
            raise ConfigError(f"name={self.name!r:.60} is not text of 1 to {LONGEST_NAME} bytes")
        if not isinstance(self.backoff, Backoff):
            raise ConfigError(f"backoff={self.backoff!r:.60} is no Backoff")


def check_namespace(namespace: object) -> Namespace:
    """A namespace that a service takes.

    Raises:
        NamespaceError: no namespace, or one whose pages are not named by sha256.
    """
    if not isinstance(namespace, Namespace):
        raise NamespaceError(f"namespace must be a hicache.Namespace, not {type(namespace).__name__}")
    if namespace.hash != "sha256":
        raise NamespaceError(
            f"the namespace names its pages by {namespace.hash}: a service sees names only, no tokens, so it takes "
            'hash="sha256"'
        )
    return namespace


def stages_of(first_layers: Iterable[int]) -> tuple[int, ...]:
    """First layers of pipeline stages.

    Raises:
        InvalidInput: not a sequence of whole numbers that grow.
    """
    stages = [whole_number(layer) for layer in first_layers]
    numbers = [layer for layer in stages if layer is not None and layer >= 0]
    if len(numbers) != len(stages) or numbers != sorted(set(numbers)):
        raise InvalidInput(
            f"pp_first_layers={stages!r:.60}: give the first layer of each stage, in order, such as (0, 16)"
        )
    return tuple(numbers)
