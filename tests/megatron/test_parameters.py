"""Parameter counts: against published models, and against Megatron's real model built on the meta device."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from published import listed_values, published_arguments
from support import as_megatron_parses

from fp8launch.megatron.architecture import architecture, division, stages
from fp8launch.megatron.model_arithmetic import parse_layout
from fp8launch.megatron.parameters import parameters
from fp8launch.megatron.schema import load_schema

HERE = Path(__file__).parent
PUBLISHED = published_arguments()[0].parent
SCHEMA = load_schema("0.19")

LLAMA: dict[str, object] = {
    "seq_length": 8192, "group_query_attention": True, "num_query_groups": 8, "swiglu": True,
    "add_bias_linear": False, "normalization": "RMSNorm", "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True, "vocab_size": 128256,
}  # fmt: skip


def by_attribute(path: Path) -> dict[str, object]:
    """A published argument list as Megatron's parser would store it."""
    return as_megatron_parses(listed_values(path, SCHEMA), SCHEMA)


# --- published models: model cards and papers


@pytest.mark.parametrize(
    ("name", "gpus", "total", "active"),
    [
        ("llama3_8b_h100_fp8_cs", 8, 8_030_261_248, 8_030_261_248),
        # Padded for tensor parallelism, the vocabulary is larger than the model card's 70 553 706 496.
        ("llama3_70b_b200_bf16", 64, 70_553_706_496, 70_553_706_496),
        ("llama31_405b_b200_fp8_cs", 128, 405_861_777_408, 405_861_777_408),
        ("mixtral_8x7b_h100_bf16", 64, 46_702_792_704, 12_879_925_248),
        ("qwen3_30b_a3b_h100_fp8_cs", 16, 30_532_122_624, 3_353_032_704),
        ("qwen3_235b_a22b_h100_fp8_cs", 256, 235_094_683_136, None),
        ("gpt_oss_120b_h100_bf16", 64, 116_829_156_672, None),
    ],
)
def test_published_models(name: str, gpus: int, total: int, active: int | None) -> None:
    counted = parameters(by_attribute(PUBLISHED / f"{name}.args"), gpus)
    assert counted is not None
    assert counted.total == total
    assert active is None or counted.active == active


def test_deepseek_v3_has_671_billion_beside_its_mtp_layer() -> None:
    args = by_attribute(PUBLISHED / "deepseek_v3_h100_bf16.args") | {"mtp_num_layers": None}
    counted = parameters(args | {"pipeline_model_parallel_layout": None, "pipeline_model_parallel_size": 1}, 1024)
    assert counted is not None
    # The model card: 671 B, 37 B of them active.
    assert round(counted.total / 1e9) == 671
    assert 36.5e9 < counted.active < 37.7e9


def test_gpt_oss_has_5_1_billion_active_without_its_embedding() -> None:
    counted = parameters(by_attribute(PUBLISHED / "gpt_oss_120b_h100_bf16.args"), 64)
    assert counted is not None
    # Its model card (arXiv 2508.10925, table 1) counts the output layer and leaves the embedding out.
    assert round(counted.multiplied / 1e9, 2) == 5.13


def test_an_embedding_that_is_the_output_layer_is_multiplied() -> None:
    args = by_attribute(PUBLISHED / "llama3_8b_h100_fp8_cs.args") | {"untie_embeddings_and_output_weights": False}
    counted = parameters(args, 8)
    assert counted is not None
    assert counted.multiplied == counted.active


# --- pipelines


def test_stages_hold_the_whole_model_whatever_the_split() -> None:
    sizes = {"num_layers": 16, "hidden_size": 512, "num_attention_heads": 8, "ffn_hidden_size": 1024}
    whole = parameters(LLAMA | sizes, 1)
    assert whole is not None and whole.per_stage == (whole.total,)
    for split in (
        {"pipeline_model_parallel_size": 4},
        {"pipeline_model_parallel_size": 4, "num_virtual_stages_per_pipeline_rank": 2},
        {"pipeline_model_parallel_size": 4, "num_layers_per_virtual_pipeline_stage": 1},
        {"pipeline_model_parallel_size": 4, "decoder_first_pipeline_num_layers": 1},
        {"pipeline_model_parallel_size": 4, "decoder_last_pipeline_num_layers": 1},
        {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Et*5|(t*2|)*2,t*7L"},
    ):  # fmt: skip
        counted = parameters(LLAMA | sizes | split, 8)
        assert counted is not None, split
        assert sum(counted.per_stage) == whole.total, split


def test_embedding_and_loss_take_the_place_of_a_layer() -> None:
    args = LLAMA | {
        "num_layers": 126, "hidden_size": 16384, "num_attention_heads": 128, "ffn_hidden_size": 53248,
        "pipeline_model_parallel_size": 8, "num_virtual_stages_per_pipeline_rank": 8,
        "account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True,
    }  # fmt: skip
    model = architecture(args)
    assert model is not None
    found = stages(args, model, division(args, 64))
    assert found is not None
    assert [sum(len(chunk.layers) for chunk in stage) for stage in found] == [15, 16, 16, 16, 16, 16, 16, 15]
    # Interleaved: a rank's second chunk comes after the last rank's first.
    assert found[0][0].layers == (0,) and found[1][0].layers == (1, 2) and found[0][1].layers == (15, 16)


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("Et|(tt|)*2,L", ("Et", "tt", "tt", "L")),
        ("Et*2|(t*2|)*34,t*3|(t*2|)*3,tL", ("Ett", *["tt"] * 34, "ttt", *["tt"] * 3, "tL")),
        ("'Et|(tt|)*30mL'", ("Et", *["tt"] * 30, "mL")),
        ("Et|tL|", ("Et", "tL", "")),
        ("Et|x", None),
        ("(t|)*9999" * 99, None),
        ("t*99999", None),
        ("", None),
    ],
)
def test_layouts(text: str, pieces: tuple[str, ...] | None) -> None:
    assert parse_layout(text) == pieces


@pytest.mark.parametrize(
    "changes",
    [
        {"num_layers": None},
        {"hybrid_layer_pattern": "M*MG"},
        {"hybrid_layer_pattern": "M*ME"},
        {"hybrid_layer_pattern": "M*M*/M/*"},
        {"hybrid_layer_pattern": "M|*|M", "pipeline_model_parallel_size": 2},
        {"is_hybrid_model": True},
        {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Ett|L"},
        {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 3},
        {"num_experts": 4, "moe_layer_freq": "[1]*3"},
    ],
)
def test_what_cannot_be_counted_is_none(changes: dict[str, object]) -> None:
    sizes = {"num_layers": 8, "hidden_size": 512, "num_attention_heads": 8}
    assert parameters(LLAMA | sizes | changes, 4) is None


# --- against the real thing


def random_case(seed: int) -> tuple[dict[str, object], dict[str, Any]]:
    """Megatron's arguments of a small random model, and the same for the real one."""
    pick = random.Random(seed)
    tp, pp = pick.choice([1, 2, 4]), pick.choice([1, 1, 2, 4])
    heads = 8
    groups = pick.choice([4, 8])
    channels = pick.choice([16, 32])
    layers = pp * pick.choice([2, 4])
    virtual = pick.choice([1, 2]) if pp > 1 else 1
    moe = pick.random() < 0.5
    # Megatron's own layers shard the down projections of latent attention, Transformer Engine's layers do not.
    latent = pick.random() < 0.3 and tp == 1
    ep = pick.choice([1, 2]) if moe else 1
    etp = pick.choice([1, tp]) if moe else 1
    gelu, rms, bias, qk_norm = (pick.random() < 0.4 for _ in range(4))
    bias = bias and not moe
    tied, learned = pick.random() < 0.5, pick.random() < 0.3
    mtp = pick.choice([0, 1]) if not learned and not latent else 0
    shared = pick.choice([0, 96]) if moe else 0
    frequency = [int(i > 0) for i in range(layers)] if pick.random() < 0.5 else 1
    world = tp * pp * ep * 2
    positions, hidden, ffn, expert_ffn = 64, 128, 256, 64
    vocab = 1000
    norm = "RMSNorm" if rms else "LayerNorm"
    # Megatron refuses a norm of the query where it is not compressed.
    query_rank = 48 if qk_norm else pick.choice([None, 48])
    args: dict[str, object] = {
        "num_layers": layers, "hidden_size": hidden, "ffn_hidden_size": ffn, "num_attention_heads": heads,
        "group_query_attention": True, "num_query_groups": groups, "kv_channels": channels, "seq_length": 64,
        "max_position_embeddings": positions, "swiglu": not gelu, "normalization": norm, "add_bias_linear": bias,
        "add_qkv_bias": not bias and seed % 3 == 0, "qk_layernorm": qk_norm,
        "position_embedding_type": "learned_absolute" if learned else "rope",
        "untie_embeddings_and_output_weights": not tied, "vocab_size": vocab, "mtp_num_layers": mtp or None,
        "tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": etp,
        "num_virtual_stages_per_pipeline_rank": virtual if virtual > 1 else None,
    }  # fmt: skip
    config: dict[str, Any] = {
        "num_layers": layers, "hidden_size": hidden, "ffn_hidden_size": ffn, "num_attention_heads": heads,
        "num_query_groups": groups, "kv_channels": channels, "gelu": gelu, "normalization": norm,
        "add_bias_linear": bias, "add_qkv_bias": args["add_qkv_bias"], "qk_layernorm": qk_norm,
        "tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": etp, "mtp_num_layers": mtp or None,
        "virtual_pipeline_model_parallel_size": virtual if virtual > 1 else None,
    }  # fmt: skip
    if moe:
        experts = {"moe_ffn_hidden_size": expert_ffn, "moe_router_topk": 2, "moe_layer_freq": frequency}
        args |= {"num_experts": 8, **experts, "moe_shared_expert_intermediate_size": shared or None}
        config |= {"num_moe_experts": 8, **experts, "moe_shared_expert_intermediate_size": shared or None}
        config["moe_token_dispatcher_type"] = "alltoall"
    if latent:
        sizes = {"q_lora_rank": query_rank, "kv_lora_rank": 32, "qk_head_dim": 16, "v_head_dim": 24}
        args |= {"multi_latent_attention": True, **sizes, "qk_pos_emb_head_dim": 8}
        config["latent"] = {**sizes, "qk_pos_emb_head_dim": 8, "rope_type": "rope", "multi_latent_attention": True}
        config["num_query_groups"] = heads
    padded = math.ceil(vocab / (128 * tp)) * 128 * tp
    position = "learned_absolute" if learned else "rope"
    real = {
        "config": config, "world": world, "vocab": padded, "positions": positions, "tied": tied, "position": position
    }  # fmt: skip
    return args, real


def hybrid_case(seed: int) -> tuple[dict[str, object], dict[str, Any]]:
    """The same of a small random hybrid: Mamba, attention, MLP and expert layers, with stages cut by the pattern."""
    pick = random.Random(seed)
    tp, pp, virtual = pick.choice([1, 2]), pick.choice([1, 1, 2]), pick.choice([1, 2])
    stages = [("".join(pick.choice("M*-E") for _ in range(pick.choice([2, 3])))) for _ in range(pp * virtual)]
    moe = "E" in "".join(stages)
    depths = pick.choice([0, 0, 2])
    pattern = "|".join(stages) + depths * ("/*E" if moe else "/*M")
    ep = pick.choice([1, 2]) if moe else 1
    tied, repeated = pick.random() < 0.5, pick.random() < 0.5
    args: dict[str, object] = {
        "hidden_size": 128, "ffn_hidden_size": 256, "num_attention_heads": 8, "kv_channels": 16,
        "num_query_groups": 4, "normalization": "RMSNorm", "add_bias_linear": False,
        "mamba_num_heads": pick.choice([None, 8]), "mamba_head_dim": 16, "mamba_num_groups": pick.choice([2, 4]),
        "mamba_state_dim": pick.choice([16, 32]), "mtp_num_layers": depths or None,
        "mtp_use_repeated_layer": repeated, "tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp,
        "expert_model_parallel_size": ep,
    }  # fmt: skip
    experts: dict[str, object] = {}
    if moe:
        experts = {"moe_ffn_hidden_size": 64, "moe_router_topk": 2, "moe_shared_expert_intermediate_size": 96}
        experts["expert_tensor_parallel_size"] = pick.choice([1, tp])
    config = {
        **args, **experts, "num_layers": len("".join(stages)), "gelu": True,
        "virtual_pipeline_model_parallel_size": virtual if virtual > 1 and pp > 1 else None,
    }  # fmt: skip
    if pp == 1:
        pattern = pattern.replace("|", "")
    if moe:
        config |= {"num_moe_experts": 8, "moe_token_dispatcher_type": "alltoall"}
        experts["num_experts"] = 8
    args |= experts | {
        "hybrid_layer_pattern": pattern, "vocab_size": 1000, "seq_length": 64, "position_embedding_type": "none",
        "untie_embeddings_and_output_weights": not tied,
    }  # fmt: skip
    real = {
        "config": config, "world": tp * pp * ep * 2, "vocab": math.ceil(1000 / (128 * tp)) * 128 * tp, "positions": 64,
        "tied": tied, "pattern": pattern,
    }  # fmt: skip
    return args, real


@pytest.mark.slow
def test_counts_are_those_of_the_real_model() -> None:
    """Random dense, expert, latent-attention, MTP and hybrid models over TP, PP, VPP, EP and expert TP."""
    if not (find_spec("torch") and find_spec("megatron")):
        pytest.skip("needs torch and megatron-core")
    cases = [random_case(seed) for seed in range(120)] + [hybrid_case(seed) for seed in range(60)]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / "meta_model.py")],
        input=json.dumps([real for _, real in cases]),
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    built = json.loads(done.stdout[done.stdout.index("[") :])
    refused = [x for x in built if isinstance(x, str)]
    assert not refused, sorted(set(refused))
    for (args, real), counted in zip(cases, built, strict=True):
        if isinstance(counted, str):
            continue
        ours = parameters(args, real["world"])
        assert ours is not None, args
        assert list(ours.per_stage) == counted, args
