"""Megatron-LM through fp8launch's own GPT entry (injob/rank/pretrain.py)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from fp8launch.engines.base import (
    AttemptArguments,
    Engine,
    EngineArguments,
    EngineDescription,
    Entry,
    EntryTraits,
    Layout,
    Setting,
)
from fp8launch.engines.megatron_lm import translate
from fp8launch.engines.megatron_lm.layout import layout
from fp8launch.megatron.argv import Argument
from fp8launch.recipe.load import LoadedRecipe
from fp8launch.recipe.schema import Recipe

# They prepare a first start. On a resume they would reset the iteration, or drop the optimizer's state.
FIRST_START = frozenset({"load", "pretrained_checkpoint", "finetune", "no_load_optim", "no_load_rng", "ckpt_step"})
# Slurm sends SIGTERM before it ends or preempts a job: with this, Megatron then saves and leaves.
LEAVE_ON_SIGTERM = Argument("exit_signal_handler", ("--exit-signal-handler",))

# NOT_HERE of injob/rank/pretrain.py, which imports torch, so this is a copy; a test compares the two.
NOT_IN_ENTRY = (
    "sft",
    "fim_data",
    "hybrid_context_parallel",
    "dataloader_inter_document_masking",
    "perform_rl_step",
    "hybrid_layer_pattern",
    "yaml_cfg",
)


class MegatronLM(Engine):
    """Everything that Megatron-LM's command line says, trained by our own entry."""

    name: ClassVar[str] = "megatron_lm"
    description: ClassVar[EngineDescription] = EngineDescription(
        checks="megatron_lm",
        validators="megatron_lm",
        log_dialect="megatron",
        evidence=("module report", "kernel profile", "tensor statistics"),
        rehearsal=True,
    )

    def translate(self, loaded: LoadedRecipe) -> EngineArguments:
        return translate.translate(loaded)

    def settings(self, recipe: Recipe) -> Iterable[Setting]:
        return translate.flag_settings(recipe)

    def defaults(self, args: EngineArguments) -> Mapping[str, Any]:
        return translate.defaults(args.version)

    def layout(self, args: EngineArguments, loaded: LoadedRecipe) -> Layout:
        return layout(args, loaded)

    def entry(self, loaded: LoadedRecipe, in_container: bool, check_paths: bool) -> Entry:
        return Entry()

    def traits(self, recipe: Recipe) -> EntryTraits:
        return EntryTraits(
            # `defaults` of injob/rank/compat/python311.py
            fills_in={"eval_interval": 1000},
            refuses=NOT_IN_ENTRY,
            sets_config=True,
        )

    def environment(self, recipe: Recipe, begin: int) -> dict[str, str]:
        found = {"FP8LAUNCH_DEVICE": "cpu" if recipe.resources.gpu == "cpu" else "cuda"}
        if not recipe.launch.probe:
            found["FP8LAUNCH_PROBE"] = "0"
        if recipe.launch.profile_iteration:
            found["FP8LAUNCH_PROFILE_ITERATION"] = str(begin + recipe.launch.profile_iteration)
        if recipe.launch.tensor_stats:
            found["FP8LAUNCH_TENSOR_STATS"] = str(recipe.launch.tensor_stats)
        if recipe.launch.config:
            found["FP8LAUNCH_CONFIG"] = json.dumps(recipe.launch.config)
        return found

    def attempts(self, args: EngineArguments) -> AttemptArguments | None:
        save = args.values.get("save")
        if not isinstance(save, str):
            return None
        always = [argument for argument in args.arguments if argument.flag not in FIRST_START]
        always += args.own
        if LEAVE_ON_SIGTERM.flag not in args.values:
            always.append(LEAVE_ON_SIGTERM)
        return AttemptArguments(
            save,
            always=tuple(always),
            first_start=tuple(argument for argument in args.arguments if argument.flag in FIRST_START),
            resume=(Argument("load", ("--load", save)),),
        )
