"""What a proof does with each Megatron flag: computed, left out, or without a part in what a step computes.

A flag in none of the lists is left out, and reported as not covered.

Flags are canonical names, with `*` for any characters.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from importlib.util import find_spec

from fp8launch.megatron.arguments import FlagValue

# Devices that train the small models.
CPU, CUDA = "cpu", "cuda"

RESET_MASK = "reset_attention_mask"
FSDP, FP8_PARAMETERS = "use_megatron_fsdp", "fp8_param_gather"

# If ranks hold parts of a sequence, each decides on its own which tokens exceed an expert's capacity.
CAPACITY = "moe_expert_capacity_factor"
DROPS = (CAPACITY, "moe_pad_expert_input_to_capacity", "moe_token_drop_policy")

_FP32 = "computed in fp32"
_TE = "needs Transformer Engine"
_GPU = "needs a GPU"
_NCCL = "needs NCCL"
_UNKNOWN = "`prove` does not know it"
_VARIANT = "experimental_attention_variant"
_FSDP2 = "the proof trains without FSDP2"
_ADAM = "the proof trains with Adam"
_LOCAL = "only Megatron's own layers read it"

# Flags that a CPU cannot compute, and why. Without a reason, nothing is lost.
_LEFT_OUT = {
    _FP32: """
        bf16 fp16 loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis attention_softmax_in_fp32
        fp16_lm_cross_entropy fp8_* fp4_* first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16
        reuse_grad_buf_for_mxfp8_* keep_fp8_* te_precision_config_file use_precision_aware_optimizer exp_avg_dtype
        exp_avg_sq_dtype main_grads_dtype main_params_dtype grad_reduce_in_bf16 accumulate_allreduce_grads_in_fp32
        no_fp8_wgrad moe_router_padding_for_* disable_bf16_reduced_precision_matmul
    """,
    "": "no_rope_fusion no_gradient_accumulation_fusion no_masked_softmax_fusion no_persist_layer_norm",
    _TE: """
        cross_entropy_* apply_rope_fusion apply_layernorm_1p use_te_* te_rng_tracker attention_backend use_flash_attn
        use_transformer_engine_op_fuser moe_grouped_gemm moe_use_legacy_grouped_gemm moe_permute_fusion
        moe_router_fusion moe_shared_expert_overlap overlap_moe_expert_parallel_comm tp_comm_* delay_wgrad_compute
        overlap_dispatch_backward_with_experts_wgrad
        cp_comm_type hierarchical_* fused_* no_fused_* memory_efficient_* mla_down_proj_fusion
        batch_invariant_mode use_grouped_gemm_for_* moe_single_grouped_* *_glu_interleave_size flash_attention_version
    """,
    "no Mamba without kernels for a GPU": """
        hybrid_layer_pattern hybrid_override_pattern is_hybrid_model mamba_* mtp_hybrid_override_pattern
    """,
    _GPU: """
        cuda_graph* enable_cuda_graph external_cuda_graph inference_* high_priority_* *_num_sms* moe_flex_*
        moe_deepep_* moe_hybridep_* moe_enable_deepep moe_paged_* moe_pad_experts_for_* moe_expert_rank_* *_stash*
        cpu_offloading* optimizer_cpu_offload* optimizer_offload* fine_grained_* offload_* min_offloaded_*
        init_model_with_meta_device gradient_accumulation_fusion defer_embedding_wgrad_compute wgrad_deferral_limit
        ep_overlap_* symmetric_ar_type optimizer_cuda_graph dsa_kernel_backend
    """,
    _FSDP2: """
        use_torch_fsdp2 use_custom_fsdp torch_fsdp2_*
    """,
    _NCCL: """
        nccl_* use_nccl_* fsdp_manual_registration use_sharp sharp_* use_tp_pp_dp_mapping create_all_gather_*
        pipeline_model_parallel_comm_backend
    """,
    "its padding is larger than the small model": "ddp_pad_buckets_for_high_nccl_busbw",
    "Megatron refuses it with distributed checkpoints": "overlap_param_gather_with_optimizer_step",
    _LOCAL: "reset_attention_mask",
    "the batch of the proof is constant": "step_batch_size_schedule",
    "routes are random, other ones in each layout": "moe_router_force_load_balancing moe_router_force_biased",
    "random numbers differ between layouts": "attention_dropout hidden_dropout moe_input_jitter_eps",
    _ADAM: "optimizer muon_* *_muon_*",
}

# Flags of the list above that a GPU computes.
_ON_GPU = """
    bf16 attention_softmax_in_fp32 fp8_* fp4_* first_last_layers_bf16 num_layers_at_start_in_bf16
    num_layers_at_end_in_bf16 reuse_grad_buf_for_mxfp8_* keep_fp8_* te_precision_config_file grad_reduce_in_bf16
    accumulate_allreduce_grads_in_fp32 no_rope_fusion no_gradient_accumulation_fusion no_masked_softmax_fusion
    no_persist_layer_norm cross_entropy_* apply_rope_fusion apply_layernorm_1p use_te_* te_rng_tracker
    attention_backend use_flash_attn use_transformer_engine_op_fuser moe_grouped_gemm moe_use_legacy_grouped_gemm
    moe_permute_fusion moe_router_fusion moe_shared_expert_overlap delay_wgrad_compute
    overlap_dispatch_backward_with_experts_wgrad
    cp_comm_type fused_* no_fused_* memory_efficient_* gradient_accumulation_fusion no_fp8_wgrad
    moe_router_padding_for_* disable_bf16_reduced_precision_matmul mla_down_proj_fusion use_grouped_gemm_for_*
    moe_single_grouped_* *_glu_interleave_size
"""
_ELSEWHERE = "not compared yet"
FLEX, DISPATCHER = "flex", "moe_token_dispatcher_type"
_BACKEND = "moe_flex_dispatcher_backend"
_DEEPEP = f"{DISPATCHER} {_BACKEND} moe_enable_deepep moe_flex_dispatcher_num_sms moe_deepep_num_sms"
_FP8 = """
    fp8_* first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 keep_fp8_*
    te_precision_config_file
"""
_HISTORY = "delayed scaling depends on earlier steps, so gradients are compared in bf16"

# Flags with no part in what a step computes from given weights and tokens, or that the proof sets itself.
_WITHOUT_PART = """
    log log_* tensorboard_* wandb_* timing_* profile profile_* manual_gc manual_gc_* eval_* check_* no_check_* rerun_*
    exit_* straggler_* disable_straggler_* inprocess_* ft_* calc_ft_* distributed_backend distributed_timeout_*
    tokenizer_* legacy_tokenizer data_path data_args_path data_cache_path data_parallel_random_init per_split_*
    train_data_path valid_data_path test_data_path mock_data split num_workers num_dataset_* dataloader_type
    no_data_sharding train_iters train_samples lr lr_* min_lr override_opt* use_checkpoint_opt* save save_* load load_*
    no_save_* no_load_* pretrained_checkpoint finetune ckpt_* dist_ckpt_* use_dist_ckpt* auto_detect_* async_*
    non_persistent_* seed init_method_* use_cpu_initialization perform_initialization no_create_attention_*
    create_attention_* transformer_impl error_injection_* micro_batch_size global_batch_size adam_beta1 adam_eps
    clip_grad vocab_size vocab_file vocab_extra_ids padded_vocab_size merge_file mmap_* no_mmap_* start_weight_decay
    end_weight_decay weight_decay_incr_style disable_jit_fuser disable_gloo_* disable_msc enable_msc
    disable_symmetric_registration enable_experimental enable_ft_package *flight_recorder_* full_validation
    multiple_validation_sets logging_level moe_per_layer_logging moe_routing_trace_* no_ckpt_* no_initialization
    no_log_* no_manual_gc_eval no_one_logger no_pin_* no_tokenizer_* no_use_tokenizer_* null_tokenizer_* nvtx_ranges
    pytorch_profiler_* use_pytorch_profiler record_memory_history record_shapes replication* start_eval_at_iter
    use_mcore_models use_persistent_ckpt_worker verify_integrity trust_remote_code tiktoken_* dataloader_defer_*
    dataloader_fast_* mid_level_* dump_param_* run_workload_* local_rank fault_injector_* adlr_autoresume
    enable_one_logger one_logger_* app_tag_* lazy_mpu_init barrier_* no_barrier_* skip_train
    iterations_to_skip result_* nvidia_* deterministic_mode empty_unused_memory_level make_vocab_size_divisible_by
    *_dir *_path *_interval rampup_batch_size
"""

# Flags that only say how work is divided among ranks, or repeated: the reference goes without.
_DIVIDES = """
    tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size expert_model_parallel_size
    expert_tensor_parallel_size sequence_parallel num_layers_per_virtual_pipeline_stage
    num_virtual_stages_per_pipeline_rank use_distributed_optimizer num_distributed_optimizer_instances overlap_*
    no_overlap_* recompute_* distribute_saved_activations moe_layer_recompute ddp_* microbatch_group_size_*
    delay_grad_reduce no_delay_grad_reduce standalone_embedding_stage batch_p2p_* no_batch_p2p_* mtp_use_repeated_*
    mtp_standalone_* pipeline_model_parallel_layout decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers
    account_for_*_in_pipeline_split no_gradient_reduce_div_fusion no_scatter_gather_tensors_in_pipeline
    align_* no_align_* use_megatron_fsdp data_parallel_sharding_strategy outer_dp_sharding_strategy fsdp_*
    megatron_fsdp_* suggested_communication_unit_size
"""

# Flags of the model, the loss and the optimizer that a CPU computes. `divides` lists the others.
_COMPUTED = """
    num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups group_query_attention kv_channels
    seq_length max_position_embeddings position_embedding_type use_rotary_position_embeddings no_position_embedding
    rotary_* rope_* use_rope_scaling no_rope_freq yarn_* no_yarn_* mscale mscale_all_dim relative_attention_*
    normalization norm_epsilon qk_layernorm qk_l2_norm apply_residual_connection_post_layernorm add_qkv_bias
    disable_bias_linear swiglu squared_relu openai_gelu quick_geglu activation_func_clamp_value glu_linear_offset
    softmax_type window_size window_attn_skip_freq attention_output_gate apply_query_key_layer_scaling
    fp32_residual_connection untie_embeddings_and_output_weights no_clone_scatter_output_in_embedding
    no_bias_dropout_fusion no_bias_gelu_fusion no_bias_swiglu_fusion
    multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim
    mtp_num_layers mtp_loss_scaling_factor mtp_detach_heads
    num_experts moe_ffn_hidden_size moe_latent_size moe_layer_freq moe_router_topk moe_router_topk_scaling_factor
    moe_router_num_groups moe_router_group_topk moe_router_pre_softmax moe_router_score_function moe_router_dtype
    moe_router_enable_expert_bias moe_router_bias_update_rate moe_router_load_balancing_type moe_aux_loss_coeff
    moe_router_quantile_balancing_ema moe_z_loss_coeff moe_shared_expert_intermediate_size moe_shared_expert_gate
    moe_token_dispatcher_type moe_token_drop_policy moe_expert_capacity_factor moe_pad_expert_input_to_capacity
    moe_apply_probs_on_input experimental_attention_variant linear_* dsa_* no_dsa_*
    calculate_per_token_loss eod_mask_loss reset_position_ids weight_decay no_weight_decay_cond_type
    apply_wd_to_qk_layernorm decoupled_lr decoupled_min_lr adam_beta2 use_mup mup_*
"""


def why_left_out(name: str, value: FlagValue, device: str = CPU) -> str | None:
    """Return why a proof leaves a flag out, None for one that it computes. Empty: nothing is lost without it."""
    if device == CUDA and _matches(name, _ON_GPU):
        return None
    if device == CUDA and name == _VARIANT and value:
        return _ELSEWHERE
    reason = _why_not_on_cpu(name, value)
    return _ELSEWHERE if device == CUDA and reason in (_TE, _GPU, _NCCL) else reason


def _why_not_on_cpu(name: str, value: FlagValue) -> str | None:
    if name == DISPATCHER:
        return _GPU if value == FLEX else None
    for reason, names in _LEFT_OUT.items():
        if _matches(name, names):
            # Off is what the proof computes anyway.
            return reason if value and (name, value) != ("optimizer", "adam") else ""
    if value and has_part(name) and not divides(name) and not _matches(name, _COMPUTED):
        return _UNKNOWN
    return None


def deepep_flags(values: Mapping[str, FlagValue], device: str) -> dict[str, FlagValue]:
    """Return the flags for DeepEP of a run that exchanges tokens with it, if this machine can compute that."""
    uses = values.get(DISPATCHER) == FLEX and values.get(_BACKEND) in (None, "deepep")
    if not uses or device != CUDA or find_spec("deep_ep") is None:
        return {}
    return {name: value for name, value in values.items() if _matches(name, _DEEPEP)}


def without_delayed_scaling(values: Mapping[str, FlagValue]) -> dict[str, FlagValue]:
    """Return flags without FP8 if its scales come from earlier steps, which differ between layouts."""
    if not _scales_are_delayed(values):
        return dict(values)
    return {name: value for name, value in values.items() if not _matches(name, _FP8)}


def compares_context_parallel(values: Mapping[str, FlagValue], device: str) -> bool:
    """Return whether a proof divides sequences among ranks.

    In multi-token prediction each rank averages over its own tokens, and the one with the end of the sequence has one
    less (advisory mtp-cp-norm). Without masked tokens, only the short sequences of a proof in fp32 show that.
    """
    if device == CUDA:
        return True
    predicts = values.get("mtp_num_layers") and not values.get("eod_mask_loss")
    # Megatron divides sequences for sparse attention only with a kernel.
    return not predicts and values.get(_VARIANT) != "dsa"


def compares_tensor_parallel(values: Mapping[str, FlagValue]) -> bool:
    """Return whether a proof divides layers among ranks.

    In sparse attention, the stand-ins for Transformer Engine's layers mark other weights as shared than Megatron before
    0.19 expects.
    """
    return values.get(_VARIANT) != "dsa"


def masks_documents(values: Mapping[str, FlagValue]) -> bool:
    """Return whether attention stays within documents. Transformer Engine's attention ignores the mask."""
    return bool(values.get(RESET_MASK)) and values.get("transformer_impl") == "local"


def _scales_are_delayed(values: Mapping[str, FlagValue]) -> bool:
    return bool(values.get("fp8_format")) and values.get("fp8_recipe") in (None, "delayed")


def has_part(name: str) -> bool:
    """Return whether a flag takes part in what a step computes."""
    return not _matches(name, _WITHOUT_PART)


def divides(name: str) -> bool:
    """Return whether a flag only says how work is divided or repeated."""
    return _matches(name, _DIVIDES)


def not_computed(values: Mapping[str, FlagValue], device: str = CPU) -> dict[str, str]:
    """Return the flags of a run that a proof does not compute, with the reasons."""
    found = {}
    if device == CUDA and _scales_are_delayed(values):
        found["fp8_format"] = _HISTORY
    if device == CUDA and values.get(FSDP) and values.get(FP8_PARAMETERS):
        found[FP8_PARAMETERS] = _ELSEWHERE
    computed = deepep_flags(values, device)
    for name, value in values.items():
        # 1 is what Megatron does without a size.
        if (
            value is not None
            and not (value == 1 and name.endswith("_size"))
            and (reason := why_left_out(name, value, device))
            and not (name == RESET_MASK and device == CPU and masks_documents(values))
            and name not in computed
        ):
            found[name] = reason
    return found


def _matches(name: str, patterns: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns.split())
