"""Known silent bugs of Megatron are found in releases that have them, and raise no alarm in releases without them."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest

from fp8launch.cli import run
from fp8launch.plugins.prove import work
from fp8launch.plugins.validators.megatron_core import find_megatron

pytestmark = [
    pytest.mark.train,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("torch") is None, reason="needs torch"),
]

BASE = """
name: affected
extends: [models/tiny, parts/pretrain, parts/distributed_optimizer, precision/bf16, hardware/h100]
batch: {micro: 1, global: 32, sequence: 64}
train: {iterations: 3, lr: 3.0e-4, min_lr: 3.0e-5, warmup: 1}
resources: {nodes: 1, gpus_per_node: 2}
"""
EXPERTS = (
    "model={num_experts: 4, moe_ffn_hidden_size: 64, moe_router_topk: 2, moe_router_load_balancing_type: aux_loss,"
    " moe_aux_loss_coeff: 0.1}"
)
LATENT = (
    "model={multi_latent_attention: true, q_lora_rank: 32, kv_lora_rank: 16, group_query_attention: null,"
    " num_query_groups: null}"
)
SPARSE = LATENT.replace("}", ", experimental_attention_variant: dsa, dsa_indexer_loss_coeff: 0.1, qk_layernorm: true}")
LINEAR = "model={experimental_attention_variant: gated_delta_net, linear_attention_freq: 2}"
BY_SEQUENCE = EXPERTS.replace("aux_loss,", "seq_aux_loss,")
# Megatron refuses averages with it.
PER_TOKEN = "megatron={calculate_per_token_loss: true, ddp_average_in_collective: null}"
DOCUMENTS = "megatron.eod_mask_loss=true"
PER_TOKEN_DOCUMENTS = PER_TOKEN.replace("}", ", eod_mask_loss: true}")
PREDICTION = "model.mtp_num_layers=1"
MASKED = "megatron={reset_attention_mask: true, transformer_impl: local}"
# Megatron refuses FSDP with one connection, which other layouts need.
CONNECTIONS = "env={CUDA_DEVICE_MAX_CONNECTIONS: 32}"
SHARDED = ("parallel.fsdp=megatron", CONNECTIONS, "resources.gpus_per_node=4")
# With averages, Megatron-FSDP fails for models without experts.
SUMMED = "megatron.ddp_average_in_collective=null"
SHARDED_TENSORS = "parallel={tp: 2, sequence: auto, fsdp: megatron}"
SHARDED_EXPERTS = (EXPERTS, "parallel={ep: 2, fsdp: megatron}", CONNECTIONS)
TWO_INSTANCES = "megatron={num_distributed_optimizer_instances: 2}"
INSTANCES = ("parallel={pp: 2, ep: 2}", "resources.gpus_per_node=8")
# Advisory or report: its settings, the check that fails, a release that has it, and one that does not.
BUGS: dict[str, tuple[tuple[str, ...], str, str | None, str | None]] = {
    "etp-ne-tp-ep1, ETP 2": ((EXPERTS, "parallel.etp=2"), "gradients", "0.17", "0.19"),
    "etp-ne-tp-ep1, ETP 1": ((EXPERTS, "parallel={tp: 2, sequence: auto, etp: 1}"), "gradients", "0.17", "0.19"),
    "router-aux-pertoken-tp": (
        (EXPERTS, "parallel={tp: 2, sequence: auto}", PER_TOKEN),
        "gradients", "0.17", "0.19",
    ),
    "router-aux-pertoken-tp, context parallel": (
        (EXPERTS, "parallel.cp=2", PER_TOKEN), "gradients", "0.17", "0.19",
    ),
    "seq-aux-mbs": ((BY_SEQUENCE, "batch.micro=2", PER_TOKEN), "gradients", "0.18", "0.19"),
    "reset-attn-mask-pp": (
        (MASKED, "model.num_layers=4", "parallel={pp: 2, vp: 2}"), "gradients", "0.19", None,
    ),
    "reset-attn-mask-pp, four stages": (
        (MASKED, "model.num_layers=4", "parallel.pp=4", "resources.gpus_per_node=4"), "gradients", "0.19", None,
    ),
    "reset-attn-mask-pp, no inner stage": ((MASKED, "parallel.pp=2"), "gradients", None, "0.19"),
    "gdn-outnorm-tp": ((LINEAR, "parallel={tp: 2, sequence: false}"), "gradients", "0.19", None),
    "gdn-outnorm-tp, sequence parallel": ((LINEAR, "parallel={tp: 2, sequence: auto}"), "gradients", None, "0.19"),
    "dsa-indexer-microbatches": ((SPARSE,), "gradients", "0.17", "0.19"),
    "cp-local-mean": (("parallel.cp=2", DOCUMENTS), "gradients", "0.19", None),
    "cp-local-mean, per token": (("parallel.cp=2", PER_TOKEN_DOCUMENTS), "gradients", None, "0.19"),
    "mtp-cp-norm": ((PREDICTION, "parallel.cp=2", PER_TOKEN_DOCUMENTS), "gradients", "0.19", None),
    "mtp-pertoken-local": ((PREDICTION, "batch.micro=2", PER_TOKEN_DOCUMENTS), "gradients", "0.19", None),
    "mtp-pertoken-local, not per token": (
        (PREDICTION, "batch.micro=2", "megatron={eod_mask_loss: true, reset_position_ids: true}"),
        "gradients", None, "0.19",
    ),
    "mfsdp-2n": ((*SHARDED_EXPERTS, SUMMED), "gradients", "0.19", None),
    "mfsdp-2n, two ranks of each expert": (
        (*SHARDED_EXPERTS, SUMMED, "resources.gpus_per_node=4"),
        "gradients", None, "0.19",
    ),
    "fsdp-average": ((*SHARDED_EXPERTS, "resources.gpus_per_node=4"), "gradients", "0.18", None),
    "mfsdp-instances-overlap": (
        (*SHARDED, TWO_INSTANCES.replace("}", ", overlap_grad_reduce: null, overlap_param_gather: null}")),
        "gradients", "0.17", None,
    ),
    "mfsdp-outer-sharding": (
        (*SHARDED, TWO_INSTANCES.replace("}", ", outer_dp_sharding_strategy: optim}")), "grad_norm", "0.19", None,
    ),
    "mfsdp-pertoken-norms": ((SHARDED_TENSORS, *SHARDED[1:], PER_TOKEN), "resume", "0.19", None),
    "mfsdp-pertoken-norms, gradients in fp32": (
        (SHARDED_TENSORS, *SHARDED[1:], PER_TOKEN.replace("}", ", megatron_fsdp_main_grads_dtype: fp32}")),
        "resume", None, "0.19",
    ),
    "mfsdp-pertoken-norms, precision-aware optimizer": (
        (SHARDED_TENSORS, *SHARDED[1:], PER_TOKEN.replace("}", ", use_precision_aware_optimizer: true}")),
        "resume", None, "0.19",
    ),
    "override-sched-ignored": (("megatron.override_opt_param_scheduler=true",), "resume", "0.18", None),
    "override-sched-ignored, schedule of the checkpoint": (
        ("megatron.use_checkpoint_opt_param_scheduler=true",), "resume", None, "0.18",
    ),
    "rampup-ignored": (("megatron.rampup_batch_size=[2, 2, 64]",), "resume", "0.18", "0.17"),
    "cyclic-tail-ranks": (
        ("megatron={dataloader_type: cyclic, no_data_sharding: true}",), "resume", "0.19", None,
    ),
    "cyclic-tail-ranks, data divided": (("megatron.dataloader_type=cyclic",), "resume", None, "0.19"),
    "decoupled-lr-resume": (
        ("megatron={decoupled_lr: 1.0e-4, use_distributed_optimizer: null, overlap_param_gather: null}",),
        "resume", "0.17", "0.19",
    ),
    "mla-kpos-grad": ((LATENT, "parallel={tp: 2, sequence: false}"), "gradients", "0.19", None),
    "mla-kpos-grad, sequence parallel": ((LATENT, "parallel={tp: 2, sequence: auto}"), "gradients", None, "0.19"),
    "moe-tp-ep-norm": (
        (
            EXPERTS, "model.disable_bias_linear=null", "megatron.no_bias_swiglu_fusion=true",
            "parallel={tp: 2, ep: 2, etp: 1, sequence: auto}",
        ),
        "grad_norm", "0.17", "0.19",
    ),
    "mtp-embedding-tag": (
        ("model.mtp_num_layers=1", "parallel.pp=2", "megatron.decoupled_lr=2.0e-2"), "gradients", "0.17", "0.19",
    ),
    "expert-rng-resume": (
        (EXPERTS, "parallel.ep=2", "megatron.moe_router_force_load_balancing=true", "checkpoint.dir=checkpoints"),
        "resume", "0.19", None,
    ),
    # Nothing draws from the stream that the checkpoint lacks, so the run is the same.
    "expert-rng-resume, without forced routes": (
        (EXPERTS, "parallel.ep=2", "model.hidden_dropout=0.1"), "resume", None, "0.19",
    ),
    "fully-reshardable-buckets": (
        ("megatron={ddp_bucket_size: 1000, dist_ckpt_optim_fully_reshardable: true, overlap_grad_reduce: true}",),
        "resume", "0.19", None,
    ),
    "fully-reshardable-buckets, other format": (
        ("megatron={ddp_bucket_size: 1000, overlap_grad_reduce: true}",), "resume", None, "0.19",
    ),
    "dp-instances-pp": (
        (EXPERTS, *INSTANCES, "megatron.num_distributed_optimizer_instances=2"), "gradients", "0.19", None,
    ),
    "dp-instances-pp, not aligned": (
        (EXPERTS, *INSTANCES, "megatron={num_distributed_optimizer_instances: 2, no_align_grad_reduce: true}"),
        "gradients", None, "0.19",
    ),
    "sink-norm": (("model.softmax_type=learnable", "parallel.tp=2"), "grad_norm", "0.19", None),
}  # fmt: skip
# Combinations of settings that are right: on two H100 they were measured to agree with one rank.
RIGHT: dict[str, tuple[str, ...]] = {
    "Megatron-FSDP, tensor parallel": (SHARDED_TENSORS, *SHARDED[1:], SUMMED),
    "Megatron-FSDP 0.17, tensor parallel": (SHARDED_TENSORS, *SHARDED[1:], SUMMED, LATENT, "software.megatron=0.17"),
    "Megatron-FSDP, biases that balance experts": (
        *SHARDED_EXPERTS, SUMMED, "resources.gpus_per_node=4", "model.moe_router_enable_expert_bias=true",
        "model.moe_router_score_function=sigmoid",
    ),
    "Megatron-FSDP in two instances": (*SHARDED, TWO_INSTANCES),
    "Megatron-FSDP of the optimizer only": ("parallel.fsdp=megatron_optim", *SHARDED[1:], SUMMED),
    "tied embeddings, norms of queries, full recomputation": (
        "model={untie_embeddings_and_output_weights: null, qk_layernorm: true}",
        "megatron={recompute_granularity: full, recompute_method: uniform, recompute_num_layers: 1}",
        "parallel={tp: 2, sequence: false}",
    ),
    "sparse attention": (SPARSE, "parallel={tp: 2, pp: 2, sequence: auto}", "resources.gpus_per_node=4"),
    "token prediction in a pipeline": (
        PREDICTION, PER_TOKEN, "parallel={tp: 2, pp: 2, sequence: auto}", "resources.gpus_per_node=4",
    ),
    "experts divided by tensors and by experts": (
        EXPERTS.replace("moe_aux", "moe_z_loss_coeff: 0.01, moe_shared_expert_intermediate_size: 64, moe_aux"),
        "parallel={tp: 2, ep: 2, etp: 2, sequence: auto}", "resources.gpus_per_node=4",
        "megatron.moe_token_dispatcher_type=allgather",
    ),
    "experts, context parallel": (
        EXPERTS.replace("moe_aux", "moe_z_loss_coeff: 0.01, moe_aux"), "parallel={cp: 2, ep: 2}",
        "megatron.moe_token_dispatcher_type=alltoall",
    ),
    "windows and off-by-one softmax, context parallel": (
        "model={softmax_type: off-by-one, window_size: [16, 0], window_attn_skip_freq: 2}", "parallel.cp=2",
    ),
    "plain optimizer, larger micro batches, asynchronous checkpoints": (
        "megatron={use_distributed_optimizer: null, overlap_param_gather: null, async_save: true}", "batch.micro=2",
    ),
}  # fmt: skip


@pytest.fixture
def prove(
    capsys: pytest.CaptureFixture[str], write: Callable[[str, str], str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., dict[str, Any]]:
    """Prove a recipe with a release; its checks by name. `only` leaves out trainings that this check does not need."""
    # The nearest right setting is not the question here.
    monkeypatch.setattr(work, "MOST_TRIALS", 0)
    recipe = write("affected.yaml", BASE)

    def call(release: str, overrides: tuple[str, ...], only: str | None = None) -> dict[str, Any]:
        if only == "resume":
            monkeypatch.setattr(work, "small_run", lambda *_: None)
        elif only:
            monkeypatch.setattr(work, "resumed_run", lambda *_: None)
        if find_megatron(release) is None:
            pytest.skip(f"Megatron-Core {release} is not on this machine")
        words = ["prove", recipe, "--json"]
        for override in (f"software.megatron={release}", *overrides):
            words += ["--set", override]
        assert run(words) in (0, 1)
        return {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}

    return call


@pytest.mark.parametrize("bug", [bug for bug, (_, _, affected, _) in BUGS.items() if affected])
def test_an_affected_release_is_found(prove: Callable[..., dict[str, Any]], bug: str) -> None:
    overrides, check, affected, _ = BUGS[bug]
    assert not prove(affected, overrides, check)[check]["ok"]


@pytest.mark.parametrize("bug", [bug for bug, (_, _, _, fixed) in BUGS.items() if fixed])
def test_a_release_without_the_bug_agrees(prove: Callable[..., dict[str, Any]], bug: str) -> None:
    overrides, check, _, fixed = BUGS[bug]
    found = prove(fixed, overrides, check)
    assert found[check]["ok"] and all(each["ok"] for each in found.values())


@pytest.mark.parametrize("case", RIGHT)
def test_what_is_right_raises_no_alarm(prove: Callable[..., dict[str, Any]], case: str) -> None:
    found = prove("0.19", RIGHT[case])
    assert all(check["ok"] for check in found.values()), found
