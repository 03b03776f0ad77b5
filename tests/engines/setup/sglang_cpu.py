"""Lets SGLang's cache modules load on a machine without a GPU: import this before anything of SGLang.

Some of what they import wants torchvision, whose builds do not load beside the CPU's torch. Nothing of it is needed to
keep pages, so here every name of it is there and is an empty class.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence

import transformers.utils.import_utils  # noqa: F401  asks now whether torchvision is there, and is told that it is not


class _Empty(type):
    """A class that has every attribute, can be called with anything, and used as a base or a decorator."""

    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Empty(name, (), {})

    def __call__(cls, *arguments: object, **named: object) -> object:
        if cls.__bases__ != (object,):
            return super().__call__(*arguments, **named)
        decorated = arguments[0] if len(arguments) == 1 and not named else None
        return decorated if callable(decorated) else cls


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Empty(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        ours = fullname.partition(".")[0] == "torchvision"
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if ours else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing: names come to be when they are asked for."""


sys.meta_path.append(_Finder())
