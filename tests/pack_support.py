"""The pack as the tests see it: its recipes, the points of its studies, and recipes of its parts."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fp8launch.job.prepared import Prepared, prepare
from fp8launch.recipe.load import load_recipe

ROOT = Path(__file__).resolve().parents[1]
PACK = ROOT / "recipes"
HEADLINE = sorted(PACK.glob("*.yaml"))
PEERS = sorted((PACK / "peers").glob("*_*.yaml"))
STUDIES = sorted((PACK / "studies").rglob("*.yaml"))
STAGES = sorted((PACK / "stages").glob("*.yaml"))
MODELS = sorted(file.stem for file in (PACK / "models").glob("*.yaml") if file.stem != "tiny")


def case(file: Path) -> Any:
    """Return a recipe as a parameter of a test. The engine of peers is a plugin."""
    return pytest.param(file, marks=pytest.mark.needs_plugin("accelerate")) if file in PEERS else file


def name_of(file: Path) -> str:
    return str(file.relative_to(PACK).with_suffix(""))


def points(file: Path) -> Iterator[tuple[list[str], int | None]]:
    """Overrides and number of nodes of every run of a study; one plain run for a recipe without axes."""
    recipe = load_recipe(str(file)).recipe
    settings = [[f"{key}={json.dumps(value)}" for value in values] for key, values in recipe.axes.items()]
    for nodes, *overrides in itertools.product(recipe.nodes or [None], *settings):
        yield overrides, nodes


def runs(file: Path) -> list[Prepared]:
    return [prepare(str(file), overrides, nodes) for overrides, nodes in points(file)]


def recipe_of(parts: list[str], **sections: str) -> str:
    """Return a recipe that combines parts of the pack."""
    lines = [f"extends: [{', '.join(parts)}]", "name: combination", "batch: {micro: 1, sequence: 2048}"]
    return "\n".join([*lines, *(f"{section}: {value}" for section, value in sections.items())]) + "\n"


def long_run(optimizer: str, data: str) -> str:
    """Return a long run on H100 with these parts of the pack."""
    parts = ["models/llama3_8b", "parts/pretrain", "parts/benchmark", "precision/tensorwise", "hardware/h100"]
    return recipe_of([*parts, "images/nemo_26_06", "parts/long_run", f"optimizer/{optimizer}", f"data/{data}"])
