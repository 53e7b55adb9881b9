"""The layout of a recipe that `init recipe` writes."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from fp8launch.diagnostics import ANSWER_IS_NO, UserError, error
from fp8launch.hardware.gpus import GPUS
from fp8launch.plugins.init.draft import Draft
from fp8launch.plugins.init.recipe_text import recipe_text
from fp8launch.plugins.plan.inputs import base_of, target_of
from fp8launch.plugins.plan.plans import accepted
from fp8launch.plugins.plan.search import search
from fp8launch.recipe.load import read_recipe

# A first recipe stays readable: layouts that need more than these keys are left to `fp8launch plan`.
_PARALLEL = ("tp", "pp", "cp", "ep", "etp", "vp", "sequence")
_RECOMPUTATION = ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules")
_KEYS = {
    "batch.micro",
    "megatron.moe_token_dispatcher_type",
    "megatron.pipeline_model_parallel_layout",
    "precision.param_gather",
    *(f"parallel.{name}" for name in _PARALLEL),
    *(f"megatron.{name}" for name in _RECOMPUTATION),
}
_CANDIDATES = 4


def with_layout(draft: Draft) -> Draft:
    """Return the draft with the fastest simple layout that is predicted to fit.

    Raises UserError (exit code 1) if no layout fits. If the planner cannot handle the model, the draft keeps its
    layout, and its note says why.
    """
    if draft.gpu == "cpu":
        return replace(draft, layout_note="Every process holds the whole model.")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "draft.yaml"
        file.write_text(recipe_text(draft), encoding="utf-8")
        source = read_recipe(str(file))
        try:
            target = replace(target_of(source, (), (), None), writable=_is_simple)
            base = base_of(source, (), None)
        except UserError as refused:
            reason = refused.problems[0].message
            note = f"No layout was searched: {reason}. `fp8launch estimate` shows whether this one fits."
            return replace(draft, layout_note=note)
        planned, _ = accepted(search([base], target, _CANDIDATES), source, (), target, 1)
    if not planned:
        raise error(
            "nothing-fits",
            f"no layout of {draft.source} is estimated to fit {draft.nodes} x {draft.gpus_per_node} {draft.gpu}",
            "--nodes",
            "use more nodes, a shorter --sequence, or GPUs with more memory",
            ANSWER_IS_NO,
        )
    best = planned[0]
    values = {key: yaml.safe_load(text) for key, _, text in (word.partition("=") for word in best.overrides)}
    flags = dict(draft.flags or {})
    for key, value in values.items():
        if key.startswith("megatron.") and value is not None:
            flags[key.removeprefix("megatron.")] = value
    gather = values.get("precision.param_gather")
    note = (
        f"Predicted to be the fastest of the simple layouts that fit ({best.layout.short}): "
        f"{best.layout.memory.total / 2**30:.0f} of {GPUS[draft.gpu].memory_gib:.0f} GiB per GPU."
    )
    return replace(
        draft,
        layout=_parallel_section(values),
        layout_note=note,
        flags=flags,
        micro=values.get("batch.micro", 1),
        gather=draft.gather if gather is None else gather,
    )


def _is_simple(overrides: Mapping[str, str]) -> bool:
    return overrides.keys() <= _KEYS


def _parallel_section(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `parallel` section for a layout's overrides, without sizes that are the default anyway."""
    sizes = {name: values.get(f"parallel.{name}") for name in _PARALLEL}
    # Expert tensor parallelism defaults to tensor parallelism, every other size to 1.
    usual = {**dict.fromkeys(_PARALLEL, 1), "tp": None, "pp": None, "etp": sizes["tp"]}
    return {name: size for name, size in sizes.items() if size is not None and size != usual[name]}
