"""Published configurations of Hugging Face models become the models of the pack; what Megatron lacks is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import only, refused

from fp8launch.plugins.init.hf_config import LLAMA3_ROPE, read_config, translate
from fp8launch.recipe.load import read_recipe

LLAMA3 = {
    "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192, "rope_theta": 500000.0,
    "rms_norm_eps": 1e-05, "hidden_act": "silu", "tie_word_embeddings": False, "vocab_size": 128256,
    "initializer_range": 0.02, "attention_bias": False, "attention_dropout": 0.0,
}  # fmt: skip
SCALED = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192, "rope_type": "llama3"}  # fmt: skip
LLAMA3_2_1B = {
    **LLAMA3, "num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 8192, "head_dim": 64,
    "rope_scaling": SCALED, "tie_word_embeddings": True,
}  # fmt: skip
QWEN3_14B = {
    "model_type": "qwen3", "num_hidden_layers": 40, "hidden_size": 5120, "intermediate_size": 17408, "head_dim": 128,
    "num_attention_heads": 40, "num_key_value_heads": 8, "max_position_embeddings": 40960, "rope_theta": 1000000,
    "rms_norm_eps": 1e-06, "hidden_act": "silu", "tie_word_embeddings": False, "vocab_size": 151936,
    "initializer_range": 0.02, "sliding_window": None, "use_sliding_window": False, "rope_scaling": None,
}  # fmt: skip
QWEN3_30B_A3B = {
    **QWEN3_14B, "model_type": "qwen3_moe", "num_hidden_layers": 48, "hidden_size": 2048, "intermediate_size": 6144,
    "num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128, "moe_intermediate_size": 768,
    "num_experts_per_tok": 8, "router_aux_loss_coef": 0.001, "norm_topk_prob": True, "mlp_only_layers": [],
    "decoder_sparse_step": 1,
}  # fmt: skip
MIXTRAL = {
    **LLAMA3, "model_type": "mixtral", "max_position_embeddings": 32768, "rope_theta": 1000000.0, "vocab_size": 32000,
    "initializer_range": 0.02, "num_local_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.02,
    "sliding_window": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "part"),
    [
        (LLAMA3, "llama3_8b"),
        (LLAMA3_2_1B, "llama3_2_1b"),
        (QWEN3_14B, "qwen3_14b"),
        (QWEN3_30B_A3B, "qwen3_30b_a3b"),
        (MIXTRAL, "mixtral_8x7b"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_published_configuration_is_the_model_of_the_pack(config: dict[str, Any], part: str) -> None:
    model = read_recipe(f"models/{part}").tree.plain()["model"]
    expected = {key: value for key, value in model.items() if value is not None}
    # NVIDIA's recipe for Llama 3, whose value the pack has, initializes with less.
    if part == "llama3_8b":
        expected["init_method_std"] = 0.02
    # The report of Qwen3 balances over the global batch, which no field of the configuration says.
    if part == "qwen3_30b_a3b":
        expected["moe_router_load_balancing_type"] = "aux_loss"
    assert translate(config, "config.json").model == expected


def test_the_field_of_newer_transformers_is_read() -> None:
    newer = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    model = translate({**newer, "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}}, "c").model
    assert (model["rotary_base"], "use_rope_scaling" in model) == (500000, False)


def test_a_window_limits_the_sequence() -> None:
    found = translate({**LLAMA3, "model_type": "mistral", "sliding_window": 4096}, "c")
    assert found.model["max_position_embeddings"] == 4096
    assert "4096 tokens" in found.notes[0]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers"),
        ({"hidden_size": None}, "hidden_size"),
        ({"vocab_size": -1}, "vocab_size"),
        ({"rope_theta": "x"}, "rope_theta"),
        ({"model_type": ["llama"]}, "llama"),
    ],
)
def test_what_megatron_lacks_is_refused_by_name(change: dict[str, Any], word: str) -> None:
    assert word in only(refused(translate, {**LLAMA3, **change}, "config.json")).message


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, '{"model_type": 1e999}'])
def test_a_broken_file_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    only(refused(read_config, file))
    only(refused(read_config, tmp_path))


def test_a_folder_stands_for_its_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA3))
    assert read_config(tmp_path).model["num_layers"] == 32


NUMBERS = ("rope_theta", "rms_norm_eps", "attention_dropout", "initializer_range", "partial_rotary_factor")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "1" + "0" * 400, "true", "{}"])
@pytest.mark.parametrize("field", [*NUMBERS, "rope_parameters", "rope_scaling"])
def test_what_is_no_number_is_refused_by_name(tmp_path: Path, field: str, number: str) -> None:
    """Python reads NaN and infinities in JSON, which no whole number and no recipe can be made of."""
    text = number
    if field == "rope_parameters":
        text = f'{{"rope_theta": {number}}}'
    elif field == "rope_scaling":
        scaling = {"rope_type": "llama3", "factor": "HERE", **LLAMA3_ROPE}
        text = json.dumps(scaling).replace('"HERE"', number)
    rest = {name: value for name, value in LLAMA3.items() if name != field}
    (tmp_path / "config.json").write_text(f'{json.dumps(rest)[:-1]}, "{field}": {text}}}')
    named = {"rope_parameters": "rope_theta"}.get(field, field)
    assert named in only(refused(read_config, tmp_path)).message
