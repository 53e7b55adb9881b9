"""Runs that would fail or mislead, by name, and what the check must say of each."""

from __future__ import annotations

from sets import (
    BF16,
    BLOCKWISE,
    DELAYED,
    ENV,
    FP16,
    FP32,
    FSDP,
    LLAMA_70B,
    LLAMA_405B,
    MLA,
    MOE,
    MXFP8,
    NVFP4,
    TP2,
    Set,
)

LOCAL = {"transformer_impl": "local", "no_rope_fusion": True, "no_persist_layer_norm": True}
CPU = {
    "distributed_backend": "gloo",
    "no_gradient_accumulation_fusion": True,
    "no_masked_softmax_fusion": True,
    "cross_entropy_loss_fusion": None,
    "cross_entropy_fusion_impl": None,
}
FULL = {"recompute_granularity": "full"}
OPEN = {"CUDA_DEVICE_MAX_CONNECTIONS": 32}
SEGMENTS = {**OPEN, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
UNDISTRIBUTED = {"use_distributed_optimizer": None, "overlap_param_gather": None, "fp8_param_gather": None}
OFFLOADED = {"fine_grained_activation_offloading": True, "offload_modules": ["attn_norm"]}
FSDP2 = {
    **UNDISTRIBUTED,
    "use_torch_fsdp2": True,
    "no_gradient_accumulation_fusion": True,
    "ckpt_format": "torch_dist",
    "untie_embeddings_and_output_weights": True,
}


def profiled(**stated: object) -> dict[str, object]:
    return {"launch": {"profile": stated}}


VPP = {"pipeline_model_parallel_size": 4, "num_virtual_stages_per_pipeline_rank": 2}

# What Megatron's parser and our schema refuse.
PARSE = {
    "misspelt flag": Set({"fp8_recipee": "tensorwise"}, "flag-unknown"),
    "no such recipe": Set({"fp8_recipe": "rowwise"}, "flag-value"),
    "no such flag": Set({"fp8_dot_product_attention": True}, "flag-unknown"),
    "flag of another version": Set({"fp8_output_proj": True}, "flag-unknown", software={"megatron": "0.17"}),
    "graph scope is old": Set({"cuda_graph_modules": ["attn"]}, "flag-unknown", software={"megatron": "0.17"}),
    "recipe without format": Set({"fp8_format": None, "fp8_param_gather": None}, "recipe-without-format"),
    "format without recipe": Set({"fp8_recipe": None}, "format-without-recipe"),
    "fp8 on a CPU": Set({}, "fp8-on-cpu", gpu="cpu"),
}
# What `validate_args` and the layout refuse.
ARGUMENTS = {
    "world % tp": Set({"tensor_model_parallel_size": 3}, "world-size"),
    "layers % pp": Set({"pipeline_model_parallel_size": 3, "global_batch_size": 60}, "megatron-validate", gpus=6),
    "batch % data parallel": Set({"global_batch_size": 60}, "batch-size"),
    "batch % micro batch": Set({"micro_batch_size": 3}, "batch-size"),
    "evaluation batch": Set({"eval_global_batch_size": 12}, "megatron-validate"),
    "sequence % 2 cp": Set({"context_parallel_size": 2, "seq_length": 8190}, "megatron-validate"),
    "tp on Hopper without one connection": Set(TP2, "max-connections-not-1", env={}),
    "cp on Hopper with 32 connections": Set({"context_parallel_size": 2}, "max-connections-not-1", env=OPEN),
    "sequence over positions": Set({"seq_length": 16384}, "megatron-validate"),
    "param gather without distributed optimizer": Set(
        {"use_distributed_optimizer": None, "overlap_param_gather": None}, "megatron-validate"
    ),
    "fp8 and fp4": Set({"fp4_format": "e2m1", "fp4_recipe": "nvfp4"}, "megatron-validate", gpu="b200"),
    "bf16 and fp16": Set({"fp16": True}, "megatron-validate"),
    "param overlap without grad overlap": Set({"overlap_grad_reduce": None}, "megatron-validate"),
    "FSDP with another checkpoint format": Set({**FSDP, "ckpt_format": "torch_dist"}, "megatron-validate", env=OPEN),
    "FSDP's checkpoint format alone": Set({"ckpt_format": "fsdp_dtensor"}, "megatron-validate"),
    "FSDP with one connection": Set(FSDP, "max-connections-1"),
    "ep without experts": Set({"expert_model_parallel_size": 2}, "megatron-validate"),
    "experts % ep": Set({**MOE, "num_experts": 100}, "megatron-validate"),
    "virtual pipeline split": Set(
        {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 3}, "megatron-validate"
    ),
    "minimum lr over lr": Set({"min_lr": 1e-3}, "megatron-validate"),
    "iterations and samples": Set({"train_samples": 1000}, "megatron-validate"),
    "save without interval": Set({"save": "checkpoints"}, "megatron-validate"),
    "CPU offload with gathered current scaling": Set(
        {"optimizer_cpu_offload": True, "use_precision_aware_optimizer": True}, "megatron-validate"
    ),
    "tp overlap without sp": Set(
        {"tensor_model_parallel_size": 2, "tp_comm_overlap": True}, "megatron-validate"
    ),
    "full iteration graph with NaN check": Set(
        {"cuda_graph_impl": "full_iteration", "no_check_for_nan_in_loss_and_grad": None}, "megatron-validate"
    ),
    "TE graph with expandable segments": Set(
        {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["attn"], "te_rng_tracker": True},
        "megatron-validate",
        env=SEGMENTS,
    ),
    "fused TE cross entropy": Set({"cross_entropy_fusion_impl": "te"}, "megatron-validate"),
    "fused TE cross entropy in 0.18.2": Set(
        {"cross_entropy_fusion_impl": "te"}, "megatron-validate", software={"megatron": "0.18.2"}
    ),
    "optimizer step overlap without VPP": Set(
        {"overlap_param_gather_with_optimizer_step": True, "ckpt_format": "torch"}, "megatron-validate"
    ),
}  # fmt: skip
# What the configurations built from the arguments refuse.
CONFIGS = {
    "heads % tp": Set(
        {"num_attention_heads": 12, "num_query_groups": 4, "tensor_model_parallel_size": 8, "sequence_parallel": True},
        "attention-heads",
    ),
    "width over heads": Set({"num_attention_heads": 15, "kv_channels": None, "num_query_groups": 8}, "attention-heads"),
    "query groups against tp": Set(
        {"num_attention_heads": 24, "num_query_groups": 6, "tensor_model_parallel_size": 4, "sequence_parallel": True},
        "megatron-transformer-config",
    ),
    "param gather without fp8": Set({**BF16, "fp8_param_gather": True}, "megatron-transformer-config"),
    "bf16 layers with delayed": Set({**DELAYED, "first_last_layers_bf16": True}, "delayed-bf16-layers"),
    "too many bf16 layers": Set(
        {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 33, "num_layers": 64,
         "pipeline_model_parallel_size": 2},
        "megatron-transformer-config",
    ),
    "full recompute without method": Set(FULL, "megatron-transformer-config"),
    "full recompute without layers": Set({**FULL, "recompute_method": "block"}, "megatron-transformer-config"),
    "custom recipe without factory": Set({"fp8_recipe": "custom"}, "megatron-transformer-config"),
    "fp8 output layer without mxfp8": Set({"fp8_output_proj": True}, "megatron-transformer-config"),
    "uneven pipeline": Set(
        {"pipeline_model_parallel_size": 4, "decoder_first_pipeline_num_layers": 6}, "megatron-transformer-config"
    ),
    "pipeline layout": Set(
        {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Et*3|t*3L"},
        "megatron-transformer-config",
    ),
    "mxfp8 buffer without param gather": Set(
        {**MXFP8, "fp8_param_gather": None}, "megatron-ddp-config", gpu="b200"
    ),
    "bucket size and number": Set({"ddp_num_buckets": 4}, "megatron-ddp-config"),
    "bf16 moments alone": Set({"exp_avg_dtype": "bf16"}, "megatron-optimizer-config"),
    "bf16 main gradients alone": Set({"main_grads_dtype": "bf16"}, "megatron-optimizer-config"),
    "router padding without fp8": Set(
        {**MOE, **BF16, "moe_router_padding_for_quantization": True}, "megatron-transformer-config"
    ),
    "router padding with allgather": Set(
        {**MOE, "moe_router_padding_for_quantization": True, "moe_token_dispatcher_type": "allgather"},
        "megatron-transformer-config",
    ),
    "delayed with activation recompute": Set(
        {**MOE, **DELAYED, "recompute_granularity": "selective", "recompute_modules": ["moe_act"]},
        "megatron-transformer-config",
    ),
}  # fmt: skip
# What Megatron says while it builds the model and the scheduler ("stage 7").
BUILDING = {
    "ffn % tp": Set(
        {"ffn_hidden_size": 14340, "tensor_model_parallel_size": 8, "sequence_parallel": True}, "size-not-divisible"
    ),
    "expert ffn % etp": Set(
        {**MOE, **TP2, "moe_ffn_hidden_size": 769, "expert_model_parallel_size": 4}, "size-not-divisible"
    ),
    "shared expert % tp": Set(
        {**MOE, **TP2, "moe_shared_expert_intermediate_size": 767, "expert_model_parallel_size": 4},
        "size-not-divisible",
    ),
    "expert grid against world": Set({**MOE, "num_experts": 129, "expert_model_parallel_size": 3}, "expert-grid"),
    "expert grid counts tp": Set({**MOE, **TP2, "expert_model_parallel_size": 8}, "expert-grid"),
    "expert grid with etp": Set(
        {**MOE, "expert_tensor_parallel_size": 4, "expert_model_parallel_size": 4}, "expert-grid"
    ),
    "optimizer instances": Set({"num_distributed_optimizer_instances": 3}, "optimizer-instances"),
    "warmup as long as decay": Set({"lr_warmup_iters": 50}, "warmup-too-long"),
    "warmup of the whole run": Set({"lr_warmup_iters": None, "lr_warmup_fraction": 1.0}, "warmup-too-long"),
    "samples warm up for ever": Set(
        {
            "train_iters": None,
            "lr_decay_iters": None,
            "lr_warmup_iters": None,
            "train_samples": 640,
            "lr_warmup_samples": 640,
        },
        "warmup-too-long",
    ),
    "warmup starts above lr": Set({"lr_warmup_init": 1e-2}, "learning-rate-schedule"),
    "WSD without its end": Set({"lr_decay_style": "WSD"}, "learning-rate-schedule"),
    "attempts without the optimizer's state": Set(
        {"no_save_optim": True},
        "no-save-optim-resume",
        more={"checkpoint": {"dir": "ck", "interval": 100}, "survive": {"attempts": 3}},
    ),
    "fault tolerance without its launcher": Set({"enable_ft_package": True}, "ft-launcher"),
    "no learning rate": Set({"lr": None, "min_lr": None}, "no-learning-rate"),
    "no length": Set({"train_iters": None, "lr_decay_iters": None, "lr_warmup_iters": None}, "no-training-length"),
    "NullTokenizer without vocabulary": Set({"vocab_size": None}, "null-tokenizer-vocabulary"),
    "no tokenizer": Set({"tokenizer_type": None}, "no-tokenizer"),
    "fine-tuning in our entry": Set({"sft": True}, "not-in-entry"),
    "a config field that no version has": Set({}, "config-unknown", more={"launch": {"config": {"fused_rope": True}}}),
    "a flag as a config field": Set({}, "config-unknown", more={"launch": {"config": {"apply_rope_fusion": False}}}),
    "a config field of another type": Set(
        {}, "config-unknown", more={"launch": {"config": {"fused_single_qkv_rope": 1}}}
    ),
    "a CPU without its flags": Set({**BF16, "bf16": True}, "cpu-flags", gpu="cpu"),
    "FSDP on a CPU": Set({**BF16, **FSDP, **LOCAL, **CPU}, "cpu-layers", gpu="cpu", env=OPEN),
    "FP8 moments beside gathered delayed weights": Set(
        {
            **DELAYED,
            "fp8_param_gather": True,
            "use_precision_aware_optimizer": True,
            "exp_avg_dtype": "fp8",
            "exp_avg_sq_dtype": "fp16",
        },
        "fp8-param-gather-states",
    ),
    "FP16 master beside gathered delayed weights on several ranks": Set(
        {**DELAYED, "fp8_param_gather": True, "use_precision_aware_optimizer": True, "main_params_dtype": "fp16"},
        "fp8-param-gather-scales",
    ),
    "fp16 master beside gathered current weights": Set(
        {"fp8_param_gather": True, "use_precision_aware_optimizer": True, "main_params_dtype": "fp16"},
        "fp8-param-gather-states",
    ),
    "fp32 master beside gathered delayed weights": Set(
        {**DELAYED, "fp8_param_gather": True, "use_precision_aware_optimizer": True}, "fp8-param-gather-states"
    ),
    "moments in bf16 and FP16 master beside gathered delayed weights": Set(
        {
            **DELAYED,
            "fp8_param_gather": True,
            "use_precision_aware_optimizer": True,
            "main_params_dtype": "fp16",
            "exp_avg_dtype": "bf16",
            "exp_avg_sq_dtype": "bf16",
        },
        "fp8-param-gather-states",
    ),
    "dense layers as groups on Hopper": Set(
        {"use_grouped_gemm_for_dense_mlp": True, "use_transformer_engine_op_fuser": True}, "dense-grouped-mxfp8"
    ),
    "recomputed MLP with biases": Set(
        {"recompute_granularity": "selective", "recompute_modules": ["mlp"], "disable_bias_linear": None},
        "fp8-recompute-mlp-bias",
    ),
    "recompute of an input that offloading frees": Set(
        {**MLA, **FULL, **OFFLOADED, "recompute_method": "uniform", "recompute_num_layers": 1},
        "offload-recomputed-input",
        env={**ENV, "NVTE_CPU_OFFLOAD_V1": 1},
    ),
    "gate of shared experts on a meta device": Set(
        {
            **MOE,
            **FSDP,
            "init_model_with_meta_device": True,
            "moe_shared_expert_intermediate_size": 768,
            "moe_shared_expert_gate": True,
        },
        "meta-device-expert-gate",
        env=OPEN,
    ),
    "weights on the host and on a meta device": Set(
        {**FSDP, "init_model_with_meta_device": True, "use_cpu_initialization": True}, "meta-device-cpu", env=OPEN
    ),
    "quantiles beside a fused router": Set(
        {**MOE, "moe_router_load_balancing_type": "quantile_balancing", "moe_router_fusion": True},
        "quantile-balancing-router",
    ),
    "torch's FSDP2 in 0.18": Set(
        FSDP2, "torch-fsdp2-step", env=OPEN, software={"megatron": "0.18", "transformer_engine": "2.16"}
    ),
    "torch's FSDP2 on a meta device": Set({**FSDP2, "init_model_with_meta_device": True}, "torch-fsdp2-meta", env=OPEN),
    "bf16 moments beside gathered delayed weights": Set(
        {
            **DELAYED,
            "fp8_param_gather": True,
            "use_precision_aware_optimizer": True,
            "exp_avg_dtype": "bf16",
            "exp_avg_sq_dtype": "bf16",
        },
        "fp8-param-gather-states",
    ),
    "padding after a fused router": Set(
        {**MOE, "moe_router_padding_for_quantization": True, "moe_router_fusion": True}, "router-padding-fusion"
    ),
    "graph of a preprocessing that pads": Set(
        {
            **MOE,
            "moe_router_padding_for_quantization": True,
            "cuda_graph_impl": "transformer_engine",
            "cuda_graph_modules": ["attn", "moe_router", "moe_preprocess"],
            "te_rng_tracker": True,
        },
        "graph-dispatch-sync",
    ),
    "full graph of alltoall": Set(
        {**MOE, **BF16, "cuda_graph_impl": "full_iteration", "te_rng_tracker": True}, "full-graph-dispatch"
    ),
    "local graph of mlp alone": Set(
        {**BF16, "cuda_graph_impl": "local", "cuda_graph_modules": ["mlp"], "te_rng_tracker": True}, "local-graph-mlp"
    ),
    "fused operations without an activation": Set(
        {
            "swiglu": None,
            "squared_relu": True,
            "no_bias_swiglu_fusion": None,
            "no_bias_gelu_fusion": True,
            "use_transformer_engine_op_fuser": True,
        },
        "op-fuser-activation",
    ),
    "weights on the host beside FP8 gather": Set({"use_cpu_initialization": True}, "cpu-initialization"),
    "weights on the host, one optimizer": Set({**UNDISTRIBUTED, "use_cpu_initialization": True}, "cpu-initialization"),
    "fused rope of normalized queries": Set(
        {"qk_layernorm": True}, "fused-rope-norm", more={"launch": {"config": {"fused_single_qkv_rope": True}}}
    ),
    "full graph of a plain pipeline": Set(
        {
            "pipeline_model_parallel_size": 2,
            "cuda_graph_impl": "full_iteration",
            "te_rng_tracker": True,
            "no_check_for_nan_in_loss_and_grad": True,
        },
        "full-graph-pipeline",
    ),
    "clipped logits in FSDP": Set({**FSDP, "qk_clip": True}, "fsdp-qk-clip", env=OPEN),
    "optimizer on the host with FSDP": Set(
        {
            **FSDP,
            "optimizer_cpu_offload": True,
            "use_precision_aware_optimizer": True,
            "fp8_param_gather": None,
        },
        "fsdp-optimizer-offload",
        env=OPEN,
    ),
    "logged logits in FSDP": Set({**FSDP, "log_max_attention_logit": True}, "fsdp-qk-clip", env=OPEN),
    "fused router in double precision": Set(
        {**MOE, **BF16, "moe_router_dtype": "fp64", "moe_router_fusion": True}, "fused-router-dtype"
    ),
    "scaled inputs of many experts": Set({**MOE, "moe_apply_probs_on_input": True}, "probs-on-input"),
    "shared experts with biases": Set(
        {
            **MOE,
            "moe_shared_expert_intermediate_size": 768,
            "no_bias_dropout_fusion": True,
            "disable_bias_linear": None,
        },
        "shared-expert-bias",
    ),
    "several instances of no distributed optimizer": Set(
        {**UNDISTRIBUTED, "num_distributed_optimizer_instances": 2}, "undistributed-instances"
    ),
    "fp16 master beside gathered mxfp8 weights": Set(
        {**MXFP8, "fp8_param_gather": True, "use_precision_aware_optimizer": True, "main_params_dtype": "fp16"},
        "fp8-param-gather-states",
        gpu="b200",
    ),
    "bf16 moments beside gathered fp4 weights": Set(
        {
            **NVFP4,
            "fp4_param_gather": True,
            "use_precision_aware_optimizer": True,
            "exp_avg_dtype": "bf16",
            "exp_avg_sq_dtype": "bf16",
        },
        "fp4-param-gather-states",
        gpu="b200",
    ),
    "distributed SGD": Set({"optimizer": "sgd"}, "distributed-optimizer-kind"),
    "FSDP in a pipeline": Set({**FSDP, "pipeline_model_parallel_size": 2}, "fsdp-pipeline", env=OPEN),
    "FSDP with graphs of layers": Set(
        {**FSDP, "cuda_graph_impl": "local", "cuda_graph_modules": ["attn", "mlp"], "te_rng_tracker": True},
        "fsdp-local-graphs",
        env=OPEN,
    ),
    "FSDP with FP4 parameters": Set(
        {**FSDP, **NVFP4, "fp4_param_gather": True}, "fsdp-fp4-parameters", gpu="b200", env=OPEN
    ),
    "experts whose first checkpoint fails": Set(
        {**MOE, "save": "/checkpoints", "save_interval": 100},
        "expert-extra-state",
        software={"megatron": "0.18", "transformer_engine": "2.17"},
    ),
    "unfused attention over contexts": Set(
        {"context_parallel_size": 2, "attention_backend": "unfused"}, "unfused-context-parallel"
    ),
    "contexts divided in fp32": Set({**FP32, "context_parallel_size": 2}, "unfused-context-parallel"),
    "flash attention with sinks": Set(
        {"attention_backend": "flash", "softmax_type": "learnable"}, "flash-attention-kernel"
    ),
    "flash attention with clipped logits": Set(
        {"attention_backend": "flash", "qk_clip": True}, "flash-attention-kernel"
    ),
    "sinks over a ring": Set({"context_parallel_size": 2, "softmax_type": "off-by-one"}, "sinks-context-parallel"),
    "wide heads on Blackwell": Set({"kv_channels": 192, "attention_backend": "fused"}, "fused-head-width", gpu="b200"),
    "local graphs in a pipeline": Set(
        {**BF16, "pipeline_model_parallel_size": 2, "cuda_graph_impl": "local", "te_rng_tracker": True},
        "local-graph-pipeline",
    ),
    "averages summed in fp32": Set(
        {"ddp_reduce_scatter_with_fp32_accumulation": True, "ddp_average_in_collective": True},
        "fp32-accumulation-average",
    ),
    "residuals in fp32": Set({"fp32_residual_connection": True}, "fp32-residual-te"),
    "rerun mode by its old name": Set({"rerun_mode": "report_stats"}, "rerun-mode-name"),
    "SGD in FSDP": Set({**FSDP, "optimizer": "sgd"}, "distributed-optimizer-kind", env=OPEN),
    "sums in fp32 of several instances": Set(
        {
            "ddp_reduce_scatter_with_fp32_accumulation": True,
            "num_distributed_optimizer_instances": 2,
            "ddp_average_in_collective": None,
        },
        "fp32-accumulation-instances",
    ),
    "tied weights in an FP8 output": Set(
        {**MXFP8, "fp8_output_proj": True, "untie_embeddings_and_output_weights": None}, "fp8-output-tied", gpu="b200"
    ),
    "recomputed token prediction": Set(
        {
            "mtp_num_layers": 1,
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
        "mtp-full-recompute",
        software={"megatron": "0.18", "transformer_engine": "2.16"},
    ),
    "delta nets without SwiGLU": Set(
        {
            "experimental_attention_variant": "gated_delta_net",
            "linear_attention_freq": 2,
            "swiglu": None,
            "no_bias_swiglu_fusion": None,
            "squared_relu": True,
            "no_bias_gelu_fusion": True,
        },
        "delta-net-activation",
    ),
    "fused GEGLU of dense layers": Set(
        {"swiglu": None, "no_bias_swiglu_fusion": None, "quick_geglu": True, "disable_bias_linear": None},
        "geglu-fusion-dense",
    ),
    "FSDP's two buffers under overlapped experts": Set(
        {**FSDP, **MOE, "fsdp_double_buffer": True, "overlap_moe_expert_parallel_comm": True},
        "fsdp-overlap-buffers",
        env=OPEN,
    ),
    "padded routing of dropped tokens": Set(
        {**MOE, "moe_router_padding_for_quantization": True, "moe_expert_capacity_factor": 1.25},
        "router-padding-capacity",
    ),
    "late gradients of expert biases": Set(
        {
            **MOE,
            **BF16,
            "overlap_dispatch_backward_with_experts_wgrad": True,
            "disable_bias_linear": None,
            "no_bias_dropout_fusion": True,
            "no_bias_swiglu_fusion": True,
        },
        "expert-bias-overlap",
    ),
    "blockwise weights in the gradients' buffer": Set(
        {**BLOCKWISE, "fp8_param_gather": True, "reuse_grad_buf_for_mxfp8_param_ag": True}, "blockwise-gather-buffer"
    ),
    "graphs of whole layers of alltoall": Set(
        {**MOE, "cuda_graph_impl": "transformer_engine", "te_rng_tracker": True}, "graph-dispatch-whole"
    ),
    "FSDP with Transformer Engine's graphs": Set(
        {**FSDP, "cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["attn"], "te_rng_tracker": True},
        "fsdp-te-graphs",
        env=OPEN,
    ),
    "biases of sequential experts": Set(
        {**MOE, "moe_grouped_gemm": None, "disable_bias_linear": None}, "sequential-expert-bias"
    ),
    "local graphs of alltoall": Set(
        {**MOE, "cuda_graph_impl": "local", "cuda_graph_modules": ["attn", "moe_router"], "te_rng_tracker": True},
        "graph-dispatch-whole",
    ),
    "graphs of whole layers of alltoall in 0.17": Set(
        {**MOE, "cuda_graph_impl": "transformer_engine", "te_rng_tracker": True},
        "graph-dispatch-whole",
        software={"megatron": "0.17"},
    ),
    "graphs of overlapped shared experts": Set(
        {
            **MOE,
            **BF16,
            "moe_shared_expert_intermediate_size": 768,
            "moe_shared_expert_overlap": True,
            "cuda_graph_impl": "transformer_engine",
            "cuda_graph_modules": ["attn", "moe_router", "moe_preprocess"],
            "te_rng_tracker": True,
        },
        "shared-overlap-graphs",
    ),
    "local graphs of allgather": Set(
        {
            **MOE,
            "moe_token_dispatcher_type": "allgather",
            "cuda_graph_impl": "local",
            "cuda_graph_modules": ["attn"],
            "te_rng_tracker": True,
        },
        "graph-dispatch-whole",
    ),
    "local graphs of fused rotations of latent attention": Set(
        {**MLA, "cuda_graph_impl": "local", "cuda_graph_modules": ["attn"], "te_rng_tracker": True},
        "graph-latent-rope",
    ),
    "local graphs of a recomputed MLP": Set(
        {
            "cuda_graph_impl": "local",
            "cuda_graph_modules": ["attn"],
            "te_rng_tracker": True,
            "recompute_granularity": "selective",
            "recompute_modules": ["mlp"],
        },
        "graph-recompute",
    ),
    "graphs that wait for what is recomputed": Set(
        {
            **BF16,
            "cuda_graph_impl": "transformer_engine",
            "cuda_graph_modules": ["attn"],
            "te_rng_tracker": True,
            "recompute_granularity": "selective",
            "recompute_modules": ["core_attn"],
            "fine_grained_activation_offloading": True,
            "offload_modules": ["core_attn"],
        },
        "graph-offload-recompute",
        env={**ENV, "NVTE_CPU_OFFLOAD_V1": 1},
    ),
    "probabilities of experts in fp64": Set({**MOE, "moe_router_dtype": "fp64"}, "router-dtype-padding"),
    "overlap beside latent experts": Set(
        {
            **MOE,
            "moe_shared_expert_intermediate_size": 768,
            "moe_shared_expert_overlap": True,
            "moe_latent_size": 1024,
        },
        "shared-overlap-latent",
    ),
    "grouped shared experts without interleaving": Set(
        {**MOE, "moe_shared_expert_intermediate_size": 768, "use_grouped_gemm_for_shared_expert": True},
        "shared-grouped-interleave",
    ),
    "delayed scaling of offloaded experts": Set(
        {
            **MOE,
            **DELAYED,
            "fine_grained_activation_offloading": True,
            "offload_modules": ["expert_fc1"],
        },
        "delayed-offloaded-experts",
        env={**ENV, "NVTE_CPU_OFFLOAD_V1": 1},
    ),
    "L2 norm of latent attention": Set({**MLA, "qk_layernorm": None, "qk_l2_norm": True}, "latent-l2-norm"),
    "offloaded ungrouped experts": Set(
        {**MOE, "moe_grouped_gemm": None, "cpu_offloading_num_layers": 2}, "offload-copied-config"
    ),
    "offloaded shared experts": Set(
        {**MOE, "moe_shared_expert_intermediate_size": 768, "cpu_offloading_num_layers": 2}, "offload-copied-config"
    ),
    "offloading with fewer query groups than TP": Set(
        {**TP2, "num_query_groups": 1, "cpu_offloading_num_layers": 2}, "offload-copied-config"
    ),
    "sinkhorn with an auxiliary loss": Set(
        {**MOE, "moe_router_load_balancing_type": "sinkhorn", "moe_aux_loss_coeff": 0.001}, "sinkhorn-aux-loss"
    ),
    "largest logits of an old cuDNN": Set({"attention_backend": "fused", "qk_clip": True}, "max-logit-cudnn"),
    "largest logits over a ring": Set({"context_parallel_size": 2, "log_max_attention_logit": True}, "max-logit-cudnn"),
    "fused windows with dropout": Set(
        {"attention_backend": "fused", "window_size": "128,0", "attention_dropout": 0.1}, "window-dropout"
    ),
    "fused rope of layers without positions": Set(
        {"no_rope_freq": 4}, "fused-rope-norm", more={"launch": {"config": {"fused_single_qkv_rope": True}}}
    ),
    "fused rope of no positions": Set(
        {"position_embedding_type": "none"},
        "fused-rope-norm",
        more={"launch": {"config": {"fused_single_qkv_rope": True}}},
    ),
    "muon in fp16": Set({**FP16, "optimizer": "muon"}, "fp16-optimizer"),
    "window over a ring": Set({"context_parallel_size": 2, "window_size": "1024,0"}, "window-context-parallel"),
    "query-key scaling without its variable": Set({"apply_query_key_layer_scaling": True}, "qk-layer-scaling"),
    "fused experts without their variable": Set(
        {**MOE, "use_transformer_engine_op_fuser": True}, "op-fuser-experts", software={"megatron": "0.19"}
    ),
    "Transformer Engine too old for Megatron 0.17": Set(
        {}, "te-offload-interface", software={"megatron": "0.17", "transformer_engine": "2.9"}
    ),
    "no evaluation interval": Set(
        {"eval_interval": None}, "evaluation-without-interval", more={"launch": {"script": "pretrain_gpt.py"}}
    ),
    "expert pattern too short": Set({**MOE, "moe_layer_freq": "[0]*3+[1]*40"}, "moe-layer-pattern"),
    "more choices than experts": Set({**MOE, "num_experts": 8, "moe_router_topk": 9}, "moe-top-k"),
    "grouped experts with bias": Set({**MOE, "disable_bias_linear": None}, "moe-grouped-bias"),
    "fused SwiGLU of experts with bias": Set(
        {**MOE, "disable_bias_linear": None, "no_bias_dropout_fusion": True}, "weighted-swiglu-bias"
    ),
    "deepep alone": Set(
        {
            **MOE,
            "moe_token_dispatcher_type": "flex",
            "moe_flex_dispatcher_backend": "deepep",
            "expert_model_parallel_size": 1,
        },
        "moe-flex-dispatcher",
    ),
    "two numbers of SMs": Set(
        {
            **MOE,
            "moe_token_dispatcher_type": "flex",
            "moe_flex_dispatcher_backend": "deepep",
            "expert_model_parallel_size": 4,
            "moe_deepep_num_sms": 20,
            "moe_hybridep_num_sms": 16,
        },
        "moe-dispatcher-sms",
    ),
    "caches without a folder": Set({"dataloader_fast_cache_load": True}, "dataset-cache-folder"),
    "averaged per-token loss": Set({"calculate_per_token_loss": True}, "per-token-loss-average"),
}
BUILDING |= {
    "layers over virtual stages": Set(
        {"pipeline_model_parallel_size": 4, "num_virtual_stages_per_pipeline_rank": 3}, "pipeline-split"
    ),
    "layers over stages, virtually": Set(
        {"pipeline_model_parallel_size": 4, "num_virtual_stages_per_pipeline_rank": 2, "num_layers": 30},
        "pipeline-split",
    ),
}
# What only the GPU or Transformer Engine tells.
RUNNING = {
    "token prediction with tied embeddings in a pipeline": Set(
        {
            "mtp_num_layers": 1,
            "untie_embeddings_and_output_weights": None,
            "pipeline_model_parallel_size": 2,
            "save": "/checkpoints",
            "save_interval": 100,
            "ckpt_format": "torch_dist",
        },
        "mtp-tied-save",
    ),
    "a stage without experts, whose optimizer cannot be loaded": Set(
        {
            **MOE,
            "moe_layer_freq": "([0]*24+[1]*24)",
            "pipeline_model_parallel_size": 2,
            "expert_model_parallel_size": 4,
            "use_distributed_optimizer": None,
            "overlap_param_gather": None,
            "fp8_param_gather": None,
            "save": "/checkpoints",
            "save_interval": 100,
        },
        "dense-stage-resume",
    ),
    "FSDP that averages in its collectives": Set(
        {**FSDP, "ddp_average_in_collective": True}, "fsdp-average", env=OPEN
    ),
    "mxfp8 on Hopper": Set(MXFP8, "mxfp8-needs-blackwell"),
    "mxfp8 on H200": Set(MXFP8, "mxfp8-needs-blackwell", gpu="h200"),
    "nvfp4 on Hopper": Set(NVFP4, "nvfp4-needs-blackwell"),
    "fp8 on Ampere": Set({}, "fp8-needs-newer-gpu", gpu="a100"),
    "nvfp4 on Ampere": Set(NVFP4, "fp8-needs-newer-gpu", gpu="a100"),
    "blockwise with CUDA 12.8": Set(BLOCKWISE, "blockwise-needs-cuda", software={"cuda": "12.8"}),
    "Blackwell with CUDA 12.6": Set(MXFP8, "cuda-too-old", gpu="b200", software={"cuda": "12.6"}),
    "mxfp8 param gather without buffer reuse": Set(
        {**MXFP8, "reuse_grad_buf_for_mxfp8_param_ag": None}, "mxfp8-param-gather-buffer", gpu="b200"
    ),
    "tensorwise with TE 2.1": Set({}, "te-too-old", software={"transformer_engine": "2.1"}),
    "blockwise with TE 2.2": Set(BLOCKWISE, "te-too-old", software={"transformer_engine": "2.2.0"}),
    "mxfp8 with TE 2.0": Set(MXFP8, "te-too-old", gpu="b200", software={"transformer_engine": "2.0"}),
    "nvfp4 with TE 2.6": Set(NVFP4, "te-too-old", gpu="b200", software={"transformer_engine": "2.6"}),
    "hidden % 16": Set({"hidden_size": 4100, "num_attention_heads": 32}, "fp8-dimension"),
    "tokens % 8": Set({"seq_length": 8188}, "fp8-tokens"),
    "tokens % 16 on Hopper": Set({"seq_length": 8184}, "fp8-tokens"),
    "tokens over cp and sp": Set(
        {**TP2, "context_parallel_size": 2, "seq_length": 8176}, "fp8-tokens"
    ),
    "ffn % 16 after tp": Set(
        {"ffn_hidden_size": 14400, "tensor_model_parallel_size": 8, "sequence_parallel": True}, "fp8-dimension"
    ),
    "mxfp8 ffn % 32": Set({**MXFP8, "ffn_hidden_size": 14352}, "fp8-dimension", gpu="b200"),
    "mxfp8 tokens % 32": Set({**MXFP8, "seq_length": 8176}, "fp8-tokens", gpu="b200"),
    "nvfp4 ffn % 16": Set({**NVFP4, "ffn_hidden_size": 14344}, "fp8-dimension", gpu="b200"),
    "mxfp8 tp overlap % 128": Set(
        {**MXFP8, **TP2, "tp_comm_overlap": True, "ffn_hidden_size": 14400}, "tp-overlap-dimension", gpu="b200"
    ),
    "blockwise tp overlap": Set({**BLOCKWISE, **TP2, "tp_comm_overlap": True}, "tp-overlap-recipe"),
    "latent attention % 32": Set({**MLA, **MXFP8, "q_lora_rank": 1552}, "fp8-dimension", gpu="b200"),
    "expert ffn % 16 after etp": Set(
        {**MOE, "moe_ffn_hidden_size": 776, "expert_tensor_parallel_size": 2, "expert_model_parallel_size": 4},
        "fp8-dimension",
    ),
    "fp8 with local layers": Set(LOCAL, "fp8-off"),
    "every layer in bf16": Set(
        {"num_layers": 4, "first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 2,
         "num_layers_at_end_in_bf16": 2},
        "fp8-no-layers",
    ),
    "router fusion with TE 2.6": Set(
        {**MOE, "moe_router_fusion": True}, "te-too-old-for-flag", software={"transformer_engine": "2.6"}
    ),
    "query groups do not divide heads": Set({"num_query_groups": 7}, "query-groups"),
    "virtual pipeline with a rest": Set(
        {**VPP, "global_batch_size": 20}, "virtual-pipeline-batches", gpus=8
    ),
    "virtual pipeline with too few": Set({**VPP, "global_batch_size": 4}, "virtual-pipeline-batches"),
    "virtual pipeline by layout with a rest": Set(
        {"pipeline_model_parallel_size": 4, "pipeline_model_parallel_layout": "Et*4|(t*4|)*6t*4L",
         "global_batch_size": 20},
        "virtual-pipeline-batches",
    ),
    "sequence % tp": Set(
        {"tensor_model_parallel_size": 8, "sequence_parallel": True, "seq_length": 8188}, "sequence-not-divisible"
    ),
    "a2a with too few key heads": Set(
        {"context_parallel_size": 4, "tensor_model_parallel_size": 2, "sequence_parallel": True, "num_query_groups": 4,
         "cp_comm_type": ["a2a"], "global_batch_size": 64},
        "context-parallel-heads",
    ),
    "experts with tp, without sp": Set(
        {**MOE, "tensor_model_parallel_size": 2, "expert_model_parallel_size": 4}, "moe-needs-sequence-parallel"
    ),
    "context parallel with local layers": Set({**BF16, **LOCAL, "context_parallel_size": 2}, "local-layers"),
    "attention variable against backend": Set({}, "attention-variables", env={"NVTE_FLASH_ATTN": 0}),
    "flash backend without flash": Set(
        {"attention_backend": "flash"}, "attention-variables", env={"NVTE_FUSED_ATTN": 1}
    ),
    "local graphs with segments": Set(
        {"cuda_graph_impl": "local", "te_rng_tracker": True}, "graph-segments", env=SEGMENTS,
        software={"megatron": "0.18"},
    ),
    "profile after the end": Set({}, "profile-range", more=profiled(start=60), plugin="measure"),
    "profile of no rank": Set({}, "profile-ranks", more=profiled(start=5, ranks=[0, 8]), plugin="measure"),
    "memory of a CPU": Set(
        {**BF16, **LOCAL, **CPU}, "profile-needs-gpu", gpu="cpu", more=profiled(start=5, tool="memory"),
        plugin="measure",
    ),
    "two profilers": Set({"profile": True}, "profile-twice", more=profiled(start=5), plugin="measure"),
    "statistics in a graph": Set(
        {"cuda_graph_impl": "local", "te_rng_tracker": True}, "tensor-stats-graphs",
        more={"launch": {"tensor_stats": 10}}, plugin="measure",
    ),
}  # fmt: skip
# What runs, and is not what it seems.
MISLEADING = {
    "nsys without an image": Set({}, "profile-nsys", more=profiled(start=5, tool="nsys"), plugin="measure"),
    "profile of all iterations": Set(
        {}, "profile-leaves-few", more=profiled(start=1, end=48), plugin="measure",
    ),
    "TE's cross entropy behind the validators": Set(
        {}, "te-cross-entropy", more={"launch": {"config": {"cross_entropy_fusion_impl": "te"}}}
    ),
    "blockwise on Blackwell": Set(BLOCKWISE, "blockwise-emulated", gpu="b200"),
    "blocks not full": Set({**BLOCKWISE, "ffn_hidden_size": 14352}, "blockwise-ragged"),
    "blockwise param gather": Set({"fp8_recipe": "blockwise"}, "blockwise-param-gather"),
    "e4m3 with delayed": Set({**DELAYED, "fp8_format": "e4m3"}, "fp8-format-unusual"),
    "e4m3 with tensorwise": Set({"fp8_format": "e4m3"}, "fp8-format-unusual"),
    "hybrid with mxfp8": Set({**MXFP8, "fp8_format": "hybrid"}, "fp8-format-unusual", gpu="b200"),
    "delayed with Megatron's defaults": Set({"fp8_recipe": "delayed"}, "delayed-short-history"),
    "dynamic loss scaling of bf16": Set({**BF16, "initial_loss_scale": 65536.0}, "flag-without-effect"),
    "dynamic beside a static loss scale": Set(
        {**FP16, "loss_scale": 1024.0, "loss_scale_window": 100.0}, "flag-without-effect"
    ),
    "gradients of fp16 in bf16": Set({**FP16, "grad_reduce_in_bf16": True}, "flag-without-effect"),
    "fp32 attention": Set(FP32, "fp32-attention"),
    "history with current scaling": Set({"fp8_amax_history_len": 1024}, "flag-without-effect"),
    "history algorithm with current scaling": Set({"fp8_amax_compute_algo": "max"}, "flag-without-effect"),
    "history of which the last entry counts": Set({**DELAYED, "fp8_amax_compute_algo": None}, "flag-without-effect"),
    "margin with current scaling": Set({"fp8_margin": 1}, "flag-without-effect"),
    "bf16 weight gradients with current scaling": Set({"no_fp8_wgrad": True}, "flag-without-effect"),
    "interval": Set({**DELAYED, "fp8_interval": 4}, "flag-without-effect"),
    "bf16 layer counts alone": Set({"num_layers_at_start_in_bf16": 2}, "flag-without-effect"),
    "bf16 layers of bf16": Set({**BF16, "first_last_layers_bf16": True}, "flag-without-effect"),
    "mxfp8 buffer with delayed": Set({**DELAYED, "reuse_grad_buf_for_mxfp8_param_ag": True}, "flag-without-effect"),
    "mxfp8 buffer with tensorwise": Set({"reuse_grad_buf_for_mxfp8_param_ag": True}, "flag-without-effect"),
    "transpose cache without FSDP": Set({"keep_fp8_transpose_cache": True}, "flag-without-effect"),
    "sharding without FSDP": Set({"data_parallel_sharding_strategy": "optim"}, "flag-without-effect"),
    "sequence parallel with tp 1": Set({"sequence_parallel": True}, "flag-without-effect"),
    "query groups without GQA": Set({"group_query_attention": None}, "flag-without-effect"),
    "recompute layers without granularity": Set({"recompute_num_layers": 5}, "flag-without-effect"),
    "recompute modules without granularity": Set({"recompute_modules": ["mlp"]}, "flag-without-effect"),
    "checkpoint interval without a folder": Set({"save_interval": 100}, "flag-without-effect"),
    "checkpoint without optimizer and without a folder": Set({"no_save_optim": True}, "flag-without-effect"),
    "only the weights of no checkpoint": Set({"finetune": True}, "flag-without-effect"),
    "fp8 without bf16": Set({"bf16": None}, "fp8-without-bf16"),
    "NaN without save": Set(
        {"rerun_mode": None, "no_check_for_nan_in_loss_and_grad": None}, "nan-without-save"
    ),
    "torch FSDP2 with param gather": Set(
        {"use_torch_fsdp2": True, "use_distributed_optimizer": None, "overlap_param_gather": None,
         "no_gradient_accumulation_fusion": True},
        "param-gather-off",
        env=OPEN,
    ),
    "FSDP that does not shard": Set(
        {**FSDP, "data_parallel_sharding_strategy": "no_shard"}, "fsdp-not-sharding", env=OPEN
    ),
    "FSDP of 0.17 by default": Set(
        {**FSDP, "data_parallel_sharding_strategy": None}, "fsdp-not-sharding", env=OPEN, software={"megatron": "0.17"}
    ),
    "wide heads with fused attention": Set(
        {"kv_channels": 192, "attention_backend": "fused"}, "attention-head-width"
    ),
    "registered buffers with segments": Set(
        {**FSDP, "use_nccl_ub": True}, "nccl-buffers-segments-unknown", env=SEGMENTS
    ),
    "registered buffers without NVLS": Set(
        {**FSDP, "use_nccl_ub": True}, "nvls-overridden", env={**OPEN, "NCCL_NVLS_ENABLE": 0}
    ),
    "expert overlap with one connection": Set(
        {**MOE, "overlap_moe_expert_parallel_comm": True}, "expert-overlap-connections"
    ),
    "tensor parallel over nodes": Set(
        {**BF16, "tensor_model_parallel_size": 8, "sequence_parallel": True}, "tensor-parallel-across-nodes",
        gpus=4, nodes=2,
    ),
    "no data": Set({"mock_data": None}, "no-data"),
    "one GPU and batch 2": Set({"global_batch_size": 2, "num_layers": 4}, "fp8-small-batch", gpus=1),
    "narrow model": Set(
        {"hidden_size": 512, "ffn_hidden_size": 1536, "num_attention_heads": 8, "kv_channels": 64}, "fp8-small-model"
    ),
    "a flag of a fork": Set({}, "unchecked-flags", more={"megatron_extra": {"flag_of_a_fork": 1}}),
    "many quantized experts": Set(
        {**MOE, "num_layers": 12, "expert_model_parallel_size": 2}, "fp8-experts-slower", plugin="plan"
    ),
    "a tracker whose library is nowhere": Set(
        code="tracking-library", severity="warning", plugin="tracking",
        more={"tracking": {"wandb": {"mode": "offline"}, "python": "/nowhere/bin/python"}},
    ),
    "a tracker without a server": Set(
        code="tracking-login", severity="warning", plugin="tracking", more={"tracking": {"mlflow": {}}},
    ),
    "a run that its time limit ends": Set({"train_iters": 100_000}, "time-limit-too-short", plugin="plan"),
    "a GPU that nobody measured": Set(MXFP8, "gpu-never-measured", gpu="vr200", gpus=4, plugin="plan"),
}  # fmt: skip
# The same on larger models and clusters.
LARGE = {
    "70B tp without one connection": Set(
        {**LLAMA_70B, "tensor_model_parallel_size": 4, "sequence_parallel": True, "pipeline_model_parallel_size": 4},
        "max-connections-not-1", nodes=8, env=OPEN,
    ),
    "70B virtual pipeline with a rest": Set(
        {**LLAMA_70B, "tensor_model_parallel_size": 4, "sequence_parallel": True, "pipeline_model_parallel_size": 4,
         "num_virtual_stages_per_pipeline_rank": 5, "global_batch_size": 24},
        "virtual-pipeline-batches", nodes=8,
    ),
    "70B stages with unequal chunks": Set(
        {**LLAMA_70B, "tensor_model_parallel_size": 4, "sequence_parallel": True, "pipeline_model_parallel_size": 4,
         "num_layers_per_virtual_pipeline_stage": 3},
        "megatron-validate", nodes=8,
    ),
    "70B mxfp8 on Hopper": Set(
        {**LLAMA_70B, **MXFP8, "tensor_model_parallel_size": 4, "sequence_parallel": True,
         "pipeline_model_parallel_size": 4},
        "mxfp8-needs-blackwell", nodes=8,
    ),
    "405B layers over 8 stages": Set(
        {**LLAMA_405B, "tensor_model_parallel_size": 8, "sequence_parallel": True, "pipeline_model_parallel_size": 8,
         "num_virtual_stages_per_pipeline_rank": 8},
        "pipeline-split", nodes=64,
    ),
    "405B tp 3": Set({**LLAMA_405B, "tensor_model_parallel_size": 3}, "world-size", nodes=64),
    "405B nvfp4 with overlap": Set(
        {**LLAMA_405B, **NVFP4, "tensor_model_parallel_size": 4, "sequence_parallel": True, "tp_comm_overlap": True,
         "num_layers": 128, "pipeline_model_parallel_size": 16, "global_batch_size": 768},
        "tp-overlap-recipe", nodes=32, gpu="gb200", gpus=4,
    ),
    "experts over more ranks than there are": Set(
        {**MOE, "expert_model_parallel_size": 64, "global_batch_size": 128}, "expert-grid", nodes=4
    ),
}  # fmt: skip

HYBRID = {
    **BF16, "num_layers": 8, "hidden_size": 512, "num_attention_heads": 8, "num_query_groups": 4,
    "ffn_hidden_size": 1024, "hybrid_layer_pattern": "M*M-M*M-",
}  # fmt: skip
SCRIPT = {"launch": {"script": "/shared/pretrain_hybrid.py"}}
DIVIDED = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "pipeline_model_parallel_size": 2}
# What issue 14 found by trying it: accepted by Megatron's validators, and then the run dies.
TRIED: dict[str, Set] = {
    "seed 0": Set({"seed": 0}, "value-range"),
    "groups with too few experts": Set(
        {**MOE, "moe_router_num_groups": 64, "moe_router_group_topk": 2}, "moe-group-top-k"
    ),
    "PP before DP, and experts of another data parallel size": Set(
        {**MOE, **DIVIDED, "num_layers": 48, "use_tp_pp_dp_mapping": True, "expert_model_parallel_size": 4,
         "expert_tensor_parallel_size": 1},
        "expert-data-parallel",
    ),
    "PP before DP with context parallelism": Set(
        {"pipeline_model_parallel_size": 2, "context_parallel_size": 2, "use_tp_pp_dp_mapping": True},
        "expert-data-parallel",
    ),
    "a negative width": Set({**BF16, "hidden_size": -4096, "kv_channels": 128}, "model-size"),
    "odd heads with rotary embeddings": Set({**BF16, "kv_channels": 127}, "rotary-odd-width"),
    "Mamba heads over TP": Set({**HYBRID, **TP2, "mamba_num_heads": 3}, "mamba-heads", more=SCRIPT),
    "Mamba groups over TP": Set({**HYBRID, **TP2, "mamba_num_groups": 1}, "mamba-heads", more=SCRIPT),
    "Mamba heads over groups": Set({**HYBRID, "mamba_num_heads": 12}, "mamba-heads", more=SCRIPT),
    "Mamba width": Set({**HYBRID, "mamba_head_dim": 60}, "mamba-heads", more=SCRIPT),
    "Mamba in FP8": Set(
        {**HYBRID, "fp8_format": "hybrid", "fp8_recipe": "tensorwise", "mamba_num_heads": 8}, "mamba-fp8-width",
        more=SCRIPT,
    ),
}  # fmt: skip

BAD: dict[str, Set] = {
    **TRIED,
    **PARSE,
    **ARGUMENTS,
    **CONFIGS,
    **BUILDING,
    **RUNNING,
    **{name: Set(**{**vars(case), "severity": "warning"}) for name, case in MISLEADING.items()},
    **LARGE,
}
