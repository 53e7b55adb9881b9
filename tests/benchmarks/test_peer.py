"""The peer trains a tiny Llama on the CPU, and its log is read as one of ours."""

from __future__ import annotations

import importlib.util
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fp8launch.report.throughput import parse_paths

ROOT = Path(__file__).resolve().parents[2]
# The peer's packages are in an environment of their own, as tools/setup.sh installs them, or with ours.
OWN = ROOT / ".cache" / "peer" / "bin" / "python"
PEER = ROOT / "benchmarks" / "peers" / "accelerate_fsdp2.py"
TINY = shlex.split("""
    --num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --num-query-groups 2
    --seq-length 64 --micro-batch-size 2 --global-batch-size 8 --train-iters 4 --lr 1e-2 --vocab-size 256
    --untie-embeddings-and-output-weights --bf16 --use-megatron-fsdp
""")
FP8 = ["--fp8-format", "hybrid", "--fp8-recipe", "tensorwise"]

pytestmark = pytest.mark.train


@pytest.fixture(scope="module", autouse=True)
def stack() -> None:
    missing = [name for name in ("accelerate", "transformers", "torchao") if importlib.util.find_spec(name) is None]
    if missing and not OWN.is_file():
        pytest.skip(f"the peer needs {', '.join(missing)}")


def peer(log: Path, *more: str) -> subprocess.CompletedProcess[str]:
    words = [str(OWN) if OWN.is_file() else sys.executable, str(PEER), *TINY, *more]
    environment = {**os.environ, "FP8LAUNCH_DEVICE": "cpu"}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment, timeout=300)
    log.write_text(done.stdout + done.stderr)
    return done


def test_fp8_trains_and_is_seen(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert peer(log, *FP8).returncode == 0, log.read_text()[-2000:]
    report = parse_paths([log], gpu="h200", world_size=1)
    assert (report.status, report.iteration_last, report.global_batch_size) == ("ok", 4, 8)
    assert report.loss_first == pytest.approx(5.55, abs=0.2)
    assert report.fp8 is not None
    assert report.fp8["verified"]
    assert "13 of 14 linears ran in FP8" in str(report.fp8["findings"])


def test_a_recipe_that_torchao_has_not_is_refused(tmp_path: Path) -> None:
    done = peer(tmp_path / "log", "--fp8-format", "e4m3", "--fp8-recipe", "blockwise")
    assert done.returncode != 0
    assert "tensorwise" in done.stderr
