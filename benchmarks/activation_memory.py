"""Measure what a transformer layer keeps for its backward pass, on real GPUs with Transformer Engine.

Run under torchrun with two processes; prints one JSON line per case. Each case builds Megatron's GPTModel twice, with
two and with four layers, and runs micro batches until caches are filled. The difference gives the memory of a layer;
the remainder belongs to the rest of the model. All values in MiB:

    layer      kept by one layer between its forward and its backward pass
    rest       kept in addition to the layers (embedding output, rotary tables, and logits and loss where there are any)
    forward    highest allocation during the forward pass, above what is kept at its end
    backward   highest allocation during the backward pass, above what is kept at its start
    weights    memory that the first passes allocate permanently (FP8 copies of weights, work spaces), two layers
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import MLATransformerConfig, TransformerConfig

MIB = 2**20

EXPERTS: dict[str, Any] = {
    "moe_token_dispatcher_type": "alltoall",
    "moe_grouped_gemm": True,
    "moe_permute_fusion": True,
    "moe_router_load_balancing_type": "none",
    "moe_router_force_load_balancing": True,
    "moe_router_dtype": "fp32",
}
LLAMA_8B: dict[str, Any] = {
    "hidden_size": 4096,
    "ffn_hidden_size": 14336,
    "num_attention_heads": 32,
    "num_query_groups": 8,
    "kv_channels": 128,
    "seq": 8192,
}
QWEN_30B: dict[str, Any] = {
    "hidden_size": 2048,
    "ffn_hidden_size": 6144,
    "num_attention_heads": 32,
    "num_query_groups": 4,
    "kv_channels": 128,
    "seq": 4096,
    "qk_layernorm": True,
    "num_moe_experts": 64,
    "moe_ffn_hidden_size": 768,
    "moe_router_topk": 8,
    **EXPERTS,
}
DEEPSEEK_DENSE: dict[str, Any] = {
    "mla": True,
    "hidden_size": 7168,
    "ffn_hidden_size": 18432,
    "num_attention_heads": 128,
    "kv_channels": 128,
    "seq": 4096,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
    "qk_layernorm": True,
    "rope_type": "yarn",
    "rotary_scaling_factor": 40,
}
DEEPSEEK_MOE: dict[str, Any] = DEEPSEEK_DENSE | {
    "num_moe_experts": 16,
    "moe_ffn_hidden_size": 2048,
    "moe_router_topk": 8,
    "moe_shared_expert_intermediate_size": 2048,
    **EXPERTS,
}

BF16: dict[str, Any] = {}
TENSORWISE = {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
DELAYED = {"fp8": "hybrid", "fp8_recipe": "delayed", "fp8_amax_history_len": 1024, "fp8_amax_compute_algo": "max"}
BLOCKWISE = {"fp8": "e4m3", "fp8_recipe": "blockwise"}
PRECISIONS = {"bf16": BF16, "tensorwise": TENSORWISE, "delayed": DELAYED, "blockwise": BLOCKWISE}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
TP2 = {"tensor_model_parallel_size": 2}
TP2_SP = TP2 | {"sequence_parallel": True}


def selective(*modules: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)}


def cases() -> dict[str, dict[str, Any]]:
    found = {f"llama {name}": LLAMA_8B | precision for name, precision in PRECISIONS.items()}
    for name, precision in PRECISIONS.items():
        found[f"llama {name} tp2 sp"] = LLAMA_8B | precision | TP2_SP
        found[f"qwen {name} ep2"] = QWEN_30B | precision | {"expert_model_parallel_size": 2}
    for name in ("bf16", "tensorwise"):
        precision = PRECISIONS[name]
        found |= {
            f"llama {name} cp2": LLAMA_8B | precision | {"context_parallel_size": 2},
            f"llama {name} tp2": LLAMA_8B | precision | TP2,
            f"llama {name} full": LLAMA_8B | precision | FULL,
            f"llama {name} full tp2 sp": LLAMA_8B | precision | FULL | TP2_SP,
            f"llama {name} core_attn": LLAMA_8B | precision | selective("core_attn"),
            f"llama {name} mlp": LLAMA_8B | precision | selective("mlp"),
            f"llama {name} layernorm": LLAMA_8B | precision | selective("layernorm"),
            f"qwen {name}": QWEN_30B | precision,
            f"qwen {name} no permute fusion": QWEN_30B | precision | {"moe_permute_fusion": False},
            f"qwen {name} moe_act": QWEN_30B | precision | selective("moe_act"),
            f"qwen {name} layernorm": QWEN_30B | precision | selective("layernorm"),
            f"qwen {name} moe": QWEN_30B | precision | selective("moe"),
            f"qwen {name} tp2 sp": QWEN_30B | precision | TP2_SP,
            f"qwen {name} padding": QWEN_30B | precision | {"moe_router_padding_for_quantization": name != "bf16"},
            f"deepseek dense {name}": DEEPSEEK_DENSE | precision,
            f"deepseek dense {name} mla_up_proj": DEEPSEEK_DENSE | precision | selective("mla_up_proj"),
            f"deepseek dense {name} tp2 sp": DEEPSEEK_DENSE | precision | TP2_SP,
            f"deepseek moe {name} ep2": DEEPSEEK_MOE | precision | {"expert_model_parallel_size": 2},
            f"deepseek moe {name} tp2 sp ep2": DEEPSEEK_MOE
            | precision
            | TP2_SP
            | {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
            f"deepseek moe {name} shared_experts": DEEPSEEK_MOE
            | precision
            | selective("shared_experts")
            | {"expert_model_parallel_size": 2},
        }
    loss = {"vocabulary": 128256}
    fused = loss | {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "native"}
    found |= {
        "llama bf16 loss": LLAMA_8B | loss,
        "llama bf16 loss fused": LLAMA_8B | fused,
        "llama bf16 loss fused tp2 sp": LLAMA_8B | fused | TP2_SP,
        "llama bf16 gelu": LLAMA_8B | {"swiglu": False},
        "llama bf16 no swiglu fusion": LLAMA_8B | {"bias_activation_fusion": False},
        "llama bf16 layernorm norm": LLAMA_8B | {"normalization": "LayerNorm"},
        "llama bf16 dropout": LLAMA_8B | {"hidden_dropout": 0.1, "attention_dropout": 0.1},
        "llama bf16 no rope fusion": LLAMA_8B | {"apply_rope_fusion": False},
        "llama bf16 micro batch 2": LLAMA_8B | {"micro_batch": 2},
        "llama bf16 qk layernorm": LLAMA_8B | {"qk_layernorm": True},
    }
    return found


def configuration(case: dict[str, Any], layers: int) -> TransformerConfig:
    own = {k: v for k, v in case.items() if k not in ("seq", "mla", "vocabulary", "swiglu", "micro_batch")}
    swiglu = case.get("swiglu", True)
    defaults = {
        "num_layers": layers,
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "gated_linear_unit": swiglu,
        "activation_func": torch.nn.functional.silu if swiglu else torch.nn.functional.gelu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bias_activation_fusion": swiglu,
        "bias_dropout_fusion": True,
        "apply_rope_fusion": True,
        "perform_initialization": False,
        "gradient_accumulation_fusion": False,
    }
    kind = MLATransformerConfig if case.get("mla") else TransformerConfig
    if case.get("mla"):
        defaults["apply_rope_fusion"] = True
    return kind(**(defaults | own))


def build(case: dict[str, Any], layers: int) -> GPTModel:
    config = configuration(case, layers)
    if config.num_moe_experts or case.get("mla"):
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=True)
    else:
        spec = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
    model = (
        GPTModel(
            config,
            spec,
            vocab_size=case.get("vocabulary", 1024),
            max_sequence_length=case["seq"],
            post_process="vocabulary" in case,
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
            rotary_base=500000,
        )
        .cuda()
        .bfloat16()
    )
    for parameter in model.parameters():
        # Gradients exist before the first pass, as Megatron's buffers do, so that they count as weights here.
        parameter.grad = torch.zeros_like(parameter)
    return model


def held() -> float:
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated() / MIB


def peak() -> float:
    return torch.cuda.max_memory_allocated() / MIB


def measure(case: dict[str, Any], layers: int) -> dict[str, float]:
    model = build(case, layers)
    length = case["seq"] // case.get("context_parallel_size", 1)
    micro = case.get("micro_batch", 1)
    tokens = torch.randint(0, 1000, (micro, length), device="cuda")
    positions = torch.arange(length, device="cuda").expand(micro, length).contiguous()
    labels = torch.randint(0, 1000, (micro, length), device="cuda") if "vocabulary" in case else None
    result: dict[str, float] = {}
    begin = held()
    for _ in range(3):
        before = held()
        torch.cuda.reset_peak_memory_stats()
        out = model(tokens, positions, None, labels=labels)
        kept = held()
        forward = peak()
        torch.cuda.reset_peak_memory_stats()
        gradient = torch.ones_like(out)
        out.backward(gradient)
        del out, gradient
        result = {"kept": kept - before, "forward": forward - kept, "backward": peak() - kept}
        result["weights"] = held() - begin
    del model
    gc.collect()
    torch.cuda.empty_cache()
    return result


def run(case: dict[str, Any]) -> dict[str, float]:
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=case.get("tensor_model_parallel_size", 1),
        context_parallel_size=case.get("context_parallel_size", 1),
        expert_model_parallel_size=case.get("expert_model_parallel_size", 1),
        expert_tensor_parallel_size=case.get("expert_tensor_parallel_size"),
    )
    model_parallel_cuda_manual_seed(1)
    two, four = measure(case, 2), measure(case, 4)
    layer = (four["kept"] - two["kept"]) / 2
    return {
        "layer": layer,
        "rest": two["kept"] - 2 * layer,
        "forward": two["forward"],
        "backward": two["backward"],
        "weights": two["weights"],
    }


def main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl")
    only = sys.argv[1:]
    for name, case in cases().items():
        if only and not any(word in name for word in only):
            continue
        try:
            result: dict[str, Any] = {k: round(v, 2) for k, v in run(case).items()}
        except Exception as exc:
            last = traceback.extract_tb(exc.__traceback__)[-1]
            result = {"error": f"{type(exc).__name__}: {str(exc)[:300]} ({last.filename.split('/')[-1]}:{last.lineno})"}
            gc.collect()
            torch.cuda.empty_cache()
        if torch.distributed.get_rank() == 0:
            print(json.dumps({"case": name} | result), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
