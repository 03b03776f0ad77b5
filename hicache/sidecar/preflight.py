"""What can be found out before a service starts: memory, sockets, storage, and a page through every tier and back.

Nothing is kept: sockets are let go again, and the page's namespace is cleared in storage.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import socket
from collections.abc import AsyncIterator, Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from hicache.config import Config, Size
from hicache.core.identity import Namespace
from hicache.core.layout import KVGeometry
from hicache.errors import ConfigError, HicacheError, StorageError
from hicache.memory.limits import available_memory
from hicache.memory.placement import check_place
from hicache.rpc.address import Address
from hicache.rpc.service import Attachment, Caller, Finding, RequestScope
from hicache.runtime.accesslog.files import is_log
from hicache.sidecar.checks import addresses, check_files, storage_url
from hicache.sidecar.quotas import Quotas
from hicache.sidecar.service import SidecarService
from hicache.sidecar.sockets import claim
from hicache.storage.base import Manifests, StorageBackend
from hicache.storage.registry import open_storage
from hicache.storage.url import StorageUrl
from hicache.units import format_size

if TYPE_CHECKING:
    from hicache.sidecar.settings import Settings

__all__ = ["disagreements", "preflight", "through_tiers"]

_PATIENCE: Final = 10.0
_POLL: Final = 0.02
_POOL: Final = Size(8 * 2**20)
_NAMESPACE: Final = Namespace(
    model="hicache/doctor",
    revision="1",
    geometry=KVGeometry.mha(layers=2, kv_heads=4, head_dim=64, dtype="float16"),
    page_size=16,
    hash="sha256",
)
_OTHERS: Final = 0o066
_SALT: Final = "hicache doctor"  # a namespace of its own, so that its page is nobody's hit
_OF_REQUESTS: Final = {"version", "model", "digest", "base_digest", "adapter", "tenant_digest", "salt_digest"}
"""Fields of a manifest that say nothing of how the model is served."""


async def preflight(settings: Settings, *, sockets: bool = True) -> tuple[Finding, ...]:
    """Look at everything that a service with these settings needs. Raises nothing: trouble is a finding.

    Args:
        settings: from all sources.
        sockets: whether to try the addresses; not where a service may be running on them.
    """
    findings = [*_settings(settings)]
    if not all(finding.good for finding in findings):
        return tuple(findings)  # what follows would only say the same in other words
    config = settings.config
    findings += [*_memory(config), *_rights(config), *_access_log(config)]
    if sockets:
        findings += [_address(address) for address in addresses(config)]
    findings += [finding async for finding in _storage(config)]
    return tuple(findings)


def _settings(settings: Settings) -> Iterator[Finding]:
    try:
        warnings = check_files(settings)
    except ConfigError as error:
        yield Finding("settings", False, str(error))
        return
    origins = sorted({origin.split(" ")[0] for origin in settings.origins.values()})
    yield Finding("settings", True, f"from {', '.join(origins) or 'defaults'}")
    for text in warnings:
        yield Finding("settings", False, text)


def _memory(config: Config, *, root: Path = Path("/")) -> Iterator[Finding]:
    host = config.host
    nodes = () if host.numa_node is None else (host.numa_node,)
    try:
        check_place(int(host.bytes), "host.bytes", nodes=nodes, huge_pages=host.huge_pages, root=root)
        memory = available_memory(root=root)
    except ConfigError as error:
        yield Finding("memory", False, str(error))
        return
    left = f"{format_size(memory.bytes)} of {format_size(memory.limit)} are available ({memory.source})"
    yield Finding("memory", True, f"{host.bytes} fit: {left}")
    where = "any NUMA node" if host.numa_node is None else f"NUMA node {host.numa_node}"
    yield Finding("placement", True, f"{where}, {'huge' if host.huge_pages else 'ordinary'} pages")


def _rights(config: Config) -> Iterator[Finding]:
    listen, tenants = config.listen, config.tenants
    unix = [address for address in addresses(config) if address.is_unix]
    if not unix:
        return
    unruled = [address for address in unix if address.path not in tenants.sockets and not tenants.uids]
    if int(listen.socket_mode) & _OTHERS and unruled:
        text = (
            f"{unruled[0]} has mode {listen.socket_mode}, and who may connect may do anything, for want of tenants.uids"
        )
        yield Finding("socket rights", False, text)
    else:
        yield Finding(
            "socket rights", True, f"mode {listen.socket_mode}, {'by rule' if not unruled else 'for their owner'}"
        )


def _access_log(config: Config) -> Iterator[Finding]:
    if not config.access_log.folder:
        return
    folder = Path(config.access_log.folder).absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        yield Finding("access log", False, f"{there} is no folder that this user may write: name another one")
        return
    logs = sum(path.stat().st_size for path in there.iterdir() if there == folder and is_log(path.name))
    room = shutil.disk_usage(there).free + logs
    text = f"up to {config.access_log.total_bytes} in {folder}, where it has room for {format_size(room)}"
    yield Finding("access log", room > int(config.access_log.total_bytes), text)


def _address(address: Address) -> Finding:
    check = f"address {address}"
    try:
        if address.is_unix:
            claim(address.path).release()
        else:
            family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
            with socket.socket(family, socket.SOCK_STREAM) as trial:
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                trial.bind((address.host, address.port))
    except ConfigError as error:
        return Finding(check, False, str(error))
    except OSError as error:
        return Finding(check, False, f"cannot be listened on: {error.strerror or error}; use another one")
    return Finding(check, True, f"may be listened on by uid {os.geteuid()}")


async def _storage(config: Config) -> AsyncIterator[Finding]:
    url = storage_url(config)
    if url is None:
        yield Finding("storage", True, "none is configured")
        yield await through_tiers(config, None)
        return
    try:
        storage = await asyncio.to_thread(open_storage, url)
    except HicacheError as error:
        yield Finding("storage", False, str(error))
        return
    try:
        answer = await _answer(storage)
        yield answer
        if not answer.good:  # what follows would only say the same in other words
            yield await through_tiers(config, None)
            return
        for finding in _disk(url, storage):
            yield finding
        yield await through_tiers(config, storage)
        for finding in await asyncio.to_thread(lambda: [*_namespaces(storage)]):
            yield finding
    finally:
        await asyncio.to_thread(storage.close)


def _disk(url: str, storage: StorageBackend) -> Iterator[Finding]:
    """A capacity that the disk does not have is reached by a full disk, not by evicting what is oldest."""
    parsed, seen = StorageUrl.parse(url), storage.statistics()
    if parsed.scheme != "file" or seen.capacity is None:
        return
    free = shutil.disk_usage(parsed.path).free
    if seen.capacity > seen.bytes_used + free:
        yield Finding(
            "disk",
            False,
            f"the storage's capacity is {format_size(seen.capacity)}, and its disk has room for {format_size(free)} "
            "more: set capacity= lower, or others on this disk will find it full",
        )


async def _answer(storage: StorageBackend) -> Finding:
    """Whether it answers, and what it says of itself: stores open before they are reached, or have read their index."""
    try:
        await asyncio.to_thread(storage.generation, _NAMESPACE.digest)
    except (StorageError, OSError) as error:
        return Finding("storage", False, f"opened, but it does not answer: {error}")
    loop = asyncio.get_running_loop()
    until = loop.time() + _PATIENCE
    while not (seen := storage.statistics()).ready and loop.time() < until:
        await asyncio.sleep(_POLL)
    texts = ["it answers"]
    if seen.objects or not seen.ready:
        texts.append(f"holds {format_size(seen.bytes_used)} in {seen.objects:,} objects")
    if not seen.ready:
        texts.append("as far as its index is read, which goes on")
    if seen.capacity is not None:
        texts.append(f"may hold {format_size(seen.capacity)}")
    return Finding("storage", True, ", ".join(texts))


async def through_tiers(config: Config, storage: StorageBackend | None) -> Finding:
    """A page of random bytes into HOST and STORAGE, then back into a HOST that has never seen it."""
    check = "canary page"
    tokens = np.arange(_NAMESPACE.page_size, dtype=np.uint32)
    page = secrets.token_bytes(_NAMESPACE.geometry.page_bytes(_NAMESPACE.page_size))
    small = msgspec.structs.replace(config, host=msgspec.structs.replace(config.host, bytes=_POOL, pool_bytes=_POOL))
    passed = []
    try:
        for tier in ("HOST", "STORAGE") if storage is not None else ("HOST",):
            text = await _round(small, storage, tokens, page, commits=tier == "HOST")
            if text:
                return Finding(check, False, f"{tier}: {text}")
            passed.append(tier)
    except (HicacheError, OSError) as error:
        return Finding(check, False, str(error))
    return Finding(check, True, f"came back with the same bytes from {' and '.join(passed)}")


async def _round(
    config: Config, storage: StorageBackend | None, tokens: np.ndarray, page: bytes, *, commits: bool
) -> str:
    """One life of a service: commits the page or expects it, and reads it. Returns what went wrong, or nothing."""
    service = SidecarService(config, quotas=Quotas(), storage=storage)
    until = service.loop.time() + _PATIENCE
    try:
        pool = await service.pools.find(Attachment(1, _NAMESPACE), Caller())
        scope = RequestScope(salt=_SALT)
        if commits:
            await asyncio.to_thread(pool.cache.clear, salt=_SALT)  # what a run that was interrupted has left
            request = await pool.bring_up(scope, tokens, until=until)
            if request is None:
                return "the namespace's generation is not known, since storage does not answer"
            (slot,) = request.reserve(1).tolist()
            pool.fill(slot, page)
            request.commit(1, tokens=tokens.astype("<u4").tobytes(), first=0)
            request.close()
            if storage is not None and not await asyncio.to_thread(pool.cache.flush, _PATIENCE):
                return "it was not written in time"
        request = await pool.bring_up(scope, tokens, until=until)
        if request is None or not len(request.usable):
            return "it was written, and is not found"
        same = pool.same_bytes(int(request.usable[0]), page)
        request.close()
        if not commits or storage is None:
            await asyncio.to_thread(pool.cache.clear, salt=_SALT)
        return "" if same else "it came back with OTHER BYTES: do not use this"
    finally:
        await service.close(_PATIENCE)


def _namespaces(storage: StorageBackend) -> Iterator[Finding]:
    if not isinstance(storage, Manifests):
        return
    try:
        documents = [json.loads(document) for document in storage.read_manifests().values()]
    except (StorageError, ValueError) as error:
        yield Finding("namespaces", False, f"their manifests cannot be read: {error}")
        return
    found = list(disagreements(documents))
    yield from found
    if not found:
        yield Finding("namespaces", True, "no two of one model differ")


def disagreements(manifests: list[dict[str, Any]]) -> Iterator[Finding]:
    """Models that storage has under several base namespaces, and in which fields those differ.

    That may be wanted, as after a new revision, so it is told and no trouble.
    """
    bases = {str(m.get("base_digest") or m.get("digest")): m for m in manifests if m.get("model") != _NAMESPACE.model}
    for model, group in groupby(sorted(bases.values(), key=_model), key=_model):
        same_model = list(group)
        fields = sorted({name for manifest in same_model for name in manifest} - _OF_REQUESTS)
        differing = [name for name in fields if len({json.dumps(m.get(name), sort_keys=True) for m in same_model}) > 1]
        if differing:
            text = f"{len(same_model)} of model {model!r:.80} share nothing: they differ in {', '.join(differing)}"
            yield Finding("namespaces", True, f"{text}; give engines that should share the same")


def _model(manifest: dict[str, Any]) -> str:
    return str(manifest.get("model"))
