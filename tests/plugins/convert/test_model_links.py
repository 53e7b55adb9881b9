"""Files next to the weights of another user's model: neither programs nor links to private files are copied."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from foreign_files import NEEDS_ROOT, give_away

from fp8launch.plugins.convert.injob.convert import files_to_copy

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason=NEEDS_ROOT)


@pytest.fixture
def model(theirs: Path) -> Path:
    for name in ("config.json", "tokenizer.json", "modeling_x.py", "model.safetensors"):
        (theirs / name).write_text("{}")
    return theirs


def test_programs_of_others_are_not_copied(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert {file.name for file in files_to_copy(model)} == {"config.json", "tokenizer.json", "modeling_x.py"}
    give_away(model)
    assert {file.name for file in files_to_copy(model)} == {"config.json", "tokenizer.json"}
    assert "modeling_x.py is left out" in capsys.readouterr().err


def test_a_linked_private_file_is_not_copied(model: Path, secret: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (model / "tokenizer_config.json").symlink_to(secret)
    give_away(model)
    with pytest.raises(SystemExit) as stopped:
        files_to_copy(model)
    assert stopped.value.code == 2
    assert "is a link of the user 54321 to a file of" in capsys.readouterr().err
