"""Room for checkpoints: their size against real ones of Megatron's, and what the check says of this machine's disk."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from train_jobs import forked

from fp8launch.check import checkpoint_space, checkpoints
from fp8launch.check.resolved_run import resolve_run
from fp8launch.cluster.profile import Cluster
from fp8launch.diagnostics import Problem, UserError
from fp8launch.job.prepared import prepare


def found(tmp_path: Path, recipe: str, *overrides: str) -> list[Problem]:
    choices = [f"checkpoint.dir={tmp_path}/not/yet", "container.image=null", *overrides]
    return list(checkpoint_space.problems(prepare(recipe, choices), Cluster()))


def test_a_checkpoint_larger_than_the_disk_is_an_error(tmp_path: Path) -> None:
    # The largest model of the pack, as large as this disk: layers do not need to fit anything else.
    size = checkpoint_space.checkpoint_bytes(resolve_run(prepare("llama8b_bf16")))
    assert size is not None
    layers = 32 * (shutil.disk_usage(tmp_path).free // size + 2)
    [problem] = found(tmp_path, "llama8b_bf16", "checkpoint.interval=10", f"model.num_layers={layers}")
    assert (problem.code, problem.severity) == ("checkpoint-space", "error")
    assert str(tmp_path) in problem.message and "GiB free" in problem.message
    assert problem.where and "checkpoint.dir" in str(problem.fix)


def test_room_for_some_is_a_warning_and_keep_helps(tmp_path: Path) -> None:
    size = checkpoint_space.checkpoint_bytes(resolve_run(prepare("tiny_cpu")))
    assert size is not None
    many = shutil.disk_usage(tmp_path).free // size * 2
    often = ("checkpoint.interval=1", f"train.iterations={many}")
    [problem] = found(tmp_path, "tiny_cpu", *often)
    assert (problem.code, problem.severity) == ("checkpoint-space-low", "warning")
    assert f"the run writes {many}" in problem.message and "checkpoint.keep" in str(problem.fix)
    assert found(tmp_path, "tiny_cpu", *often, "checkpoint.keep=3") == []
    assert found(tmp_path, "tiny_cpu", *often, f"megatron.exit_interval={many // 4}") == [], "it exits before"
    samples = ("train.iterations=null", "train.warmup=null", f"megatron.train_samples={8 * many}")
    [same] = found(tmp_path, "tiny_cpu", *often, *samples)
    # The rest of the message depends on the free space, which changes while other tests run.
    assert f"the run writes {many}" in same.message
    [still] = found(tmp_path, "tiny_cpu", *often, f"checkpoint.keep={many // 2 + many // 4}")
    assert still.code == "checkpoint-space-low" and "checkpoint.keep: " in still.message


def test_survival_without_checkpoints_is_reported() -> None:
    """No supervisor looks after such a run, on Slurm or on this machine."""
    without = prepare("tiny_cpu", ["survive.hang_after=30", "survive.rules={nccl: stop}"])
    [problem] = checkpoints.survival_problems(without)
    assert (problem.code, problem.severity) == ("survive-unused", "warning")
    assert problem.message.startswith("survive.hang_after, survive.rules have no effect")
    saving = prepare("tiny_cpu", ["survive.hang_after=30", "checkpoint={dir: c, interval: 5}"])
    assert [
        *checkpoints.survival_problems(saving),
        *checkpoints.survival_problems(prepare("tiny_cpu")),
    ] == []


@pytest.mark.parametrize(
    ("settings", "unused"),
    [
        ("{keep: 3}", "checkpoint.keep has no effect"),
        ("{dir: c, keep: 3}", "checkpoint.keep has no effect"),
        ("{keep: 3, allow_pickle: true}", "checkpoint.keep, checkpoint.allow_pickle have no effect"),
        ("{allow_pickle: true}", "checkpoint.allow_pickle has no effect"),
        ("{allow_pickle: true, load: /elsewhere}", None),
        ("{dir: c, interval: 5, keep: 3, allow_pickle: true}", None),
    ],
)
def test_checkpoint_settings_that_need_others_are_reported(settings: str, unused: str | None) -> None:
    found = list(checkpoints.survival_problems(prepare("tiny_cpu", [f"checkpoint={settings}"])))
    assert [(problem.code, problem.severity) for problem in found] == [("survive-unused", "warning")] * (
        unused is not None
    )
    assert not found or found[0].message.startswith(str(unused))


def test_actions_on_health_that_cannot_happen_are_reported() -> None:
    rewind = "health.actions={nan: {rewind: 2}, loss-jump: continue}"
    saving = "checkpoint={dir: c, interval: 5}"

    def codes(*choices: str) -> list[str]:
        return [problem.code for problem in checkpoints.health_problems(prepare("tiny_cpu", choices).loaded)]

    assert codes(rewind) == ["health-unused"]
    assert codes(rewind, "checkpoint={dir: c, interval: 5, keep: 2}") == ["health-keep"]
    assert codes(rewind, "checkpoint={dir: c, interval: 5, keep: 3}") == codes(rewind, saving) == []
    assert codes("health.actions={nan: continue}") == []
    assert codes("health.actions={slow-node: exclude}", saving) == ["health-unused"]
    assert codes("health.actions={slow-node: exclude-later}", saving, "resources.nodes=2") == []


@pytest.mark.parametrize(
    ("actions", "named"),
    [
        ("{nan: restart}", "not 'restart' write one of continue, stop, {rewind: N}"),
        ("{nan: exclude}", "must be continue, stop or {rewind: N}, not 'exclude'"),
        ("{slow-node: stop}", "must be continue, exclude or exclude-later, not 'stop'"),
        ("{loss-jump: null}", "not null"),
        ("{loss-flat: stop}", "'nan', 'zero-grad-norm', 'loss-jump' or 'slow-node'"),
        ("{nan: {rewind: 0}}", "rewind: 1 or more"),
        ("{nan: {back: 1}}", "valid keys: rewind"),
    ],
)
def test_actions_name_what_is_allowed(actions: str, named: str) -> None:
    with pytest.raises(UserError) as refused:
        prepare("tiny_cpu", [f"health.actions={actions}"])
    text = " ".join(f"{problem.message} {problem.fix}" for problem in refused.value.problems)
    assert "health.actions" in text and named in text, text


def test_what_this_machine_does_not_see_is_not_judged(tmp_path: Path) -> None:
    huge = ("checkpoint.interval=10", "model.num_layers=320000")
    assert found(tmp_path, "llama8b_bf16", *huge, "checkpoint.dir=s3://bucket/run") == []
    assert found(tmp_path, "llama8b_bf16", *huge, "container.image=nemo-26.04") == []
    assert list(checkpoint_space.problems(prepare("llama8b_bf16", ["model.num_layers=320000"]), Cluster())) == []


@pytest.mark.parametrize("box", ["container={image: null}", "container={image: nemo-26.04, mounts: [/nope]}"])
def test_a_file_system_that_is_not_mounted_here_is_not_judged(tmp_path: Path, box: str) -> None:
    """The room of `/` says nothing about it."""
    huge = ("checkpoint.interval=10", "model.num_layers=320000", "checkpoint.dir=/nope/run/ckpt", box)
    assert found(tmp_path, "llama8b_bf16", *huge) == []


@pytest.mark.train
@pytest.mark.parametrize("choice", ["megatron.use_distributed_optimizer=true", "megatron.no_save_optim=true", None])
def test_the_size_is_that_of_a_real_checkpoint(tmp_path: Path, choice: str | None) -> None:
    choices = [
        "model.hidden_size=256", "model.ffn_hidden_size=1024", "train.iterations=1", "train.warmup=0",
        f"checkpoint.dir={tmp_path}/ckpt", "checkpoint.interval=1", *([choice] if choice else []),
    ]  # fmt: skip
    prepared = prepare("tiny_cpu", choices)
    forked(1, prepared.args.argv, tmp_path).succeeded()
    real = sum(file.stat().st_size for file in (tmp_path / "ckpt" / "iter_0000001").iterdir())
    assert checkpoint_space.checkpoint_bytes(resolve_run(prepared)) == pytest.approx(real, rel=0.03)
