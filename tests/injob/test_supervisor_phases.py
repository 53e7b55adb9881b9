"""Which phase an attempt is for, by the newest checkpoint, and when it is over."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fp8launch.injob.supervisor.attempt_log import Run

PHASES = [{"name": "warmup", "end": 10}, {"name": "body", "end": 30}, {"name": "cooldown", "end": 40}]


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Any]:
    """A run as its supervisor sees it, with a checkpoint of that iteration; its newest attempt was for that phase."""

    def at(checkpoint: int, attempt: str | None = None, phases: list[dict[str, Any]] = PHASES) -> Any:
        (tmp_path / "ckpt").mkdir(exist_ok=True)
        if checkpoint:
            (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").write_text(str(checkpoint))
        plan = {"checkpoint": "ckpt", "iterations": 40, "attempts": 1, "stuck": 2, "rules": {}, "phases": phases}
        (tmp_path / "survive.json").write_text(json.dumps(plan))
        attempts = [{"name": "1-0", "before": 0, **({"phase": attempt} if attempt else {})}]
        (tmp_path / "attempts.json").write_text(json.dumps({"attempts": attempts}))
        return Run(tmp_path, tmp_path / "logs" / "1-0", {})

    return at


@pytest.mark.parametrize(
    ("checkpoint", "phase"),
    [(0, "warmup"), (9, "warmup"), (10, "body"), (29, "body"), (30, "cooldown"), (39, "cooldown"), (40, None)],
)
def test_the_checkpoint_says_which_phase_it_is(run: Callable[..., Any], checkpoint: int, phase: str | None) -> None:
    found = run(checkpoint).phase
    assert (found and found["name"]) == phase


@pytest.mark.parametrize(
    ("checkpoint", "attempt", "over"),
    [
        (9, "warmup", False),
        (10, "warmup", True),
        (29, "body", False),
        (30, "body", True),
        # A torn checkpoint brought the run back behind the attempt's own phase: that is no end of it.
        (5, "body", False),
        # The last one's end is the run's.
        (40, "cooldown", False),
    ],
)
def test_a_phase_is_over_at_its_end(run: Callable[..., Any], checkpoint: int, attempt: str, over: bool) -> None:
    assert run(checkpoint, attempt).phase_is_over is over


def test_a_run_without_phases_has_none(run: Callable[..., Any]) -> None:
    plain = run(10, phases=[])
    assert plain.phase is None
    assert plain.phase_is_over is False
