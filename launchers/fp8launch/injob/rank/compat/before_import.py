"""Call a function right before a program imports certain modules."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType


def call(act: Callable[[], None], *names: str) -> None:
    """Call `act` once before any of these top-level modules is imported, or now if one already is."""
    if any(name in sys.modules for name in names):
        act()
    else:
        sys.meta_path.insert(0, _Before(act, names))


class _Before(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """A finder that calls the function and then lets the other finders import the module."""

    def __init__(self, act: Callable[[], None], names: Sequence[str]) -> None:
        self._act, self._names = act, names

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name not in self._names:
            return None
        return importlib.machinery.ModuleSpec(name, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        with contextlib.suppress(ValueError):  # another thread may import the module at the same time
            sys.meta_path.remove(self)
            self._act()
        module = importlib.import_module(spec.name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # restore what the import system replaced
