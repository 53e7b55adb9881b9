"""The walls around the schedulers: other code knows the interface, and none of the implementations by name."""

from __future__ import annotations

import ast
import re
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
from support import only, refused

from fp8launch import schedulers
from fp8launch.schedulers.base import Scheduler

PACKAGE = Path(__file__).resolve().parents[2] / "launchers" / "fp8launch"
OUTSIDE = [file for file in sorted(PACKAGE.rglob("*.py")) if "schedulers" not in file.relative_to(PACKAGE).parts]


@pytest.mark.parametrize("name", schedulers.names())
def test_every_name_is_a_scheduler_that_cannot_change(name: str) -> None:
    scheduler = schedulers.by_name(name)
    assert isinstance(scheduler, Scheduler)
    assert scheduler.name == name
    with pytest.raises(FrozenInstanceError):
        scheduler.capabilities.arrays = True  # type: ignore[misc]


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    problem = only(refused(schedulers.by_name, "sbach"))
    assert (problem.code, problem.fix) == ("unknown-backend", "did you mean 'sbatch'?")


ASKS = re.compile(r"\b(scheduler|backend|chosen)(\.name|_name)?\b")
NAMES = re.compile("|".join(repr(name) for name in schedulers.names()))


def test_nobody_outside_compares_the_name_of_a_scheduler() -> None:
    for file in OUTSIDE:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Compare):
                text = ast.unparse(node)
                asks = ASKS.search(text) and NAMES.search(text)
                assert not asks, f"{file}:{node.lineno}: {text}: ask for a capability instead"


def test_nobody_outside_imports_an_implementation() -> None:
    for file in OUTSIDE:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                module = str(node.module)
                inside = module.startswith(("fp8launch.schedulers.slurm", "fp8launch.schedulers.local"))
                assert not inside, f"{file}:{node.lineno}: {module}"
