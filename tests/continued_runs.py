"""Runs that continue the checkpoint of another run."""

from __future__ import annotations

import json
from pathlib import Path

from fp8launch.check.checker import check
from fp8launch.diagnostics import Problem
from fp8launch.job.prepared import prepare

OVERRIDE = "megatron.override_opt_param_scheduler=true"


def written_by(folder: Path, **arguments: object) -> Path:
    """A run folder as `submit` leaves it, with a checkpoint."""
    run = folder / "earlier"
    checkpoint = run / "checkpoints" / "iter_0000100"
    checkpoint.mkdir(parents=True)
    (checkpoint / "common.pt").touch()
    (run / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("100")
    manifest = {
        "megatron": {"version": "0.18.2"},
        "arguments": {"lr": 0.01, "min_lr": 0.001, **arguments},
        "layout": {"world": 1},
    }
    (run / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    return run / "checkpoints"


def continued(load: Path, *changes: str, version: str = "0.18.2") -> dict[str, Problem]:
    settings = [f'software.megatron="{version}"', OVERRIDE, f"checkpoint.load={load}", *changes]
    result = check(prepare("tiny_cpu", settings), layers=("schema", "rules", "machine"))
    return {problem.code: problem for problem in result.problems}
