"""Random runs: the check never passes what Megatron's own validators refuse with real torch, and says why it refuses
more."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sets import BF16, BLOCKWISE, DELAYED, FSDP, MLA, MOE, MXFP8, NVFP4, RULES, Set

from fp8launch.check.checker import check_all, schema_result
from fp8launch.check.job_paths import JobPaths
from fp8launch.check.resolved_run import resolve_run
from fp8launch.check.rule import all_rules
from fp8launch.diagnostics import UserError
from fp8launch.megatron.schema import supported_versions
from fp8launch.plugins.validators.layer import request
from fp8launch.plugins.validators.megatron_core import megatron_for
from fp8launch.plugins.validators.verdicts import validate

# Refused before a validator is asked, on purpose more strictly than Megatron does.
STRICTER = {
    "world-size": "Megatron refuses it as well, when it makes process groups",
    "batch-size": "Megatron refuses it as well",
    "recipe-without-format": "Megatron would train in bf16",
    "format-without-recipe": "Megatron would take delayed scaling",
    "fp8-on-cpu": "Megatron would train in bf16",
    "flag-value": "Megatron's parser refuses it as well",
    "flag-unknown": "Megatron's parser refuses it as well",
}


def maybe(name: str, *values: Any) -> st.SearchStrategy[dict[str, Any]]:
    """Mostly the base's value, sometimes one of these."""
    return st.one_of(st.just({}), st.just({}), st.sampled_from(values).map(lambda value: {name: value}))


CHANGES = st.tuples(
    st.sampled_from([{}, BF16, DELAYED, BLOCKWISE, MXFP8, NVFP4, {"fp8_recipe": "custom"}]),
    st.sampled_from([{}, {}, {}, MOE, MLA, FSDP]),
    maybe("tensor_model_parallel_size", 2, 4, 8),
    maybe("sequence_parallel", True),
    maybe("pipeline_model_parallel_size", 2, 4, 3),
    maybe("num_virtual_stages_per_pipeline_rank", 2, 3),
    maybe("num_layers_per_virtual_pipeline_stage", 2, 3),
    maybe("context_parallel_size", 2, 4),
    maybe("expert_model_parallel_size", 2, 4, 3),
    maybe("num_attention_heads", 12, 24, 48),
    maybe("num_query_groups", 4, 6, 7),
    maybe("num_layers", 30, 33),
    maybe("micro_batch_size", 2, 3),
    maybe("global_batch_size", 16, 20, 128),
    maybe("seq_length", 4096, 8190, 16384),
    maybe("first_last_layers_bf16", True),
    maybe("num_layers_at_start_in_bf16", 2, 40),
    maybe("fp8_param_gather", True),
    maybe("reuse_grad_buf_for_mxfp8_param_ag", True),
    maybe("use_distributed_optimizer", None),
    maybe("overlap_grad_reduce", None),
    maybe("overlap_param_gather", None),
    maybe("use_precision_aware_optimizer", True),
    maybe("exp_avg_dtype", "bf16", "fp8"),
    maybe("main_grads_dtype", "bf16"),
    maybe("optimizer_cpu_offload", True),
    maybe("recompute_granularity", "full", "selective"),
    maybe("recompute_method", "block", "uniform"),
    maybe("recompute_num_layers", 1, 5),
    maybe("recompute_modules", ["mlp"], ["moe_act"], ["layernorm"]),
    maybe("cuda_graph_impl", "local", "transformer_engine"),
    maybe("tp_comm_overlap", True),
    maybe("moe_router_padding_for_quantization", True),
    maybe("moe_token_dispatcher_type", "allgather", "flex"),
    maybe("save", "checkpoints"),
    maybe("save_interval", 10),
    maybe("min_lr", 1e-2),
    maybe("lr_warmup_iters", 0, 50),
    maybe("train_samples", 1000),
    maybe("bf16", None),
    maybe("fp16", True),
    maybe("transformer_impl", "local"),
    maybe("ckpt_format", "torch", "fsdp_dtensor"),
    maybe("num_distributed_optimizer_instances", 2, 3),
)


@st.composite
def runs(draw: st.DrawFn) -> Set:
    # Three changes or so at a time: with more, hardly any run passes.
    changes = [change for change in draw(CHANGES) if change]
    some = draw(st.lists(st.sampled_from(changes), max_size=4, unique_by=str)) if changes else []
    env = draw(st.sampled_from([{}, {"CUDA_DEVICE_MAX_CONNECTIONS": 1}, {"CUDA_DEVICE_MAX_CONNECTIONS": 32}]))
    minor = draw(st.sampled_from(supported_versions()))
    flags: dict[str, Any] = {}
    for change in some:
        flags |= change
    return Set(flags, gpu=draw(st.sampled_from(["h100", "b200"])), env=env, software={"megatron": minor})


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases=st.lists(runs(), min_size=60, max_size=60))
def test_nothing_passes_that_megatron_refuses(cases: list[Set], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("runs")
    prepared = {}
    for i, case in enumerate(cases):
        try:
            prepared[i] = case.prepare(folder, f"run{i}")
        except UserError as exc:
            assert {p.code for p in schema_result(exc).problems} <= set(STRICTER), exc
    found = dict(zip(prepared, check_all(list(prepared.values()), layers=RULES), strict=True))
    for minor in supported_versions():
        mine = [i for i in prepared if cases[i].software["megatron"] == minor]
        requests = [request(resolve_run(prepared[i]), JobPaths(None)) for i in mine]
        real = validate(requests, megatron_for(minor), real_torch=True)
        for i, verdict in zip(mine, real, strict=True):
            errors = {p.code for p in found[i].problems if p.severity == "error"}
            told = f"{cases[i].change} {cases[i].env} {cases[i].gpu}: {verdict.message}"
            if not verdict.ok:
                assert errors, told
            else:
                # What goes beyond the validators is a rule, which names its source.
                assert errors <= set(all_rules()), told
