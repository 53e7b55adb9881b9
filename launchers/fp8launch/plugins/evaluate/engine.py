"""The engine of evaluations: the job runs lm-evaluation-harness (injob/evaluate.py), and nothing is trained."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from fp8launch.diagnostics import Problem
from fp8launch.engines.base import (
    AttemptArguments,
    EngineArguments,
    Entry,
    NeededFile,
)
from fp8launch.megatron.arguments import Argument
from fp8launch.plugins.convert.engine import ModelJob
from fp8launch.plugins.evaluate.section import FOLLOWER_STATE, evaluate_of
from fp8launch.plugins.evaluate.section import Evaluate as EvaluateSection
from fp8launch.recipe.load import LoadedRecipe
from fp8launch.recipe.schema import Recipe
from fp8launch.recipe.sections import Section


class Evaluate(ModelJob):
    """Evaluate a Hugging Face model or a Megatron checkpoint."""

    name: ClassVar[str] = "evaluate"
    noun: ClassVar[str] = "an evaluation"
    section: ClassVar[type[Section]] = EvaluateSection
    own_keys: ClassVar[tuple[str, ...]] = tuple(f"evaluate.{key}" for key in EvaluateSection.model_fields)
    packages: ClassVar[dict[str, str]] = {"torch": "torch", "lm_eval": "lm-eval", "transformers": "transformers"}

    def problems(self, loaded: LoadedRecipe) -> Iterator[Problem]:
        stated = evaluate_of(loaded.recipe)
        megatron = stated.backend == "megatron"
        follows = stated.every is not None
        for key in ["model", "tasks"] + ["checkpoint"] * megatron + ["run", "checkpoints", "interval"] * follows:
            if not getattr(stated, key):
                fix = "`fp8launch evaluate` writes the whole section"
                yield Problem("error", "evaluate-key", f"evaluate.{key} is not set", loaded.where("evaluate"), fix)
        if megatron and loaded.recipe.resources.device == "cpu":
            message = "evaluate.backend is megatron, which needs CUDA, but resources.gpu is cpu"
            fix = "use --engine hf (evaluate.backend: hf), or a GPU"
            yield Problem("error", "evaluate-backend", message, loaded.where("evaluate", "backend"), fix)

    def translate(self, loaded: LoadedRecipe) -> EngineArguments:
        stated, sizes = evaluate_of(loaded.recipe), loaded.recipe.parallel
        values: dict[str, Any] = {name: value for name, value in vars(stated).items() if value not in (None, False)}
        values["tasks"] = ",".join(stated.tasks or ())
        values |= {"tp": sizes.tp or 1, "pp": sizes.pp or 1, "ep": sizes.ep or 1}
        arguments = []
        for name, value in values.items():
            word = f"--{name}" if value is True else f"--{name}={value}"
            arguments.append(Argument(name, (word,)))
        return EngineArguments("", values, tuple(arguments), {}, {})

    def entry(self, loaded: LoadedRecipe, in_container: bool, check_paths: bool) -> Entry:
        program = "evaluate.py" if evaluate_of(loaded.recipe).every is None else "follow.py"
        return Entry(program=program, title="lm-evaluation-harness", plugin="evaluate")

    def files(self, recipe: Recipe) -> list[NeededFile]:
        found, folder = super().files(recipe), evaluate_of(recipe).task_folder
        if folder is not None:
            found.append(NeededFile(("evaluate", "task_folder"), folder, kind="folder"))
        return found

    def attempts(self, args: EngineArguments) -> AttemptArguments | None:
        if "every" not in args.values:
            return None
        # Each attempt finds the remaining checkpoints in the followed run's folder, so all have the same arguments.
        return AttemptArguments(FOLLOWER_STATE, args.arguments, (), ())
