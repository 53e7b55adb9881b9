"""A plugin imports the core and the plugins that it requires, and nothing of the others."""

from __future__ import annotations

import grimp
import pytest

from fp8launch import plugin_registry

GRAPH = grimp.build_graph("fp8launch", cache_dir=None)


@pytest.mark.parametrize("name", plugin_registry._BUILT_IN)
def test_a_plugin_imports_only_plugins_that_it_requires(name: str) -> None:
    imported = set()
    for module in GRAPH.find_descendants(f"fp8launch.plugins.{name}"):
        for target in GRAPH.find_modules_directly_imported_by(module):
            if target.startswith("fp8launch.plugins."):
                imported.add(target.split(".")[2])
    assert imported - {name} == set(plugin_registry._built_in(name).requires)
