"""Datasets looked at, verified, divided and blended, and what `check` knows of those that `data build` made."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from dataset_support import as_bytes, build, data, make_texts, read, write_jsonl

from fp8launch.check import files
from fp8launch.cluster.profile import Cluster
from fp8launch.diagnostics import UserError
from fp8launch.job.prepared import prepare


@pytest.fixture
def made(tmp_path: Path, bpe: Path) -> Path:
    """A dataset of 300 documents with a tokenizer."""
    source = write_jsonl(tmp_path / "a.jsonl", ["Straße of the text", *make_texts(299)])
    build(source, "--tokenizer", bpe, "--out", tmp_path / "made")
    return tmp_path / "made"


def test_inspect_shows_counts_lengths_and_text(made: Path) -> None:
    shown = json.loads(data("inspect", made, "--verify", "--json").stdout)
    documents = read(made)
    assert (shown["documents"], shown["tokens"]) == (300, sum(map(len, documents)))
    lengths = shown["lengths"]
    assert (lengths["shortest"], lengths["longest"]) == (min(map(len, documents)), max(map(len, documents)))
    expected = Counter(len(document).bit_length() for document in documents)
    assert {each["end"]: each["documents"] for each in lengths["buckets"]} == {
        1 << power: expected[power] for power in range(min(expected), max(expected) + 1)
    }
    assert shown["sample"]["text"] == "Straße of the text<|endoftext|>"
    assert shown["verified"] and shown["largest_token"] == max(map(max, documents))
    lines = data("inspect", f"{made}.idx").stdout.splitlines()
    assert "300 documents" in lines[1] and any("█" in line for line in lines)
    assert max(len(line) for line in lines if "█" in line) <= 80


def test_changed_files_are_found(made: Path) -> None:
    tokens = bytearray(Path(f"{made}.bin").read_bytes())
    tokens[10] ^= 1
    Path(f"{made}.bin").write_bytes(tokens)
    data("inspect", made)
    done = data("inspect", made, "--verify", expect=1)
    assert "damaged: the .bin has another sha256 than when it was made" in done.stdout
    Path(f"{made}.bin").write_bytes(tokens[:-2])
    assert "the .bin is cut short" in data("inspect", made, expect=1).stderr


def test_a_missing_dataset_has_a_near_name(made: Path) -> None:
    done = data("inspect", made.with_name("mode"), expect=2)
    assert f"did you mean {made}?" in done.stderr


def test_half_a_dataset_is_not_a_typing_error(made: Path) -> None:
    Path(f"{made}.bin").unlink()
    done = data("inspect", made, expect=2)
    assert "did you mean" not in done.stderr and "copy the missing file" in done.stderr


def test_split_gives_every_document_to_one_part(made: Path) -> None:
    data("split", made, "--part", "train=90", "--part", "valid=10")
    train, valid = (read(made.with_name(f"made_{name}")) for name in ("train", "valid"))
    assert (len(train), len(valid)) == (270, 30)
    assert sorted(train + valid) == sorted(read(made))
    assert valid != read(made)[270:]
    # With the same seed the same documents; in order the last ones.
    before = Path(f"{made}_valid.bin").read_bytes()
    again = ["split", made, "--part", "train=90", "--part", "valid=10"]
    assert "[data-exists]" in data(*again, expect=1).stderr
    data(*again, "--overwrite")
    assert Path(f"{made}_valid.bin").read_bytes() == before
    data(*again, "--overwrite", "--in-order")
    assert read(made.with_name("made_valid")) == read(made)[270:]
    assert json.loads(data("inspect", f"{made}_valid", "--verify", "--json").stdout)["verified"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--part", "train"], "'train' is not NAME=SHARE"),
        (["--part", "a=1", "--part", "a=2"], "two parts have the same name"),
        (["--part", "a=99999", "--part", "b=1"], "made_b would get none of the 300 documents"),
    ],
)
def test_splits_that_cannot_be(made: Path, words: list[str], message: str) -> None:
    done = data("split", made, *words, expect=1 if "none of" in message else 2)
    assert message in done.stderr
    assert not list(made.parent.glob("*_*")) and not list(made.parent.glob(".*split*"))


def test_blend_weights_and_epochs(tmp_path: Path) -> None:
    for name, count in (("large", 400), ("small", 100)):
        build(
            write_jsonl(tmp_path / f"{name}.jsonl", ["x" * 9] * count), "--tokenizer", "bytes", "--out", tmp_path / name
        )
    words = ["blend", tmp_path / "large", tmp_path / "small", "--tokens", 10_000]
    shares = json.loads(data(*words, "--json").stdout)["datasets"]
    assert [each["weight"] for each in shares] == pytest.approx([0.8, 0.2])
    assert [each["epochs"] for each in shares] == pytest.approx([2, 2])
    shares = json.loads(data(*words, "--temperature", 2, "--json").stdout)["datasets"]
    assert [each["weight"] for each in shares] == pytest.approx([2 / 3, 1 / 3])
    shares = json.loads(data("blend", f"{tmp_path}/large=1", f"{tmp_path}/small=3", "--json").stdout)["datasets"]
    assert [each["weight"] for each in shares] == pytest.approx([0.25, 0.75])
    assert "some datasets have a weight" in data("blend", f"{tmp_path}/large=1", f"{tmp_path}/small", expect=2).stderr
    # The lines are a recipe's.
    (tmp_path / "recipe.yaml").write_text("extends: [tiny_cpu]\n" + data(*words).stdout)
    loaded = prepare(str(tmp_path / "recipe.yaml"))
    assert loaded.args.values["data_path"] == ["0.8", str(tmp_path / "large"), "0.2", str(tmp_path / "small")]


def test_blend_counts_the_tokens_of_a_recipe_until_it_exits(made: Path, tmp_path: Path) -> None:
    def tokens(text: str) -> int:
        (tmp_path / "recipe.yaml").write_text(f"extends: [tiny_cpu]\n{text}")
        return int(json.loads(data("blend", made, "--recipe", tmp_path / "recipe.yaml", "--json").stdout)["tokens"])

    whole = tokens("train: {iterations: 10}\n")
    assert tokens("train: {iterations: 10}\nmegatron: {exit_interval: 5}\n") == whole // 2
    phases = "phases: {a: {iterations: 5}, b: {iterations: 5}}\ncheckpoint: {dir: saved, interval: 5}\n"
    assert tokens("train: {iterations: 10}\n" + phases) == whole


def test_blend_prints_the_tokenizer_that_the_data_was_built_with(made: Path, tmp_path: Path, bpe: Path) -> None:
    for name in ("a", "b"):
        build(tmp_path / "a.jsonl", "--tokenizer", "bytes", "--out", tmp_path / name)
    (tmp_path / "recipe.yaml").write_text(
        "extends: [tiny_cpu]\n" + data("blend", tmp_path / "a", tmp_path / "b").stdout
    )
    values = prepare(str(tmp_path / "recipe.yaml")).args.values
    assert (values["tokenizer_type"], values["vocab_size"]) == ("NullTokenizer", 257)
    (tmp_path / "recipe.yaml").write_text("extends: [tiny_cpu]\n" + data("blend", made).stdout)
    values = prepare(str(tmp_path / "recipe.yaml")).args.values
    assert (values["tokenizer_type"], values["tokenizer_model"]) == ("HuggingFaceTokenizer", str(bpe))
    assert "tokenizer" not in data("blend", made, tmp_path / "a").stdout


def test_a_byte_tokenizer_is_called_otherwise(made: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        _problems(tmp_path, made, tokenizer={"type": "ByteTokenizer"})
    (problem,) = refused.value.problems
    assert problem.fix is not None and problem.fix.startswith("write NullTokenizer, and model.vocab_size: 257")


def _problems(tmp_path: Path, prefix: Path, settings: str = "", **more: object) -> dict[str, str]:
    section = {"kind": "indexed", "blend": [str(prefix)], "split": "1,0,0", "tokenizer": {"type": "NullTokenizer"}}
    (tmp_path / "recipe.yaml").write_text(f"extends: [tiny_cpu]\ndata: {json.dumps({**section, **more})}\n{settings}")
    prepared = prepare(str(tmp_path / "recipe.yaml"), ["train.iterations=1"])
    return {each.code: each.message for each in files.problems(prepared, Cluster(), {})}


def test_check_holds_the_manifest_against_files_model_and_tokenizer(made: Path, tmp_path: Path, bpe: Path) -> None:
    # Some hundred tokens, and 255 embeddings padded to 256.
    largest = json.loads(Path(f"{made}.manifest.json").read_text())["vocab_limit"] - 1
    found = _problems(tmp_path, made)
    assert f"may have token ids up to {largest}, but the model has 256 embeddings" in found["data-vocabulary"]
    small = build(tmp_path / "a.jsonl", "--tokenizer", "bytes", "--vocab-size", 257, "--out", tmp_path / "small")
    assert small["vocab_limit"] == 257
    # Megatron before 0.18 adds a word to NullTokenizer's, so 256 are enough for it, and padded to a multiple of 128.
    for version, words, refused in (
        ("0.17", 256, False),
        ("0.18", 256, True),
        ("0.19", 256, True),
        ("0.19", 257, False),
    ):
        more = f"software: {{megatron: '{version}'}}\nmodel: {{vocab_size: {words}}}\n"
        assert ("data-vocabulary" in _problems(tmp_path, tmp_path / "small", settings=more)) == refused, (
            version,
            words,
        )
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "tokenizer.json").write_text((bpe / "tokenizer.json").read_text() + "\n")
    same = {"type": "HuggingFaceTokenizer", "model": str(bpe)}
    assert "data-other-tokenizer" not in _problems(tmp_path, made, tokenizer=same)
    found = _problems(tmp_path, made, tokenizer={**same, "model": str(tmp_path / "other")})
    assert "was built with tokenizer" in found["data-other-tokenizer"]
    manifest = json.loads(Path(f"{made}.manifest.json").read_text())
    manifest["documents"] += 1
    Path(f"{made}.manifest.json").write_text(json.dumps(manifest))
    assert "it has 300 documents, and had 301 when it was made" in _problems(tmp_path, made)["data-manifest"]
    Path(f"{made}.manifest.json").write_text("{}")
    assert "data-manifest-unread" in _problems(tmp_path, made)


def test_bytes_decode_to_their_text(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["häß\tx"])
    build(source, "--tokenizer", "bytes", "--out", tmp_path / "out")
    assert read(tmp_path / "out") == as_bytes(["häß\tx"])
    assert json.loads(data("inspect", tmp_path / "out", "--json").stdout)["sample"]["text"] == "häß\tx"
