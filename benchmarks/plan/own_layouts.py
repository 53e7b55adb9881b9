"""Compare NVIDIA's own layouts with the best that `plan` finds, for every recipe of the pack with a published figure.

Prints two ratios: for the recipe as it is, and for its division (TP, PP, CP, EP, micro batch) with the split over
stages, savings, dispatcher and CUDA graphs that `plan` chooses for it.

python benchmarks/plan/own_layouts.py             # all recipes, about a minute
python benchmarks/plan/own_layouts.py --bridge    # all recipes of Megatron-Bridge with a published figure, minutes
python benchmarks/plan/own_layouts.py NAME...
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from fp8launch.diagnostics import UserError
from fp8launch.plugins.bridge.attributes import of_recipe
from fp8launch.plugins.bridge.index import find
from fp8launch.plugins.bridge.published import recipe_of, rows
from fp8launch.plugins.plan.inputs import base_of, source_of, target_of
from fp8launch.plugins.plan.plans import accepted, own_layout
from fp8launch.plugins.plan.search import search
from fp8launch.plugins.plan.term_groups import difference
from fp8launch.recipe.load import load_recipe
from fp8launch.resources import pack_folder

CLOSE = 0.95


DIVISION = {
    "parallel.tp": "tensor_model_parallel_size",
    "parallel.pp": "pipeline_model_parallel_size",
    "parallel.cp": "context_parallel_size",
    "parallel.ep": "expert_model_parallel_size",
    "batch.micro": "micro_batch_size",
}


def compared(name: str) -> tuple[float, float, str] | None:
    """Return the speeds of a recipe's own layout and of its division relative to the best, and both layouts in words.

    None without a published figure.
    """
    with tempfile.TemporaryDirectory() as folder:
        source, _ = source_of(name, None, (), Path(folder))
        if not name.startswith("bridge:") and load_recipe(source).recipe.reference is None:
            return None
        target = target_of(source, [], [], None)
        base = base_of(source, [], None)
        planned, _ = accepted(search([base], target, 14, own=True), source, [], target, 1)
        sizes = {key: str(base.args.get(size) or 1) for key, size in DIVISION.items()}
        divided = replace(target, fixed=sizes)
        alike, _ = accepted(search([base], divided, 4, own=True), source, [], divided, 1)
        own = own_layout(source, [], target)
    if own is None:
        return None  # the rules refuse it with the newest software
    assert planned and alike, name
    best = planned[0]
    words = f"{own.layout.short} | {best.layout.short}\n    {difference(own.step, best.step)}"
    return best.step.ms / own.step.ms, best.step.ms / alike[0].step.ms, words


def _of_bridge() -> list[str]:
    """Return the recipes of Megatron-Bridge with a published pre-training figure, without hybrids."""
    published = (recipe_of(row) for row in rows() if row.task == "pre-training")
    names = {recipe.name for recipe in published if recipe is not None}
    return sorted(f"bridge:{name}" for name in names if not of_recipe(find(name)).get("is_hybrid_model"))


def main() -> int:
    names = sys.argv[1:] or sorted(file.stem for file in pack_folder("recipes").glob("*.yaml"))
    if names == ["--bridge"]:
        names = _of_bridge()
    close = close_divisions = total = 0
    for name in names:
        try:
            found = compared(name)
        except UserError as problem:
            print(f"{name}: {problem}", flush=True)
            continue
        if found is None:
            continue
        total += 1
        own, division, words = found
        close += own >= CLOSE
        close_divisions += division >= CLOSE
        print(f"{name}: {own:.1%} of the best, its division {division:.1%}: {words}", flush=True)
    print(f"within {1 - CLOSE:.0%}: {close} of {total}, divisions {close_divisions} of {total}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
