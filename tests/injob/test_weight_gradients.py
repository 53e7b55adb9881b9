"""Fused weight gradients without APEX: what the worker prepares, a script of the user's finds as well."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "launchers"
# What megatron/core/tensor_parallel/layers.py does in its backward pass with gradient_accumulation_fusion.
SCRIPT = """
import fused_weight_gradient_mlp_cuda
import torch

inputs, grad_output = torch.ones(4, 2, dtype=torch.bfloat16), torch.ones(4, 3, dtype=torch.bfloat16)
main_grad = torch.ones(3, 2)
fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32(inputs, grad_output, main_grad)
print("main_grad", main_grad.unique().tolist())
"""
# As on a GPU, up to what needs one: PyTorch for a CPU comes without triton.
WORKER = """
import sys
from pathlib import Path
from fp8launch.injob.rank import worker
from fp8launch.injob.rank.compat import triton_stub

triton_stub.install()
worker.prepare("cuda")
worker.run_script(Path(sys.argv[1]), [])
"""


@pytest.mark.skipif(
    importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None, reason="APEX's extension is installed"
)
def test_a_script_finds_the_replacement(megatron: None, tmp_path: Path) -> None:
    script = tmp_path / "pretrain_gpt.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE), "FP8LAUNCH_PROBE": "0"}
    command = [sys.executable, "-c", WORKER, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "main_grad [5.0]" in done.stdout
