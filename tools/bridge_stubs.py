"""Import Megatron-Bridge's recipes on a machine without a GPU.

Its recipe modules import the whole package, among it multimodal data loaders and compiled kernels that no text recipe
uses. `load` imports a module and replaces each package that is not installed by empty classes; torch, Megatron-Core and
transformers must be the real ones. `HubModels` stands in for Bridge's reader of Hugging Face models: it records which
model a recipe reads and returns an empty model configuration, in which the recipe's own settings are then found.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import re
import sys
import types
from collections.abc import Callable
from typing import Any, ClassVar

from fp8launch.plugins.bridge.injob import absent_packages

_REAL = {"megatron", "torch", "transformers"}


def install() -> None:
    """Let missing packages be replaced from now on."""
    from fp8launch.injob.rank.compat import python311, triton_stub

    python311.install()
    triton_stub.install(("megatron.", "transformer_engine."), launches_do_nothing=True)
    absent_packages.install()
    transformers = importlib.import_module("transformers")

    # Newer releases of transformers have models of their own under names that Bridge registers.
    for name in ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoTokenizer", "AutoProcessor"):
        known = getattr(transformers, name)
        known.register = functools.partial(_register_anew, known.register)


def _register_anew(register: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    register(*args, **{**kwargs, "exist_ok": True})


def load(name: str) -> types.ModuleType:
    """Import a module, replacing one missing package after the other."""
    return absent_packages.load(name, _REAL)


def settled(read: Callable[[], Any]) -> Any:
    """Call `read` until it replaces no further package: what it returns then comes from one set of modules."""
    while True:
        before = absent_packages.replaced()
        result = read()
        if before == absent_packages.replaced():
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

    def to_text_provider(self) -> RecordedModel:
        """Return the part of a model for images and text that reads the text."""
        return self


class HubModels:
    """In the place of `AutoBridge`: remembers the models that recipes read from the Hugging Face hub."""

    read: ClassVar[list[str]] = []

    def __init__(self, hub_id: str) -> None:
        self.hub_id = hub_id

    @classmethod
    def from_hf_pretrained(cls, path: str, **kwargs: Any) -> HubModels:
        cls.read.append(str(path))
        return cls(str(path))

    @classmethod
    def from_hf_config(cls, config: Any) -> HubModels:
        return cls(config.hub_id)

    @classmethod
    def config(cls, path: str, **kwargs: Any) -> Any:
        """Stand in for the configuration of a model with images and text, whose text part a recipe trains."""
        cls.read.append(str(path))
        return types.SimpleNamespace(text_config=types.SimpleNamespace(hub_id=str(path)))

    def to_megatron_provider(self, load_weights: bool = True, **kwargs: Any) -> RecordedModel:
        return RecordedModel(self.hub_id)


def replace_hub() -> None:
    """Let recipes read models from `HubModels` instead of the Hugging Face hub."""
    bridge: Any = load("megatron.bridge.models.conversion.auto_bridge").AutoBridge
    bridge.from_hf_pretrained = HubModels.from_hf_pretrained
    bridge.from_hf_config = HubModels.from_hf_config
    transformers = importlib.import_module("transformers")
    transformers.AutoConfig.from_pretrained = HubModels.config
    # Gemma 3's recipes for fine-tuning ask whether the tokenizer has more tokens than the model.
    transformers.AutoTokenizer.from_pretrained = lambda path, **kwargs: ()
    try:
        flux: Any = load("megatron.bridge.diffusion.conversion.flux.flux_bridge")
    except ModuleNotFoundError:
        return  # before 0.6
    flux.FluxBridge.provider_bridge = lambda self, model: _flux(flux, model)


def _flux(module: Any, model: Any) -> Any:
    HubModels.read.append(model.model_name_or_path)
    return module.FluxProvider()
