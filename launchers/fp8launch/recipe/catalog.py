"""List the recipes of the pack, and show one recipe with the file and line of each value."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from fp8launch.recipe.load import LoadedRecipe, load_recipe, pack_name
from fp8launch.recipe.schema import Recipe, recipe_keys
from fp8launch.recipe.yaml_source import Node
from fp8launch.resources import pack_folder

_COLUMN = 52


@dataclass(frozen=True)
class Row:
    """A recipe of the pack. `name` is its name in commands; `runs` is the number of runs if it is a study, else 1."""

    name: str
    model: str
    recipe: Recipe
    runs: int

    @property
    def precision(self) -> str:
        """The precision, or all precisions if a study or its phases vary it."""
        compared = self.recipe.axes.get("precision.recipe")
        if compared:
            return ", ".join(map(str, compared))
        names = []
        if self.recipe.precision:
            names.append(self.recipe.precision.recipe)
        for phase in self.recipe.phases.values():
            if phase.precision and phase.precision.get("recipe"):
                names.append(str(phase.precision["recipe"]))
        return ", ".join(dict.fromkeys(names))

    @property
    def gpus(self) -> str:
        """Number and type of GPUs, as a range for a study: `8 h100`, `16-128 h100`."""
        per_node = self.recipe.axes.get("resources.gpus_per_node") or [self.recipe.resources.gpus_per_node]
        nodes = self.recipe.nodes or [self.recipe.resources.nodes]
        worlds = set()
        for count_of_nodes, gpus in product(nodes, per_node):
            if isinstance(gpus, int):
                worlds.add(count_of_nodes * gpus)
        count = str(min(worlds))
        if len(worlds) > 1:
            count += f"-{max(worlds)}"
        return f"{count} {self.recipe.resources.gpu}"

    def as_dict(self) -> dict[str, Any]:
        need, precision, reference = self.recipe.resources, self.recipe.precision, self.recipe.reference
        return {
            "name": self.recipe.name,
            "recipe": self.name,
            "description": self.recipe.description,
            "model": self.model,
            "gpu": need.gpu,
            "gpus": need.world_size,
            "nodes": need.nodes,
            "precision": precision and precision.recipe,
            "study": self.recipe.is_study,
            "runs": self.runs,
            "reference": reference and reference.model_dump(),
        }


def pack_recipes(folder: str = "") -> list[Row]:
    """Return the recipes at the top of the pack, or all recipes in one of its folders, smallest jobs first."""
    top = pack_folder("recipes")
    files = top.glob("*.yaml")
    if folder:
        files = (top / folder).rglob("*.yaml")
    return sorted(map(_row, files), key=lambda row: (row.name.count("/"), row.recipe.resources.world_size, row.name))


@dataclass(frozen=True)
class Part:
    """A part that recipes extend. `description` is the comment on its first line."""

    kind: str
    name: str
    description: str


def pack_parts() -> list[Part]:
    """Return the parts of the pack by kind (models, precision, hardware, ...) and name."""
    top = pack_folder("recipes")
    found = []
    for file in sorted(top.glob("*/*.yaml")):
        if file.parent.name != "studies":
            found.append(Part(file.parent.name, pack_name(file), _first_comment(file)))
    return found


def _first_comment(file: Path) -> str:
    """Return the comment on the first line of a file, or an empty string."""
    first, _, _ = file.read_text(encoding="utf-8").partition("\n")
    if not first.startswith("#"):
        return ""
    return first.removeprefix("#").strip()


def study_points(recipe: Recipe) -> int:
    """Return the number of runs that axes and node counts span."""
    return math.prod(map(len, recipe.axes.values())) * len(recipe.nodes or [0])


def explained(loaded: LoadedRecipe) -> str:
    """Return the resolved recipe as YAML, with the file and line of each value as a comment."""
    return "".join(f"{line}\n" for line in _lines(loaded.tree, 0))


def places(loaded: LoadedRecipe) -> dict[str, str]:
    """Return `file:line` of every value, by its dotted key."""
    return dict(_places(loaded.tree, ""))


def _row(file: Path) -> Row:
    loaded = load_recipe(str(file))
    model = ""
    for path in loaded.files:
        if path.parent.name == "models":
            model = path.stem
    return Row(pack_name(file), model, loaded.recipe, study_points(loaded.recipe))


def _lines(node: Node, depth: int) -> Iterator[str]:
    assert isinstance(node.value, dict)
    keys = list(node.value)
    if depth == 0:
        keys.sort(key=_rank)
    indent = "  " * depth
    for key in keys:
        child = node.value[key]
        if isinstance(child.value, dict) and child.value:
            yield f"{indent}{_scalar(key)}:"
            yield from _lines(child, depth + 1)
        elif isinstance(child.value, list) and len(_scalar(child.plain())) > _COLUMN:
            yield _with_place(f"{indent}{_scalar(key)}:", child)
            for item in child.value:
                yield f"{indent}- {_scalar(item.plain())}"
        else:
            yield _with_place(f"{indent}{_scalar(key)}: {_scalar(child.plain())}", child)


def _rank(key: str) -> int:
    """Return the sort position of a top-level key. Unknown keys come last."""
    order = ["name", "description", *recipe_keys()]
    if key in order:
        return order.index(key)
    return len(order)


def _with_place(text: str, node: Node) -> str:
    return f"{text:<{_COLUMN}}  # {_short(node.where)}"


def _places(node: Node, prefix: str) -> Iterator[tuple[str, str]]:
    if isinstance(node.value, dict) and node.value:
        for key, child in node.value.items():
            yield from _places(child, f"{prefix}.{key}" if prefix else key)
    else:
        yield prefix, _short(node.where)


def _short(where: str) -> str:
    """Shorten a place by the folder of the pack's recipes."""
    return where.removeprefix(f"{pack_folder('recipes').parent}/")


def _scalar(value: Any) -> str:
    """Return a value as YAML on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, width=math.inf, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")
