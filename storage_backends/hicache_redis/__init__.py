"""Storage in Redis or Valkey: one server, Sentinel or Cluster."""

from .backend import RedisBackend
from .settings import RedisSettings

__all__ = ["RedisBackend", "RedisSettings"]
