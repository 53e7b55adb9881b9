"""A Hugging Face model of the size of `tiny_cpu`, and whether its checkpoints can be evaluated here."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

needs_lm_eval = pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed")
needs_bridge = pytest.mark.skipif(
    importlib.util.find_spec("megatron.bridge") is None, reason="Megatron-Bridge is not on PYTHONPATH"
)
SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}
WORDS = ["<unk>", "<eos>", "the", "and", "of", "to", "in", "is", "it", "was"]


def make_model(folder: Path) -> Path:
    """The configuration of the recipe's model, and a tokenizer that has the words of the tiny task."""
    transformers: Any = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**SIZES)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    words = [*WORDS, *(f"t{number}" for number in range(512 - len(WORDS)))]
    tokenizer = {
        "version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None, "decoder": None,
        "model": {
            "type": "WordLevel", "vocab": {word: number for number, word in enumerate(words)}, "unk_token": "<unk>",
        },
    }  # fmt: skip
    stated = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "eos_token": "<eos>"}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(stated))
    return folder
