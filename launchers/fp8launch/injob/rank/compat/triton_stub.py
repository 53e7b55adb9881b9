"""Make Megatron importable if triton is not installed.

torch for CPUs comes without triton. Megatron 0.18 and 0.19 nevertheless import it unconditionally in a module that
every model needs, which has the GPU kernels for paged MoE stashing. Only this module gets a stub, whose kernels refuse
to run. If the stub were visible to all modules, torch and the rest of Megatron would assume that triton is installed.
"""

from __future__ import annotations

import builtins
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from typing import Any

# The module's name in 0.19 and in 0.18.
MODULES = ("megatron.core.transformer.moe.ops.paged_stash", "megatron.core.transformer.moe.paged_stash")


class _Kernel:
    """Replaces a function decorated with `@triton.jit`. Launching it raises an error or does nothing."""

    launches_do_nothing = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self  # a decorator with arguments

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Kernel()

    def __getitem__(self, grid: Any) -> Any:
        if _Kernel.launches_do_nothing:
            return lambda *args, **kwargs: None
        raise RuntimeError("a triton kernel was launched, but triton is not installed (no GPU)")


class _Triton(types.ModuleType):
    """The parts of triton and triton.language that decorators and annotations need at import time."""

    __version__ = "3.5.0"

    @staticmethod
    def cdiv(dividend: int, divisor: int) -> int:
        return -(-dividend // divisor)

    @staticmethod
    def next_power_of_2(number: int) -> int:
        return 1 << (int(number) - 1).bit_length()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Triton(name) if name == "language" else _Kernel()


def _import(name: str, names: Any = None, local: Any = None, wanted: Sequence[str] = (), level: int = 0) -> Any:
    # `from .triton.x import y` refers to a folder of the package itself.
    if level == 0 and name.split(".")[0] == "triton":
        return _Triton("triton")
    return builtins.__import__(name, names, local, wanted, level)


class _Loader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module: types.ModuleType) -> None:
        # Give this module its own builtins, so that only its import statements see the stub.
        module.__dict__["__builtins__"] = {**vars(builtins), "__import__": _import}
        super().exec_module(module)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, packages: tuple[str, ...]) -> None:
        self.packages = packages

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in MODULES and not name.startswith(self.packages or "/"):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            return spec
        return importlib.util.spec_from_file_location(
            name,
            spec.origin,
            loader=_Loader(name, spec.origin),
            submodule_search_locations=spec.submodule_search_locations,
        )


def install(packages: tuple[str, ...] = (), launches_do_nothing: bool = False) -> None:
    """Provide the stub, unless triton is installed.

    Modules whose names start with one of `packages` see it as well. With `launches_do_nothing`, kernels leave their
    outputs as allocated, for callers that only look at shapes.
    """
    _Kernel.launches_do_nothing = launches_do_nothing
    if importlib.util.find_spec("triton") is None:
        sys.meta_path.insert(0, _Finder(packages))
