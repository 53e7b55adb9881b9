"""The three phases of a training, each a run of its own, go on from one another's checkpoint along one schedule."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from pack_support import PACK

PHASES = sorted((PACK / "studies" / "phases").glob("*.yaml"))

# The same recipes on a model and a machine that every test has: all in bf16, and Adam as PyTorch has it on a CPU,
# whose states lack what the reshardable checkpoint format looks for.
ON_THE_CPU = """
extends: [studies/phases/{phase}, models/tiny, precision/bf16, hardware/cpu]
name: {phase}
model: {{use_rope_scaling: null, rope_scaling_factor: null}}
precision: {{format: null}}
batch: {{micro: 2, global: 8, sequence: 64}}
train: {{iterations: {iterations}, lr: 1.0e-2, min_lr: 1.0e-3, warmup: 2}}
optimizer: {{grad_reduce: fp32}}
container: {{image: null}}
software: {{megatron: "0.19"}}
megatron: {{lr_decay_iters: 9, num_workers: 0, log_interval: 1, async_save: null, ddp_bucket_size: null,
  cross_entropy_loss_fusion: null, cross_entropy_fusion_impl: null, dist_ckpt_optim_fully_reshardable: null}}
"""


@pytest.mark.train
@pytest.mark.slow
def test_phases_go_on_from_one_another(home: Path, tmp_path: Path, write: Callable[[str, str], str]) -> None:
    if not (find_spec("torch") and find_spec("megatron") and find_spec("megatron.training")):
        pytest.skip("torch or megatron-core is not installed")
    runs = tmp_path / "runs"
    seen: dict[int, float] = {}
    for phase, iterations in zip(PHASES, (3, 6, 9), strict=True):
        recipe = write(f"{phase.stem}.yaml", ON_THE_CPU.format(phase=phase.stem, iterations=iterations))
        command = [sys.executable, "-m", "fp8launch", "submit", recipe, "--backend", "local", "--wait"]
        environment = {**os.environ, "FP8LAUNCH_RUNS": str(runs)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180, check=False)
        assert done.returncode == 0, done.stderr
        (log,) = runs.glob(f"{phase.stem}-*/logs/*.log")
        lines = re.findall(r"iteration +(\d+)/ *\d+ .*?learning rate: ([\d.E+-]+)", log.read_text(encoding="utf-8"))
        # Each phase takes up where the one before ended.
        assert [int(number) for number, _ in lines] == list(range(iterations - 2, iterations + 1))
        seen |= {int(number): float(rate) for number, rate in lines}
    # One cosine over all nine steps, from the peak after two to the smallest rate at the end.
    rates = [seen[step] for step in range(1, 10)]
    assert max(rates) == rates[1] == pytest.approx(1e-2)
    assert rates[1:] == sorted(rates[1:], reverse=True)
    assert rates[-1] == pytest.approx(1e-3)
