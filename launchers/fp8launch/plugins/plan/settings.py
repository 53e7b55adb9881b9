"""Settings of a recipe that are no arguments of Megatron but change the time of a step.

The speed model reads them like arguments, so they take the same way through `estimate`, `plan` and `tune`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp8launch.check.resolved_run import ResolvedRun
from fp8launch.engines.base import EntryTraits
from fp8launch.megatron.model_arithmetic import Arguments
from fp8launch.recipe.schema import Recipe

# Read by nvte_multi_tensor_gemm (common/gemm/cublaslt_gemm.cu of Transformer Engine).
CUTLASS_GROUPED_GEMM = "NVTE_USE_CUTLASS_GROUPED_GEMM"
# The variables by the names under which the speed model reads them.
_VARIABLES = {"cutlass_grouped_gemm": CUTLASS_GROUPED_GEMM}


def timed_arguments(run: ResolvedRun) -> Arguments:
    """Return a run's arguments and its other settings that change the time of a step."""
    return {**run.arguments, **timed_settings(run.loaded.recipe, run.entry, run.env)}


def timed_settings(recipe: Recipe, entry: EntryTraits, env: Mapping[str, str]) -> dict[str, Any]:
    """Return `launch.config`, if the entry sets it, and known environment variables by the speed model's names."""
    found: dict[str, Any] = dict(recipe.launch.config) if entry.sets_config else {}
    for name, variable in _VARIABLES.items():
        if env.get(variable) == "1":
            found[name] = True
    return found
