"""Huge checkpoints and models of others: refused with a message, in little time and memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from limited_command import command, sparse, spoil

from fp8launch.injob.supervisor import checkpoints


@pytest.fixture
def stored(home: Path) -> Path:
    """A folder of an iteration, to be spoiled."""
    place = home / "checkpoints" / "iter_0000007"
    place.mkdir(parents=True)
    (home / "checkpoints" / checkpoints.TRACKER).write_text("7")
    (place / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    (place / ".metadata").write_bytes(b"\x80\x04N.")
    return place


# One opcode makes C's unpickler enlarge its table of references to 4 GiB.
BOMB = b"\x80\x02Nr" + (1 << 28).to_bytes(4, "little") + b"."
SPOILED: list[tuple[str, Any, str]] = [
    ("metadata.json", "sparse", "it is larger than 1 MiB"),
    (".metadata", "sparse", "it is larger than 256 MiB"),
    (".metadata", BOMB, "'NoneType' object has no attribute 'storage_data'"),
    (".metadata", b"\x80\x05\x96" + (1 << 60).to_bytes(8, "little") + b".", "out of memory"),  # a bytearray of 2^60
    ("metadata.json", b"[" * (1 << 20), "maximum recursion depth exceeded"),
]


@pytest.mark.parametrize(("name", "content", "reason"), SPOILED)
def test_metadata_of_a_checkpoint_is_limited(home: Path, stored: Path, name: str, content: Any, reason: str) -> None:
    """The reason shows that the limit refused the file. Without a limit it is a MemoryError, which has no text."""
    if content == "sparse":
        spoil(stored / name, content)
    else:
        (stored / name).write_bytes(content)
    status, said = command(home, "convert", "megatron-to-hf", home / "checkpoints", home / "out")
    assert (status, "[convert-checkpoint]" in said) == (1, True), said
    assert f"that cannot be read: {reason}" in " ".join(said.split())


def test_a_configuration_in_a_checkpoint_is_limited(home: Path, stored: Path) -> None:
    """PyYAML takes 8 s and 0.2 GiB for a megabyte."""
    whole(stored)
    lines = "".join(f"  k{at}: [1, 2, {{a: b}}]\n" for at in range(600_000))
    (stored / "run_config.yaml").write_text(f"model:\n  hf_model_id: a/b\n{lines}")
    assert (stored / "run_config.yaml").stat().st_size > 15_000_000
    status, said = command(home, "convert", "megatron-to-hf", home / "checkpoints", home / "out")
    assert (status, "name one with --model" in said) == (2, True), said


def test_a_usual_configuration_in_a_checkpoint_is_read(home: Path, stored: Path) -> None:
    whole(stored)
    settings = "".join(f"  k{at}: 1.0e-05\n" for at in range(2000))
    (stored / "run_config.yaml").write_text(f"model:\n{settings}  hf_model_id: some/model\n")
    words = ("convert", "megatron-to-hf", home / "checkpoints", home / "out", "--backend", "local", "--dry-run")
    assert "some/model" in command(home, *words)[1]


def whole(place: Path) -> None:
    """Write metadata of which nothing is torn."""
    code = (
        "import pickle, sys, types\n"
        "(open(sys.argv[1], 'wb')).write(pickle.dumps(types.SimpleNamespace(storage_data={})))\n"
    )
    subprocess.run([sys.executable, "-c", code, str(place / ".metadata")], check=True)


def test_a_model_s_configuration_is_limited(home: Path) -> None:
    folder = home / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    sparse(folder / "config.json")
    status, said = command(home, "convert", "hf-to-megatron", folder, home / "out", "--backend", "local", "--dry-run")
    assert (status, "it is larger than 1 MiB" in said) == (1, True), said
