"""For each advisory that can be reported, a run that has the bug, and the change that takes it away."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from sets import BF16, FSDP, MLA, MOE, MXFP8, TP2, Set

from fp8launch.check.resolved_run import ResolvedRun
from fp8launch.check.rule import all_rules
from fp8launch.diagnostics import Problem

SAVED = {"save": "/ckpt", "load": "/ckpt", "save_interval": 100}
UNSPLIT = {"tensor_model_parallel_size": 1, "sequence_parallel": None}
PER_TOKEN = {"calculate_per_token_loss": True, "ddp_average_in_collective": None}
GLOBAL_LOSS = {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.001}
SINKS = {"softmax_type": "learnable", "attention_backend": None}
MXFP8_EXPERTS = {**MOE, **MXFP8}


@dataclass(frozen=True)
class Case:
    """`change` gives the base run the bug; with `without` on top the run is not affected, in the same release."""

    change: Mapping[str, Any]
    without: Mapping[str, Any]
    megatron: str = "0.19.2"
    engine: str = "2.20.2"
    gpu: str = "h100"
    gpus: int = 8
    more: Mapping[str, Any] = field(default_factory=dict)

    def run(self, megatron: str | None = None, engine: str | None = None, fixed: bool = False) -> Set:
        software = {"megatron": megatron or self.megatron, "transformer_engine": engine or self.engine}
        change = {**self.change, **self.without} if fixed else self.change
        return Set(change, gpu=self.gpu, gpus=self.gpus, software=software, more=self.more)


CASES: dict[str, Case] = {
    "mla-kpos-grad": Case({**BF16, **MLA, "tensor_model_parallel_size": 2}, {"sequence_parallel": True}),
    "etp-ne-tp-ep1": Case(
        {**MOE, **TP2, "expert_tensor_parallel_size": 1, "expert_model_parallel_size": 1},
        {"expert_tensor_parallel_size": 2},
        megatron="0.18.2",
    ),
    "router-aux-pertoken-tp": Case(
        {**MOE, **TP2, **PER_TOKEN, "moe_aux_loss_coeff": 0.01, "expert_model_parallel_size": 4},
        {"moe_aux_loss_coeff": None},
        megatron="0.17.1",
    ),
    "seq-aux-mbs": Case(
        {
            **MOE,
            **PER_TOKEN,
            "moe_router_load_balancing_type": "seq_aux_loss",
            "moe_aux_loss_coeff": 0.01,
            "micro_batch_size": 2,
        },
        {"micro_batch_size": 1},
        megatron="0.17.0",
    ),
    "global-aux-dp": Case({**MOE, **GLOBAL_LOSS}, {"moe_aux_loss_coeff": None}),
    "reset-attn-mask-pp": Case({"reset_attention_mask": True}, {"reset_attention_mask": None}),
    "gdn-outnorm-tp": Case(
        {
            "experimental_attention_variant": "gated_delta_net",
            "linear_attention_freq": 4,
            "tensor_model_parallel_size": 2,
        },
        {"sequence_parallel": True},
    ),
    "dsa-indexer-microbatches": Case(
        {**MLA, "experimental_attention_variant": "dsa", "dsa_indexer_loss_coeff": 0.01},
        {"dsa_indexer_loss_coeff": None},
        megatron="0.18.0",
    ),
    "gtp-expert-scale": Case(
        {**MOE, "tensor_parallel_num_weight_shards": 2}, {"expert_tensor_parallel_num_weight_shards": 2}
    ),
    "dp-instances-pp": Case(
        {"pipeline_model_parallel_size": 2, "num_distributed_optimizer_instances": 2}, {"no_align_grad_reduce": True}
    ),
    "pp-isend-dealloc": Case(
        {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2},
        {"no_overlap_p2p_communication": True},
        megatron="0.17.0",
    ),
    "mfsdp-zero1-fusion": Case(
        {**FSDP, "data_parallel_sharding_strategy": "optim", "no_gradient_accumulation_fusion": None},
        {"no_gradient_accumulation_fusion": True},
    ),
    "mfsdp-2n": Case({**FSDP, **MOE, "expert_model_parallel_size": 8}, {"expert_model_parallel_size": 4}),
    "mfsdp-instances-overlap": Case(
        {**FSDP, "num_distributed_optimizer_instances": 2, "overlap_grad_reduce": None, "overlap_param_gather": None},
        {"overlap_grad_reduce": True},
    ),
    "mfsdp-outer-sharding": Case(
        {**FSDP, "num_distributed_optimizer_instances": 2, "outer_dp_sharding_strategy": "optim"},
        {"outer_dp_sharding_strategy": None},
    ),
    "mfsdp-pertoken-norms": Case(
        {**FSDP, **TP2, **PER_TOKEN}, {"megatron_fsdp_main_grads_dtype": "fp32"},
    ),
    "opfuser-fc2-bias": Case(
        {**MOE, "use_transformer_engine_op_fuser": True, "disable_bias_linear": None, "no_bias_dropout_fusion": True},
        {"disable_bias_linear": True},
        megatron="0.18.0",
    ),
    "cuda-graph-buffers": Case({"cuda_graph_impl": "local"}, {"cuda_graph_impl": "none"}, megatron="0.18.2"),
    "sinks-a2a-grad": Case(
        {**SINKS, "context_parallel_size": 2, "cp_comm_type": ["a2a"]}, {"softmax_type": "off-by-one"}
    ),
    "moe-tp-ep-norm": Case(
        {**MOE, **TP2, "expert_model_parallel_size": 4, "expert_tensor_parallel_size": 1},
        UNSPLIT,
        megatron="0.18.0",
    ),
    "muon-expert-bias-norm": Case(
        {
            **MOE,
            **TP2,
            "optimizer": "dist_muon",
            "expert_model_parallel_size": 4,
            "expert_tensor_parallel_size": 1,
            "disable_bias_linear": None,
        },
        {"disable_bias_linear": True},
    ),
    "sink-norm": Case({**SINKS, **TP2}, UNSPLIT),
    "cp-local-mean": Case({"context_parallel_size": 2, "eod_mask_loss": True}, PER_TOKEN),
    "mtp-cp-norm": Case(
        {"context_parallel_size": 2, "eod_mask_loss": True, "mtp_num_layers": 1}, {"eod_mask_loss": None}
    ),
    "mtp-pertoken-local": Case({**PER_TOKEN, "eod_mask_loss": True, "mtp_num_layers": 1}, {"eod_mask_loss": None}),
    "decoupled-lr-resume": Case({**SAVED, "decoupled_lr": 1e-3}, {"decoupled_lr": None}, megatron="0.17.1"),
    "override-sched-ignored": Case(
        {"override_opt_param_scheduler": True, "load": "/elsewhere"}, {"finetune": True}, megatron="0.18.2"
    ),
    "rampup-ignored": Case({"rampup_batch_size": [8, 8, 1000]}, {"rampup_batch_size": None}, megatron="0.18.0"),
    "expert-rng-resume": Case(
        {**MOE, **SAVED, "moe_router_force_load_balancing": True}, {"moe_router_force_load_balancing": None}
    ),
    "delayed-param-tp-resume": Case(
        {**SAVED, **TP2, "fp8_recipe": "delayed", "fp8_param_gather": True}, {"fp8_recipe": "tensorwise"}
    ),
    "mtp-embedding-tag": Case(
        {"mtp_num_layers": 1, "pipeline_model_parallel_size": 2, "decoupled_lr": 1e-3},
        {"decoupled_lr": None},
        megatron="0.17.0",
    ),
    "hdo-stale-step": Case(
        {**SAVED, "optimizer_cpu_offload": True, "use_precision_aware_optimizer": True},
        {"dist_ckpt_optim_fully_reshardable": True},
    ),
    "cyclic-tail-ranks": Case({"dataloader_type": "cyclic", "no_data_sharding": True}, {"no_data_sharding": None}),
    "fully-reshardable-buckets": Case(
        {**SAVED, "dist_ckpt_optim_fully_reshardable": True, "global_batch_size": 60}, {"overlap_grad_reduce": None,
                                                                                       "overlap_param_gather": None},
        gpus=6,
    ),
    "mxfp8-paramgather-nooverlap": Case(
        {**MXFP8_EXPERTS, "overlap_param_gather": None}, {"overlap_param_gather": True}, megatron="0.17.0", gpu="b200"
    ),
    "mxfp8-paramgather-forced": Case(MXFP8, {"overlap_param_gather": None}, megatron="0.18.2", gpu="b200"),
    "fp8-single-grouped-weight": Case(
        {**MXFP8_EXPERTS, "moe_single_grouped_weight": True},
        {"fp8_param_gather": None, "reuse_grad_buf_for_mxfp8_param_ag": None},
        megatron="0.18.2",
        gpu="b200",
    ),
    "te-hybrid-grouped-mlp": Case(
        {
            **MXFP8_EXPERTS,
            "fp8_format": "hybrid",
            "use_transformer_engine_op_fuser": True,
            "moe_mlp_glu_interleave_size": 32,
        },
        {"fp8_format": "e4m3"},
        engine="2.16.1",
        gpu="b200",
    ),
    "te-tp-overlap-wgrad": Case({**TP2, "tp_comm_overlap": True}, {"tp_comm_overlap": None}, engine="2.1.0"),
}  # fmt: skip


def problems(run: ResolvedRun) -> Iterator[Problem]:
    """The known bugs of a run."""
    for rule in all_rules().values():
        if rule.known_bug:
            yield from rule.problems(run)
