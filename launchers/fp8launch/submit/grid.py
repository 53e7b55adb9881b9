"""A grid of points: recipes x node counts x values x repeats, each with a key that names what it would run."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fp8launch.diagnostics import error
from fp8launch.engines.base import Entry
from fp8launch.job.prepared import Prepared
from fp8launch.recipe.schema import Recipe
from fp8launch.recipe.yaml_source import parse_yaml
from fp8launch.wording import counted

MAX_POINTS = 10_000
# The default seed of Megatron-LM and of Megatron-Bridge.
DEFAULT_SEED = 1234


@dataclass(frozen=True)
class Point:
    """One run of a grid. `values` are the axes' values by dotted key; `repeat` counts from 1."""

    recipe: str
    nodes: int | None
    values: Mapping[str, Any] = field(default_factory=dict)
    repeat: int = 1

    @property
    def overrides(self) -> list[str]:
        # JSON is YAML: text that looks like a number stays text.
        return [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in self.values.items()]

    @property
    def label(self) -> str:
        """The point in words, such as `2 nodes, recipe=delayed, repeat 2`."""
        parts = [f"{key.rpartition('.')[2]}={value}" for key, value in self.values.items()]
        if self.nodes:
            parts.insert(0, counted(self.nodes, "node"))
        return ", ".join([*parts, f"repeat {self.repeat}"])


def expand(recipes: Sequence[str], nodes: Sequence[int], axes: Mapping[str, Sequence[Any]], repeat: int) -> list[Point]:
    """Every point, repeats outermost: a study that is cut short has measured everything once before anything twice."""
    counts: Sequence[int | None] = nodes or [None]
    size = len(recipes) * len(counts) * repeat
    for values in axes.values():
        size *= len(values)
    if size > MAX_POINTS:
        raise error("too-many-points", f"the grid has {size} points, more than {MAX_POINTS}", "--sweep", "split it")
    points = []
    for number, recipe, count in itertools.product(range(1, repeat + 1), recipes, counts):
        for values in itertools.product(*axes.values()):
            points.append(Point(recipe, count, dict(zip(axes, values, strict=True)), number))
    return points


def parse_axis(text: str) -> tuple[str, list[Any]]:
    """`section.key=a,b,c` to the key and its values, each read as YAML. Raises UserError for anything else."""
    key, sign, listed = text.partition("=")
    place = f"--sweep {text}"
    values = []
    if sign:
        values = parse_yaml(f"[{listed}]", place, numbered=False).plain()
    if not re.fullmatch(r"\w+(\.\w+)+", key.strip()) or not values:
        raise error("bad-axis", "must look like section.key=value,value", place)
    if len({json.dumps(v, sort_keys=True) for v in values}) != len(values):
        raise error("bad-axis", "names a value twice", place, "use --repeat to measure a point several times")
    return key.strip(), values


def parse_nodes(text: str) -> list[int]:
    """`1,2,4` to node counts. Raises UserError for anything but different numbers above zero."""
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"[1-9][0-9]{0,4}", part) for part in parts) or len(set(parts)) != len(parts):
        raise error("bad-nodes", "must be one node count or several, such as 1,2,4", f"--nodes {text}")
    return list(map(int, parts))


def parse_seeds(text: str) -> list[int]:
    """`1,2,3` to seeds. Raises UserError for anything but different whole numbers."""
    words = [word.strip() for word in text.split(",")]
    numbers = [int(word) for word in words if word.isascii() and word.isdecimal() and len(word) < 10]
    if len(numbers) != len(words) or len(set(numbers)) != len(numbers):
        message = f"must be different whole numbers separated by commas, not {text!r}"
        raise error("bad-seeds", message, "--seeds", "for example --seeds 1,2,3")
    return numbers


def seeds_from(first: int | None, count: int) -> list[int]:
    """Return consecutive seeds from `first` on, by default from Megatron's own."""
    start = DEFAULT_SEED if first is None else first
    return list(range(start, start + count))


def own_checkpoint_folder(point: Point, recipe: Recipe) -> list[str]:
    """Return the overrides that give a point of a grid its own folder below an absolute `checkpoint.dir`.

    A relative one is in the run folder, and one that the grid varies is the user's choice.
    """
    stated = recipe.checkpoint.dir
    if stated is None or not stated.startswith("/") or "checkpoint.dir" in point.values:
        return []
    return [f"checkpoint.dir={json.dumps(f'{stated}/{_slug(point, recipe.name)}')}"]


def point_key(point: Point, prepared: Prepared) -> str:
    """The identity of a point as 12 hex digits: two points with one key are the same run."""
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
        _launch(recipe),
        point.repeat,
        *_entry(prepared),
    ]
    return _digest(content, 12)


def _launch(recipe: Recipe) -> dict[str, Any]:
    """The launch section for a key. A field that came later counts where it is set, so that older studies are found."""
    if recipe.launch.arguments:
        return recipe.launch.model_dump()
    return recipe.launch.model_dump(exclude={"arguments"})


def _entry(prepared: Prepared) -> list[Any]:
    """The program of an engine that has its own; empty for others, so that older studies are found."""
    entry = prepared.engine.entry(prepared.loaded, in_container=True, check_paths=False)
    if entry.program == Entry.program:
        return []
    return [entry.program, entry.options]


def study_id(name: str, keys: Sequence[str]) -> str:
    """The same grid of the same recipes has the same id, so that a second submission finds the first."""
    return f"{name}-study-{_digest(sorted(keys), 6)}"


def run_name(point: Point, name: str, key: str) -> str:
    """The id of a point's run: readable, unique by its key, safe as a folder."""
    return f"{_slug(point, name)}-{key[:6]}"


def _slug(point: Point, name: str) -> str:
    parts = [name]
    if point.nodes:
        parts.append(f"n{point.nodes}")
    parts += map(str, point.values.values())
    slug = "-".join([*parts, f"r{point.repeat}"])
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", slug)[:90]


def _digest(content: Any, digits: int) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:digits]
