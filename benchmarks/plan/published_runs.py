"""The published figures of Megatron-Bridge as Megatron's arguments: the recipe that each belongs to, on its model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fp8launch.engines.bridge.attributes import of_recipe
from fp8launch.engines.bridge.index import BridgeRecipe
from fp8launch.engines.bridge.published import PublishedRow, recipe_of, rows

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
# Bridge's names of models to parts of the recipe pack.
MODELS = {
    "llama3_8b": "llama3_8b",
    "llama3_70b": "llama3_70b",
    "llama31_405b": "llama3_1_405b",
    "deepseek_v3": "deepseek_v3",
    "gpt_oss_120b": "gpt_oss_120b",
    "qwen3_30b_a3b": "qwen3_30b_a3b",
    "qwen3_235b_a22b": "qwen3_235b_a22b",
}
PRECISIONS = {"fp8cs": "tensorwise", "fp8mx": "mxfp8", "nvfp4": "nvfp4"}

LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}


@dataclass(frozen=True)
class Run:
    """A measured run: its arguments by Megatron's attribute name, and tokens/s/GPU."""

    name: str
    family: str
    gpu: str
    gpus: int
    global_batch: int
    args: dict[str, Any]
    measured: float


def published_runs() -> Iterator[Run]:
    """Every pre-training figure that belongs to one recipe, of the models in the pack (no hybrid ones)."""
    for row in rows():
        recipe = recipe_of(row)
        if recipe is None or row.task != "pre-training" or recipe.model not in MODELS:
            continue
        yield Run(
            f"{recipe.model} {row.gpu} x{row.gpus} {row.precision} ({row.container})",
            recipe.model,
            row.gpu,
            row.gpus,
            row.global_batch,
            arguments(recipe, row),
            row.tokens_per_s_per_gpu,
        )


def hybrid_runs() -> Iterator[Run]:
    """Every pre-training figure of a hybrid model that belongs to one recipe; nothing is calibrated on these."""
    for row in rows():
        recipe = recipe_of(row)
        if recipe is None or row.task != "pre-training":
            continue
        args = of_recipe(recipe)
        if not args.get("is_hybrid_model"):
            continue
        args |= {"micro_batch_size": row.micro_batch, "seq_length": row.sequence}
        yield Run(
            f"{recipe.model} {row.gpu} x{row.gpus} {row.precision} ({row.container})",
            recipe.model,
            row.gpu,
            row.gpus,
            row.global_batch,
            args,
            row.tokens_per_s_per_gpu,
        )


def arguments(recipe: BridgeRecipe, row: PublishedRow) -> dict[str, Any]:
    """The recipe's settings on the sizes of its model."""
    layout = recipe.layout
    args = {**model_sizes(MODELS[recipe.model]), **recipe.settings}
    if "num_moe_experts" in args:
        args["num_experts"] = args["num_moe_experts"]
    args |= {
        "tensor_model_parallel_size": layout.get("tp", 1),
        "pipeline_model_parallel_size": layout.get("pp", 1),
        "context_parallel_size": layout.get("cp", 1),
        "expert_model_parallel_size": layout.get("ep", 1) or 1,
        "expert_tensor_parallel_size": layout.get("etp") or 1,
        "num_virtual_stages_per_pipeline_rank": layout.get("vp") or None,
        "micro_batch_size": row.micro_batch,
        "global_batch_size": row.global_batch,
        "seq_length": row.sequence,
        "bf16": True,
        "use_distributed_optimizer": True,
    }
    for section in recipe.sections.values():
        args |= {name: value for name, value in section.items() if name not in ("lr", "min_lr")}
    if isinstance(layout_of_stages := args.get("pipeline_model_parallel_layout"), list):
        args["pipeline_model_parallel_layout"] = "|".join(
            "".join(LETTERS[layer] for layer in stage) for stage in layout_of_stages
        )
    args["grad_reduce_in_bf16"] = not args.get("grad_reduce_in_fp32", True)
    if row.precision == "nvfp4":
        args |= {"fp4": "e2m1", "fp4_recipe": "nvfp4"}
        args.pop("fp8", None)
    elif row.precision in PRECISIONS:
        args |= {"fp8": args.get("fp8") or "hybrid", "fp8_recipe": PRECISIONS[row.precision]}
    for name, value in args.items():
        if isinstance(value, str) and value.startswith("torch."):
            args[name] = {"torch.float32": "fp32", "torch.bfloat16": "bf16"}.get(value, value)
    return args


def model_sizes(part: str) -> dict[str, Any]:
    """Sizes of a model of the pack, with what it extends, by Megatron's attribute names."""
    document = yaml.safe_load((RECIPES / "models" / f"{part}.yaml").read_text())
    found: dict[str, Any] = {}
    for name in document.get("extends", ()):
        found |= model_sizes(Path(name).name)
    for section in ("model", "megatron"):
        found |= document.get(section) or {}
    if found.pop("disable_bias_linear", False):
        found["add_bias_linear"] = False
    return found
