"""A conversion as a run: AutoBridge of Megatron-Bridge in the job (injob/rank/convert.py), no training."""

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
)
from fp8launch.megatron.arguments import Argument
from fp8launch.recipe import engine_sections
from fp8launch.recipe.load import LoadedRecipe
from fp8launch.recipe.schema import Recipe


class Convert(Engine):
    """Weights from a Hugging Face model to a checkpoint of Megatron, or back."""

    name: ClassVar[str] = "convert"
    description: ClassVar[EngineDescription] = EngineDescription(
        checks="hardware", validators="none", log_dialect="megatron", evidence=()
    )
    own_keys: ClassVar[tuple[str, ...]] = tuple(f"convert.{key}" for key in engine_sections.Convert.model_fields)

    def problems(self, loaded: LoadedRecipe) -> Iterator[Problem]:
        stated = loaded.recipe.convert
        needed = ["direction", "model", "out"] + ["checkpoint"] * (stated.direction == "megatron-to-hf")
        for key in needed:
            if getattr(stated, key) is None:
                fix = "`fp8launch convert` writes the whole section"
                yield Problem("error", "convert-key", f"convert.{key} is not set", loaded.where("convert"), fix)

    def translate(self, loaded: LoadedRecipe) -> EngineArguments:
        stated, sizes = loaded.recipe.convert, loaded.recipe.parallel
        values: dict[str, Any] = {
            "model": stated.model,
            "checkpoint": stated.checkpoint,
            "out": stated.out,
            "dtype": stated.dtype,
            "fingerprint": stated.fingerprint,
            "tp": sizes.tp,
            "pp": sizes.pp,
            "ep": sizes.ep,
        }
        values = {name: value for name, value in values.items() if value is not None}
        direction = Argument("direction", (str(stated.direction),))
        arguments = (direction, *(Argument(name, (f"--{name}={value}",)) for name, value in values.items()))
        return EngineArguments("", {"direction": stated.direction, **values}, arguments, {}, {})

    def layout(self, args: EngineArguments, loaded: LoadedRecipe) -> Layout:
        tp, pp, ep = (args.integer(name, 1) for name in ("tp", "pp", "ep"))
        world = loaded.recipe.resources.world_size
        if world != tp * pp * ep:
            message = f"a conversion with TP {tp}, PP {pp} and EP {ep} takes {tp * pp * ep} processes, not {world}"
            raise error("convert-world", message, loaded.where("resources"), "set resources.gpus_per_node")
        return Layout(world, tp, pp, 1, 1, ep, ep, 1, 1, 1)

    def entry(self, loaded: LoadedRecipe, in_container: bool, check_paths: bool) -> Entry:
        if check_paths:
            _refuse_unknown(str(loaded.recipe.convert.model), loaded)
        return Entry(program="convert.py", title="Megatron-Bridge's AutoBridge")

    def files(self, recipe: Recipe) -> Sequence[NeededFile]:
        stated, found = recipe.convert, []
        if stated.model is not None and PurePath(stated.model).is_absolute():
            found.append(NeededFile(("convert", "model"), str(PurePath(stated.model, "config.json"))))
        if stated.checkpoint is not None:
            found.append(NeededFile(("convert", "checkpoint"), str(PurePath(stated.checkpoint, ".metadata"))))
        return found

    def environment(self, recipe: Recipe, begin: int) -> dict[str, str]:
        return {"FP8LAUNCH_DEVICE": "cpu" if recipe.resources.gpu == "cpu" else "cuda"}

    def attempts(self, args: EngineArguments) -> AttemptArguments | None:
        return None


def _refuse_unknown(model: str, loaded: LoadedRecipe) -> None:
    """Raise UserError for a model on this machine of an architecture that no release of Bridge converts."""
    try:
        stated = json.loads(Path(model, "config.json").read_text(encoding="utf-8"))["architectures"][0]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return  # of the hub, or only visible in the job
    if any(stated in names for names in architectures().values()):
        return
    message = f"Megatron-Bridge converts no {stated}, the architecture of {model}"
    lists = "; ".join(f"{release}: {', '.join(names)}" for release, names in architectures().items())
    fix = f"it converts, by the release that brought them, {lists}"
    raise error("convert-architecture", message, loaded.where("convert", "model"), fix, ANSWER_IS_NO)


@functools.cache
def architectures() -> Mapping[str, Sequence[str]]:
    """Return the architectures of Hugging Face that Megatron-Bridge converts, by the release that brought them.

    From `register_bridge` in the source of 0.4.0, 0.5.0 and 0.6.0 (tools/bridge_architectures.py); the first stands for
    all releases before it.
    """
    found: dict[str, list[str]] = json.loads(Path(__file__).with_name("architectures.json").read_text(encoding="utf-8"))
    return found
