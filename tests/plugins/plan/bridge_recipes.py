"""Recipes of Megatron-Bridge, for tests of the planner that need the plugin bridge as well."""

from __future__ import annotations

from typing import Any


def arguments_of(name: str) -> dict[str, Any]:
    """Return Megatron's arguments of a recipe by its name, from the release whose figures NVIDIA published."""
    from fp8launch.plugins.bridge.attributes import of_recipe
    from fp8launch.plugins.bridge.index import find

    return dict(of_recipe(find(name, "0.6.0")))
