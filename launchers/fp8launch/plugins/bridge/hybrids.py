"""Hybrid models that Megatron-Bridge builds from the hub: their sizes by Megatron's attribute names.

Sources: `HybridModelProvider` (megatron/bridge/models/hybrid/hybrid_provider.py) and `NemotronHBridge`
(models/nemotronh/nemotron_h_bridge.py) of 0.6.0; sizes from the models' published config.json, Ultra's also from
NVIDIA's script of its pre-training (examples of Megatron-LM, `pretrain_hybrid.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Defaults of Bridge's class of hybrid models, and the vocabulary size of Nemotron-H's and Nemotron 3's tokenizer.
HYBRID_DEFAULTS: Mapping[str, Any] = {
    "is_hybrid_model": True,
    "bias_dropout_fusion": True,
    "position_embedding_type": "none",
    "untie_embeddings_and_output_weights": True,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "squared_relu": True,
    "swiglu": False,
    "group_query_attention": True,
    "mamba_head_dim": 64,
    "mamba_num_groups": 8,
    "mamba_state_dim": 128,
    "cross_entropy_loss_fusion": True,
    "seq_length": 8192,
    "vocab_size": 131072,
}
_NEMOTRON_3: Mapping[str, Any] = {
    "first_last_layers_bf16": True,
    "kv_channels": 128,
    "num_query_groups": 2,
    "num_experts": 512,
    "moe_router_topk": 22,
    "moe_router_score_function": "sigmoid",
    "moe_router_dtype": "fp32",
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_router_enable_expert_bias": True,
    "moe_aux_loss_coeff": 1e-4,
    "moe_grouped_gemm": True,
    "moe_permute_fusion": True,
    "mtp_hybrid_override_pattern": "*E",
}
HYBRIDS: Mapping[str, Mapping[str, Any]] = {
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16": {
        **_NEMOTRON_3,
        "hybrid_layer_pattern": (
            "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"
        ),
        "num_layers": 88,
        "hidden_size": 4096,
        "ffn_hidden_size": 2688,
        "num_attention_heads": 32,
        "mamba_num_heads": 128,
        "moe_ffn_hidden_size": 2688,
        "moe_shared_expert_intermediate_size": 5376,
        "moe_latent_size": 1024,
    },
    "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16": {
        **_NEMOTRON_3,
        "hybrid_layer_pattern": (
            "MEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
        ),
        "num_layers": 108,
        "hidden_size": 8192,
        "ffn_hidden_size": 5120,
        "num_attention_heads": 64,
        "mamba_num_heads": 256,
        "moe_ffn_hidden_size": 5120,
        "moe_shared_expert_intermediate_size": 10240,
        "moe_latent_size": 2048,
    },
}
