"""The Megatron flag that each field of a recipe's sections sets, for translation and import.

The map only has fields whose value becomes the value of one flag, and named choices that stand for a fixed set of
flags. Flags that depend on several fields are set by code in `engines/megatron_lm/engine.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

Path: TypeAlias = "tuple[str, ...]"

# Section to field to flag, in the order of the arguments.
FIELDS: Mapping[Path, Mapping[str, str]] = {
    ("batch",): {"micro": "micro_batch_size", "global": "global_batch_size", "sequence": "seq_length"},
    ("train",): {"iterations": "train_iters", "lr": "lr", "min_lr": "min_lr", "warmup": "lr_warmup_iters"},
    ("precision",): {
        "amax_history": "fp8_amax_history_len",
        "amax_algo": "fp8_amax_compute_algo",
        "loss_scale": "loss_scale",
    },
    ("parallel",): {
        "tp": "tensor_model_parallel_size",
        "pp": "pipeline_model_parallel_size",
        "vp": "num_virtual_stages_per_pipeline_rank",
        "cp": "context_parallel_size",
        "ep": "expert_model_parallel_size",
        "etp": "expert_tensor_parallel_size",
    },
    ("optimizer",): {
        "exp_avg": "exp_avg_dtype",
        "exp_avg_sq": "exp_avg_sq_dtype",
        "main_grads": "main_grads_dtype",
        "main_params": "main_params_dtype",
    },
    ("data", "tokenizer"): {"type": "tokenizer_type", "model": "tokenizer_model"},
    ("data",): {"split": "split", "cache": "data_cache_path"},
    ("checkpoint",): {"dir": "save", "interval": "save_interval", "load": "load"},
}


def _megatron_fsdp(strategy: str) -> dict[str, bool | str]:
    return {
        "use_megatron_fsdp": True,
        "data_parallel_sharding_strategy": strategy,
        "ckpt_format": "fsdp_dtensor",
    }


# Fields whose value sets several flags.
CHOICES: Mapping[Path, Mapping[str, Mapping[str, bool | str]]] = {
    ("parallel", "fsdp"): {
        "torch_fsdp2": {"use_torch_fsdp2": True, "ckpt_format": "torch_dist"},
        "megatron": _megatron_fsdp("optim_grads_params"),
        "megatron_optim_grads": _megatron_fsdp("optim_grads"),
        "megatron_optim": _megatron_fsdp("optim"),
    },
    ("optimizer", "grad_reduce"): {
        "bf16": {"grad_reduce_in_bf16": True},
        "fp32": {"accumulate_allreduce_grads_in_fp32": True},
    },
}

# The flags that describe the model, which a recipe keeps under `model:`.
MODEL_FLAGS = frozenset(
    """
    num_layers hidden_size ffn_hidden_size num_attention_heads group_query_attention num_query_groups kv_channels
    max_position_embeddings position_embedding_type rotary_base rotary_percent rotary_interleaved rotary_scaling_factor
    rotary_seq_len_interpolation_factor rope_type rope_scaling_factor use_rope_scaling no_rope_freq mrope_section
    mscale mscale_all_dim yarn_original_max_position_embeddings yarn_beta_fast yarn_beta_slow
    yarn_correction_range_round_to_int no_yarn_correction_range_round_to_int
    normalization norm_epsilon apply_layernorm_1p swiglu quick_geglu squared_relu openai_gelu onnx_safe
    glu_linear_offset activation_func_clamp_value disable_bias_linear add_qkv_bias qk_layernorm qk_l2_norm
    untie_embeddings_and_output_weights attention_dropout hidden_dropout init_method_std init_method_xavier_uniform
    embedding_init_method_std softmax_type window_size window_attn_skip_freq attention_output_gate
    apply_residual_connection_post_layernorm vocab_size make_vocab_size_divisible_by padded_vocab_size
    multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim
    experimental_attention_variant linear_attention_freq linear_conv_kernel_dim linear_key_head_dim
    linear_value_head_dim linear_num_key_heads linear_num_value_heads
    num_experts moe_layer_freq moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_shared_expert_gate
    moe_router_topk moe_router_num_groups moe_router_group_topk moe_router_score_function moe_router_pre_softmax
    moe_router_topk_scaling_factor moe_router_enable_expert_bias moe_router_bias_update_rate
    moe_router_load_balancing_type moe_aux_loss_coeff moe_z_loss_coeff moe_latent_size
    mtp_num_layers mtp_loss_scaling_factor
    hybrid_layer_pattern hybrid_override_pattern mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads
    """.split()  # noqa: SIM905
)
