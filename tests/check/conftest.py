"""Megatron-Core for the check's first layer: what the suite has installed, else the user's cache."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from bad_sets import BAD
from good_sets import GOOD
from megatron_sites import UNPACKED
from sets import RULES, Set

from fp8launch.check.checker import CheckResult, check_all, schema_result
from fp8launch.diagnostics import UserError


@pytest.fixture(scope="session", autouse=True)
def megatron() -> None:
    if "FP8LAUNCH_MEGATRON" not in os.environ and UNPACKED.is_dir():
        os.environ["FP8LAUNCH_MEGATRON"] = str(UNPACKED)


def results(sets: dict[str, Set], folder: Path) -> dict[str, CheckResult]:
    """The check's result for each set; Megatron and rules only, in one process."""
    prepared, found = {}, {}
    for name, case in sets.items():
        try:
            prepared[name] = case.prepare(folder, name)
        except UserError as exc:
            found[name] = schema_result(exc)
    found.update(zip(prepared, check_all(list(prepared.values()), layers=RULES), strict=True))
    return found


@pytest.fixture(scope="session")
def checked(tmp_path_factory: pytest.TempPathFactory, megatron: None) -> Callable[[str], CheckResult]:
    """Every named set, checked once."""
    found = results({**BAD, **GOOD}, tmp_path_factory.mktemp("sets"))
    return found.__getitem__
