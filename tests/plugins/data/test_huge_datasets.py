"""Datasets of others that are huge, or become huge when they are read: refused in words, in little time and memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from limited_command import WRONG, command, sparse, spoil


@pytest.fixture
def dataset(home: Path) -> Path:
    source = home / "a.jsonl"
    source.write_text('{"text": "one two three"}\n' * 4)
    status, said = command(home, "data", "build", source, "--tokenizer", "bytes", "--out", home / "set", "--workers", 1)
    assert status == 0, said
    return home / "set"


@pytest.mark.parametrize("kind", WRONG)
def test_inspect_names_a_manifest_that_is_no_small_file(home: Path, dataset: Path, kind: str) -> None:
    spoil(home / "set.manifest.json", kind)
    status, said = command(home, "data", "inspect", dataset)
    assert status == 1
    assert f"the manifest cannot be read: {WRONG[kind]}" in said


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
