"""An engine that has nothing of Megatron: the proof that a new one needs only the interface.

Its program counts (`counting_program.py`), takes its own flags, prints iterations in its own format, and
reports what ran in FP8 in the format of fp8launch's module report.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

from fp8launch.diagnostics import error
from fp8launch.engines.base import AttemptArguments, Engine, EngineArguments, EngineDescription, Entry, Layout
from fp8launch.logs import Iteration
from fp8launch.logs.dialects import Dialect
from fp8launch.megatron.arguments import Argument
from fp8launch.recipe.load import LoadedRecipe
from fp8launch.recipe.schema import Recipe

NAME = "counting"
PROGRAM = Path(__file__).with_name("counting_program.py")


def iteration(line: str) -> Iteration | None:
    """Read `{"step": 3, "of": 12, "ms": 5.0, "loss": 0.5, "batch": 8}`."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    values = {"step_time_ms": record["ms"], "loss:lm loss": record["loss"], "global_batch_size": record["batch"]}
    return Iteration(record["step"], record["of"], values)


DIALECT = Dialect(NAME, b'"step":', iteration)


class CountingEngine(Engine):
    name: ClassVar[str] = NAME
    description: ClassVar[EngineDescription] = EngineDescription(
        checks="hardware", validators="none", log_dialect=NAME, evidence=("module report",)
    )

    def translate(self, loaded: LoadedRecipe) -> EngineArguments:
        recipe = loaded.recipe
        steps = recipe.train.iterations
        if steps is None:
            raise error("counting-length", "train.iterations is not set", loaded.where("train"), "set train.iterations")
        values: dict[str, Any] = {"steps": steps}
        attributes: dict[str, Any] = {
            "train_iters": steps,
            "seq_length": recipe.batch.sequence,
            "global_batch_size": recipe.batch.global_,
        }
        if recipe.precision is not None and recipe.precision.quantized:
            values["quantize"] = recipe.precision.recipe
            attributes |= {"fp8": recipe.precision.format, "fp8_recipe": recipe.precision.recipe}
        if recipe.goes_on:
            values["keep-in"] = recipe.checkpoint.dir
            attributes |= {"save": recipe.checkpoint.dir, "save_interval": recipe.checkpoint.interval}
        arguments = tuple(Argument(flag, (f"--{flag}", str(value))) for flag, value in values.items())
        places = {"steps": loaded.where("train", "iterations")}
        return EngineArguments("", values, arguments, attributes, places)

    def layout(self, args: EngineArguments, loaded: LoadedRecipe) -> Layout:
        world, batch = loaded.recipe.resources.world_size, loaded.recipe.batch.global_ or 1
        return Layout(world, 1, 1, 1, 1, 1, world, 1, batch, batch // world)

    def entry(self, loaded: LoadedRecipe, in_container: bool, check_paths: bool) -> Entry:
        return Entry(program=str(PROGRAM), title="the counting program")

    def environment(self, recipe: Recipe, begin: int) -> dict[str, str]:
        return {"COUNTING_REPORT": "1" if recipe.launch.probe else "0"}

    def attempts(self, args: EngineArguments) -> AttemptArguments | None:
        if "save" not in args.attributes:
            return None
        save = str(args.attributes["save"])
        return AttemptArguments(save, args.arguments, (), (Argument("continue-from", ("--continue-from", save)),))
