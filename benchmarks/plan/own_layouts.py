"""NVIDIA's own layout beside the best that `plan` finds, for every recipe of the pack with a published figure.

python benchmarks/plan/own_layouts.py             # all recipes, about a minute
python benchmarks/plan/own_layouts.py NAME...
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from fp8launch.cli.plan_input import base_of, source_of, target_of
from fp8launch.cli.planned import accepted, own_layout
from fp8launch.planning.layouts import search
from fp8launch.planning.term_groups import difference
from fp8launch.recipe.load import load_recipe
from fp8launch.resources import pack_folder

CLOSE = 0.95


def compared(name: str) -> tuple[float, str] | None:
    """The speed of a recipe's own layout over that of the best, and both in words; None without a published figure."""
    with tempfile.TemporaryDirectory() as folder:
        source, _ = source_of(name, None, (), Path(folder))
        if load_recipe(source).recipe.reference is None:
            return None
        target = target_of(source, [], [], None)
        found = search([base_of(source, [], None)], target, 14)
        planned, _ = accepted(found, source, [], target, 1)
        own = own_layout(source, [], target)
    assert planned and own is not None, name
    best = planned[0]
    words = f"{own.layout.short} | {best.layout.short}\n    {difference(own.step, best.step)}"
    return best.step.ms / own.step.ms, words


def main() -> int:
    names = sys.argv[1:] or sorted(file.stem for file in pack_folder("recipes").glob("*.yaml"))
    close = total = 0
    for name in names:
        found = compared(name)
        if found is None:
            continue
        total += 1
        close += found[0] >= CLOSE
        print(f"{name}: {found[0]:.1%} of the best: {found[1]}", flush=True)
    print(f"{close} of {total} within {1 - CLOSE:.0%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
