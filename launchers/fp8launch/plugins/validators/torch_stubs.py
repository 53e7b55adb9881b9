"""Stand-ins for torch, numpy and triton, good enough to import Megatron's argument and configuration code.

Megatron's parser and validators never compute with tensors: they need torch's names (dtypes, decorators, base
classes) and a few plain answers ("is CUDA available"). With these stand-ins the 2 MB wheel of megatron-core is all
that is needed to run them; no torch, no GPU. The file imports nothing of ours and runs on Python 3.10 and later, so
that it can be loaded by its path in an otherwise bare interpreter.

A stand-in has any name, which keeps this file small but could make it wrong: a new check of Megatron may really
depend on torch. So ANSWERS holds everything that validators are known to use, which the test suite compares with real
torch and numpy, and `asked` records every other stand-in whose value took part in a computation.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import inspect
import sys
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any

PACKAGES = ("torch", "numpy", "triton")
VERSIONS = {"torch": "2.13.0", "numpy": "2.3.0", "triton": "3.7.0"}


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# Real sub-packages, imported by name as well as reached by attribute; both must give the same module.
_SUBMODULES = frozenset(
    f"torch.{name}"
    for name in _names("autograd backends cuda distributed functional jit library nn optim utils version _C")
)
_DTYPES = _names(
    "bfloat16 bool complex64 float16 float32 float64 float8_e4m3fn float8_e5m2 int16 int32 int64 int8 uint8"
)
_DTYPE_ALIASES = {
    "half": "float16",
    "float": "float32",
    "double": "float64",
    "int": "int32",
    "long": "int64",
    "short": "int16",
}
_DECORATORS = frozenset(
    _names(
        "allow_in_graph assume_constant_result autotune compile custom_bwd custom_fwd custom_op disable export "
        "heuristics ignore inference_mode jit no_grad once_differentiable script"
    )
)
_ALWAYS_FALSE = frozenset({"is_available", "is_initialized"})


def _prod(numbers: typing.Iterable[Any]) -> Any:
    """numpy.prod of a list of numbers, or of lists of them."""
    product: Any = 1
    for number in numbers:
        product *= _prod(number) if isinstance(number, (list, tuple)) else number
    return product


def _true(*args: object, **kwargs: object) -> bool:
    return True


def _nothing(*args: object, **kwargs: object) -> None:
    """Change a setting of torch, which no validator reads."""


class Device:
    """A torch.device: a type such as cuda, and a number or None."""

    def __init__(self, kind: str, index: int | None = None) -> None:
        name, colon, number = kind.partition(":")
        self.type = name
        self.index = int(number) if colon else index

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and (self.type, self.index) == (other.type, other.index)

    def __hash__(self) -> int:
        return hash((self.type, self.index))

    def __str__(self) -> str:
        return self.type if self.index is None else f"{self.type}:{self.index}"


# Values that validators use, by full name: here a stand-in must agree with the real package.
ANSWERS: dict[str, Any] = {
    "asyncio.iscoroutinefunction": inspect.iscoroutinefunction,  # for unittest.mock, which Megatron imports
    "numpy.prod": _prod,
    "torch.device": Device,
    "torch.is_grad_enabled": _true,
    "torch.use_deterministic_algorithms": _nothing,
}
# Names of stand-ins that were called, compared or computed with and are not among ANSWERS, in order.
asked: list[str] = []


class DType:
    """A torch dtype: an identity and a name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"torch.{self.name}"


_DTYPE_BY_NAME = {name: DType(name) for name in _DTYPES}
_DTYPE_BY_NAME |= {alias: _DTYPE_BY_NAME[name] for alias, name in _DTYPE_ALIASES.items()}


class _AnythingType(type(typing.Protocol)):  # type: ignore[misc]
    """Metaclass of `Anything`: its classes can be subscripted, joined with `|`, compared and computed with.

    It derives from Protocol's metaclass because Megatron has classes that inherit from both torch's and Protocol.
    Comparisons say "new enough", so that a check for a minimum version passes.
    """

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return _anything(f"{cls.__qualname__}.{name}")

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        asked.append(cls.__qualname__)
        return super().__call__(*args, **kwargs)

    def __or__(cls, other: object) -> Any:
        return cls

    __ror__ = __or__

    def __iter__(cls) -> Iterator[Any]:
        asked.append(cls.__qualname__)
        return iter(())

    def __getitem__(cls, key: object) -> Any:
        return cls

    def __lt__(cls, other: object) -> bool:
        asked.append(cls.__qualname__)
        return False

    __le__ = __lt__

    def __gt__(cls, other: object) -> bool:
        asked.append(cls.__qualname__)
        return True

    __ge__ = __gt__

    def __bool__(cls) -> bool:
        asked.append(cls.__qualname__)
        return True

    def __index__(cls) -> int:
        asked.append(cls.__qualname__)
        return 1

    def __mul__(cls, other: object) -> int:
        asked.append(cls.__qualname__)
        return 1

    __rmul__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__
    __floordiv__ = __rfloordiv__ = __truediv__ = __rtruediv__ = __mul__


class Anything(metaclass=_AnythingType):
    """Can be inherited from, called, used as a decorator or a context manager; has every public attribute."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __init_subclass__(cls, **kwargs: object) -> None:
        pass

    def __class_getitem__(cls, key: object) -> Any:
        return cls

    def __call__(self, *args: Any, **kwargs: object) -> Any:
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return _decorator(*args)
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _anything(f"{type(self).__qualname__}.{name}")

    def __eq__(self, other: object) -> bool:
        asked.append(type(self).__qualname__)
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __bool__(self) -> bool:
        asked.append(type(self).__qualname__)
        return True

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def __iter__(self) -> Iterator[Any]:
        return iter(())


def _anything(full_name: str) -> Any:
    return _AnythingType(full_name.rpartition(".")[2], (Anything,), {"__qualname__": full_name})


def _decorator(*args: Any, **kwargs: object) -> Any:
    """Return the decorated function unchanged, whether or not the decorator takes arguments."""
    if len(args) == 1 and callable(args[0]) and not kwargs:
        return args[0]
    return lambda function: function


def _false(*args: object, **kwargs: object) -> bool:
    return False


class _Module(types.ModuleType):
    """A module that has every attribute; what Megatron looks at closely is answered plainly."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__version__":
            raise AttributeError(name)
        value = self._answer(name)
        setattr(self, name, value)
        return value

    def _answer(self, name: str) -> Any:
        package = self.__name__.partition(".")[0]
        full_name = f"{self.__name__}.{name}"
        if name == "__version__" and package in VERSIONS:
            return VERSIONS[package]
        if self.__name__ == "torch" and name in _DTYPE_BY_NAME:
            return _DTYPE_BY_NAME[name]
        if name == "dtype":
            return DType
        if name == "CUDA_HOME":
            return None
        if name in _ALWAYS_FALSE:
            return _false
        if full_name in _SUBMODULES or full_name in sys.modules:
            return importlib.import_module(full_name)
        if full_name in ANSWERS:
            return ANSWERS[full_name]
        if name in _DECORATORS:
            return _decorator
        return _anything(full_name)


class _Finder:
    """Serves every module of the packages it stands in for, at any depth. A package may be part of another."""

    def __init__(self, packages: Sequence[str]) -> None:
        self.packages = frozenset(packages)
        self.inside = tuple(f"{package}." for package in packages)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname in self.packages or fullname.startswith(self.inside):
            loader: Any = self
            return importlib.machinery.ModuleSpec(fullname, loader, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _Module(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def install(packages: Sequence[str] = PACKAGES) -> None:
    """Put the stand-ins in front of any real torch, numpy and triton of this interpreter, or of other packages.

    Raises RuntimeError when one of them is already imported for real.
    """
    loaded = [name for name in packages if name in sys.modules and not isinstance(sys.modules[name], _Module)]
    if loaded:
        raise RuntimeError(f"already imported for real: {', '.join(loaded)}")
    if "torch" in packages:
        sys.meta_path.insert(0, _WithoutOthers())
        sys.modules["importlib.metadata"] = _empty_metadata()
    sys.meta_path.insert(0, _Finder(packages))


class _WithoutOthers:
    """Hides every package but Megatron, the standard library and the few that Megatron's arguments need.

    A verdict must not depend on what else is installed here. Megatron guards the imports of its optional packages;
    those compiled against the real torch would look for libc10.so, and others take time to import.
    """

    needed = frozenset(("megatron", "packaging", "yaml", "_yaml", "typing_extensions"))

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        package = name.partition(".")[0]
        known = package in self.needed or package in sys.stdlib_module_names
        if not known and name not in sys.modules:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def _empty_metadata() -> types.ModuleType:
    """`importlib.metadata` where nothing is installed: what `_WithoutOthers` hides has no version either."""

    class PackageNotFoundError(ModuleNotFoundError):
        pass

    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    module: Any = types.ModuleType("importlib.metadata")
    module.PackageNotFoundError, module.version = PackageNotFoundError, version
    found: types.ModuleType = module
    return found


def modernize_typing() -> None:
    """Give an older interpreter the names that Megatron imports from `typing` and that came with Python 3.12.

    megatron-core asks for 3.12 since 0.17; `typing.override` is the only newer name on the way to its arguments.
    It marks a method and does nothing else.
    """
    if not hasattr(typing, "override"):
        typing.__dict__["override"] = _decorator
