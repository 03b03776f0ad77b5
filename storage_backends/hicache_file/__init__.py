"""Storage in files: one root folder, for one process or several."""

from .backend import FileBackend
from .filesystem import FileSystem

__all__ = ["FileBackend", "FileSystem"]
