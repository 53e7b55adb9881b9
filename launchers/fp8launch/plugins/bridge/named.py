"""Recipes of Megatron-Bridge by their names: `bridge:NAME`."""

from __future__ import annotations

from pathlib import Path

from fp8launch.recipe.load import NamedRecipes
from fp8launch.recipe.yaml_source import Node


def _complete(tree: Node) -> Node:
    """Fill in the data of the index, which is read only for recipes of this engine."""
    if "bridge" not in tree.entries():
        return tree
    from fp8launch.plugins.bridge.complete import complete

    return complete(tree)


RECIPES = NamedRecipes(_complete, Path(__file__).with_name("recipes.json.xz"))
