"""Translate a Hugging Face `config.json` to the `model` section of a recipe.

Sources: the configuration classes in transformers (`LlamaConfig`, `MistralConfig`, `Qwen2Config`, `Qwen3Config`,
`MixtralConfig`, `Qwen3MoeConfig`), and the corresponding Megatron flags. Features that Megatron-Core's GPT model lacks
are refused by name, because silently training a different model would be worse.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from fp8launch.diagnostics import UserError, error
from fp8launch.recipe.yaml_source import MAX_BYTES, read_start
from fp8launch.untyped import as_mapping, as_number

# Model types (`model_type`) for which Megatron has a flag for every field below.
DENSE = ("llama", "mistral", "qwen2", "qwen3")
EXPERTS = ("mixtral", "qwen3_moe")
SUPPORTED = (*DENSE, *EXPERTS)
# The parameters of Megatron's --use-rope-scaling (megatron/core/models/common/embeddings/rotary_pos_embedding.py).
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclass(frozen=True)
class HfModel:
    """The `model` section of a recipe, and `notes` for the user about the translation."""

    kind: str
    model: dict[str, Any]
    notes: tuple[str, ...]


def read_config(path: Path) -> HfModel:
    """Read a `config.json`, given as a file or as its folder. Raises UserError."""
    file = path
    if path.is_dir():
        file = path / "config.json"
    config = None
    try:
        raw = read_start(file)
        if len(raw) <= MAX_BYTES:
            config = json.loads(raw)
    except OSError as exc:
        raise error("unreadable-file", f"cannot be read: {exc.strerror}", str(file)) from None
    except (ValueError, RecursionError) as exc:
        raise error("not-json", f"is not JSON: {exc}", str(file)) from None
    if not isinstance(config, dict):
        raise error("not-a-config", "is not the configuration of a Hugging Face model", str(file))
    return translate(config, str(file))


def translate(config: Mapping[str, Any], where: str) -> HfModel:
    """Translate a configuration. Raises UserError for models that Megatron cannot train unchanged."""
    kind = config.get("model_type")
    if kind not in SUPPORTED:
        message = f"models of type '{kind}' cannot be translated; supported: {', '.join(SUPPORTED)}"
        fix = "set the model's Megatron flags in your own recipe (docs/recipes.md)"
        raise error("unsupported-model", message, where, fix)
    reader = _Reader(config, where)
    notes: list[str] = []
    model = _shape(reader) | _attention(reader, str(kind), notes) | _rope(reader) | _fixed(reader)
    if kind in EXPERTS:
        model |= _experts(reader, str(kind))
    if reader.refusals:
        raise UserError(chain.from_iterable(refusal.problems for refusal in reader.refusals))
    return HfModel(str(kind), model, tuple(notes))


class _Reader:
    """Reads fields, checks their types, and collects those that cannot be translated."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.config = config
        self.where = where
        self.refusals: list[UserError] = []

    def refuse(self, field: str, why: str) -> None:
        value = json.dumps(self.config.get(field))[:80]
        message = f"'{field}' is {value}: {why}"
        self.refusals.append(error("unsupported-model", message, self.where))

    def integer(self, *fields: str, default: int | None = None) -> int:
        for field in fields:
            value = self.config.get(field)
            if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 10**9:
                return value
            if value is not None:
                self.refuse(field, "it must be a positive whole number")
                return 1
        if default is None:
            self.refuse(fields[0], "the field is required")
            return 1
        return default

    def number(self, field: str, default: float) -> float:
        value = as_number(self.config.get(field, default))
        if value is None:
            self.refuse(field, "it must be a number")
            return default
        return value

    def flag(self, field: str) -> bool:
        return self.config.get(field) is True


def _shape(reader: _Reader) -> dict[str, Any]:
    heads = reader.integer("num_attention_heads")
    groups = reader.integer("num_key_value_heads", default=heads)
    hidden = reader.integer("hidden_size")
    shape: dict[str, Any] = {
        "num_layers": reader.integer("num_hidden_layers"),
        "hidden_size": hidden,
        "ffn_hidden_size": reader.integer("intermediate_size"),
        "num_attention_heads": heads,
    }
    if groups != heads:
        shape |= {"group_query_attention": True, "num_query_groups": groups}
    shape["kv_channels"] = reader.integer("head_dim", default=max(hidden // heads, 1))
    return shape


def _attention(reader: _Reader, kind: str, notes: list[str]) -> dict[str, Any]:
    attention: dict[str, Any] = {}
    length = reader.integer("max_position_embeddings")
    window = reader.config.get("sliding_window")
    if isinstance(window, int) and reader.config.get("use_sliding_window", True) and window < length:
        notes.append(
            f"its attention sees only the last {window} tokens, so sequences are limited to that length; for longer "
            "ones, set Megatron's window_size"
        )
        length = window
    attention["max_position_embeddings"] = length
    if kind.startswith("qwen3"):
        attention["qk_layernorm"] = True
    if kind == "qwen2":
        attention["add_qkv_bias"] = True
    if reader.flag("attention_bias"):
        reader.refuse("attention_bias", "Megatron has a bias in QKV alone or in every linear layer")
    if reader.flag("mlp_bias"):
        reader.refuse("mlp_bias", "Megatron has biases in every linear layer or in none")
    return attention


def _rope(reader: _Reader) -> dict[str, Any]:
    # In transformers 5, one field contains both.
    parameters = as_mapping(reader.config.get("rope_parameters"))
    scaling = reader.config.get("rope_scaling") or parameters
    base = as_number(parameters.get("rope_theta", reader.config.get("rope_theta", 10000.0)))
    if base is None:
        reader.refuse("rope_theta", "it must be a number")
        base = 1.0
    rope: dict[str, Any] = {
        "position_embedding_type": "rope",
        "rotary_base": int(base),
        "rotary_percent": reader.number("partial_rotary_factor", 1.0),
    }
    kind = "?"
    if isinstance(scaling, Mapping):
        kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return rope
    if kind != "llama3" or any(scaling.get(name) != value for name, value in LLAMA3_ROPE.items()):
        reader.refuse("rope_scaling", "Megatron's GPT model has only Llama 3's scaling of rotary frequencies")
        return rope
    factor = as_number(scaling.get("factor", 8.0))
    if factor is None:
        reader.refuse("rope_scaling", "its factor must be a number")
        return rope
    return {**rope, "use_rope_scaling": True, "rope_scaling_factor": factor}


def _fixed(reader: _Reader) -> dict[str, Any]:
    if reader.config.get("hidden_act", "silu") != "silu":
        reader.refuse("hidden_act", "only SwiGLU (silu) is translated")
    found: dict[str, Any] = {
        "normalization": "RMSNorm",
        "norm_epsilon": reader.number("rms_norm_eps", 1e-6),
        "swiglu": True,
        "disable_bias_linear": True,
    }
    if not reader.flag("tie_word_embeddings"):
        found["untie_embeddings_and_output_weights"] = True
    return {
        **found,
        "attention_dropout": reader.number("attention_dropout", 0.0),
        "hidden_dropout": 0.0,
        "init_method_std": reader.number("initializer_range", 0.02),
        "vocab_size": reader.integer("vocab_size"),
        "make_vocab_size_divisible_by": 128,
    }


def _experts(reader: _Reader, kind: str) -> dict[str, Any]:
    if reader.config.get("mlp_only_layers"):
        reader.refuse("mlp_only_layers", "dense layers among layers with experts are not translated")
    if reader.config.get("decoder_sparse_step", 1) != 1:
        reader.refuse("decoder_sparse_step", "dense layers among layers with experts are not translated")
    experts: dict[str, Any] = {
        "num_experts": reader.integer("num_experts", "num_local_experts"),
        "moe_ffn_hidden_size": reader.integer("moe_intermediate_size", "intermediate_size"),
        "moe_router_topk": reader.integer("num_experts_per_tok"),
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": reader.number("router_aux_loss_coef", 0.001),
    }
    # A softmax over the chosen experts equals the normalized softmax over all of them, which `norm_topk_prob` requests.
    if kind == "qwen3_moe" and not reader.flag("norm_topk_prob"):
        experts["moe_router_pre_softmax"] = True
    return experts
