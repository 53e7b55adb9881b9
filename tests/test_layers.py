"""Walls between packages: imports point downwards only, and no modules import each other in a circle."""

from __future__ import annotations

from pathlib import Path

from importlinter import api
from importlinter.application.use_cases import lint_imports

CONFIGURATION = str(Path(__file__).parents[1] / "pyproject.toml")


def test_imports_point_downwards_and_never_in_a_circle() -> None:
    assert lint_imports(CONFIGURATION, cache_dir=None)


def test_lazy_and_type_checking_imports_count() -> None:
    options = api.read_configuration(CONFIGURATION)
    assert not options["session_options"].get("exclude_type_checking_imports")
    types = {contract["type"] for contract in options["contracts_options"]}
    assert types == {"layers", "acyclic_siblings", "protected"}
    assert all("ignore_imports" not in contract for contract in options["contracts_options"])
