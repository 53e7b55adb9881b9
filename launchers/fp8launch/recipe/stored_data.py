"""Data paths of a recipe that are relative, below the folder where a cluster keeps its datasets."""

from __future__ import annotations

from pathlib import Path

from fp8launch.recipe.load import LoadedRecipe
from fp8launch.recipe.schema import recipe_class
from fp8launch.recipe.yaml_source import Node


def has_relative_data(loaded: LoadedRecipe) -> bool:
    """Return whether a prefix of `data.blend` is relative, in the recipe or in a phase."""
    return _with_data_below(loaded, Path("/")) != loaded.tree


def with_data_below(loaded: LoadedRecipe, place: Path) -> LoadedRecipe:
    """Return the recipe with the relative prefixes of `data.blend`, its phases' too, below `place`."""
    tree = _with_data_below(loaded, place)
    return LoadedRecipe(recipe_class().from_node(tree), tree, loaded.files)


def _with_data_below(loaded: LoadedRecipe, place: Path) -> Node:
    tree = _placed(loaded.tree, place)
    phases = tree.at(("phases",))
    if phases is None or not isinstance(tree.value, dict) or not isinstance(phases.value, dict):
        return tree
    placed = {name: _placed(phase, place) for name, phase in phases.value.items()}
    return Node({**tree.value, "phases": Node(placed, phases.where)}, tree.where)


def _placed(tree: Node, place: Path) -> Node:
    """A recipe's tree, or a phase's, with its blend below `place`."""
    blend = tree.find(("data", "blend"))
    if not isinstance(tree.value, dict) or not isinstance(blend.value, list):
        return tree
    items = []
    for item in blend.value:
        if _is_relative(item):
            item = Node(str(place / str(item.value)), item.where)
        items.append(item)
    data = tree.value["data"]
    assert isinstance(data.value, dict)
    with_blend = Node({**data.value, "blend": Node(items, blend.where)}, data.where)
    return Node({**tree.value, "data": with_blend}, tree.where)


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
