"""Manifests of conversations that somebody else wrote, or an earlier version."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fp8launch.cli import run

FILE = {"bytes": 3, "sha256": "0" * 64}
PACKED = {
    "sequences": 1, "left_out": 1, "cut": 1, "file": FILE,
    "metadata": {"packing_efficiency": 98.7, "packing_factor": 2},
}  # fmt: skip
SPLIT = {"conversations": 2, "tokens": 9, "trained_tokens": 4, "lengths": [[4, 1], [5, 1]], "file": FILE}
MANIFEST = {
    "format": 1,
    "sequence": 4,
    "splits": {"training": SPLIT},
    "packed": {"size": 8, "training": PACKED},
    "tokenizer": {"name": "tiny", "vocab_size": 512, "file": "/nowhere/tokenizer.json", "sha256": "0" * 64},
}


def damaged(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield copies of a value, each with one part missing or of another type, and the place of that part."""
    for replacement in ("text", ["text"], {"a": 1}, 1.5, -1):
        yield f"{place}={replacement}", replacement
    if isinstance(value, dict):
        for key, child in value.items():
            yield f"{place}.{key} missing", {name: part for name, part in value.items() if name != key}
            for where, other in damaged(child, f"{place}.{key}"):
                yield where, {**value, key: other}


def inspect(folder: Path, manifest: Any, capfd: pytest.CaptureFixture[str]) -> tuple[int, str]:
    (folder / "training.jsonl").write_text("{}\n")
    (folder / "chat.manifest.json").write_text(json.dumps(manifest))
    return run(["data", "inspect", str(folder)]), "".join(capfd.readouterr())


def test_a_whole_manifest_is_shown(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    _, text = inspect(tmp_path, MANIFEST, capfd)
    assert "98.7 % full, 2 conversations in each" in text
    assert "tokenizer tiny, 512 tokens" in text


def test_a_damaged_manifest_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    refused = 0
    for place, manifest in damaged(copy.deepcopy(MANIFEST)):
        status, text = inspect(tmp_path, manifest, capfd)
        assert status in (0, 1), place
        assert "a bug in fp8launch" not in text, f"{place}: {text}"
        refused += "is not a manifest of conversations" in text
    assert refused > 100
