"""Runs for which the check must report neither errors nor warnings."""

from __future__ import annotations

from bad_sets import LOCAL, OPEN, SEGMENTS
from sets import (
    BF16,
    BLOCKWISE,
    DELAYED,
    FP16,
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

DENSE_70B = {
    **LLAMA_70B,
    "tensor_model_parallel_size": 4,
    "sequence_parallel": True,
    "pipeline_model_parallel_size": 4,
    "num_virtual_stages_per_pipeline_rank": 5,
    "global_batch_size": 256,
    "tp_comm_overlap": True,
}
GOOD: dict[str, Set] = {
    "8B tensorwise": Set(),
    "8B that saves only weights": Set({"no_save_optim": True}, more={"checkpoint": {"dir": "ck", "interval": 100}}),
    "8B on H200": Set(gpu="h200", gpus=4),
    "8B that is profiled": Set(more={"launch": {"profile": {"start": 10, "end": 12, "ranks": [0, 7]}}}),
    "8B in NeMo's image under nsys": Set(
        software={"megatron": "0.18", "transformer_engine": "2.16", "cuda": "13.2.1"},
        more={"launch": {"profile": {"start": 10, "tool": "nsys"}}, "container": {"image": "nemo-26.06"}},
    ),
    "8B bf16": Set(BF16),
    "8B bf16 on Ampere": Set(BF16, gpu="a100"),
    "8B fp16": Set(FP16),
    "8B fp16 with its own loss scale": Set({**FP16, "loss_scale": 4096.0}),
    "8B delayed": Set(DELAYED),
    "8B delayed, bf16 weight gradients, odd tokens": Set({**DELAYED, "no_fp8_wgrad": True, "seq_length": 8184}),
    "8B blockwise": Set(BLOCKWISE),
    "8B blockwise, hybrid as Megatron-Bridge trains it": Set({**BLOCKWISE, "fp8_format": "hybrid"}),
    "8B bf16 layers": Set(
        {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 2, "num_layers_at_end_in_bf16": 2}
    ),
    "8B mxfp8 on B200": Set(MXFP8, gpu="b200"),
    "8B mxfp8 on GB300": Set(MXFP8, gpu="gb300", gpus=4),
    "8B nvfp4 on B200": Set({**NVFP4, "fp4_param_gather": True}, gpu="b200"),
    "8B tensorwise on B200, odd tokens": Set({"seq_length": 8184}, gpu="b200"),
    "8B with odd widths in bf16": Set({**BF16, "ffn_hidden_size": 14340}),
    "8B tp 2 on Hopper": Set(TP2),
    "8B tp 2 on Blackwell without the variable": Set(TP2, gpu="b200", env={}),
    "8B cp 2": Set({"context_parallel_size": 2}),
    "8B cp 2 by all-to-all": Set({"context_parallel_size": 2, "cp_comm_type": ["a2a"]}),
    "8B FSDP": Set(FSDP, env=OPEN),
    "8B FSDP, mxfp8": Set({**FSDP, **MXFP8, "reuse_grad_buf_for_mxfp8_param_ag": None}, gpu="b200", env=OPEN),
    "8B FSDP, transposes kept": Set({**FSDP, "keep_fp8_transpose_cache": True}, env=OPEN),
    "8B low-precision states": Set(
        {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
    ),
    "8B recompute": Set({"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 5}),
    "8B selective recompute": Set({"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}),
    # The worker brings what local layers fuse weight gradients with, to its own entry and to scripts.
    "8B local layers": Set({**BF16, **LOCAL}),
    "8B local layers of a script": Set({**BF16, **LOCAL}, more={"launch": {"script": "pretrain_gpt.py"}}),
    "8B saves": Set(
        {"save": "checkpoints", "save_interval": 100, "rerun_mode": None, "no_check_for_nan_in_loss_and_grad": None}
    ),
    "8B full-iteration graph": Set({"cuda_graph_impl": "full_iteration", "te_rng_tracker": True}, gpu="b200"),
    "8B graphs with segments": Set(
        {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["attn"], "te_rng_tracker": True},
        env={**SEGMENTS, "NCCL_GRAPH_REGISTER": 0},
    ),
    "8B fused attention by argument and variable": Set(
        {"attention_backend": "fused"}, env={"NVTE_FLASH_ATTN": 0, "NVTE_FUSED_ATTN": 1}
    ),
    "8B by samples": Set(
        {"train_iters": None, "lr_decay_iters": None, "lr_warmup_iters": None, "train_samples": 6400,
         "lr_warmup_samples": 640}
    ),
    "8B without evaluation": Set({"eval_interval": None}),
    "8B never evaluates": Set(
        {"eval_interval": None, "full_validation": True}, more={"launch": {"script": "pretrain_gpt.py"}}
    ),
    "8B pipeline": Set({"pipeline_model_parallel_size": 2}),
    "8B of 0.17": Set(software={"megatron": "0.17"}),
    # Before 0.19, overlapped parameter gather has a known bug in MXFP8.
    "8B of 0.18, mxfp8 output layer": Set(
        {**MXFP8, "fp8_output_proj": True, "overlap_param_gather": None}, gpu="b200", software={"megatron": "0.18"}
    ),
    "8B of 0.18.0, TE's cross entropy": Set({"cross_entropy_fusion_impl": "te"}, software={"megatron": "0.18.0"}),
    "8B rampup in samples of 0.17": Set(
        {"rampup_batch_size": [8, 8, 1000], "train_iters": None, "lr_decay_iters": None, "lr_warmup_iters": None,
         "train_samples": 6400},
        software={"megatron": "0.17"},
    ),
    "70B": Set(DENSE_70B, nodes=8),
    "70B by layout": Set(
        {**DENSE_70B, "num_virtual_stages_per_pipeline_rank": None, "pipeline_model_parallel_size": 8,
         "pipeline_model_parallel_layout": "Et*2|(t*2|)*34,t*3|(t*2|)*3,tL"},
        nodes=8,
    ),
    "70B mxfp8 on GB200": Set({**DENSE_70B, **MXFP8}, gpu="gb200", gpus=4, nodes=16),
    "405B": Set(
        {**LLAMA_405B, "tensor_model_parallel_size": 8, "sequence_parallel": True, "pipeline_model_parallel_size": 8,
         "num_virtual_stages_per_pipeline_rank": 8, "context_parallel_size": 2, "global_batch_size": 768,
         "account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True},
        nodes=64,
    ),
    "experts": Set(MOE),
    "experts with router padding": Set({**MOE, "moe_router_padding_for_quantization": True}),
    "experts, mxfp8": Set({**MOE, **MXFP8}, gpu="b200"),
    "experts, blockwise": Set({**MOE, **BLOCKWISE}),
    "experts with tp and etp 1": Set({**MOE, **TP2, "expert_tensor_parallel_size": 1}),
    "experts with overlap": Set({**MOE, "overlap_moe_expert_parallel_comm": True}, env=OPEN),
    "some layers with experts": Set({**MOE, "moe_layer_freq": "[0]*3+[1]*45"}),
    "fused experts with their variable": Set(
        {**MOE, "use_transformer_engine_op_fuser": True},
        software={"megatron": "0.19"},
        env={"NVTE_CUTEDSL_FUSED_GROUPED_MLP": "1"},
    ),
    "fused experts before Megatron 0.19": Set(
        {**MOE, "use_transformer_engine_op_fuser": True}, software={"megatron": "0.18"}
    ),
    "weights from the host through the distributed optimizer": Set(
        {"use_cpu_initialization": True, "fp8_param_gather": None}
    ),
    "weights from the host, before Megatron 0.19": Set({"use_cpu_initialization": True}, software={"megatron": "0.18"}),
    "fused rope of plain queries": Set({}, more={"launch": {"config": {"fused_single_qkv_rope": True}}}),
    "full graph of an interleaved pipeline": Set(
        {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2,
         "cuda_graph_impl": "full_iteration", "te_rng_tracker": True, "no_check_for_nan_in_loss_and_grad": True},
    ),
    "clipped logits": Set({"qk_clip": True}, software={"cuda": "13.1"}),
    "router in double precision": Set({**MOE, **BF16, "moe_router_dtype": "fp64"}),
    "scaled inputs of one expert": Set(
        {**MOE, "moe_router_topk": 1, "moe_router_pre_softmax": True, "moe_apply_probs_on_input": True}
    ),
    "shared experts": Set({**MOE, "moe_shared_expert_intermediate_size": 768}),
    "several instances": Set({"num_distributed_optimizer_instances": 2}),
    "latent attention": Set(MLA),
    "latent attention, blockwise": Set({**MLA, **BLOCKWISE}),
    "latent attention, mxfp8": Set({**MLA, **MXFP8}, gpu="b200"),
}  # fmt: skip
