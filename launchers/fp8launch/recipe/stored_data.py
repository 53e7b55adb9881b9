"""Data paths of a recipe that are relative, below the folder where a cluster keeps its datasets."""

from __future__ import annotations

from pathlib import Path

from fp8launch.recipe.load import LoadedRecipe
from fp8launch.recipe.schema import Recipe
from fp8launch.recipe.yaml_source import Node


def has_relative_data(loaded: LoadedRecipe) -> bool:
    """Return whether a prefix of `data.blend` is relative, in the recipe or in a phase."""
    return _with_data_below(loaded, Path("/")) != loaded.tree


def with_data_below(loaded: LoadedRecipe, place: Path) -> LoadedRecipe:
    """Return the recipe with the relative prefixes of `data.blend`, its phases' too, below `place`."""
    tree = _with_data_below(loaded, place)
    return LoadedRecipe(Recipe.from_node(tree), tree, loaded.files)


def _with_data_below(loaded: LoadedRecipe, place: Path) -> Node:
    tree = _placed(loaded.tree, place)
    phases = tree.find(("phases",)).value if loaded.recipe.phases else None
    if isinstance(tree.value, dict) and isinstance(phases, dict):
        placed = Node({name: _placed(phase, place) for name, phase in phases.items()}, tree.value["phases"].where)
        tree = Node({**tree.value, "phases": placed}, tree.where)
    return tree


def _placed(tree: Node, place: Path) -> Node:
    """A recipe's tree, or a phase's, with its blend below `place`."""
    blend = tree.find(("data", "blend"))
    if not isinstance(tree.value, dict) or not isinstance(blend.value, list):
        return tree
    items = [Node(str(place / str(item.value)), item.where) if _is_relative(item) else item for item in blend.value]
    data = tree.value["data"]
    assert isinstance(data.value, dict)
    return Node({**tree.value, "data": Node({**data.value, "blend": Node(items, blend.where)}, data.where)}, tree.where)


def _is_relative(item: Node) -> bool:
    """Whether an item of a blend is a relative path: neither a weight, nor absolute, nor of an object store."""
    text = item.value
    if not isinstance(text, str) or text.startswith(("/", "~", "$")) or "://" in text:
        return False
    try:
        float(text)
    except ValueError:
        return True
    return False
