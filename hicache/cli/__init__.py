"""The `hicache` command."""

from hicache.cli.main import main

__all__ = ["main"]
