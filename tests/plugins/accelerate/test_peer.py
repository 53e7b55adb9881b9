"""The peers train a tiny Llama on two CPU processes, and their logs are read as ours; a dropped ZeRO is seen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from command_line import said
from support import parse_paths

ROOT = Path(__file__).resolve().parents[3]
# The peers' packages are in an environment of their own, as tools/setup.sh installs them, or with ours.
OWN = ROOT / ".cache" / "peer" / "bin" / "python"
PYTHON = str(OWN) if OWN.is_file() else sys.executable
PROGRAM = ROOT / "launchers" / "fp8launch" / "plugins" / "accelerate" / "injob" / "accelerate_train.py"
TINY = """\
extends: [models/tiny, precision/bf16]
model: {vocab_size: 256}
name: peer
engine: accelerate
accelerate: {sharding: zero2, fp8: torchao}
batch: {micro: 2, global: 8, sequence: 64}
train: {iterations: 4, lr: 1.0e-2}
data: {kind: mock}
resources: {gpu: cpu, gpus_per_node: 2, nodes: 1, time: "00:10:00"}
"""
# torchao emulates FP8 on a CPU, which recipes for CPUs refuse: these runs are started without one.
WORDS = """--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --num-query-groups 2
    --seq-length 64 --micro-batch-size 2 --global-batch-size 8 --train-iters 4 --lr 1e-2 --vocab-size 256 --bf16
    --untie-embeddings-and-output-weights --fp8-library torchao"""


pytestmark = [pytest.mark.train, pytest.mark.slow]


@pytest.fixture(scope="module", autouse=True)
def stack() -> None:
    names = ("accelerate", "transformers", "torchao", "deepspeed")
    code = "import importlib.util as u, sys; print(*[n for n in sys.argv[1:] if u.find_spec(n) is None])"
    done = subprocess.run([PYTHON, "-c", code, *names], capture_output=True, text=True, check=True)
    if done.stdout.strip():
        pytest.skip(f"the peers need {done.stdout.strip()}")


def peer(log: Path, *more: str, words: Sequence[str] = tuple(WORDS.split())) -> None:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(PROGRAM), *words, *more]
    environment = {**os.environ, "FP8LAUNCH_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    with log.open("w") as file:
        done = subprocess.run([PYTHON, *command], stdout=file, stderr=file, check=False, env=environment, timeout=600)
    assert done.returncode == 0, log.read_text()[-3000:]


def test_fp8_beside_zero_trains_divided(tmp_path: Path) -> None:
    log = tmp_path / "log"
    peer(log, "--sharding", "zero2", "--fp8-format", "hybrid", "--fp8-recipe", "tensorwise")
    report = parse_paths([log], gpu="h200", world_size=2)
    assert (report.status, report.training.iteration_last, report.setup.global_batch_size) == ("ok", 4, 8)
    assert report.training.loss_first == pytest.approx(5.55, abs=0.2)
    assert report.fp8 is not None and report.fp8["verified"]
    assert "13 of 14 linears ran in FP8 with torchao.tensorwise" in str(report.fp8["findings"])
    assert "ZeRO 2 is in effect: each rank holds 53408 of 106816 elements" in str(report.fp8["findings"])


def test_deepspeed_is_told_the_recipe_of_transformer_engine() -> None:
    """Accelerate's own code ended two runs on H200 here. It makes the settings only where Transformer Engine is."""
    code = """if True:
        import sys
        from types import SimpleNamespace
        from accelerate import Accelerator
        from accelerate.utils import dataclasses
        dataclasses.is_transformer_engine_available = lambda: True
        sys.path.insert(0, sys.argv[1])
        from fp8launch.plugins.accelerate.injob.accelerate_setup import tell_deepspeed_the_recipe
        settings = dataclasses.TERecipeKwargs(fp8_format="E4M3")
        made = SimpleNamespace(has_fp8_handler=True, te_recipe_handler=settings, fp8_recipe_handler=None)
        tell_deepspeed_the_recipe(made)
        print(Accelerator.fp8_backend.fget(made).value, made.fp8_recipe_handler.to_kwargs())
    """
    words = [PYTHON, "-c", code, str(ROOT / "launchers")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.returncode) == ("TE {'fp8_format': 'E4M3'}", 0), done.stderr


def test_fsdp2_gathers_in_fp8(tmp_path: Path) -> None:
    log = tmp_path / "log"
    words = ["--fp8-format", "hybrid", "--fp8-recipe", "tensorwise", "--fp8-param-gather"]
    peer(log, "--sharding", "fsdp2", *words)
    report = parse_paths([log], gpu="h200", world_size=2)
    assert report.status == "ok" and report.fp8 is not None
    assert "13 of 15 weights are FP8 tensors" in str(report.fp8["findings"])
    assert "FSDP2 is in effect: each rank holds 53408 of 106816 elements" in str(report.fp8["findings"])


def test_qwen3_with_experts_recomputes_its_layers(tmp_path: Path) -> None:
    log = tmp_path / "log"
    words = ["--fp8-format", "hybrid", "--fp8-recipe", "tensorwise", "--recompute-granularity", "full"]
    words += ["--qk-layernorm", "--num-experts", "4", "--moe-ffn-hidden-size", "64", "--moe-router-topk", "2"]
    peer(log, "--sharding", "fsdp2", *words)
    report = parse_paths([log], gpu="h200", world_size=2)
    assert (report.status, report.training.iteration_last) == ("ok", 4) and report.fp8 is not None
    assert "7 of 12 linears ran in FP8" in str(report.fp8["findings"])
    assert "4: grouped experts stay in bf16" in str(report.fp8["findings"])


def test_tied_weights_and_scaled_rope_train(tmp_path: Path) -> None:
    log = tmp_path / "log"
    words = [word for word in WORDS.split() if not word.startswith("--untie")]
    words += ["--use-rope-scaling", "--rope-scaling-factor", "32", "--sharding", "fsdp2"]
    peer(log, words=words)
    report = parse_paths([log], gpu="h200", world_size=2)
    assert (report.status, report.training.iteration_last) == ("ok", 4)
    assert '"parameters":90432' in log.read_text()  # 256 x 64 fewer than with two matrices


@pytest.fixture
def ask(home: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*words: str, expect: int = 0) -> str:
        return said(capsys, *words, expect=expect).out

    return call


def submitted(ask: Any, recipe: Path, *settings: str, expect: int = 0) -> str:
    overrides = [word for setting in (f"launch.python={PYTHON}", *settings) for word in ("--set", setting)]
    out = ask("submit", str(recipe), "--backend", "local", "--wait", "--yes", *overrides, expect=expect)
    return str(out.split()[-1])


def test_a_recipe_runs_and_a_dropped_plugin_is_seen(tmp_path: Path, ask: Any) -> None:
    """Accelerate drops DeepSpeed's plugin where ACCELERATE_USE_CPU is set: the same recipe, one variable apart."""
    recipe = tmp_path / "peer.yaml"
    recipe.write_text(TINY)
    divided = submitted(ask, recipe, "accelerate.sharding=zero3")
    assert "ZeRO 3 is in effect: each rank holds 53408 of 106816" in " ".join(ask("verify", divided).split())
    dropped = submitted(ask, recipe, "env.ACCELERATE_USE_CPU=1", expect=1)
    shown = " ".join(ask("verify", dropped, expect=1).split())
    assert (
        "ZeRO 2 was requested, but optimizer states are not partitioned: each rank holds 106816 of 106816 elements"
        in shown
    )
    report = json.loads(ask("parse", dropped, "--json", expect=1))
    assert (report["status"], report["failure"]["code"]) == ("failed", "not-partitioned")
    rows = json.loads(ask("compare", divided, dropped, "--force", "--json"))["rows"]
    assert len(rows) == 2
