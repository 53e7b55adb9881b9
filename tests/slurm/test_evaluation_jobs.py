"""Evaluations as jobs of a real Slurm, next to the training that they evaluate.

CI has no lm-eval for jobs of Slurm. To run this:
.cache/evaluate/bin/python -m pytest tests/slurm/test_evaluation_jobs.py
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cluster.processes import until
from launching import Site, sets
from tiny_models import make_model, needs_bridge, needs_lm_eval

pytestmark = [pytest.mark.train, pytest.mark.slow, needs_lm_eval, needs_bridge]
TRAINING = sets(
    "model.vocab_size=511", "model.norm_epsilon=1.0e-5", "train.iterations=30", "checkpoint.dir=ckpt",
    "checkpoint.interval=10",
)  # fmt: skip


def evaluated(run: Path) -> list[int]:
    results = [json.loads(file.read_text()) for file in run.glob("evaluations/*.json")]
    return sorted(result["iteration"] for result in results if "iteration" in result)  # lm-eval's own have none


def test_a_second_job_evaluates_checkpoints_and_is_cut_by_slurm(site: Site) -> None:
    """The follower is requeued in its first evaluation; a plain evaluation of one checkpoint runs at the same time."""
    model = make_model(site.folder / "model")
    run = site.submit("--backend", "sbatch", *TRAINING)
    words = ("--model", str(model), "--tasks", "fp8launch_tiny", "--offline", "--backend", "sbatch")
    follower = site.json("evaluate", run, *words, "--every", "2", "--time", "60")
    log = lambda: "".join(each.read_text() for each in Path(follower["folder"]).glob("logs/*.log"))  # noqa: E731
    assert until(lambda: "evaluating checkpoint 20" in log(), 300, 0.5), log()
    site.slurm.run("scontrol", "requeue", *follower["jobs"])

    assert until(lambda: site.state(run)["state"] == "completed", 300, 0.5)
    plain = site.json("evaluate", run, *words, "--iteration", "10", "--wait")
    assert plain["status"] == "finished" and {score["iteration"] for score in plain["scores"]} == {10}

    assert until(lambda: site.state(follower["run"])["state"] == "completed", 1200, 0.5), log()
    assert evaluated(Path(follower["folder"])) == [20, 30]
    assert evaluated(site.runs / run) == [10, 20, 30]
    scores = site.json("parse", run)["evaluations"]["scores"]
    assert {score["iteration"] for score in scores} == {10, 20, 30}
