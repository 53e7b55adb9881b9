"""The table of known bugs that neither crash nor warn. `docs/advisories.md` is generated from it.

To add a row: decide the releases by looking for the faulty line in each published wheel, add its id to `plugin.py`, and
add a run that has the bug to `tests/plugins/advisories/advisory_sets.py`. A bug whose releases nobody has decided has
`affected={}` and is never reported.
"""

from __future__ import annotations

from collections.abc import Mapping

from fp8launch.check.phases import fully_reshardable_shifts
from fp8launch.megatron.model_arithmetic import parse_layout
from fp8launch.megatron.versions import release
from fp8launch.plugins.advisories.advisory import PACKAGES, PUBLISHED, Advisory, Package, Setup

ML = "https://github.com/NVIDIA/Megatron-LM"
TE = "https://github.com/NVIDIA/TransformerEngine"
MB = "https://github.com/NVIDIA-NeMo/Megatron-Bridge"


def _published(package: Package, first: str, last: str) -> tuple[str, ...]:
    """Return the published releases from `first` to `last`."""
    return tuple(text for text in PUBLISHED[package] if release(first) <= release(text) <= release(last))


# All releases of a minor version have the same faulty lines: 0.17.0 and 0.17.1 differ in NVFP4 parameter gather, 0.18.0
# and 0.18.2 in a check of cross entropy, 0.19.0 and 0.19.2 in MTP's quantization context.
ONLY_0_17: Mapping[Package, tuple[str, ...]] = {"megatron_core": _published("megatron_core", "0.17.0", "0.17.1")}
ONLY_0_18: Mapping[Package, tuple[str, ...]] = {"megatron_core": _published("megatron_core", "0.18.0", "0.18.2")}
ONLY_0_19: Mapping[Package, tuple[str, ...]] = {"megatron_core": _published("megatron_core", "0.19.0", "0.19.2")}
TO_0_18: Mapping[Package, tuple[str, ...]] = {"megatron_core": _published("megatron_core", "0.17.0", "0.18.2")}
FROM_0_18: Mapping[Package, tuple[str, ...]] = {"megatron_core": _published("megatron_core", "0.18.0", "0.19.2")}
TO_0_19: Mapping[Package, tuple[str, ...]] = {"megatron_core": _published("megatron_core", "0.17.0", "0.19.2")}
UNDECIDED: Mapping[Package, tuple[str, ...]] = {}


def _middle_stages(run: Setup) -> bool:
    """Return whether a model chunk is neither the first nor the last."""
    return run.pp > 2 or (run.pp == 2 and run.layout.vp > 1)


def _mtp_alone(run: Setup) -> bool:
    """Return whether the layer of multi-token prediction and the loss are on different pipeline stages."""
    layout = run.value("pipeline_model_parallel_layout")
    stages = parse_layout(layout) if isinstance(layout, str) else None
    return run.pp > 1 and bool(stages) and "m" in "".join(stages or ()) and "m" not in (stages or ("",))[-1]


def _gathers_in_gradient_buffer(run: Setup) -> bool:
    return run.fp8("mxfp8") and run.on("fp8_param_gather") and run.on("reuse_grad_buf_for_mxfp8_param_ag")


def _undivided_gradients(run: Setup) -> bool:
    """Return whether Megatron-FSDP has a group of one rank, which keeps whole gradients."""
    ranks = run.dp * run.cp
    return ranks == 1 or (run.experts and ranks * run.tp == run.ep * run.etp)


def _fsdp_accumulates_in_bf16(run: Setup) -> bool:
    """Return whether Megatron-FSDP accumulates gradients in bf16 and converts them for the optimizer.

    The precision-aware optimizer reads them as they are. Until 0.18, FSDP follows the usual setting for gradients.
    """
    if run.on("use_precision_aware_optimizer") or run.value("megatron_fsdp_main_grads_dtype") not in (
        None,
        "auto",
        "bf16",
    ):
        return False
    return run.on("grad_reduce_in_bf16") or run.versions.get("megatron_core", (0,)) >= (0, 19)


def _other_rates(before: Setup, run: Setup) -> bool:
    return any(before.value(name) != run.value(name) for name in ("lr", "min_lr"))


ADVISORIES: tuple[Advisory, ...] = (
    # --- gradients ---------------------------------------------------------------------------------------------------
    Advisory(
        id="mla-kpos-grad",
        when="multi-latent attention with TP above 1, without sequence parallelism or with local layers",
        applies=lambda run: (
            run.on("multi_latent_attention") and run.tp > 1 and not (run.uses_te and run.sequence_parallel)
        ),
        affected=TO_0_19,
        effect="the gradient of the shared rotary key covers only the local heads, and its copies drift apart",
        fix="turn sequence parallelism on (parallel.sequence: true) with Transformer Engine's layers, or set TP to 1",
        source=f"{ML}/issues/1699",
        settings=("multi_latent_attention", "tensor_model_parallel_size"),
    ),
    Advisory(
        id="etp-ne-tp-ep1",
        when="experts with EP 1 and an expert TP that differs from TP",
        applies=lambda run: run.experts and run.ep == 1 and run.etp != run.tp,
        affected=TO_0_18,
        effect="expert gradients are reduced over the wrong ranks, so the experts' copies diverge",
        fix="set parallel.etp to the value of parallel.tp, or use Megatron-Core 0.19",
        source=f"{ML}/pull/5916",
        settings=("expert_tensor_parallel_size", "tensor_model_parallel_size", "expert_model_parallel_size"),
    ),
    Advisory(
        id="router-aux-pertoken-tp",
        when="an auxiliary or z-loss of the router with per-token loss, and TP or CP above 1",
        applies=lambda run: (
            run.experts
            and run.on("calculate_per_token_loss")
            and run.tp * run.cp > 1
            and (
                run.number("moe_z_loss_coeff") > 0
                or any(map(run.balances_by, ("aux_loss", "seq_aux_loss", "global_aux_loss")))
            )
        ),
        affected=TO_0_18,
        effect="the gradients of the router's auxiliary and z-loss are divided by TP x CP one time too many",
        fix="remove calculate_per_token_loss, or use Megatron-Core 0.19",
        source=f"{ML}/pull/5047",
        settings=("calculate_per_token_loss", "tensor_model_parallel_size", "context_parallel_size"),
    ),
    Advisory(
        id="seq-aux-mbs",
        when="seq_aux_loss with per-token loss and a micro batch above 1",
        applies=lambda run: (
            run.balances_by("seq_aux_loss") and run.on("calculate_per_token_loss") and run.layout.micro_batch > 1
        ),
        affected=TO_0_18,
        effect="the gradient of seq_aux_loss is divided by the micro batch size",
        fix="set batch.micro to 1, remove calculate_per_token_loss, or use Megatron-Core 0.19",
        source=f"{ML}/pull/5798",
        settings=("moe_router_load_balancing_type", "calculate_per_token_loss", "micro_batch_size"),
    ),
    Advisory(
        id="global-aux-dp",
        when="global_aux_loss with DP above 1",
        applies=lambda run: run.balances_by("global_aux_loss") and run.dp > 1,
        affected=TO_0_19,
        effect="the gradient of global_aux_loss is divided by DP: it depends on the number of GPUs",
        fix="use aux_loss or seq_aux_loss, or multiply moe_aux_loss_coeff by DP",
        source=f"{ML}/issues/3672",
        settings=("moe_router_load_balancing_type", "moe_aux_loss_coeff", "DP"),
    ),
    Advisory(
        id="reset-attn-mask-pp",
        when="reset_attention_mask with Transformer Engine's attention, or with model chunks between first and last",
        applies=lambda run: run.on("reset_attention_mask") and (run.uses_te or _middle_stages(run)),
        affected=TO_0_19,
        effect="the mask is ignored (middle pipeline stages, Transformer Engine), so documents attend to each other",
        fix="remove reset_attention_mask, or use PP 1 with local layers; 0.19 has dataloader_inter_document_masking",
        source=f"{ML}/issues/752",
        settings=("reset_attention_mask", "pipeline_model_parallel_size", "transformer_impl"),
        scope="megatron_lm",
    ),
    Advisory(
        id="gdn-outnorm-tp",
        when="GatedDeltaNet with TP above 1 and without sequence parallelism",
        applies=lambda run: (
            run.value("experimental_attention_variant") == "gated_delta_net"
            and run.tp > 1
            and not run.sequence_parallel
        ),
        affected=TO_0_19,
        effect="the gradient of out_norm is not summed over TP, so its copies drift apart",
        fix="turn sequence parallelism on (parallel.sequence: true)",
        source=f"{ML}/issues/7452",
        settings=("experimental_attention_variant", "tensor_model_parallel_size"),
    ),
    Advisory(
        id="dsa-indexer-microbatches",
        when="DSA with an indexer loss and more than one micro batch per step",
        applies=lambda run: (
            run.value("experimental_attention_variant") == "dsa"
            and run.number("dsa_indexer_loss_coeff") > 0
            and run.layout.microbatches > 1
        ),
        affected=TO_0_18,
        effect="the indexer loss is not divided by the number of micro batches, so it is too strong by that factor",
        fix="divide dsa_indexer_loss_coeff by the number of micro batches, or use Megatron-Core 0.19",
        source=f"{ML}/pull/4070",
        settings=("dsa_indexer_loss_coeff", "microbatches"),
    ),
    Advisory(
        id="gtp-expert-scale",
        when="experts whose weight shards (expert_tensor_parallel_num_weight_shards) differ from the model's",
        applies=lambda run: (
            run.experts
            and max(run.number("tensor_parallel_num_weight_shards"), 1)
            != max(run.number("expert_tensor_parallel_num_weight_shards"), 1)
            and not run.on("calculate_per_token_loss")
        ),
        affected=ONLY_0_19,
        effect="expert gradients are multiplied by the ratio of the two numbers of weight shards",
        fix="set both numbers of weight shards to the same value, or add calculate_per_token_loss",
        source=f"{ML}/pull/7165",
        settings=("tensor_parallel_num_weight_shards", "expert_tensor_parallel_num_weight_shards"),
    ),
    Advisory(
        id="dp-instances-pp",
        when="several optimizer instances with overlapped gradient reduction and PP above 1",
        applies=lambda run: (
            run.number("num_distributed_optimizer_instances") > 1
            and run.pp > 1
            and run.on("overlap_grad_reduce")
            and run.on("align_grad_reduce")
            and (
                run.dp * run.cp > run.number("num_distributed_optimizer_instances")
                or run.on("calculate_per_token_loss")
            )
        ),
        affected=TO_0_19,
        effect="pipeline stages reduce their gradients twice, which leaves a mixture of ranks' gradients (measured on "
        "a CPU, in the first step: off by up to 39 %)",
        fix="add no_align_grad_reduce, or set num_distributed_optimizer_instances to 1",
        source=f"{ML}/blob/core_v0.19.2/megatron/core/distributed/param_and_grad_buffer.py",
        settings=("num_distributed_optimizer_instances", "pipeline_model_parallel_size", "overlap_grad_reduce"),
    ),
    Advisory(
        id="pp-isend-dealloc",
        when="virtual pipeline stages with overlapped point-to-point communication, which is the default",
        applies=lambda run: run.pp > 1 and run.layout.vp > 1 and run.on("overlap_p2p_comm"),
        affected=ONLY_0_17,
        effect="an activation may be freed before it is sent: the next pipeline stage may read garbage (a race)",
        # Megatron interleaves two stages only with that overlap.
        fix="add no_overlap_p2p_communication (with PP above 2), set parallel.vp to 1, or use Megatron-Core 0.18 or "
        "newer",
        source=f"{ML}/pull/4047",
        settings=("pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank"),
    ),
    Advisory(
        id="mfsdp-zero1-fusion",
        when="Megatron-FSDP with fused gradient accumulation and several micro batches, if its strategy is no_shard or "
        "optim, DP is 1, or EP equals DP",
        applies=lambda run: (
            run.on("use_megatron_fsdp")
            and run.on("gradient_accumulation_fusion")
            and run.layout.microbatches > 1
            and (run.value("data_parallel_sharding_strategy") in ("no_shard", "optim") or _undivided_gradients(run))
        ),
        affected=TO_0_19,
        effect="the fused weight gradients of earlier micro batches are overwritten instead of accumulated (measured "
        "on two H200 with EP 2 and two micro batches: gradients of experts are off by 65 %)",
        fix="add no_gradient_accumulation_fusion with strategy no_shard or optim, or choose DP and EP so that no group "
        "has one rank",
        source=f"{ML}/pull/6357",
        settings=("use_megatron_fsdp", "data_parallel_sharding_strategy", "expert_model_parallel_size", "microbatches"),
    ),
    Advisory(
        id="mfsdp-2n",
        when="Megatron-FSDP that shards gradients, with several micro batches, unfused gradient accumulation, no "
        "ddp_average_in_collective, and DP 1 or EP equal to DP",
        applies=lambda run: (
            run.on("use_megatron_fsdp")
            and run.value("data_parallel_sharding_strategy") in ("optim_grads", "optim_grads_params")
            and not run.on("gradient_accumulation_fusion")
            and not run.on("ddp_average_in_collective")
            and not run.on("calculate_per_token_loss")
            and run.layout.microbatches > 1
            and _undivided_gradients(run)
        ),
        affected=TO_0_19,
        effect="gradients that are not divided among ranks are rescaled with every micro batch (measured with two "
        "micro batches: gradients of experts are off by 31 % on a CPU and by 33 % on two H200)",
        fix="add ddp_average_in_collective without experts, or choose DP and EP so that no group has one rank",
        source=f"{ML}/issues/6660",
        settings=("use_megatron_fsdp", "data_parallel_sharding_strategy", "expert_model_parallel_size"),
    ),
    Advisory(
        id="mfsdp-instances-overlap",
        when="Megatron-FSDP with several optimizer instances and without overlap_grad_reduce",
        applies=lambda run: (
            run.on("use_megatron_fsdp")
            and run.number("num_distributed_optimizer_instances") > 1
            and not run.on("overlap_grad_reduce")
        ),
        affected=TO_0_19,
        effect="instances do not exchange gradients, so each trains a different model, and a checkpoint saves only one "
        "(measured on a CPU)",
        fix="add overlap_grad_reduce, or set num_distributed_optimizer_instances to 1",
        source=f"{ML}/pull/4891",
        settings=("use_megatron_fsdp", "num_distributed_optimizer_instances", "overlap_grad_reduce"),
    ),
    Advisory(
        id="mfsdp-outer-sharding",
        when="Megatron-FSDP with several optimizer instances and outer_dp_sharding_strategy optim",
        applies=lambda run: (
            run.on("use_megatron_fsdp")
            and run.number("num_distributed_optimizer_instances") > 1
            and run.value("outer_dp_sharding_strategy") == "optim"
        ),
        affected=TO_0_19,
        effect="the gradient norm, with which gradients are clipped, leaves out the shards of other instances, and "
        "gradients are summed instead of averaged (measured on a CPU, with DP 4 in two instances: 4 times too large, "
        "2 times with ddp_average_in_collective)",
        fix="remove outer_dp_sharding_strategy",
        source=f"{ML}/pull/4891",
        settings=("use_megatron_fsdp", "num_distributed_optimizer_instances", "outer_dp_sharding_strategy"),
    ),
    Advisory(
        id="mfsdp-pertoken-norms",
        when="Megatron-FSDP with calculate_per_token_loss, sequence parallelism, and gradients that are accumulated in "
        "bf16, which is the default of 0.19 (not with the precision-aware optimizer)",
        applies=lambda run: (
            run.on("use_megatron_fsdp")
            and run.on("calculate_per_token_loss")
            and run.sequence_parallel
            and run.on("bf16")
            and _fsdp_accumulates_in_bf16(run)
        ),
        affected=TO_0_19,
        effect="gradients of norms and routers are not summed over tensor parallel ranks, so the copies of these "
        "weights drift apart: dividing by the number of tokens restores the gradients from before the sum",
        fix="set megatron.megatron_fsdp_main_grads_dtype: fp32",
        source=f"{ML}/tree/main/megatron/core/distributed/fsdp/src/megatron_fsdp",
        settings=("use_megatron_fsdp", "calculate_per_token_loss", "tensor_model_parallel_size"),
    ),
    Advisory(
        id="opfuser-fc2-bias",
        when="grouped experts with biases and use_transformer_engine_op_fuser",
        applies=lambda run: (
            run.on("use_transformer_engine_op_fuser") and run.grouped_experts and run.on("add_bias_linear")
        ),
        affected=ONLY_0_18,
        effect="the bias of the experts' second layer is not multiplied by the router's probability",
        fix="remove use_transformer_engine_op_fuser, add disable_bias_linear, or use Megatron-Core 0.19",
        source=f"{ML}/pull/5850",
        settings=("use_transformer_engine_op_fuser", "moe_grouped_gemm"),
    ),
    Advisory(
        id="cuda-graph-buffers",
        when="local CUDA graphs (cuda_graph_impl local) of single layers",
        applies=lambda run: (
            (run.value("cuda_graph_impl") == "local" or run.on("enable_cuda_graph"))
            and "full_iteration" not in str([run.value(f"cuda_graph_{name}") for name in ("scope", "scope_deprecated")])
        ),
        affected=TO_0_18,
        effect="buffers of the graphs are reused too early or aliased: activations and gradients may be wrong",
        fix="set cuda_graph_impl to transformer_engine, or use Megatron-Core 0.19",
        source=f"{ML}/pull/5975",
        settings=("cuda_graph_impl", "enable_cuda_graph"),
    ),
    Advisory(
        id="sinks-a2a-grad",
        when="learnable attention sinks (softmax_type learnable) with CP above 1 and cp_comm_type a2a",
        applies=lambda run: (
            run.uses_te
            and run.value("softmax_type") == "learnable"
            and run.cp > 1
            and "a2a" in str(run.value("cp_comm_type"))
        ),
        affected={"transformer_engine": _published("transformer_engine", "2.8.0", "2.20.2")},
        effect="the gradient of softmax_offset is CP times too large (measured with CP 2: exactly twice)",
        fix="set parallel.cp to 1",
        # d_softmax_offset is gathered from all CP ranks, although the data parallel reduction averages over CP as well.
        source=f"{TE}/blob/v2.18/transformer_engine/pytorch/attention/dot_product_attention/context_parallel.py",
        settings=("softmax_type", "context_parallel_size", "cp_comm_type"),
    ),
    # --- gradient norm -----------------------------------------------------------------------------------------------
    Advisory(
        id="moe-tp-ep-norm",
        when="TP and EP above 1: grouped experts, or experts with biases and an expert TP below TP",
        # Up to 2.12, and for a single grouped weight, Transformer Engine marks grouped weights as tensor parallel, so
        # the norm includes the shards of all TP ranks. Without the mark it includes only the shards of TP rank 0.
        applies=lambda run: (
            run.experts
            and run.tp > 1
            and run.ep > 1
            and (
                (run.on("add_bias_linear") and run.etp < run.tp)
                or (
                    run.grouped_experts
                    and run.at_least("transformer_engine", (2, 13))
                    and not run.on("moe_single_grouped_weight")
                )
            )
        ),
        affected=TO_0_18,
        effect="the gradient norm leaves out the experts of all TP ranks but the first, so clipping is too weak",
        fix="set parallel.tp to 1, or use Megatron-Core 0.19",
        source=f"{ML}/pull/5916",
        settings=("tensor_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"),
    ),
    Advisory(
        id="muon-expert-bias-norm",
        when="Muon with the distributed optimizer, TP and EP above 1, expert TP 1 and biases",
        applies=lambda run: (
            run.muon
            and (run.on("use_distributed_optimizer") or "dist" in str(run.value("optimizer")))
            and run.experts
            and run.tp > 1
            and run.ep > 1
            and run.etp == 1
            and run.on("add_bias_linear")
        ),
        affected=TO_0_19,
        effect="the gradient norm counts the experts' biases wrongly",
        fix="add disable_bias_linear, or set parallel.tp to 1",
        source=f"{ML}/pull/6099",
        settings=("optimizer", "tensor_model_parallel_size", "expert_model_parallel_size"),
    ),
    Advisory(
        id="sink-norm",
        when="learnable attention sinks (softmax_type learnable) with TP above 1",
        applies=lambda run: run.value("softmax_type") == "learnable" and run.tp > 1,
        affected=TO_0_19,
        effect="the gradient norm has the softmax_offset of the first TP rank only",
        fix="set parallel.tp to 1; the effect is small, because there is one number per head",
        source=f"{ML}/issues/7452",
        settings=("softmax_type", "tensor_model_parallel_size"),
    ),
    # --- loss --------------------------------------------------------------------------------------------------------
    Advisory(
        id="cp-local-mean",
        when="CP above 1 with masked tokens (eod_mask_loss, sft) and without per-token loss",
        applies=lambda run: run.cp > 1 and run.masks_tokens and not run.on("calculate_per_token_loss"),
        affected=TO_0_19,
        effect="each CP rank averages over its own tokens, so tokens have unequal weights in the loss",
        fix="add calculate_per_token_loss, or set parallel.cp to 1",
        source=f"{ML}/issues/7452",
        settings=("context_parallel_size", "eod_mask_loss", "sft"),
    ),
    Advisory(
        id="mtp-cp-norm",
        when="multi-token prediction with CP above 1 and masked tokens (eod_mask_loss, sft)",
        applies=lambda run: run.on("mtp_num_layers") and run.cp > 1 and run.masks_tokens,
        affected=TO_0_19,
        effect="the MTP loss is divided by the tokens of one CP rank, so tokens have unequal weights",
        fix="set parallel.cp to 1, or remove eod_mask_loss",
        source=f"{ML}/pull/7498",
        settings=("mtp_num_layers", "context_parallel_size", "eod_mask_loss", "sft"),
    ),
    Advisory(
        id="mtp-pertoken-local",
        when="multi-token prediction with per-token loss and masked tokens (eod_mask_loss, sft)",
        applies=lambda run: (
            run.on("mtp_num_layers")
            and run.on("calculate_per_token_loss")
            and run.masks_tokens
            and run.dp * run.layout.microbatches > 1
        ),
        affected=TO_0_19,
        effect="the MTP loss is normalized per rank and micro batch instead of over the global batch",
        fix="remove calculate_per_token_loss or eod_mask_loss",
        source=f"{ML}/issues/7452",
        settings=("mtp_num_layers", "calculate_per_token_loss", "eod_mask_loss", "sft"),
    ),
    Advisory(
        id="bridge-mtp-mask",
        when="multi-token prediction with masked tokens (dataset.eod_mask_loss) in Megatron-Bridge",
        applies=lambda run: run.on("mtp_num_layers") and run.masks_tokens,
        affected={"megatron_bridge": ("0.4.0", "0.5.0", "0.6.0", "0.6.2")},
        effect="the MTP loss covers masked tokens, because the model does not get the loss mask",
        fix="set dataset.eod_mask_loss to false, or model.mtp_num_layers to null",
        source=f"{MB}/issues/6103",
        settings=("mtp_num_layers", "eod_mask_loss"),
    ),
    # --- optimizer, schedule, resume, order of the data --------------------------------------------------------------
    Advisory(
        id="decoupled-lr-resume",
        when="decoupled_lr or use_mup with the distributed optimizer, in a run with checkpoints",
        applies=lambda run: (
            (run.on("decoupled_lr") or run.on("use_mup")) and run.on("use_distributed_optimizer") and run.checkpoints
        ),
        affected=TO_0_18,
        effect="after a resume all weights with weight decay may have the learning rate of another parameter group",
        fix="remove decoupled_lr and use_mup, or use Megatron-Core 0.19",
        source=f"{ML}/pull/4705",
        settings=("decoupled_lr", "use_mup", "save", "load"),
    ),
    Advisory(
        id="override-sched-ignored",
        when="override_opt_param_scheduler with another lr or min_lr than the run that wrote the checkpoint",
        applies=lambda run: run.on("override_opt_param_scheduler"),
        affected=TO_0_18,
        effect="a different lr or min_lr has no effect: the parameter groups keep the checkpoint's values",
        fix="use the checkpoint's lr and min_lr; more iterations and another decay do take effect",
        source=f"{ML}/issues/1138",
        settings=("override_opt_param_scheduler", "lr", "min_lr"),
        scope="megatron_lm",
        changes=_other_rates,
        even_if_unknown=True,
    ),
    Advisory(
        id="rampup-ignored",
        when="rampup_batch_size",
        applies=lambda run: run.on("rampup_batch_size"),
        affected=FROM_0_18,
        effect="rampup_batch_size is ignored: the run starts with the full global batch",
        fix="use step_batch_size_schedule, or Megatron-Core 0.17",
        source=f"{ML}/pull/3779",
        settings=("rampup_batch_size",),
    ),
    Advisory(
        id="bridge-rampup-lr",
        when="a batch ramp with a schedule in iterations in Megatron-Bridge",
        applies=lambda run: run.on("rampup_batch_size"),
        affected={"megatron_bridge": ("0.4.0",)},
        effect="warm-up and decay are counted in full batches, so the schedule is too long and decay never ends",
        fix="remove train.rampup_batch_size",
        source=f"{MB}/issues/2609",
        settings=("rampup_batch_size",),
    ),
    Advisory(
        id="expert-rng-resume",
        when="moe_router_force_load_balancing with EP above 1 and torch_dist checkpoints",
        # After the weights are initialized, only forced routing draws from the experts' random stream.
        applies=lambda run: (
            run.on("moe_router_force_load_balancing")
            and run.experts
            and run.ep > 1
            and run.checkpoints
            and run.value("ckpt_format") == "torch_dist"
        ),
        affected=TO_0_19,
        effect="after a resume most ranks draw the random routes of another rank",
        fix="remove moe_router_force_load_balancing, which is for benchmarks only",
        source=f"{ML}/pull/6858",
        settings=("moe_router_force_load_balancing", "expert_model_parallel_size"),
    ),
    Advisory(
        id="delayed-param-tp-resume",
        when="delayed scaling with FP8 parameters (fp8_param_gather), TP above 1 and torch_dist checkpoints",
        # The optimizer reduces the largest value of a weight over data parallel ranks only, and a checkpoint holds the
        # FP8 state of the first tensor parallel rank (`replica_id` of `make_sharded_tensors_for_checkpoint`).
        applies=lambda run: (
            run.fp8("delayed")
            and run.on("fp8_param_gather")
            and run.tp > 1
            and run.checkpoints
            and run.value("ckpt_format") == "torch_dist"
        ),
        affected=TO_0_19,
        effect="a resumed run scales weights by the largest value on the first TP rank, so larger ones on other ranks "
        "are cut off for a step (measured with TP 2: moments differ by up to 3.5 % two steps after a resume)",
        fix="remove precision.param_gather, or use tensorwise, which stores no scales",
        source=f"{ML}/blob/core_v0.19.0/megatron/core/transformer/utils.py",
        settings=("fp8_param_gather", "tensor_model_parallel_size"),
    ),
    Advisory(
        id="mtp-embedding-tag",
        when="multi-token prediction with PP above 1, and decoupled_lr or Muon",
        applies=lambda run: run.on("mtp_num_layers") and run.pp > 1 and (run.on("decoupled_lr") or run.muon),
        affected=ONLY_0_17,
        effect="the two copies of the word embedding are updated by different rules and drift apart",
        fix="remove decoupled_lr, use Adam, or use Megatron-Core 0.18 or newer",
        source=f"{ML}/issues/4641",
        settings=("mtp_num_layers", "pipeline_model_parallel_size", "decoupled_lr", "optimizer"),
    ),
    Advisory(
        id="bridge-mtp-embedding-group",
        when="multi-token prediction and loss on different pipeline stages in Megatron-Bridge",
        applies=lambda run: run.on("mtp_num_layers") and _mtp_alone(run),
        affected={"megatron_bridge": ("0.4.0", "0.5.0")},
        effect="the word embedding of the MTP stage is not synchronized: it drifts, and a resume jumps",
        fix="put the MTP layer on the stage of the loss (model.pipeline_model_parallel_layout), or use Bridge 0.6",
        source=f"{MB}/pull/5380",
        settings=("mtp_num_layers", "pipeline_model_parallel_layout"),
    ),
    Advisory(
        id="hdo-stale-step",
        when="optimizer_cpu_offload with the distributed optimizer and checkpoints that are not fully reshardable",
        applies=lambda run: (
            run.on("optimizer_cpu_offload")
            and run.on("use_distributed_optimizer")
            and run.checkpoints
            and run.value("ckpt_format") == "torch_dist"
            and not run.on("dist_ckpt_optim_fully_reshardable")
        ),
        affected=TO_0_19,
        effect="after a resume Adam's step count restarts, so its bias correction makes the first updates too large",
        fix="set megatron.dist_ckpt_optim_fully_reshardable: true, or remove optimizer_cpu_offload",
        source=f"{ML}/issues/1842",
        settings=("optimizer_cpu_offload",),
    ),
    Advisory(
        id="hdo-weights-only",
        when="optimizer_cpu_offload in a run that loads only weights (finetune, no_load_optim)",
        applies=lambda run: (
            run.on("optimizer_cpu_offload") and run.on("load") and (run.on("finetune") or run.on("no_load_optim"))
        ),
        affected=UNDECIDED,
        effect="the optimizer keeps its randomly initialized copies of the weights, and the first step undoes the load",
        fix="remove optimizer_cpu_offload",
        source=f"{ML}/pull/5071",
        settings=("optimizer_cpu_offload", "finetune", "no_load_optim"),
    ),
    Advisory(
        id="cyclic-tail-ranks",
        when="dataloader_type cyclic with no_data_sharding and DP above 1",
        applies=lambda run: (
            run.value("dataloader_type") == "cyclic" and run.value("data_sharding") is False and run.dp > 1
        ),
        affected=TO_0_19,
        effect="from the second epoch on, ranks may be at different positions in the data",
        fix="remove no_data_sharding, or train for at most one epoch",
        source=f"{ML}/pull/7299",
        settings=("dataloader_type", "DP"),
        scope="megatron_lm",
    ),
    # --- resharding --------------------------------------------------------------------------------------------------
    Advisory(
        id="fully-reshardable-buckets",
        when=(
            "fully reshardable checkpoints with overlapped gradient reduction and padded buckets: DP x CP not a power "
            "of two or above 128, sizes that are not multiples of 128, or ddp_pad_buckets_for_high_nccl_busbw"
        ),
        applies=lambda run: (
            run.on("dist_ckpt_optim_fully_reshardable")
            and run.on("save")
            and run.value("ckpt_format") == "torch_dist"
            and fully_reshardable_shifts(run.arguments, run.layout)
        ),
        affected=TO_0_19,
        effect="checkpoints hold shifted master weights and moments after the first padded bucket",
        fix="remove dist_ckpt_optim_fully_reshardable, or overlap_grad_reduce",
        source=f"{ML}/pull/5077",
        settings=("dist_ckpt_optim_fully_reshardable", "overlap_grad_reduce", "hidden_size", "DP"),
    ),
    Advisory(
        id="mfsdp-pp-reshard",
        when="a checkpoint of Megatron-FSDP loaded with another PP",
        applies=lambda run: run.on("use_megatron_fsdp"),
        affected=TO_0_19,
        effect="pipeline stages load the wrong layers, because layer names count from 0 on each stage",
        fix="keep parallel.pp as it was",
        source=f"{ML}/issues/7452",
        settings=("use_megatron_fsdp", "pipeline_model_parallel_size"),
        changes=lambda before, run: before.pp != run.pp,
    ),
    # --- FP8 ---------------------------------------------------------------------------------------------------------
    Advisory(
        id="mxfp8-paramgather-nooverlap",
        when="experts with EP above 1 in MXFP8 with parameter gather, without overlap_param_gather",
        applies=lambda run: (
            _gathers_in_gradient_buffer(run) and run.experts and run.ep > 1 and not run.on("overlap_param_gather")
        ),
        affected=ONLY_0_17,
        effect="one optimizer zeroes the shared buffer before the other has copied its weights: NaN in the second step",
        fix="remove precision.param_gather, or use Megatron-Core 0.18 or newer",
        source=f"{ML}/issues/2272",
        settings=("fp8_recipe", "fp8_param_gather", "expert_model_parallel_size"),
    ),
    Advisory(
        id="mxfp8-paramgather-forced",
        when="MXFP8 with parameter gather and overlap_param_gather",
        applies=lambda run: _gathers_in_gradient_buffer(run) and run.on("overlap_param_gather"),
        affected=TO_0_18,
        effect=(
            "weights are gathered from a buffer that no longer holds them before each save and at the end: saved "
            "weights may be wrong, while master weights and training steps are right"
        ),
        fix="in runs that save checkpoints remove precision.param_gather, or use Megatron-Core 0.19",
        source=f"{ML}/pull/5236",
        settings=("fp8_recipe", "fp8_param_gather", "overlap_param_gather"),
    ),
    Advisory(
        id="fp8-single-grouped-weight",
        when="moe_single_grouped_weight with FP8 or FP4 parameter gather",
        applies=lambda run: (
            run.on("moe_single_grouped_weight") and (run.on("fp8_param_gather") or run.on("fp4_param_gather"))
        ),
        affected=ONLY_0_18,
        effect="quantized expert weights are wrong, and the gradient norm has spikes",
        fix="remove moe_single_grouped_weight or precision.param_gather, or use Megatron-Core 0.19",
        source=f"{ML}/pull/5487",
        settings=("moe_single_grouped_weight", "fp8_param_gather", "fp4_param_gather"),
    ),
    Advisory(
        id="te-hybrid-grouped-mlp",
        when="MXFP8 in format hybrid with fused grouped experts (op fuser, moe_mlp_glu_interleave_size 32)",
        applies=lambda run: (
            run.fp8("mxfp8")
            and run.value("fp8") == "hybrid"
            and run.on("use_transformer_engine_op_fuser")
            and run.grouped_experts
            and run.number("moe_mlp_glu_interleave_size") == 32
        ),
        affected={"transformer_engine": _published("transformer_engine", "2.14.0", "2.19.0")},
        effect="gradients in E5M2 are read as E4M3: they are up to 128 times too small, while the loss looks right",
        fix="set precision.format to e4m3",
        source=f"{TE}/issues/3342",
        settings=("fp8_recipe", "fp8", "use_transformer_engine_op_fuser"),
    ),
    Advisory(
        id="te-grouped-padding",
        when="MXFP8 with one local expert and a padded token buffer",
        applies=lambda run: run.fp8("mxfp8") and run.grouped_experts and run.number("num_experts") == run.ep,
        affected=UNDECIDED,
        effect="rows behind the last token enter the weight gradient",
        fix="use a smaller EP, so that each rank has several experts",
        source=f"{TE}/issues/3484",
        settings=("fp8_recipe", "num_experts", "expert_model_parallel_size"),
    ),
    Advisory(
        id="te-recompute-amax",
        when="delayed scaling with full recomputation",
        applies=lambda run: run.fp8("delayed") and run.value("recompute_granularity") == "full",
        affected=UNDECIDED,
        effect="scaling factors of the backward pass are not updated (fixed in Transformer Engine 2.4 at the latest)",
        fix="use Transformer Engine 2.4 or newer",
        source=f"{TE}/pull/1723",
        settings=("fp8_recipe", "recompute_granularity"),
        scope="hardware",
    ),
    Advisory(
        id="te-norm-sp-flag",
        when="sequence parallelism",
        applies=lambda run: run.uses_te and run.sequence_parallel,
        affected=UNDECIDED,
        effect="gradients of norms differ between TP ranks (fixed in Transformer Engine 2.2)",
        fix="use Transformer Engine 2.2 or newer",
        source=f"{TE}/pull/1528",
        settings=("sequence_parallel", "tensor_model_parallel_size"),
    ),
    Advisory(
        id="te-tp-overlap-wgrad",
        when="tp_comm_overlap with TP above 1",
        applies=lambda run: run.uses_te and run.on("tp_comm_overlap") and run.tp > 1,
        affected={"transformer_engine": ("2.1.0",)},
        effect="weight gradients are wrong, and the loss diverges",
        fix="remove tp_comm_overlap, or use Transformer Engine 2.2 or newer",
        source=f"{TE}/issues/1616",
        settings=("tp_comm_overlap", "tensor_model_parallel_size"),
    ),
)

# Known bugs that are not rows, because no recipe can trigger them in a supported release.
NOT_FROM_RECIPES: Mapping[str, str] = {
    "global-aux-denominator": "needs micro batches with padding masks, which the training entries do not pass",
    "router-mask-count-alias": "needs a padding mask, which the training entries do not pass",
    "vocab-ce-smoothing-tp": "no flag reaches label smoothing",
    "gathered-logits-ce": "library calls only",
    "reduce-noncontig": "no caller in Megatron passes a non-contiguous tensor",
    "mfsdp-fullyshard-step": "library calls only (fully_shard_optimizer)",
    "hdo-stale-grad": "every parameter has a gradient buffer in Megatron-LM's training",
    "dist-opt-is-loading": "library calls only",
    "bridge-packed-pp": "packed fine-tuning only",
    "bridge-finetune-sampler": "fine-tuning only",
    "te-sink-cp-p2p": "refused with an error (`sinks-context-parallel`)",
    "dp-instances-overlap": "fixed before 0.17.0",
    "mla-duplicated-norm": "fixed before 0.17.0",
    "mtp-pertoken-scale": "fixed before 0.17.0",
    "te-weight-cache": "Transformer Engine 1.7 only",
    "te-ln-tp-cp-fp8": "Transformer Engine 1.13 only",
    "te-linear-fp8-sp": "fixed before Transformer Engine 2.1",
}


def releases_in_words(affected: Mapping[Package, tuple[str, ...]]) -> str:
    """Return the affected releases of each package, such as `Megatron-Core 0.17.0 to 0.18.2`."""
    parts = []
    for package, releases in affected.items():
        known = PUBLISHED[package]
        first, last = known.index(releases[0]), known.index(releases[-1])
        if len(releases) > 2 and known[first : last + 1] == releases:
            words = f"{releases[0]} to {releases[-1]}"
        else:
            words = ", ".join(releases)
        parts.append(f"{PACKAGES[package]} {words}")
    return "; ".join(parts) or "not decided"
