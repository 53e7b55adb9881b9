"""If a stage is killed after its last checkpoint, the next stage still starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from local_study import LocalStudy
from support import wait_for

from fp8launch.injob.supervisor import checkpoints

# The first stage evaluates for minutes once it has saved its last checkpoint.
RECIPE = """\
name: two
stages:
  - name: first
    recipe: tiny_cpu
    set:
      train.iterations: 4
      megatron: {eval_iters: 20000, eval_interval: 1000}
      checkpoint: {dir: ckpt, interval: 4}
  - name: second
    recipe: tiny_cpu
    from: first
    set: {train.iterations: 4, megatron.finetune: true, checkpoint: {dir: ckpt, interval: 4}}
"""


@pytest.mark.train
@pytest.mark.slow
def test_the_stage_after_one_that_was_killed_during_its_last_evaluation_starts(tmp_path: Path) -> None:
    study = LocalStudy(tmp_path, RECIPE)
    first, second = study.runs
    wait_for(lambda: checkpoints.latest(first / "ckpt") == 4, 300)
    study.kill(first)
    assert (study.state(first), study.state(second)) == ("failed", "pending")

    said = study.call("resume", study.name).stderr
    assert f"{first.name} had already saved its last iteration" in said and second.name in said
    study.completes(second)
    assert len(list(first.glob("logs/local-*.log"))) == 1
    assert checkpoints.latest(second / "ckpt") == 4
    assert "all 2 stages" in study.call("resume", study.name, expect=1).stderr
    # Stages are not repeats of one run.
    assert [line.split()[:2] for line in study.call("compare", study.name).stdout.splitlines()[1:3]] == [
        ["stage", "first"],
        ["stage", "second"],
    ]
