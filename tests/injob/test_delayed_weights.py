"""Weights of delayed scaling wait for their scale, in the real loading code of Megatron 0.19.

Older releases convert FP8 parameters themselves, by a test that only real ones of Transformer Engine pass.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fp8launch.resources import in_job_folder

pytestmark = pytest.mark.train

# A parameter as Transformer Engine's Float8Tensor is one: it quantizes whatever is copied into it, with the scale that
# its quantizer has at that moment.
PROGRAM = """
import os, sys, types
import torch
from fp8launch.injob.rank.compat import checkpointing, cpu
cpu.install()
torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
checkpointing.load_weights_with_their_scale()
checkpointing.load_weights_with_their_scale()
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor

class Float8(torch.Tensor):
    _quantizer = types.SimpleNamespace(scale=torch.tensor(1.0))
    def dequantize(self):
        return torch.zeros(self.shape, dtype=torch.bfloat16)

folder = sys.argv[1]
saved = torch.full((4, 4), 0.02, dtype=torch.bfloat16)
dist_checkpointing.save({"w": ShardedTensor.from_rank_offsets("w", saved)}, folder)
weight = torch.zeros(4, 4, dtype=torch.bfloat16).as_subclass(Float8)
plain = torch.zeros(4, 4, dtype=torch.bfloat16)
wanted = {"w": ShardedTensor.from_rank_offsets("w", weight)}
loaded = dist_checkpointing.load(wanted, folder)["w"]
assert type(loaded) is torch.Tensor and torch.equal(loaded, saved), loaded
assert torch.equal(weight.as_subclass(torch.Tensor), plain), "written before its scale was known"
print("converted")
"""


def test_a_weight_is_not_written_before_its_scale_is_known(megatron: None, tmp_path: Path) -> None:
    (tmp_path / "iter_0000001").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "iter_0000001")],
        env={**os.environ, "PYTHONPATH": str(in_job_folder().parents[1]), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.stdout.endswith("converted\n"), done.stderr[-2000:]
