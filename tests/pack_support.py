"""The pack as the tests see it: its recipes, the points of its studies, and Megatron's verdict on any of them."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from fp8launch.check.resolved_run import ASSUMED_TE, installed_software
from fp8launch.diagnostics import UserError
from fp8launch.hardware.gpus import gpu
from fp8launch.job.prepared import Prepared, prepare
from fp8launch.plugins.validators.megatron_core import find_megatron
from fp8launch.plugins.validators.verdicts import MegatronVerdict, Request, validate
from fp8launch.recipe.load import load_recipe

ROOT = Path(__file__).resolve().parents[1]
PACK = ROOT / "recipes"
HEADLINE = sorted(PACK.glob("*.yaml"))
PEERS = sorted((PACK / "peers").glob("*_*.yaml"))
STUDIES = sorted((PACK / "studies").rglob("*.yaml"))


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


def request(prepared: Prepared) -> Request:
    """What a job of this run would ask of Megatron, on the hardware and software that the recipe names."""
    recipe = prepared.loaded.recipe
    te = installed_software(prepared.loaded).transformer_engine
    te_version = ".".join(map(str, te)) if te else ASSUMED_TE
    return Request(
        prepared.args.argv,
        world_size=recipe.resources.world_size,
        compute_capability=gpu(recipe.resources.gpu).capability,
        te_version=None if recipe.resources.gpu == "cpu" else te_version,
        env=recipe.environment,
    )


def verdicts(prepared: Sequence[Prepared]) -> list[MegatronVerdict]:
    """The verdict of each run's own version of Megatron. Skips the test where one of them is not installed."""
    found: dict[int, MegatronVerdict] = {}
    for version in sorted({p.args.version for p in prepared}):
        mine = [i for i, p in enumerate(prepared) if p.args.version == version]
        answers = validate([request(prepared[i]) for i in mine], megatron_site(version))
        found.update(zip(mine, answers, strict=True))
    return [found[i] for i in range(len(prepared))]


def megatron_site(version: str) -> Path:
    for place in (os.environ.get("FP8LAUNCH_TEST_MEGATRON"), ROOT / ".cache" / "megatron"):
        try:
            if place and (found := find_megatron(version, Path(place))):
                return found
        except UserError:
            continue
    if found := find_megatron(version):
        return found
    pytest.skip(f"no megatron-core {version} in FP8LAUNCH_TEST_MEGATRON, in .cache/megatron or installed")
