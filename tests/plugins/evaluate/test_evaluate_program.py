"""`fp8launch evaluate` against lm-eval's own command, where lm-eval and Megatron-Bridge are installed.

It runs in .cache/evaluate (tests/plugins/bridge/test_with_bridge.py).
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import train_jobs
from support import wait_for
from tiny_models import make_model, needs_bridge, needs_lm_eval

from fp8launch.plugins.evaluate.injob import evaluate, tiny_task

PATH = os.environ.get("PYTHONPATH", "")
RECIPE = """\
extends: tiny_cpu
name: evaluated
model: {vocab_size: 511, norm_epsilon: 1.0e-5}
train: {iterations: 10}
checkpoint: {dir: checkpoints, interval: 5}
"""
FOLLOWED = RECIPE.replace("iterations: 10", "iterations: 1000").replace("interval: 5", "interval: 100")


@pytest.fixture
def call(tmp_path: Path) -> Any:
    environment = {
        **train_jobs.job_environment(PYTHONPATH=f"{train_jobs.LAUNCHERS}:{PATH}"),
        "HOME": str(tmp_path),
        "FP8LAUNCH_RUNS": str(tmp_path / "runs"),
    }
    del environment["FP8LAUNCH_DEVICE"]

    def run(*words: object, expect: int = 0, module: str = "fp8launch") -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", module, *map(str, words)]
        done = subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == expect, done.stdout + done.stderr
        return done

    return run


@pytest.mark.train
@needs_lm_eval
@needs_bridge
def test_a_checkpoint_has_the_numbers_that_lm_eval_prints(tmp_path: Path, call: Any) -> None:
    """Train, evaluate a checkpoint of the run, and repeat that by hand with lm-eval's command."""
    model = make_model(tmp_path / "model")
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    local = ("--backend", "local", "--wait", "--json")
    run = json.loads(call("submit", "recipe.yaml", *local).stdout)[0]["run"]
    words = ("--model", model, "--tasks", "fp8launch_tiny", "--offline", *local)
    found = json.loads(call("evaluate", run, *words).stdout)
    assert found["status"] == "finished"
    scores = {score["metric"]: (score["value"], score["stderr"]) for score in found["scores"]}

    folder = Path(found["folder"])
    by_hand = ("--model", "hf", "--model_args", f"pretrained={folder}/model", "--tasks", "fp8launch_tiny")
    more = ("--include_path", folder / "evaluations/tasks", "--device", "cpu", "--output_path", tmp_path / "by_hand")
    call(*by_hand, *more, module="lm_eval")
    (file,) = (tmp_path / "by_hand").rglob("results_*.json")
    theirs = json.loads(file.read_text())["results"]["fp8launch_tiny"]
    assert scores == {name: (theirs[f"{name},none"], theirs[f"{name}_stderr,none"]) for name in ("acc", "acc_norm")}

    (row,) = json.loads(call("compare", run, "--json").stdout)["rows"]
    assert row["loss"] is not None and row["step_time_ms"] is not None
    assert row["evaluations"][0]["value"] == theirs["acc,none"] and row["evaluations"][0]["iterations"] == [10]


@pytest.mark.train
@needs_lm_eval
def test_an_unknown_task_is_refused_before_the_model_loads(tmp_path: Path, call: Any) -> None:
    model = make_model(tmp_path / "model")
    done = call("evaluate", model, "--tasks", "arc_eazy", "--backend", "local", "--wait", expect=1)
    assert "lm-eval has no task arc_eazy; similar names: arc_easy" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


@needs_lm_eval
def test_the_files_of_lm_evals_own_tasks_are_not_read_without_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", "0")
    assert evaluate.find_tasks([tiny_task.NAME], None).all_tasks == [tiny_task.NAME]


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is not None, reason="lm-eval is installed")
def test_a_job_without_lm_eval_says_so(tmp_path: Path, call: Any) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    done = call("evaluate", folder, "--tasks", "fp8launch_tiny", "--backend", "local", "--wait", expect=1)
    said = done.stdout + done.stderr
    assert "has no lm-eval" in said and "pip install" in said and "Traceback" not in said


def evaluated(run: Path) -> list[int]:
    """The iterations with a result."""
    results = [json.loads(file.read_text()) for file in run.glob("evaluations/*.json")]
    return sorted(result["iteration"] for result in results if "iteration" in result)  # lm-eval's own have none


def text_of(run: Path) -> str:
    return "".join(log.read_text() for log in sorted(run.glob("logs/*.log")))


@pytest.mark.train
@pytest.mark.slow
@needs_lm_eval
@needs_bridge
def test_checkpoints_are_evaluated_while_their_run_trains(tmp_path: Path, call: Any) -> None:
    """Training and follower are killed and resumed: every fifth checkpoint has one result."""
    model = make_model(tmp_path / "model")
    (tmp_path / "recipe.yaml").write_text(FOLLOWED)
    run = Path(json.loads(call("submit", "recipe.yaml", "--backend", "local", "--json").stdout)[0]["folder"])
    words = ("--model", model, "--tasks", "fp8launch_tiny", "--offline", "--every", 5, "--backend", "local", "--json")
    follower = Path(json.loads(call("evaluate", run.name, *words).stdout)["folder"])
    assert "follows" in call("evaluate", run.name, *words, expect=1).stderr
    tracker = run / "checkpoints" / "latest_checkpointed_iteration.txt"
    wait_for(tracker.is_file, 300)
    call("cancel", run.name)
    wait_for(lambda: "evaluating checkpoint" in text_of(follower), 300)  # the last one of a run that is over
    call("cancel", follower.name)
    assert evaluated(run) == []
    for each in (run, follower):
        call("resume", each.name)
    wait_for(lambda: (follower / "attempts.json").is_file() and "is over" in text_of(follower), 600)
    assert evaluated(run) == evaluated(follower) == [500, 1000]
    wait_for(lambda: json.loads(call("runs", follower.name, "--json").stdout)[0]["state"] == "completed")
    assert not (follower / "models").exists()

    # One more follower finds everything evaluated.
    call("evaluate", run.name, *words, "--wait")
    assert evaluated(run) == [500, 1000]
    (row,) = json.loads(call("compare", run, "--json").stdout)["rows"]
    assert row["evaluations"][0]["iterations"] == [1000]
    assert [each["iteration"] for each in row["evaluations"][0]["by_iteration"]] == [500, 1000]
