"""How often a submission does the same work: files are read, points loaded and translated, jobs planned once."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from fp8launch.check import checker
from fp8launch.cli import run
from fp8launch.engines.megatron_lm.engine import MegatronLM
from fp8launch.job import build_job
from fp8launch.recipe import load

SIX_POINTS = ["--nodes", "1,2,4", "--sweep", "train.lr=1e-3,2e-3", "--dry-run"]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Counter[str]]:
    """Count calls of functions under the name by which each module knows them; the real code runs."""
    counts: Counter[str] = Counter()

    def count(owner: Any, name: str) -> Counter[str]:
        real = getattr(owner, name)

        @functools.wraps(real)
        def counted(*arguments: Any, **named: Any) -> Any:
            counts[name] += 1
            return real(*arguments, **named)

        monkeypatch.setattr(owner, name, counted)
        return counts

    return count


def submit(*arguments: str) -> None:
    assert run(["submit", "tiny_cpu", "--backend", "local", *arguments]) == 0


def test_recipe_files_are_read_once_for_a_whole_grid(calls: Callable[..., Counter[str]]) -> None:
    counts = calls(load, "read_yaml")
    submit("--dry-run")
    files = counts["read_yaml"]
    counts.clear()
    submit(*SIX_POINTS)
    assert counts["read_yaml"] == files


def test_every_point_is_loaded_once(calls: Callable[..., Counter[str]]) -> None:
    counts = calls(load, "LoadedRecipe")
    submit(*SIX_POINTS)
    # Six points, and the recipe alone for its axes.
    assert counts["LoadedRecipe"] == 7


def count_all(calls: Callable[..., Counter[str]]) -> Counter[str]:
    """Count what each step of a submission makes: recipes, argument lists, views for the check, jobs, scripts."""
    calls(load, "LoadedRecipe")
    calls(MegatronLM, "translate")
    calls(checker, "resolve_run")
    return calls(build_job, "Job")


STEPS = ("LoadedRecipe", "translate", "resolve_run", "Job")


def test_a_submission_does_every_step_once(calls: Callable[..., Counter[str]], in_memory: Any) -> None:
    counts = count_all(calls)
    in_memory.submit()
    assert counts == dict.fromkeys(STEPS, 1)


def test_a_study_does_every_step_once_for_a_point(calls: Callable[..., Counter[str]], in_memory: Any) -> None:
    counts = count_all(calls)
    in_memory.submit("--sweep", "train.lr=1e-3,2e-3,3e-3", "--yes")
    # The recipe alone is loaded for its axes.
    assert counts == {**dict.fromkeys(STEPS, 3), "LoadedRecipe": 4}


def test_a_run_with_phases_is_planned_once(calls: Callable[..., Counter[str]], in_memory: Any) -> None:
    counts = count_all(calls)
    in_memory.submit(
        *("--set", "checkpoint.dir=checkpoints", "--set", "checkpoint.interval=5"),
        *("--set", "phases.one.iterations=5", "--set", "phases.two.env.NCCL_DEBUG=WARN"),
    )
    assert counts["Job"] == 1
    assert counts["translate"] == 2
