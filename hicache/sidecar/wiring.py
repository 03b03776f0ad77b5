"""What settings are for the parts that they are about."""

from __future__ import annotations

from typing import Any

from hicache.config import Config
from hicache.rpc.service import Limits
from hicache.runtime.accesslog.settings import AccessLog
from hicache.runtime.options import PrefetchTimeout

__all__ = ["access_log_of", "hosted_options", "session_limits"]


def session_limits(config: Config) -> Limits:
    """Bounds of one session."""
    limits, leases = config.limits, config.leases
    return Limits(
        message_bytes=int(limits.message_bytes),
        pages=limits.pages,
        leases=limits.leases,
        requests=limits.requests,
        quarantined_slots=leases.quarantined_slots,
        lease_seconds=leases.seconds,
        chunk_bytes=int(limits.chunk_bytes),
    )


def access_log_of(config: Config) -> AccessLog | None:
    """How the access log is written; None: it is not.

    Raises:
        ConfigError: bounds that do not fit together.
    """
    log = config.access_log
    if not log.folder:
        return None
    return AccessLog(
        folder=log.folder,
        file_bytes=int(log.file_bytes),
        total_bytes=int(log.total_bytes),
        sample=log.sample,
        sample_by=log.sample_by,
        sample_tokens=log.sample_tokens,
        tenants=log.tenants,
        key_file=log.key_file or None,
    )


def hosted_options(config: Config) -> dict[str, Any]:
    """What `open_hosted` is given for every pool, by name."""
    policies, storage = config.policies, config.storage
    return {
        "write_policy": policies.write,
        "eviction": policies.eviction,
        "protected_share": policies.protected_share,
        "prefetch": policies.prefetch,
        "prefetch_timeout": PrefetchTimeout(
            policies.prefetch_base, policies.prefetch_per_1024_tokens, policies.prefetch_cap
        ),
        "prefetch_threshold": policies.prefetch_threshold,
        "prefill_tokens_per_second": policies.prefill_tokens_per_second,
        "reserve": policies.reserve,
        "call_timeout": storage.call_timeout,
        "max_hung": storage.max_hung,
        "read_threads": storage.read_threads,
        "write_threads": storage.write_threads,
    }
