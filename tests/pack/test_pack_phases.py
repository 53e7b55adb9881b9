"""The pack's recipe with phases, on a model and a machine that every test has: one training, whatever its phases."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

# All in bf16, and Adam as PyTorch has it on a CPU, whose states lack what the reshardable checkpoint format looks for.
# The body differs in how it cuts its batch, which only changes the order of sums.
ON_THE_CPU = """
extends: [studies/fp8_phases_llama3_2_1b, models/tiny, precision/bf16, hardware/cpu]
name: tiny_phases
model: {use_rope_scaling: null, rope_scaling_factor: null}
batch: {micro: 2, global: 8, sequence: 64}
train: {iterations: 9, lr: 1.0e-2, min_lr: 1.0e-3, warmup: 2}
optimizer: {grad_reduce: fp32}
container: {image: null}
software: {megatron: "0.19"}
phases:
  warmup: {iterations: 3}
  body: {precision: {recipe: bf16}, batch: {micro: 1}, env: {BODY: "of the body"}}
  cooldown: {iterations: 3}
megatron: {num_workers: 0, log_interval: 1, async_save: null, ddp_bucket_size: null, cross_entropy_loss_fusion: null,
  cross_entropy_fusion_impl: null, dist_ckpt_optim_fully_reshardable: null}
"""
LINE = re.compile(r"iteration +(\d+)/ *(\d+) .*?learning rate: ([\d.E+-]+).*?lm loss: ([\d.E+-]+)")


@pytest.fixture
def train(home: Path, tmp_path: Path, write: Callable[[str, str], str]) -> Callable[..., Path]:
    """Runs the recipe on this machine; the run folder."""
    if not (find_spec("torch") and find_spec("megatron") and find_spec("megatron.training")):
        pytest.skip("torch or megatron-core is not installed")
    recipe = write("tiny_phases.yaml", ON_THE_CPU)

    def run(name: str, *choices: str) -> Path:
        root = tmp_path / name
        command = [sys.executable, "-m", "fp8launch", "submit", recipe, "--backend", "local", "--wait", *choices]
        environment = {**os.environ, "FP8LAUNCH_RUNS": str(root)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        (folder,) = root.glob("tiny_phases-*")
        return folder

    return run


def curve(log: Path) -> dict[int, tuple[float, float]]:
    """Learning rate and loss by iteration."""
    lines = LINE.findall(log.read_text(encoding="utf-8"))
    assert {total for _, total, _, _ in lines} == {"9"}
    return {int(number): (float(rate), float(loss)) for number, _, rate, loss in lines}


@pytest.mark.train
@pytest.mark.slow
def test_phases_train_what_one_piece_would(train: Callable[..., Path]) -> None:
    phased, whole = train("phased"), train("whole", "--set", "phases=null")
    logs = sorted((phased / "logs").glob("*-*.log"))
    curves = [curve(log) for log in logs]
    assert [list(one) for one in curves] == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    # The body really ran with its own arguments.
    sizes = [re.search(r"micro_batch_size \.* (\d+)", log.read_text(encoding="utf-8"))[1] for log in logs]  # type: ignore[index]
    assert sizes == ["2", "1", "2"]
    (log,) = (whole / "logs").glob("*-*.log")
    undivided = curve(log)
    for iteration, (rate, loss) in {n: v for one in curves for n, v in one.items()}.items():
        assert rate == undivided[iteration][0]
        if iteration in (2, 5, 8):
            continue  # Megatron's second line after a start is a mean with the first
        assert loss == pytest.approx(undivided[iteration][1], rel=1e-4), f"iteration {iteration}"
    manifest = json.loads((phased / "manifest.json").read_text(encoding="utf-8"))
    assert [(p["name"], p["begin"], p["end"]) for p in manifest["phases"]] == [
        ("warmup", 0, 3), ("body", 3, 6), ("cooldown", 6, 9),
    ]  # fmt: skip
    assert manifest["phases"][1]["environment"]["BODY"] == "of the body"
