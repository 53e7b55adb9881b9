"""Five stages, killed in every one of them and resumed, where Megatron-Bridge and lm-eval are installed.

It runs in .cache/evaluate (tests/plugins/bridge/test_with_bridge.py).
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from local_study import LocalStudy
from support import wait_for
from test_handovers import SIZES

from fp8launch.injob.local_job import LOCAL_RUN, processes_with
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
      train: {train_iters: 20, global_batch_size: 4, micro_batch_size: 2}
      model.seq_length: 64
      dataset: {seq_length: 64, enable_offline_packing: false, offline_packing_specs: null}
      scheduler.lr_warmup_iters: 0
"""
TINY = """\
extends: tiny_cpu
model: {vocab_size: 511, norm_epsilon: 1.0e-5}
train: {iterations: 40}
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
    study = LocalStudy(tmp_path, RECIPE.replace("DATA", str(tmp_path / "data")))
    for number, run in enumerate(study.runs, 1):
        name = run.name.rpartition("-")[0]
        trains = name not in ("convert", "evaluate")
        wait_for(lambda run=run: any(processes_with(LOCAL_RUN, str(run))), 300)
        if trains:
            wait_for(lambda run=run: checkpoints.latest(run / "checkpoints") > 0, 300)
        else:
            wait_for(lambda run=run: any(run.glob("logs/local-0.log")), 300)
        study.kill(run)
        assert study.state(run) == "failed"
        assert f"stage {number} of 5 ({name})" in study.call("runs").stdout
        if number < len(study.runs):
            assert study.state(study.runs[number]) == "pending"
        said = study.call("resume", study.name).stderr
        assert ("continues from iteration" if trains else "starts again") in said
        study.completes(run)
        if trains:
            assert checkpoints.latest(run / "checkpoints") == (20 if name == "sft" else 40)
    for run in study.runs:
        assert len(list(run.glob("logs/local-*.log"))) == 2
    assert "all 5 stages" in study.call("resume", study.name, expect=1).stderr
    scores = json.loads((study.runs[1] / "evaluations" / f"{study.runs[3].name}.json").read_text())
    assert scores["tasks"][0]["metrics"]
    assert "acc" in study.call("evaluate", str(study.runs[3])).stdout
    # Fine-tuning has another batch and cannot be compared. Conversion and evaluation have no iterations.
    rows = study.call("compare", study.name, expect=1).stdout.splitlines()
    assert [row.split()[1] for row in rows if row.startswith("stage ")] == ["pretrain", "anneal", "sft"]
    assert "no data" not in "".join(rows)
