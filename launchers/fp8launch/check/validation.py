"""The layer `megatron`: the verdict of the engine's own validators, run by a plugin (`Plugin.validators`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from fp8launch import plugin_registry
from fp8launch.check.job_paths import JobPaths
from fp8launch.check.resolved_run import ResolvedRun
from fp8launch.check.rule import Rule
from fp8launch.diagnostics import Problem, Severity

STAGE_CODES = {
    "parse_args": "megatron-arguments",
    "validate_args": "megatron-validate",
    "TransformerConfig": "megatron-transformer-config",
    "DistributedDataParallelConfig": "megatron-ddp-config",
    "OptimizerConfig": "megatron-optimizer-config",
    "num_microbatches": "megatron-microbatches",
}
CODES: Mapping[str, Severity] = {
    **dict.fromkeys(STAGE_CODES.values(), "error"),
    "megatron-no-verdict": "error",
    "model-not-known-here": "warning",
}


@dataclass(frozen=True)
class Validation:
    """The result of an engine's validators for a run.

    `state` is "ran", or why they did not run. `lacking` is true if they should have run but could not. `problems`
    returns what they refuse, except for causes that one of the given rules already reports.
    """

    state: str
    problems: Callable[[Sequence[Rule]], Iterable[Problem]] = lambda fired: ()
    lacking: bool = False


# Takes runs, the paths of each run, and a callback for messages about downloads. Returns one validation per run.
Validator: TypeAlias = "Callable[[Sequence[ResolvedRun], Sequence[JobPaths], Callable[[str], None]], list[Validation]]"
UNKNOWN_ARGUMENTS = Validation("not run: Megatron-LM's validators do not know the arguments of this engine")


def validate(
    runs: Sequence[ResolvedRun], paths: Sequence[JobPaths], say: Callable[[str], None] = lambda message: None
) -> list[Validation]:
    """Return the validation of each run by its engine's validators, in order."""
    found = [UNKNOWN_ARGUMENTS] * len(runs)
    for name in {run.engine.validators for run in runs} - {"none"}:
        places = [place for place, run in enumerate(runs) if run.engine.validators == name]
        offer = plugin_registry.offered("validators").get(name)
        if offer is None:
            plugin = plugin_registry.absent_plugin("validators", name) or name
            answers = [Validation(f"not run: the plugin {plugin} is not active")] * len(places)
        else:
            validator: Validator = plugin_registry.load(offer)
            answers = validator([runs[place] for place in places], [paths[place] for place in places], say)
        for place, answer in zip(places, answers, strict=True):
            found[place] = answer
    return found
