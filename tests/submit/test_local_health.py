"""Real trainings that break on a machine without Slurm, and what the recipe's `health.actions` make of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fp8launch import cli
from fp8launch.injob.supervisor import checkpoints
from fp8launch.rundir.registry import find_run

pytestmark = [pytest.mark.train, pytest.mark.slow]

Site = Any
BREAKS = Path(__file__).parents[1] / "broken_loss.py"
SETS = (
    "checkpoint.dir=ckpt", "checkpoint.interval=10", "train.iterations=200", "train.lr=1e-3",
    f"launch.script={BREAKS}", "megatron.log_interval=1",
)  # fmt: skip


def submit(site: Site, breaks: str, actions: str, *more: str, expect: int = 0) -> Path:
    site.backend = "local"
    sets = (*SETS, f"env.BREAKS={breaks}", f"health.actions={actions}", *more)
    options = [word for one in sets for word in ("--set", one)]
    site.submit(*options, "--wait", expect=expect)
    [run] = site.json("runs")
    return find_run(run["run"]).path


def attempts(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "attempts.json").read_text())["attempts"]
    return found


@pytest.mark.parametrize(
    ("kind", "code", "first", "last", "status"),
    [
        ("nan", "nan", 33, 33, "ok"),
        # It stays broken after the skipped batches too, which `parse` reports, but it does not rise any more.
        ("jump", "loss-jump", 43, 200, "unhealthy"),
    ],
)
def test_a_rewind_skips_the_batches_and_completes(
    in_memory: Site, kind: str, code: str, first: int, last: int, status: str
) -> None:
    folder = submit(in_memory, f"{kind},{first},{last}", f"{{{code}: {{rewind: 1}}}}", expect=int(status != "ok"))
    one, two = attempts(folder)
    target = first // 10 * 10
    health = one["health"]
    assert (one["cause"], health["code"], health["rewound_to"]) == ("rewind", code, target)
    assert first <= health["skipped"][1] <= first + 4 and health["skipped"][0] == target + 1
    assert (two["before"], two["after"], two["cause"]) == (target, 200, "finished")
    in_memory.capsys.readouterr()
    cli.run(["parse", folder.name, "--json"])
    report = json.loads(in_memory.capsys.readouterr().out)
    assert (report["status"], report["iteration_last"]) == (status, 200)
    assert report["iterations"] == 200 - (health["skipped"][1] - target)
    [problem] = [problem for problem in report["health"] if problem["code"] == code]
    assert problem["severity"] == "warning" and f"went back to iteration {target}" in problem["message"]
    assert f"iteration {health['skipped'][1] + 1:8d}/" in find_run(folder.name).logs()[1].read_text()
    assert f"iteration {health['skipped'][1]:8d}/" not in find_run(folder.name).logs()[1].read_text()
    assert "1 rewind" in in_memory("runs", folder.name).out


def test_a_stop_ends_the_run_with_its_cause(in_memory: Site) -> None:
    folder = submit(in_memory, "zero,33,200", "{zero-grad-norm: stop}", "survive.attempts=5", expect=1)
    [one] = attempts(folder)
    assert one["cause"] == "unhealthy-training"
    assert one["then"].startswith("unhealthy-training (the gradient norm is 0 from iteration 33 on)")
    assert checkpoints.latest(folder / "ckpt") == 30
    report = in_memory("parse", folder.name, expect=1).out
    assert "unhealthy-training, line" in report and "the gradient norm is 0 from iteration 33 on" in report
    assert "stopped: unhealthy-training" in in_memory("runs", folder.name).out


def test_rewinds_end(in_memory: Site) -> None:
    """Every batch from iteration 33 on is broken: going back does not help."""
    folder = submit(in_memory, "nan,33,200", "{nan: {rewind: 1}}", "health.max_rewinds=1", expect=1)
    assert [one["cause"] for one in attempts(folder)] == ["rewind", "unhealthy-training"]
    assert "health.max_rewinds 1 is used up" in json.loads((folder / "attempts.json").read_text())["stopped"]


def test_continue_only_reports(in_memory: Site) -> None:
    folder = submit(in_memory, "jump,43,200", "{loss-jump: continue}")
    [one] = attempts(folder)
    assert one["cause"] == "finished" and "health" not in one
