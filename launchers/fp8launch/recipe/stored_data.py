"""Resolve relative data paths of a recipe against the cluster's dataset folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fp8launch.recipe.load import LoadedRecipe
from fp8launch.recipe.schema import recipe_class
from fp8launch.recipe.yaml_source import Node


def has_relative_data(loaded: LoadedRecipe) -> bool:
    """Return whether any prefix of `data.blend` is relative, in the recipe or in a phase."""
    return _with_data_below(loaded, Path("/")) != loaded.tree


def with_data_below(loaded: LoadedRecipe, place: Path) -> LoadedRecipe:
    """Resolve relative prefixes of `data.blend` against `place`, in the recipe and in its phases."""
    tree = _with_data_below(loaded, place)
    return replace(loaded, recipe=recipe_class().from_node(tree), tree=tree)


def _with_data_below(loaded: LoadedRecipe, place: Path) -> Node:
    def placed(blend: Node) -> Node:
        if not isinstance(blend.value, list):
            return blend
        items = []
        for item in blend.value:
            if _is_relative(item):
                item = Node(str(place / str(item.value)), item.where)
            items.append(item)
        return Node(items, blend.where)

    return loaded.tree.changed(("data", "blend"), placed).changed(("phases", "*", "data", "blend"), placed)


def _is_relative(item: Node) -> bool:
    """Return whether an item of a blend is a relative path, not a weight, an absolute path or a URL."""
    text = item.value
    if not isinstance(text, str) or text.startswith(("/", "~", "$")) or "://" in text:
        return False
    try:
        float(text)
    except ValueError:
        return True
    return False
