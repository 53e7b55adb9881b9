"""Files of others that are huge, or become huge when they are read: refused in words, in little time and memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fp8launch.injob.supervisor import checkpoints

# A command needs 0.4 GiB of address space and two seconds. What is read without a limit needs more.
LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (3 << 29, 3 << 29))
resource.setrlimit(resource.RLIMIT_CPU, (25, 25))
from fp8launch.cli import run
sys.exit(run(sys.argv[1:]))
"""


def command(home: Path, *words: object) -> tuple[int, str]:
    """Exit code and output of a command with 1.5 GiB of memory and 25 s of processor time."""
    environment = {**os.environ, "FP8LAUNCH_RUNS": str(home / "runs"), "SLURM_CONF": "/nonexistent/slurm.conf"}
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, *map(str, words)],
        env=environment,
        cwd=home,
        timeout=120,
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stdout + done.stderr
    assert "a bug in" not in said and "Traceback" not in said, said
    return done.returncode, said


def sparse(file: Path, size: int = 6 << 30) -> None:
    with file.open("wb") as stream:
        stream.truncate(size)


@pytest.fixture
def dataset(home: Path) -> Path:
    source = home / "a.jsonl"
    source.write_text('{"text": "one two three"}\n' * 4)
    status, said = command(home, "data", "build", source, "--tokenizer", "bytes", "--out", home / "set", "--workers", 1)
    assert status == 0, said
    return home / "set"


def spoil(file: Path, kind: str) -> None:
    file.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "device":
        file.symlink_to("/dev/zero")
    else:
        sparse(file)


WRONG = {"pipe": "it is not a regular file", "device": "it is not a regular file", "sparse": "it is larger than"}


@pytest.mark.parametrize("kind", WRONG)
def test_inspect_names_a_manifest_that_is_no_small_file(home: Path, dataset: Path, kind: str) -> None:
    spoil(home / "set.manifest.json", kind)
    status, said = command(home, "data", "inspect", dataset)
    assert status == 1
    assert f"the manifest cannot be read: {WRONG[kind]}" in said


@pytest.mark.parametrize("kind", WRONG)
def test_check_names_a_manifest_that_is_no_small_file(home: Path, dataset: Path, kind: str) -> None:
    spoil(home / "set.manifest.json", kind)
    recipe = home / "r.yaml"
    recipe.write_text(f"extends: tiny_cpu\nname: r\ndata: {{kind: indexed, blend: [{dataset}]}}\n")
    _, said = command(home, "check", recipe)
    assert "[data-manifest-unread]" in said
    assert WRONG[kind] in " ".join(said.split())


@pytest.mark.parametrize("kind", WRONG)
def test_a_build_over_such_a_manifest_is_refused(home: Path, dataset: Path, kind: str) -> None:
    spoil(home / "set.manifest.json", kind)
    status, said = command(home, "data", "build", home / "a.jsonl", "--tokenizer", "bytes", "--out", dataset)
    assert (status, "[data-exists]" in said) == (1, True)


@pytest.mark.parametrize("kind", WRONG)
def test_a_split_of_a_dataset_with_such_a_manifest_has_no_tokenizer(home: Path, dataset: Path, kind: str) -> None:
    spoil(home / "set.manifest.json", kind)
    status, said = command(home, "data", "split", dataset, "--part", "a=1", "--part", "b=1")
    assert status == 0, said


@pytest.mark.parametrize("kind", ["pipe", "device", "sparse"])
def test_a_list_of_a_saved_dataset_s_files_is_a_small_file(home: Path, kind: str) -> None:
    (home / "saved").mkdir()
    spoil(home / "saved/state.json", kind)
    status, said = command(home, "data", "build", home / "saved", "--tokenizer", "bytes", "--out", home / "out")
    assert (status, "[data-source]" in said) == (2, True)


@pytest.mark.parametrize("lengths", [-5, -(1 << 31)])
@pytest.mark.parametrize("verb", [("inspect",), ("inspect", "--verify"), ("split", "--part", "a=1", "--part", "b=1")])
def test_an_index_with_negative_lengths_is_broken(
    home: Path, dataset: Path, lengths: int, verb: tuple[str, ...]
) -> None:
    with (home / "set.idx").open("r+b") as file:
        file.seek(34)
        file.write(lengths.to_bytes(4, "little", signed=True))
    status, said = command(home, "data", verb[0], dataset, *verb[1:])
    assert (status, "[data-broken]" in said) == (1, True), said


def test_a_token_id_beyond_every_vocabulary_takes_no_memory(home: Path, dataset: Path) -> None:
    """Ids are counted in a table with as many rows as the largest id."""
    raw = (home / "set.bin").read_bytes()
    index = bytearray((home / "set.idx").read_bytes())
    index[17] = 4  # int32
    (home / "set.bin").write_bytes(((1 << 31) - 1).to_bytes(4, "little") * (len(raw) // 2))
    counts = [int.from_bytes(index[34 + 4 * at : 38 + 4 * at], "little") for at in range(4)]
    for at in range(4):
        index[50 + 8 * at : 58 + 8 * at] = (4 * sum(counts[:at])).to_bytes(8, "little")
    (home / "set.idx").write_bytes(index)
    status, said = command(home, "data", "inspect", dataset, "--verify")
    assert (status, "[data-broken]" in said) == (1, True), said


# --- checkpoints ------------------------------------------------------------------------------------------------------


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
SPOILED: list[tuple[str, Any]] = [
    ("metadata.json", "sparse"), (".metadata", "sparse"), (".metadata", BOMB), ("metadata.json", b"[" * (1 << 20)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content"), SPOILED)
def test_metadata_of_a_checkpoint_is_limited(home: Path, stored: Path, name: str, content: Any) -> None:
    if content == "sparse":
        spoil(stored / name, content)
    else:
        (stored / name).write_bytes(content)
    status, said = command(home, "convert", "megatron-to-hf", home / "checkpoints", home / "out")
    assert (status, "[convert-checkpoint]" in said) == (1, True), said
    assert "has metadata that cannot be read" in " ".join(said.split())


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


@pytest.mark.parametrize("flag", ["data_args_path", "per_split_data_args_path"])
def test_a_list_of_datasets_is_limited(home: Path, flag: str) -> None:
    sparse(home / "blend")
    recipe = home / "r.yaml"
    recipe.write_text(
        "extends: llama8b_fp8\nname: r\ndata: null\n"
        f"megatron: {{{flag}: {home}/blend, tokenizer_type: NullTokenizer, vocab_size: 1000}}\n"
    )
    assert command(home, "check", recipe)[0] == 1


@pytest.mark.parametrize("name", ["tokenizer.json", "a.tiktoken", "tokenizer_config.json"])
def test_a_tokenizer_is_limited(home: Path, dataset: Path, name: str) -> None:
    folder = home / "tokenizer"
    folder.mkdir()
    if name == "tokenizer_config.json":
        (folder / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}')
    sparse(folder / name)
    status, said = command(
        home, "data", "build", home / "a.jsonl", "--tokenizer", folder, "--out", home / "other", "--workers", 1
    )
    assert status == 2, said
    assert "[data-tokenizer]" in said or "[data-eod]" in said
