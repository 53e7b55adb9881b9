"""The engine of conversions: the job runs Megatron-Bridge's AutoBridge (injob/convert.py), and nothing is trained."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, ClassVar

from fp8launch.diagnostics import ANSWER_IS_NO, Problem, error
from fp8launch.engines.base import (
    AttemptArguments,
    Engine,
    EngineArguments,
    EngineDescription,
    Entry,
    Layout,
    NeededFile,
    ReadCheckpoint,
)
from fp8launch.injob.regular_files import read_regular
from fp8launch.megatron.arguments import Argument
from fp8launch.plugins.convert.section import Convert as ConvertSection
from fp8launch.plugins.convert.section import convert_of
from fp8launch.recipe.load import LoadedRecipe
from fp8launch.recipe.schema import Recipe, section_of
from fp8launch.recipe.sections import Section

# Hugging Face's keys for the number of experts in a layer.
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_LARGEST_CONFIG = 1 << 20
# Architectures with their own layout or layer pattern for pipeline stages in Bridge.
_OWN_STAGES = ("Sarvam", "NemotronH", "FalconH1", "DeepseekV4")


class ModelJob(Engine):
    """A job on a Hugging Face model or a Megatron checkpoint that trains nothing, with TP x PP x EP processes.

    The recipe's section has the engine's name, and is of the class `section`, with the keys `model` and `checkpoint`.
    """

    noun: ClassVar[str]  # with its article, for messages
    section: ClassVar[type[Section]]
    description: ClassVar[EngineDescription] = EngineDescription(
        checks="hardware", validators="none", log_dialect="megatron", evidence=(), trains=False
    )

    def _stated(self, recipe: Recipe) -> Any:
        return section_of(recipe, self.name, self.section)

    def layout(self, args: EngineArguments, loaded: LoadedRecipe) -> Layout:
        tp, pp, ep = (args.integer(name, 1) for name in ("tp", "pp", "ep"))
        world = loaded.recipe.resources.world_size
        if world != tp * pp * ep:
            message = f"{self.noun} with TP {tp}, PP {pp} and EP {ep} takes {tp * pp * ep} processes, not {world}"
            raise error(f"{self.name}-world", message, loaded.where("resources"), "set resources.gpus_per_node")
        return Layout(world, tp, pp, 1, 1, ep, ep, 1, 1, 1)

    def files(self, recipe: Recipe) -> list[NeededFile]:
        stated, found = self._stated(recipe), []
        if stated.model is not None and PurePath(stated.model).is_absolute():
            found.append(NeededFile((self.name, "model"), str(PurePath(stated.model, "config.json"))))
        if stated.checkpoint is not None:
            found.append(NeededFile((self.name, "checkpoint"), str(PurePath(stated.checkpoint, ".metadata"))))
        return found

    def read_checkpoints(self, loaded: LoadedRecipe) -> Iterator[ReadCheckpoint]:
        checkpoint = self._stated(loaded.recipe).checkpoint
        if checkpoint is not None:
            yield ReadCheckpoint("the checkpoint", checkpoint, loaded.where(self.name, "checkpoint"))

    def environment(self, recipe: Recipe, begin: int) -> dict[str, str]:
        return {"FP8LAUNCH_DEVICE": recipe.resources.device}

    def attempts(self, args: EngineArguments) -> AttemptArguments | None:
        return None


class Convert(ModelJob):
    """Convert a Hugging Face model to a Megatron checkpoint, or back."""

    name: ClassVar[str] = "convert"
    noun: ClassVar[str] = "a conversion"
    section: ClassVar[type[Section]] = ConvertSection
    own_keys: ClassVar[tuple[str, ...]] = tuple(f"convert.{key}" for key in ConvertSection.model_fields)

    def problems(self, loaded: LoadedRecipe) -> Iterator[Problem]:
        stated = convert_of(loaded.recipe)
        needed = ["direction", "model", "out"] + ["checkpoint"] * (stated.direction == "megatron-to-hf")
        for key in needed:
            if getattr(stated, key) is None:
                fix = "`fp8launch convert` writes the whole section"
                yield Problem("error", "convert-key", f"convert.{key} is not set", loaded.where("convert"), fix)

    def translate(self, loaded: LoadedRecipe) -> EngineArguments:
        stated, sizes = convert_of(loaded.recipe), loaded.recipe.parallel
        options = {
            "model": stated.model,
            "checkpoint": stated.checkpoint,
            "out": stated.out,
            "dtype": stated.dtype,
            "fingerprint": stated.fingerprint,
            "tp": sizes.tp,
            "pp": sizes.pp,
            "ep": sizes.ep,
        }
        values: dict[str, Any] = {"direction": stated.direction}
        arguments = [Argument("direction", (str(stated.direction),))]
        for name, value in options.items():
            if value is not None:
                values[name] = value
                arguments.append(Argument(name, (f"--{name}={value}",)))
        return EngineArguments("", values, tuple(arguments), {}, {})

    def entry(self, loaded: LoadedRecipe, in_container: bool, check_paths: bool) -> Entry:
        if check_paths:
            _refuse_unknown(str(convert_of(loaded.recipe).model), loaded)
        return Entry(program="convert.py", title="Megatron-Bridge's AutoBridge", plugin="convert")


def _refuse_unknown(model: str, loaded: LoadedRecipe) -> None:
    """Raise UserError for a local model that no release of Bridge converts, or not with this layout."""
    where = loaded.where("convert", "model")
    path = Path(model, "config.json")
    try:
        config = json.loads(read_regular(path, _LARGEST_CONFIG).decode())
    except OSError:
        return  # of the hub, or only visible in the job
    except (ValueError, RecursionError) as broken:
        raise error("convert-model", f"{path} cannot be read as JSON: {broken}", where, "name a whole model") from None
    names = None
    if isinstance(config, dict):
        names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        message = f"{path} states no list `architectures`, by which Bridge knows a model"
        raise error("convert-model", message, where, 'write it as transformers does: ["LlamaForCausalLM"]')
    if not any(names[0] in known for known in architectures().values()):
        message = f"Megatron-Bridge converts no {names[0]}, the architecture of {model}"
        lists = "; ".join(f"{release}: {', '.join(known)}" for release, known in architectures().items())
        fix = f"it converts, by the release that brought them, {lists}"
        raise error("convert-architecture", message, where, fix, ANSWER_IS_NO)
    _refuse_sizes(path, config, loaded)


def _refuse_sizes(path: Path, config: Mapping[str, object], loaded: LoadedRecipe) -> None:
    """Raise UserError for invalid sizes, and for heads that tensor parallel ranks cannot share evenly."""
    where = loaded.where("convert", "model")
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        size = config.get(name)
        if isinstance(size, str | float | bool) or (isinstance(size, int) and size < 1):
            message = f"'{name}' of {path} must be a whole number above 0, not {json.dumps(size)}"
            raise error("convert-model", message, where, "name a whole model")
    sizes = loaded.recipe.parallel
    for option, size in (("tp", sizes.tp), ("pp", sizes.pp), ("ep", sizes.ep)):
        asked = size or 1
        if why := undivided(config, option, asked):
            allowed = [str(each) for each in range(1, max(asked, 64) + 1) if undivided(config, option, each) is None]
            message = f"--{option} {asked} does not divide {path}: {why}"
            raise error("convert-division", message, loaded.where("parallel", option), f"use {', '.join(allowed)}")


def undivided(config: Mapping[str, object], option: str, ranks: int) -> str | None:
    """Return why a model cannot be divided over `ranks` ranks of --tp, --pp or --ep, or None.

    Each of these ended a conversion by Bridge 0.6.0 with Megatron-Core 0.19.2 in an assertion. `config` is Hugging
    Face's.
    """
    parts = config
    if isinstance(nested := config.get("text_config"), Mapping):
        parts = {**config, **nested}

    def size(*names: str) -> int:
        """Return the first of these keys that holds a number, or 0, which divides over any ranks."""
        for name in names:
            found = parts.get(name)
            if isinstance(found, int) and not isinstance(found, bool):
                return found
        return 0

    experts = size(*_EXPERTS)
    has_experts = any("expert" in name and value for name, value in parts.items())
    if option == "ep":
        if ranks > 1 and not has_experts:
            return "it has no experts"
        return _remainder(experts, ranks, "experts")
    if option == "pp":
        named = config.get("architectures")
        if isinstance(named, list) and str(named[0]).startswith(_OWN_STAGES):
            return None
        return _remainder(size("num_hidden_layers"), ranks, "layers")
    heads = _remainder(size("num_attention_heads"), ranks, "attention heads")
    groups = size("num_key_value_heads")
    if heads is None and groups and groups % ranks and ranks % groups:
        return f"{groups} groups of keys and values are neither a multiple nor a divisor of {ranks}"
    width = size("intermediate_size")
    if has_experts:
        width = 0  # experts are not divided by --tp
    return (
        heads
        or _remainder(size("vocab_size"), ranks, "tokens of the vocabulary")
        or _remainder(width, ranks, "channels of intermediate_size")
    )


def _remainder(size: int, ranks: int, what: str) -> str | None:
    if size % ranks == 0:
        return None
    return f"{size} {what} are not a multiple of {ranks}"


@functools.cache
def architectures() -> Mapping[str, Sequence[str]]:
    """Return the architectures of Hugging Face that Megatron-Bridge converts, by the release that brought them.

    From `register_bridge` in the source of 0.4.0, 0.5.0 and 0.6.0 (tools/bridge_architectures.py); 0.4.0 also
    covers all earlier releases.
    """
    found: dict[str, list[str]] = json.loads(Path(__file__).with_name("architectures.json").read_text(encoding="utf-8"))
    return found
