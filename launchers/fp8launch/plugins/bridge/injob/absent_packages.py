"""Stand-ins for packages that Megatron-Bridge imports for models other than text, where they are not installed.

`megatron.bridge` imports all of its models and data loaders at once, including those for images, speech and diffusion,
and tools for distillation. NVIDIA's images have the packages that these need, other Python environments rarely do.
Recipes for text use none of them, so each missing package is replaced by empty classes.
"""

from __future__ import annotations

import abc
import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Collection, Sequence
from typing import Any, ClassVar

# Never replaced, because nothing trains without them.
NEEDED = frozenset(("megatron", "torch", "transformers", "omegaconf", "hydra", "fp8launch"))
# Functions that may return None for "nothing to do"; Megatron accepts no other answer from a stand-in.
_NOTHING_TO_SAY = frozenset(("get_tensor_shapes_adjust_fn_for_distillation",))
# Packages of `scripts/performance` that import Megatron-Bridge: they hold its recipes up to release 0.5.
_OF_SCRIPTS = ("configs", "utils")
# A package in the namespace of Megatron.
_ENERGON = "megatron.energon"


class _EmptyType(abc.ABCMeta):
    """The type of a class whose attributes are empty classes, too."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _empty_class(name)
        setattr(cls, name, value)
        return value

    def __or__(cls, other: object) -> Any:
        return cls

    def __ror__(cls, other: object) -> Any:
        return cls


def _empty_class(name: str) -> Any:
    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        # As a decorator it returns the decorated function or class.
        if len(args) == 1 and not kwargs and callable(args[0]):
            return args[0]
        return None if name in _NOTHING_TO_SAY else object.__new__(cls)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args:
            return args[0]
        return None

    members = {
        "__new__": new,
        "__init__": lambda self, *args, **kwargs: None,
        "__call__": call,
        "__class_getitem__": classmethod(lambda cls, item: cls),
        "__init_subclass__": classmethod(lambda cls, **kwargs: None),
    }
    return _EmptyType(name, (), members)


class _EmptyModule(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012  (an instance variable for type checkers)
    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _empty_class(name)
        setattr(self, name, value)
        return value


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the missing packages, after every other finder."""

    names: ClassVar[set[str]] = set()

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        if name.split(".")[0] in self.names or name.startswith(_ENERGON):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _EmptyModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


def install() -> None:
    """Let missing packages be replaced from now on. A second call does nothing."""
    if not any(isinstance(finder, _Absent) for finder in sys.meta_path):
        sys.meta_path.append(_Absent())


def load(name: str, needed: Collection[str] = NEEDED) -> types.ModuleType:
    """Import a module. Each missing package is replaced, except those in `needed`."""
    while True:
        before = set(sys.modules)
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as missing:
            package = (missing.name or "").split(".")[0]
            if not package or package in needed or package in _Absent.names:
                raise
            _Absent.names.add(package)
            _forget(package, before)


def _forget(package: str, before: Collection[str]) -> None:
    """Remove what a failed import left in `sys.modules`, so that the next import starts afresh.

    Python removes a package whose import fails, but not its submodules.
    """
    for name in list(sys.modules):
        above = name.rpartition(".")[0]
        orphan = name not in before and above and above not in sys.modules
        if orphan or name.startswith("megatron.bridge") or name.split(".")[0] in (package, *_OF_SCRIPTS):
            del sys.modules[name]


def load_together(names: Sequence[str]) -> list[types.ModuleType]:
    """Import modules that use each other, again from the start after each replaced package."""
    while True:
        before = replaced()
        modules = list(map(load, names))
        if replaced() == before:
            return modules


def replaced() -> frozenset[str]:
    """Return the packages that have been replaced so far."""
    return frozenset(_Absent.names)
