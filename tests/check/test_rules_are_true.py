"""What the rules say of a run really happens: Megatron's validators pass it, and training on this machine's CPU ends
with the error that the rule foretells."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from sets import RULES
from train_jobs import forked

from fp8launch.check.checker import check
from fp8launch.job.prepared import prepare

SHORT = ("train.iterations=2", "train.warmup=0")
TWO = "resources.gpus_per_node=2"
EXPERTS = ("model.num_experts=4", "megatron.moe_token_dispatcher_type=alltoall")

# Code, changes to tiny_cpu (two layers, width 64, four heads in two groups, batch 8 of 2), what Megatron then says.
CASES = [
    ("pipeline-split", ["parallel.pp=2", "parallel.vp=2", "model.num_layers=6", TWO], "divisible by vp_size"),
    (
        "virtual-pipeline-batches",
        ["parallel.pp=2", "parallel.vp=2", "model.num_layers=4", "batch.global=6", TWO],
        "remainder of M",
    ),
    ("query-groups", ["model.num_attention_heads=8", "model.num_query_groups=3"], "Error"),
    ("size-not-divisible", ["parallel.tp=2", "model.ffn_hidden_size=129", TWO], "not divisible"),
    ("expert-grid", [*EXPERTS, "parallel.ep=2"], "not divisible by expert_tensor_model_pipeline"),
    (
        "optimizer-instances",
        ["megatron.num_distributed_optimizer_instances=3", "megatron.use_distributed_optimizer=true"],
        "divisible by partial DistOpt",
    ),
    ("moe-needs-sequence-parallel", [*EXPERTS, "parallel.tp=2", TWO], "without also enabling sequence"),
    ("moe-layer-pattern", [*EXPERTS, "model.moe_layer_freq='[0,1,1]'"], "Invalid length of moe_layer_pattern"),
    (
        "weighted-swiglu-bias",
        [*EXPERTS, "model.swiglu=true", "model.disable_bias_linear=null", "megatron.no_bias_swiglu_fusion=null"],
        "Bias is not supported for weighted swiglu fusion",
    ),
    ("local-layers", ["megatron.apply_layernorm_1p=true"], "zero_centered_gamma not supported"),
    ("moe-top-k", [*EXPERTS, "model.moe_router_topk=5"], "out of range"),
    (
        "per-token-loss-average",
        ["megatron.calculate_per_token_loss=true", "megatron.ddp_average_in_collective=true"],
        "Cannot average in collective",
    ),
    ("warmup-too-long", ["train.warmup=2"], "lr_warmup_steps < self.lr_decay_steps"),
    ("no-learning-rate", ["train.lr=null", "train.min_lr=null"], "TypeError"),
    ("null-tokenizer-vocabulary", ["model.vocab_size=null"], r"Error: .*vocab_size"),
]


@pytest.mark.slow
@pytest.mark.train
@pytest.mark.skipif(find_spec("torch") is None or find_spec("megatron") is None, reason="needs torch and Megatron")
@pytest.mark.needs_plugin("validators")
@pytest.mark.parametrize(("code", "changes", "message"), CASES, ids=[case[0] for case in CASES])
def test_what_a_rule_foretells_happens(code: str, changes: list[str], message: str, tmp_path: Path) -> None:
    prepared = prepare("tiny_cpu", [*SHORT, *changes])
    result = check(prepared, layers=RULES)
    assert [p.code for p in result.problems] == [code]
    assert result.layers["megatron"] == "ran"
    run = forked(prepared.layout.world, prepared.args.argv, tmp_path, **prepared.loaded.recipe.environment)
    said = run.output
    assert any(run.codes)
    assert re.search(message, said), said[-3000:]
    assert not re.search(r"iteration +2/ +2", said)
