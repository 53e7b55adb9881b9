"""Five stages, killed in every one of them and resumed, where Megatron-Bridge and lm-eval are installed.

It runs in .cache/evaluate (tests/plugins/bridge/test_with_bridge.py).
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import train_jobs
from support import wait_for
from test_handovers import SIZES

from fp8launch.injob.local_job import LOCAL_RUN, processes_with, send
from fp8launch.injob.supervisor import checkpoints

WORDS = ["<unk>", "<eos>", "the", "and", "of", "to", "in", "is", "it", "was"]
RECIPE = """\
name: five
stages:
  - name: pretrain
    recipe: ./tiny.yaml
  - name: anneal
    recipe: ./tiny.yaml
    from: pretrain
    set: {train: {lr: 1.0e-3, min_lr: 1.0e-4}, megatron.finetune: true}
  - {name: convert, convert: anneal, model: ./model}
  - {name: evaluate, evaluate: convert, tasks: [fp8launch_tiny], offline: true}
  - name: sft
    recipe: bridge:llama32_1b_sft_1gpu_h100_bf16_config
    from: convert
    set:
      bridge.data: DATA
      resources.gpu: cpu
      checkpoint: {dir: checkpoints, interval: 2}
      train: {train_iters: 8, global_batch_size: 4, micro_batch_size: 2}
      model.seq_length: 64
      dataset: {seq_length: 64, enable_offline_packing: false, offline_packing_specs: null}
      scheduler.lr_warmup_iters: 0
"""
TINY = """\
extends: tiny_cpu
model: {vocab_size: 511, norm_epsilon: 1.0e-5}
train: {iterations: 8}
checkpoint: {dir: checkpoints, interval: 2}
"""


def make_model(folder: Path) -> None:
    """The configuration of the trained model, and a tokenizer that has the words of the tiny task."""
    words = [*WORDS, *(f"t{number}" for number in range(SIZES["vocab_size"] - len(WORDS)))]
    tokenizer = {
        "version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": {word: n for n, word in enumerate(words)}, "unk_token": "<unk>"},
    }  # fmt: skip
    stated = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "eos_token": "<eos>"}
    folder.mkdir()
    for name, content in (("config", SIZES), ("tokenizer", tokenizer), ("tokenizer_config", stated)):
        (folder / f"{name}.json").write_text(json.dumps(content))


@pytest.mark.train
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed")
@pytest.mark.skipif(importlib.util.find_spec("megatron.bridge") is None, reason="Megatron-Bridge is not installed")
def test_killed_in_every_stage_and_resumed(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    (tmp_path / "data").mkdir()
    lines = [json.dumps({"input": f"the and t{n} of", "output": f"is t{n} it was"}) for n in range(64)]
    (tmp_path / "data" / "training.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "tiny.yaml").write_text(TINY)
    (tmp_path / "five.yaml").write_text(RECIPE.replace("DATA", str(tmp_path / "data")))
    environment = {
        **train_jobs.job_environment(PYTHONPATH=f"{train_jobs.LAUNCHERS}:{os.environ.get('PYTHONPATH', '')}"),
        "HOME": str(tmp_path),
        "FP8LAUNCH_RUNS": str(tmp_path / "runs"),
    }
    del environment["FP8LAUNCH_DEVICE"]

    def call(*words: str, expect: int = 0) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "fp8launch", *words]
        done = subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == expect, done.stdout + done.stderr
        return done

    study = call("submit", "./five.yaml", "--backend", "local", "--yes").stdout.strip()
    folder = tmp_path / "runs" / study
    runs = [folder / point["run"] for point in json.loads((folder / "study.json").read_text())["points"]]

    def status(run: Path) -> dict[str, Any]:
        found: list[dict[str, Any]] = json.loads(call("runs", study, "--json").stdout)
        return next(each for each in found if each["run"] == run.name)

    for number, run in enumerate(runs, 1):
        name = run.name.rpartition("-")[0]
        trains = name not in ("convert", "evaluate")
        wait_for(lambda run=run: any(processes_with(LOCAL_RUN, str(run))), 300)
        if trains:
            wait_for(lambda run=run: checkpoints.latest(run / "checkpoints") > 0, 300)
        else:
            wait_for(lambda run=run: any(run.glob("logs/local-0.log")), 300)
        # At once: none of them may act on the death of another one.
        while alive := set(processes_with(LOCAL_RUN, str(run))):
            send(signal.SIGSTOP, alive)
            send(signal.SIGKILL, alive)
        assert status(run)["state"] == "failed"
        assert f"stage {number} of 5 ({name})" in call("runs").stdout
        if number < len(runs):
            assert status(runs[number])["state"] == "pending"
        said = call("resume", study).stderr
        assert ("continues from iteration" if trains else "starts again") in said
        wait_for(lambda run=run: status(run)["state"] == "completed", 300)
        if trains:
            assert checkpoints.latest(run / "checkpoints") == 8
    for run in runs:
        assert len(list(run.glob("logs/local-*.log"))) == 2
    assert "all 5 stages" in call("resume", study, expect=1).stderr
    scores = json.loads((runs[1] / "evaluations" / f"{runs[3].name}.json").read_text())
    assert scores["tasks"][0]["metrics"]
    assert "acc" in call("evaluate", str(runs[3])).stdout
