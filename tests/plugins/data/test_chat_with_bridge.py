"""Token ids, loss masks and packed sequences, beside what Megatron-Bridge's own datasets make of the same files."""

from __future__ import annotations

import dataclasses
import gzip
import importlib.util
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from chat_support import GEMMA, MARKED, TEMPLATES, conversations, text, write_chat_tokenizer, write_lines

from fp8launch.cli import run
from fp8launch.plugins.data.chat import dataset as chat_dataset
from fp8launch.plugins.data.chat.chat_tokenizer import load_chat_tokenizer
from fp8launch.plugins.data.chat.conversations import Conversation, Unusable, conversation_of

INSTALLED = importlib.util.find_spec("megatron.bridge") is not None
pytestmark = [
    pytest.mark.needs_plugin("bridge"),
    pytest.mark.skipif(not INSTALLED, reason="runs in .cache/bridge (bridge/test_with_bridge.py)"),
]
BUILDER = "megatron.bridge.data.builders.gpt_sft"
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


@pytest.fixture(scope="session")
def bridge() -> Any:
    """Bridge's module of datasets, imported as a job does."""
    from fp8launch.injob.rank.compat import cpu, python311
    from fp8launch.plugins.bridge.injob import absent_packages

    os.environ.setdefault("RANK", "0")
    os.environ["FP8LAUNCH_DEVICE"] = "cpu"
    python311.install()
    cpu.install()
    absent_packages.install()
    absent_packages.load_together([BUILDER])
    return importlib.import_module(BUILDER)


def bridges_tokenizer(folder: Path) -> Any:
    tokenizer = importlib.import_module("megatron.bridge.training.tokenizers.tokenizer")
    config = importlib.import_module("megatron.bridge.training.tokenizers.config")
    return tokenizer.build_tokenizer(
        config.TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder))
    )


def unusual() -> Iterator[Conversation]:
    """Conversations whose turns are hard to find."""
    choose = random.Random(1)
    for written in ("<|im_end|>", "<|im_start|>assistant\n", "<|eot_id|>", "<end_of_turn>\n", "<|end|>", "</think>"):
        for role in ("user", "assistant"):
            turns = [("user", text(choose)), ("assistant", text(choose)), ("user", text(choose)), ("assistant", "one")]
            said = [(name, f"{words} {written} {words}" if name == role else words) for name, words in turns]
            yield Conversation([{"role": name, "content": words} for name, words in said])
    question = {"role": "user", "content": "what is 1 + 2?"}
    call = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    result = {"role": "tool", "content": "3"}
    yield Conversation([question, call, result, {"role": "assistant", "content": "three"}], [TOOL])
    yield Conversation([question, {"role": "assistant", "content": "<think>hm</think>3"}, question])
    yield Conversation([question, {"role": "assistant", "content": " \n 3 \n "}])


@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_and_masks_are_those_of_bridges_own_dataset(name: str, bridge: Any, tmp_path: Path) -> None:
    folder = write_chat_tokenizer(tmp_path / "tokenizer", TEMPLATES[name])
    ours = load_chat_tokenizer(folder)
    given = [*map(conversation_of, conversations(60, system=name != "gemma")), *unusual()]
    file = write_lines(tmp_path / "lines.jsonl", (one.as_json() for one in given))
    dataset = bridge.build_gpt_sft_split(
        file,
        tokenizer=bridges_tokenizer(folder),
        seq_length=4096,
        memmap_workers=1,
        seed=1,
        packed_sequence_size=-1,
        dataset_kwargs={"chat": True, "use_hf_tokenizer_chat_template": True},
    )
    refused = 0
    for number, conversation in enumerate(given):
        try:
            theirs = dataset[number]
        except Exception as exc:
            theirs = exc
        try:
            ids, mask = ours.encode(conversation)
        except Unusable as exc:
            refused += 1
            # Bridge cannot make a sample of it either, or trains on nothing of it.
            assert isinstance(theirs, Exception) or not theirs["loss_mask"][1:].any(), (exc, conversation)
            continue
        assert not isinstance(theirs, Exception), (theirs, conversation)
        assert ids == theirs["input_ids"].tolist(), conversation
        assert mask == theirs["loss_mask"].int().tolist(), (conversation, ours.tokenizer.convert_ids_to_tokens(ids))
    assert refused < 5


@pytest.mark.parametrize("multiple", [1, 8])
def test_packed_sequences_are_those_that_bridge_writes(multiple: int, bridge: Any, tmp_path: Path) -> None:
    import pyarrow.parquet

    from fp8launch.plugins.bridge.injob import chat_data, fine_tuning

    folder = write_chat_tokenizer(tmp_path / "tokenizer")
    source = write_lines(tmp_path / "source.jsonl", conversations(1200, seed=3))
    options = ["--sequence", "256", "--pack", "--pad-to", str(multiple), "--split", "90,10,0"]
    words = [str(source), "--chat", "--tokenizer", str(folder), "--out", str(tmp_path / "out"), *options]
    assert run(["data", "build", *words]) == 0
    config = bridge.GPTSFTDatasetConfig(
        seq_length=256,
        dataset_root=tmp_path / "out",
        preprocessing=bridge.ChatSFTPreprocessingConfig(),
        enable_offline_packing=True,
        offline_packing_specs=bridge.PackedSequenceSpecs(packed_sequence_size=256, pad_seq_to_mult=multiple),
        do_test=False,
    )
    builder = bridge.GPTSFTDatasetBuilder(config, bridges_tokenizer(folder))
    builder.prepare_packed_data()
    for split, path in (("training", builder.train_path_packed), ("validation", builder.validation_path_packed)):
        ours = pyarrow.parquet.read_table(tmp_path / "out" / "packed" / f"{split}_256.idx.parquet")
        theirs = pyarrow.parquet.read_table(path)
        assert ours.schema.types == theirs.schema.types
        assert ours.num_rows > (600 if split == "training" else 60) / 2
        assert ours.to_pydict() == theirs.to_pydict()
    metadata = json.loads((tmp_path / "out" / "packed" / "256_metadata.jsonl").read_text())
    assert metadata == json.loads(Path(builder.pack_metadata).read_text())
    used = dataclasses.replace(config, offline_packing_specs=bridge.PackedSequenceSpecs(256, pad_seq_to_mult=multiple))
    before = sorted((tmp_path / "out").rglob("*"))
    fine_tuning.use_packed_files(
        SimpleNamespace(dataset=used, tokenizer=SimpleNamespace(tokenizer_model=folder)), str(tmp_path / "out")
    )
    training = bridge.GPTSFTDatasetBuilder(used, builder.tokenizer).build()[0]
    assert sorted((tmp_path / "out").rglob("*")) == before
    assert len(training) == pyarrow.parquet.read_metadata(used.offline_packing_specs.packed_train_data_path).num_rows
    assert training.collate_fn([training[0]])["loss_mask"].sum() > 0
    described = chat_data.read(tmp_path / "out")
    assert described is not None and described.packed is not None
    if multiple == 1:
        assert described.longer_than(256) == described.packed["training"]["left_out"] > 0


def built(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> Any:
    """Run `data build --chat --json`, and return what it prints."""
    assert run(["data", "build", "--chat", *map(str, words), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_a_bad_line_ends_the_build_with_its_place_or_is_left_out_and_counted(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = write_chat_tokenizer(tmp_path / "tokenizer", GEMMA)
    records = [
        *conversations(20, system=False),
        {"messages": [{"role": "user", "content": "one"}]},
        {"messages": [{"role": "system", "content": "two"}, *conversations(1, system=False)[0]["messages"]]},
    ]
    source = tmp_path / "chats.jsonl.gz"
    lines = "".join(json.dumps(record) + "\n" for record in records) + "{broken\n"
    source.write_bytes(gzip.compress(lines.encode()))
    options = [source, "--tokenizer", folder, "--out", tmp_path / "out"]
    found = built(capsys, *options, code=1)
    problem = found["problems"][0]
    assert (problem["code"], problem["where"]) == ("data-no-answer", f"{source}:21")
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*"))
    found = built(capsys, *options, "--on-error", "skip")
    assert found["skipped"] == {"no-answer": 1, "template": 1, "broken-json": 1}
    assert [bad["place"].rsplit(":")[-1] for bad in found["examples"]] == ["21", "22", "23"]
    assert "System role not supported" in found["examples"][1]["detail"]
    assert found["conversations"] == 20


def test_a_build_is_repeated_only_if_something_changed_and_leaves_no_files_of_older_data(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = write_chat_tokenizer(tmp_path / "tokenizer")
    source = write_lines(tmp_path / "chats.jsonl", conversations(60))
    options = [source, "--tokenizer", folder, "--out", tmp_path / "out", "--workers", "2"]
    assert built(capsys, *options)["built"]
    assert not built(capsys, *options)["built"]
    lines = (tmp_path / "out" / "training.jsonl").read_bytes()
    # What Bridge writes when it trains.
    (tmp_path / "out" / "training.jsonl.idx.npy").write_bytes(b"")
    options += ["--sequence", "200", "--pack"]
    assert built(capsys, *options, code=1)["problems"][0]["code"] == "data-exists"
    monkeypatch.setattr("fp8launch.plugins.data.chat.encoding.SMALL", 0)
    found = built(capsys, *options, "--overwrite")
    # Two processes write the same lines as one.
    assert (tmp_path / "out" / "training.jsonl").read_bytes() == lines
    names = {"training.jsonl", "validation.jsonl", "test.jsonl", "packed", "chat.manifest.json"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    assert found["packed"]["training"]["left_out"] > len(found["examples"]) == 5
    assert {bad["reason"] for bad in found["examples"]} == {"beyond-sequence"}
    (tmp_path / "out" / "notes.txt").write_text("mine")
    assert built(capsys, *options, "--seed", "2", "--overwrite", code=1)["problems"][0]["code"] == "data-folder"


def test_what_another_process_built_meanwhile_is_not_built_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = write_chat_tokenizer(tmp_path / "tokenizer")
    source = write_lines(tmp_path / "chats.jsonl", conversations(20))
    options = [source, "--tokenizer", folder, "--out", tmp_path / "out"]
    begin = chat_dataset.make_folder

    def late(building: Path) -> None:
        monkeypatch.setattr(chat_dataset, "make_folder", begin)
        assert built(capsys, *options)["built"]
        begin(building)

    monkeypatch.setattr(chat_dataset, "make_folder", late)
    assert not built(capsys, *options)["built"]
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    ("template", "code", "words"),
    [
        (None, "data-template", "no chat template"),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}", "data-template", "{% generation %}"),
        # A template that leaves Jinja's sandbox.
        (f"{{{{ ''.__class__.__mro__[1].__subclasses__() }}}}{MARKED}", "data-template", "unsafe"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused(
    template: str | None, code: str, words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = write_chat_tokenizer(tmp_path / "tokenizer", template)
    source = write_lines(tmp_path / "chats.jsonl", conversations(4))
    problem = built(
        capsys,
        source,
        "--tokenizer",
        folder,
        "--out",
        tmp_path / "out",
        code=1 if template and "mro" in template else 2,
    )["problems"][0]
    assert problem["code"] == code
    assert words in f"{problem['message']} {problem['fix']}"


def test_inspect_marks_trained_tokens_and_reports_what_teaches_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = write_chat_tokenizer(tmp_path / "tokenizer", None)
    template = tmp_path / "mine.jinja"
    template.write_text(MARKED)
    source = write_lines(tmp_path / "chats.jsonl", [{"prompt": "one", "completion": "which of them"}] * 20)
    out = tmp_path / "out"
    built(capsys, source, "--tokenizer", folder, "--chat-template", template, "--out", out, "--split", "1,0,0")
    assert run(["data", "inspect", str(out), "--verify"]) == 0
    shown = capsys.readouterr().out
    assert "[user] one[assistant]\u27e6 which of them<|end_of_text|>\u27e7\n" in shown
    assert max(map(len, shown.replace(str(tmp_path), "").splitlines())) <= 80
    assert run(["data", "inspect", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    sample, training = found["samples"][0], found["splits"]["training"]
    assert (sample["trained"] * 20, sample["tokens"] * 20) == (training["trained_tokens"], training["tokens"])
    # Files without a manifest, of which the second line has no answer.
    (out / "chat.manifest.json").unlink()
    with (out / "training.jsonl").open("a") as stream:
        stream.write('{"messages": [{"role": "user", "content": "one"}]}\n')
    assert run(["data", "inspect", str(out)]) == 2
    assert "--tokenizer" in capsys.readouterr().err
    assert run(["data", "inspect", str(out), "--tokenizer", str(folder)]) == 1
    shown = capsys.readouterr().out
    assert "1 lines cannot be used" in shown and "line 21" in shown


def test_a_changed_file_is_reported(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = write_chat_tokenizer(tmp_path / "tokenizer")
    source = write_lines(tmp_path / "chats.jsonl", conversations(20))
    built(capsys, source, "--tokenizer", folder, "--out", tmp_path / "out")
    lines = (tmp_path / "out" / "training.jsonl").read_bytes()
    (tmp_path / "out" / "training.jsonl").write_bytes(lines.replace(b"the", b"teh"))
    assert run(["data", "inspect", str(tmp_path / "out")]) == 0
    assert run(["data", "inspect", str(tmp_path / "out"), "--verify"]) == 1
    assert "training.jsonl has changed" in capsys.readouterr().out
