"""recipes/tiny_text.yaml: text to dataset to a model that has learnt it, stopped and resumed on the way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from dataset_support import data

ROOT = Path(__file__).parents[3]


def fp8launch(home: Path, *words: object) -> str:
    environment = {**os.environ, "HOME": str(home), "FP8LAUNCH_RUNS": str(home / "runs")}
    done = subprocess.run(
        [sys.executable, "-m", "fp8launch", *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.train
@pytest.mark.slow
def test_the_loss_falls_well_below_the_unigram_entropy(tmp_path: Path) -> None:
    data("tokenizer", ROOT / "docs", "--vocab-size", 512, "--out", tmp_path / "tokenizer")
    data("build", ROOT / "docs", "--tokenizer", tmp_path / "tokenizer", "--out", tmp_path / "docs")
    entropy = json.loads(data("inspect", tmp_path / "docs", "--verify", "--json").stdout)["unigram_entropy"]
    weights = tmp_path / "weights"
    words = ["submit", ROOT / "recipes" / "tiny_text.yaml", "--set", f"data.blend=[{tmp_path / 'docs'}]"]
    words += ["--set", f"checkpoint.dir={weights}", "--backend", "local", "--wait", "--set"]
    fp8launch(tmp_path, *words, "megatron.exit_interval=200")
    first = json.loads(fp8launch(tmp_path, "parse", "latest", "--json"))
    assert (weights / "latest_checkpointed_iteration.txt").read_text().strip() == "200"
    fp8launch(tmp_path, *words, f"checkpoint.load={weights}")
    second = json.loads(fp8launch(tmp_path, "parse", "latest", "--json"))
    # Resumed: it goes on from the loss that the first had.
    assert second["loss_first"] < entropy - 1
    assert abs(second["loss_first"] - first["loss_last"]) < 0.8
    assert second["loss_last"] < entropy - 1.2
    words = ["data", "sample", "latest", "--prompt", "The checkpoint", "--tokens", 30, "--json"]
    text = json.loads(fp8launch(tmp_path, *words))["text"]
    assert text.startswith("The checkpoint") and len(text) > 40
    assert json.loads(fp8launch(tmp_path, *words))["text"] == text
