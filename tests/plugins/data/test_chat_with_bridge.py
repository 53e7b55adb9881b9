"""Token ids, loss masks and packed sequences, beside what Megatron-Bridge's own datasets make of the same files."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from chat_support import TEMPLATES, conversations, text, write_chat_tokenizer, write_lines

from fp8launch.plugins.data.chat.chat_tokenizer import load_chat_tokenizer
from fp8launch.plugins.data.chat.conversations import Conversation, Unusable, conversation_of
from fp8launch.plugins.data.cli.build import build

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron.bridge") is None, reason="runs in .cache/bridge (bridge/test_with_bridge.py)"
)
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

    folder = write_chat_tokenizer(tmp_path / "tokenizer")
    source = write_lines(tmp_path / "source.jsonl", conversations(1200, seed=3))
    options = ["--sequence", "256", "--pack", "--pad-to", str(multiple), "--split", "90,10,0"]
    words = [str(source), "--chat", "--tokenizer", str(folder), "--out", str(tmp_path / "out"), *options]
    build.main(words, standalone_mode=False)
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
    specs = packed_specs(bridge, tmp_path / "out" / "packed", multiple)
    named = bridge.GPTSFTDatasetBuilder(dataclasses.replace(config, offline_packing_specs=specs), builder.tokenizer)
    training = named.build()[0]
    assert len(training) == ours_rows(tmp_path)
    assert training.collate_fn([training[0]])["loss_mask"].sum() > 0


def ours_rows(folder: Path) -> int:
    import pyarrow.parquet

    return int(pyarrow.parquet.read_metadata(folder / "out" / "packed" / "training_256.idx.parquet").num_rows)


def packed_specs(bridge: Any, folder: Path, multiple: int) -> Any:
    names: Mapping[str, str] = {
        "packed_train_data_path": "training_256.idx.parquet",
        "packed_val_data_path": "validation_256.idx.parquet",
        "packed_metadata_path": "256_metadata.jsonl",
    }
    paths = {name: folder / file for name, file in names.items()}
    return bridge.PackedSequenceSpecs(packed_sequence_size=256, pad_seq_to_mult=multiple, **paths)
