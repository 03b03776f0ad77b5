"""What tenants have in storage when a service starts: their quotas begin with the truth."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Collection

from hicache.core.identity import secret_digest
from hicache.errors import StorageError
from hicache.storage.base import Listing, Manifests, StorageBackend

__all__ = ["stored_by_tenant"]

_log = logging.getLogger("hicache.sidecar")


def stored_by_tenant(storage: StorageBackend, tenants: Collection[str]) -> Counter[str]:
    """Bytes of each of these tenants' objects. Blocks, for as long as listing the store takes.

    Namespaces tell by their manifests whose they are. Where the store cannot list, or fails meanwhile, what was found
    so far is returned, and a line is logged.
    """
    found: Counter[str] = Counter()
    if not tenants:
        return found
    if not isinstance(storage, Listing) or not isinstance(storage, Manifests):
        _log.warning("this storage cannot be listed: quotas of storage count what is put from now on")
        return found
    try:
        owners = {
            digest: tenant
            for digest, document in storage.read_manifests().items()
            if (tenant := _owner(document, tenants)) is not None
        }
        for entry in storage.list_objects():
            if entry.key is not None and entry.key.namespace in owners:
                found[owners[entry.key.namespace]] += entry.size
    except StorageError as error:
        _log.warning("what tenants have in storage could not be counted to the end: %s", error)
    return found


def _owner(document: bytes, tenants: Collection[str]) -> str | None:
    try:
        manifest = json.loads(document)
        base, digest = bytes.fromhex(manifest["base_digest"]), manifest["tenant_digest"]
    except (ValueError, KeyError, TypeError):
        return None  # another program's, or of a namespace without a tenant
    return next((tenant for tenant in tenants if secret_digest(base, "tenant", tenant) == digest), None)
