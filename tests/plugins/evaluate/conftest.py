"""Commands on a Hugging Face model, up to the job."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import said

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


@pytest.fixture
def ask(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[str, str]]:
    """Run a command without a Hugging Face token, and return its stdout and stderr."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.chdir(home)

    def call(*words: object, expect: int = 0) -> tuple[str, str]:
        return said(capsys, *words, expect=expect)

    return call


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that looks like a model of Hugging Face."""
    folder = tmp_path / "llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder
