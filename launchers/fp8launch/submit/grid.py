"""A grid of points (recipes x node counts x values x repeats), each with a key that identifies its run."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fp8launch.diagnostics import error
from fp8launch.engines import engine_of
from fp8launch.engines.base import Entry
from fp8launch.job.prepared import Prepared
from fp8launch.recipe.load import LoadedRecipe
from fp8launch.recipe.schema import Recipe
from fp8launch.recipe.yaml_source import parse_yaml
from fp8launch.wording import counted

MAX_POINTS = 10_000
# The default seed in Megatron-LM and Megatron-Bridge.
DEFAULT_SEED = 1234


@dataclass(frozen=True)
class Point:
    """One run of a grid. `values` has its value on each axis by dotted key. `repeat` counts from 1."""

    recipe: str
    nodes: int | None
    values: Mapping[str, Any] = field(default_factory=dict)
    repeat: int = 1

    @property
    def overrides(self) -> list[str]:
        # JSON is valid YAML, and its quotes keep text that looks like a number as text.
        return [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in self.values.items()]

    @property
    def label(self) -> str:
        """The point as text, such as `2 nodes, recipe=delayed, repeat 2`."""
        parts = [f"{key.rpartition('.')[2]}={value}" for key, value in self.values.items()]
        if self.nodes:
            parts.insert(0, counted(self.nodes, "node"))
        return ", ".join([*parts, f"repeat {self.repeat}"])


def expand(recipes: Sequence[str], nodes: Sequence[int], axes: Mapping[str, Sequence[Any]], repeat: int) -> list[Point]:
    """Return all points. Repeats vary slowest, so that an interrupted study has a run of every point first."""
    counts: Sequence[int | None] = nodes or [None]
    size = len(recipes) * len(counts) * repeat * math.prod(map(len, axes.values()))
    if size > MAX_POINTS:
        raise error("too-many-points", f"the grid has {size} points, more than {MAX_POINTS}", "--sweep", "split it")
    points = []
    for number, recipe, count in itertools.product(range(1, repeat + 1), recipes, counts):
        for values in itertools.product(*axes.values()):
            points.append(Point(recipe, count, dict(zip(axes, values, strict=True)), number))
    return points


def parse_axis(text: str) -> tuple[str, list[Any]]:
    """Parse `section.key=a,b,c` into the key and its values, each parsed as YAML. Raises UserError for other text."""
    key, sign, listed = text.partition("=")
    place = f"--sweep {text}"
    values = []
    if sign:
        values = parse_yaml(f"[{listed}]", place, numbered=False).plain()
    if not re.fullmatch(r"\w+(\.\w+)+", key.strip()) or not values:
        raise error("bad-axis", "must look like section.key=value,value", place)
    if len({json.dumps(v, sort_keys=True) for v in values}) != len(values):
        raise error("bad-axis", "has the same value twice", place, "use --repeat to run a point several times")
    return key.strip(), values


def parse_nodes(text: str) -> list[int]:
    """Parse node counts such as `1,2,4`. Raises UserError unless they are distinct positive numbers."""
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"[1-9][0-9]{0,4}", part) for part in parts) or len(set(parts)) != len(parts):
        raise error("bad-nodes", "must be one node count or several, such as 1,2,4", f"--nodes {text}")
    return list(map(int, parts))


def parse_seeds(text: str) -> list[int]:
    """Parse seeds such as `1,2,3`. Raises UserError unless they are distinct whole numbers."""
    words = [word.strip() for word in text.split(",")]
    numbers = [int(word) for word in words if word.isascii() and word.isdecimal() and len(word) < 10]
    if len(numbers) != len(words) or len(set(numbers)) != len(numbers):
        message = f"must be different whole numbers separated by commas, not {text!r}"
        raise error("bad-seeds", message, "--seeds", "for example --seeds 1,2,3")
    return numbers


def seed_axis(
    base: LoadedRecipe, axes: Mapping[str, list[Any]], repeat: int, seeds: str | None, vary_seed: bool
) -> dict[str, list[Any]]:
    """Return the axis that `--seeds` or `--vary-seed` adds to a recipe; empty if neither is given."""
    if seeds is None and not vary_seed:
        return {}
    option = "--vary-seed" if vary_seed else "--seeds"
    if vary_seed and seeds is not None:
        raise error("two-options", "--seeds and --vary-seed both choose the seeds", option, "pass only one of them")
    if vary_seed and repeat < 2:
        raise error("no-repeats", "there is one run per point", option, "add --repeat with at least 2")
    engine = engine_of(base)
    if engine.seed_key in axes:
        message = f"--sweep {engine.seed_key} and {option} both choose the seeds"
        raise error("two-options", message, option, "pass only one of them")
    if seeds is not None:
        return {engine.seed_key: parse_seeds(seeds)}
    first = engine.stated_seed(base.recipe)
    if first is None:
        first = DEFAULT_SEED
    return {engine.seed_key: list(range(first, first + repeat))}


def grid_of(
    bases: Mapping[str, LoadedRecipe],
    nodes: Sequence[int],
    axes: Mapping[str, list[Any]],
    seed_axes: Mapping[str, Mapping[str, list[Any]]],
    repeat: int,
) -> list[Point]:
    """Return the points of all recipes. Axes from the command line are added to the recipe's, and override them.

    Repeats and seeds vary slowest, so that an interrupted study has one run of every point.
    """
    found: list[tuple[int, int, Point]] = []
    for name, base in bases.items():
        recipe = base.recipe
        every = {**recipe.axes, **axes, **seed_axes[name]}
        for point in expand([name], nodes or recipe.nodes or [], every, repeat):
            turn = sum(seeds.index(point.values[key]) for key, seeds in seed_axes[name].items())
            found.append((point.repeat, turn, point))
    return [point for _, _, point in sorted(found, key=lambda one: one[:2])]


def own_checkpoint_folder(point: Point, recipe: Recipe) -> list[str]:
    """Return the overrides that give a point of a grid its own folder below an absolute `checkpoint.dir`.

    There are none for a relative folder, which is inside the run folder, or if the grid itself varies the folder.
    """
    stated = recipe.checkpoint.dir
    if stated is None or not stated.startswith("/") or "checkpoint.dir" in point.values:
        return []
    return [f"checkpoint.dir={json.dumps(f'{stated}/{_slug(point, recipe.name)}')}"]


def point_key(point: Point, prepared: Prepared) -> str:
    """Return the identity of a point as 12 hex digits. Points with equal keys are the same run."""
    recipe = prepared.loaded.recipe
    argv: Any = prepared.args.argv
    environment: Any = recipe.environment
    if prepared.phases:
        argv = [one.args.argv for one in prepared.parts]
        environment = [one.loaded.recipe.environment for one in prepared.parts]
    content = [
        prepared.args.version,
        argv,
        environment,
        recipe.resources.model_dump(),
        recipe.container.model_dump(),
        # Fields that were added later count only if they are set, so that keys of older studies do not change.
        recipe.launch.model_dump(exclude=set() if recipe.launch.arguments else {"arguments"}),
        point.repeat,
    ]
    entry = prepared.engine.entry(prepared.loaded, in_container=True, check_paths=False)
    if entry.program != Entry.program:
        content += [entry.program, entry.options]
    return _digest(content, 12)


def study_id(name: str, keys: Sequence[str]) -> str:
    """Return the id of a study. The same grid of the same recipes always has the same id."""
    return f"{name}-study-{_digest(sorted(keys), 6)}"


def run_name(point: Point, name: str, key: str) -> str:
    """Return the id of a point's run: readable, unique because of its key, and safe as a folder name."""
    return f"{_slug(point, name)}-{key[:6]}"


def _slug(point: Point, name: str) -> str:
    nodes = [f"n{point.nodes}"] if point.nodes else []
    slug = "-".join([name, *nodes, *map(str, point.values.values()), f"r{point.repeat}"])
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", slug)[:90]


def _digest(content: Any, digits: int) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:digits]
