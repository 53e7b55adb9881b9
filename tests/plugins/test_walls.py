"""A plugin imports the core and the plugins that it requires, and nothing of the others. So do its tests."""

from __future__ import annotations

import ast
from pathlib import Path

import grimp
import pytest

from fp8launch import plugin_registry

GRAPH = grimp.build_graph("fp8launch", cache_dir=None)
TESTS = Path(__file__).parents[1]
# Folders with the plugins' own names would hide the packages nemo_run and submitit.
FOLDERS = {"nemo_run": "nemo_run_backend", "submitit": "submitit_backend"}


@pytest.mark.parametrize("name", plugin_registry._BUILT_IN)
def test_a_plugin_imports_only_plugins_that_it_requires(name: str) -> None:
    imported = set()
    for module in GRAPH.find_descendants(f"fp8launch.plugins.{name}"):
        for target in GRAPH.find_modules_directly_imported_by(module):
            if target.startswith("fp8launch.plugins."):
                imported.add(target.split(".")[2])
    assert imported - {name} == set(plugin_registry._built_in(name).requires)


@pytest.mark.parametrize("name", ["", *plugin_registry._BUILT_IN])
def test_tests_import_only_what_their_plugin_requires(name: str) -> None:
    """At the top of a file. A test that needs a second plugin has `needs_plugin`, and imports it in its body."""
    if name:
        files = list((TESTS / "plugins" / FOLDERS.get(name, name)).rglob("*.py"))
    else:
        files = [file for file in TESTS.rglob("*.py") if TESTS / "plugins" not in file.parents]
    allowed = plugin_registry._with_required([name] if name else [])
    assert files
    assert {str(file): others for file in files if (others := imported_plugins(file) - allowed)} == {}


def imported_plugins(file: Path) -> set[str]:
    """Return the plugins whose modules a file imports at its top."""
    imported = set()
    for statement in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Import):
            imported |= {alias.name for alias in statement.names}
        elif isinstance(statement, ast.ImportFrom):
            imported |= {f"{statement.module}.{alias.name}" for alias in statement.names}
    parts = [module.split(".") for module in imported if module.startswith("fp8launch.plugins.")]
    return {part[2] for part in parts} & set(plugin_registry._BUILT_IN)
