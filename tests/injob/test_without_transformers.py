"""Megatron is imported without transformers where the run's tokenizer does without."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
from train_jobs import MOCK, worker

from fp8launch.injob.rank.compat import tokenizers

TRANSFORMERS = "print('transformers is imported')\nclass AutoTokenizer: pass\n"


@pytest.mark.train
def test_a_run_on_random_tokens_does_not_import_transformers(megatron: None, tmp_path: Path) -> None:
    (tmp_path / "transformers.py").write_text(TRANSFORMERS)
    run = worker([*MOCK, "--train-iters", "3"], PYTHONPATH=str(tmp_path)).succeeded()
    assert list(run.losses) == [1, 2, 3]
    assert "transformers is imported" not in run.output


def test_a_tokenizer_that_needs_it_finds_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "transformers.py").write_text(TRANSFORMERS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    with tokenizers.without_transformers("HuggingFaceTokenizer"):
        assert importlib.import_module("transformers").AutoTokenizer
    monkeypatch.delitem(sys.modules, "transformers")
