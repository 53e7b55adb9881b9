"""The walls around the schedulers: other code knows the interface, and none of the implementations by name."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
from support import only, refused

from fp8launch import plugin_registry, schedulers
from fp8launch.check.checker import check
from fp8launch.cluster.profile import Cluster
from fp8launch.diagnostics import Severity
from fp8launch.job.prepared import prepare
from fp8launch.plugin_registry import Plugin
from fp8launch.schedulers.base import Scheduler
from fp8launch.schedulers.local import LocalScheduler

PACKAGE = Path(__file__).resolve().parents[2] / "launchers" / "fp8launch"
# Plugins for Slurm alone: they submit to it in their own way, or show what it reports.
ON_SLURM = {PACKAGE / "plugins" / name for name in ("submitit", "nemo_run", "init", "doctor", "data")}
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


class Elsewhere(LocalScheduler):
    """A scheduler of a plugin, with a problem of its own."""

    name = "elsewhere"

    def problem_codes(self) -> Mapping[str, Severity]:
        return {"elsewhere-is-full": "warning"}


def test_a_recipe_may_silence_what_the_scheduler_of_a_plugin_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    def codes() -> list[str]:
        prepared = prepare("tiny_cpu", ["silence.elsewhere-is-full=known"])
        return [problem.code for problem in check(prepared, Cluster()).problems]

    assert "unknown-code" in codes()
    monkeypatch.setattr(plugin_registry, "_added", [Plugin("acme", schedulers={"elsewhere": Elsewhere})])
    assert "unknown-code" not in codes()


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
        if ON_SLURM.intersection(file.parents):
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                module = str(node.module)
                inside = module.startswith(("fp8launch.schedulers.slurm", "fp8launch.schedulers.local"))
                assert not inside, f"{file}:{node.lineno}: {module}"
