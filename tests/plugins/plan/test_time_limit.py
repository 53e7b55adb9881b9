"""Runs that are predicted to lose their training at the time limit."""

from __future__ import annotations

import pytest

from fp8launch.check.checker import check
from fp8launch.job.prepared import prepare

CODE = "time-limit-too-short"
LONG = "train.iterations=2000"  # 9.1 s each, and the recipe's limit is half an hour
SAVES = ("checkpoint.dir=c", "megatron.save_interval=100")  # without checkpoint.interval, nothing supervises the run


def warnings(*overrides: str) -> list[str]:
    found = check(prepare("llama8b_fp8", overrides), layers=("rules",)).problems
    return [problem.message for problem in found if problem.code == CODE]


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        (LONG, "resources.time=6:00:00"),
        (LONG, "checkpoint={dir: c, interval: 1000}"),
        (LONG, *SAVES),
        (LONG, "megatron.exit_duration_in_mins=20"),
        (LONG, "megatron.exit_interval=100"),
        (LONG, "megatron.skip_train=true"),
    ],
)
def test_a_run_that_ends_or_saves_before_its_limit_is_not_reported(overrides: tuple[str, ...]) -> None:
    assert warnings(*overrides) == []


def test_a_run_that_saves_nothing_loses_everything() -> None:
    [message] = warnings(LONG)
    assert message.startswith("2000 iterations need 5.0 hours (9.07 s each, published for 8 GPUs)")
    assert "00:30:00 ends the run after about 198: the run saves no checkpoints" in message
    samples = ("train.iterations=null", "train.warmup=null", "megatron.train_samples=256000")
    assert warnings(*samples)[0].startswith("2000 iterations")


def test_a_first_checkpoint_after_the_limit_is_too_late() -> None:
    [message] = warnings(LONG, SAVES[0], "megatron.save_interval=1000")
    assert message.startswith("the first checkpoint, after 1000 iterations, needs 2.6 hours (9.41 s each, predicted")
    [message] = warnings(LONG, SAVES[0], "megatron.save_interval=5000")
    assert message.startswith("the first checkpoint, after 2000 iterations")


def test_a_step_that_takes_longer_than_the_time_to_save_is_reported() -> None:
    saving = ("checkpoint={dir: c, interval: 10}", "batch.global=8192", "resources.time=24:00:00")
    [message] = warnings(*saving)
    assert "a step takes 595 s" in message and "saves 120 s before" not in message
    assert warnings(*saving, "survive.stop_before=1200") == []
