"""Figures of NeMo 25.09 to 26.02.01 as Megatron's arguments: the rows of bridge_runs.yaml."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import yaml
from older_runs import OlderRun
from published_runs import Run

from fp8launch.plugins.bridge.attributes import of_recipe
from fp8launch.plugins.bridge.index import recipes_of
from fp8launch.plugins.bridge.published import recipe_of, rows

FILE = Path(__file__).resolve().parent / "bridge_runs.yaml"
RELEASE = "0.4.0"
_AXES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
}
_TOKEN_DROP = {
    "moe_token_dispatcher_type": "alltoall",
    "moe_expert_capacity_factor": 1.0,
    "moe_pad_expert_input_to_capacity": True,
    "moe_router_force_load_balancing": False,
}


def bridge_runs() -> Iterator[OlderRun]:
    """Yield all figures, in the order of the file."""
    recipes = recipes_of(RELEASE)
    for row in yaml.safe_load(FILE.read_text()):
        recipe, sizes, batch = recipes[row["recipe"]], row["parallel"], row["batch"]
        settings = row.get("settings", {})
        if row.get("token_drop"):
            settings = _TOKEN_DROP | settings
        args = dict(of_recipe(recipe))
        args.update({flag: sizes.get(axis, 1) for axis, flag in _AXES.items()})
        args["num_virtual_stages_per_pipeline_rank"] = sizes.get("vp")
        args["sequence_parallel"] = sizes.get("tp", 1) > 1
        args["micro_batch_size"], args["global_batch_size"] = batch["micro"], batch["global"]
        args.update(settings)
        name = f"{recipe.model} {recipe.gpu} x{row['gpus']} {recipe.precision} ({row['release']})"
        speed = row["tokens_per_s_per_gpu"]
        run = Run(name, recipe.model, recipe.gpu, row["gpus"], batch["global"], args, speed)
        layout = recipe.model, recipe.gpu, row["gpus"], recipe.precision, frozenset(sizes.items()), batch["micro"]
        repeats = not settings and layout in _newer_layouts()
        yield OlderRun(run, row["release"], bool(row.get("held_out")), repeats)


@functools.cache
def _newer_layouts() -> frozenset[tuple[object, ...]]:
    """Return model, GPU, precision and sizes of the figures that belong to recipes of newer releases."""
    found = set()
    for row in rows():
        recipe = recipe_of(row)
        if recipe is not None:
            sizes = frozenset((axis, size) for axis, size in row.layout.items() if size != 1)
            found.add((recipe.model, row.gpu, row.gpus, row.precision, sizes, row.micro_batch))
    return frozenset(found)
