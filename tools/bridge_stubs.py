"""Import Megatron-Bridge's recipes on a machine without a GPU.

Its recipe modules import the whole package, among it multimodal data loaders and compiled kernels that no text recipe
uses. `load` imports a module and replaces each package that is not installed by empty classes; torch, Megatron-Core and
transformers must be the real ones. `HubModels` stands in for Bridge's reader of Hugging Face models: it records which
model a recipe reads and returns an empty model configuration, in which the recipe's own settings are then found.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import importlib
import importlib.abc
import importlib.machinery
import re
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

_REAL = {"megatron", "torch", "transformers"}


class _EmptyType(abc.ABCMeta):
    """The type of a class whose attributes are again empty classes."""

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
        # A decorator gets the function or class that it decorates back.
        if len(args) == 1 and not kwargs and callable(args[0]):
            return args[0]
        return object.__new__(cls)

    members = {
        "__new__": new,
        "__init__": lambda self, *args, **kwargs: None,
        "__call__": lambda self, *args, **kwargs: args[0] if args else None,
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


class _MissingPackages(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    names: ClassVar[set[str]] = set()

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        if name.split(".")[0] in self.names or name.startswith("megatron.energon"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _EmptyModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


def install() -> None:
    """Let missing packages be replaced from now on."""
    from fp8launch.injob.rank.compat import python311, triton_stub

    python311.install()
    triton_stub.install(("megatron.", "transformer_engine."), launches_do_nothing=True)
    sys.meta_path.append(_MissingPackages())
    transformers = importlib.import_module("transformers")

    # Newer releases of transformers have models of their own under names that Bridge registers.
    for name in ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoTokenizer", "AutoProcessor"):
        known = getattr(transformers, name)
        known.register = functools.partial(_register_anew, known.register)


def _register_anew(register: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    register(*args, **{**kwargs, "exist_ok": True})


def load(name: str) -> types.ModuleType:
    """Import a module, replacing one missing package after the other."""
    while True:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as missing:
            package = (missing.name or "").split(".")[0]
            if not package or package in _REAL or package in _MissingPackages.names:
                raise
            _MissingPackages.names.add(package)
            for loaded in list(sys.modules):
                if loaded.startswith("megatron.bridge") or loaded.split(".")[0] == package:
                    del sys.modules[loaded]


def settled(read: Callable[[], Any]) -> Any:
    """Call `read` until it replaces no further package: what it returns then comes from one set of modules."""
    while True:
        before = set(_MissingPackages.names)
        result = read()
        if before == _MissingPackages.names:
            return result


def answer_as(gpu: str) -> None:
    """Let torch describe the GPU that a recipe is for, which recipes of 0.4 and 0.5 ask for their dispatcher."""
    import torch

    capability = {"a100": (8, 0), "h100": (9, 0), "b300": (10, 3), "gb300": (10, 3)}.get(gpu, (10, 0))
    properties = types.SimpleNamespace(major=capability[0], minor=capability[1], name=f"NVIDIA {gpu.upper()}")
    torch.cuda.get_device_properties = lambda *device: properties
    torch.cuda.get_device_capability = lambda *device: capability


class RecordedModel:
    """A model configuration that records what a recipe sets; the rest has the defaults of Bridge's GPT provider."""

    _MIXTURE_OF_EXPERTS = re.compile(r"-A\d+B|DeepSeek-V|gpt-oss|Kimi|GLM-5|Mixtral|Nemotron-3", re.IGNORECASE)

    def __init__(self, hub_id: str) -> None:
        self.__dict__["hub_id"] = hub_id
        # What the hub would have said, as far as recipes look at it.
        mixture = bool(self._MIXTURE_OF_EXPERTS.search(hub_id))
        self.__dict__["of_the_hub"] = {"vocab_size": 1, "num_moe_experts": 1 if mixture else None}

    def settings(self) -> dict[str, Any]:
        """Return what the recipe set."""
        return {name: value for name, value in vars(self).items() if name not in ("hub_id", "of_the_hub")}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        provider = sys.modules["megatron.bridge.models.gpt_provider"].GPTModelProvider
        fields = {field.name: field for field in dataclasses.fields(provider)}
        if name in self.of_the_hub:
            return self.of_the_hub[name]
        if name not in fields or fields[name].default is dataclasses.MISSING:
            return None
        return fields[name].default

    def finalize(self) -> None:
        """Do nothing: a recipe is read, not run."""


class HubModels:
    """In the place of `AutoBridge`: remembers the models that recipes read from the Hugging Face hub."""

    read: ClassVar[list[str]] = []

    def __init__(self, hub_id: str) -> None:
        self.hub_id = hub_id

    @classmethod
    def from_hf_pretrained(cls, path: str, **kwargs: Any) -> HubModels:
        cls.read.append(str(path))
        return cls(str(path))

    def to_megatron_provider(self, load_weights: bool = True, **kwargs: Any) -> RecordedModel:
        return RecordedModel(self.hub_id)
