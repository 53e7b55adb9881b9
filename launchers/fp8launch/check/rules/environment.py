"""Check environment variables against arguments and GPU."""

from __future__ import annotations

from collections.abc import Iterator

from fp8launch.check.resolved_run import ResolvedRun
from fp8launch.check.rule import Finding, rule
from fp8launch.hardware.connections import CONNECTIONS

_BACKENDS = {"flash": (1, 0, 0), "fused": (0, 1, 0), "unfused": (0, 0, 1), "local": (0, 0, 0), "auto": (1, 1, 1)}
_ATTENTION = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


@rule(
    "attention-variables",
    "error",
    source="megatron/core/models/common/language_module/language_module.py:117-145, building the model",
)
def attention_is_chosen_by_argument(run: ResolvedRun) -> Iterator[Finding]:
    backend = str(run.value("attention_backend"))
    for name, expected in zip(_ATTENTION, _BACKENDS.get(backend, ()), strict=False):
        value = run.env.get(name)
        if value is not None and value != str(expected):
            message = f"{name}={value} contradicts attention_backend {backend}, which sets it to {expected}"
            fix = "remove the variable, and set attention_backend to flash, fused, unfused or auto"
            yield Finding(message, run.where(name, "attention_backend"), fix)


@rule(
    "max-connections-not-1",
    "error",
    source="megatron/training/arguments.py:1415-1439",
    says=r"CUDA_DEVICE_MAX_CONNECTIONS to 1$",
    scope="megatron_lm",
)
def split_tensors_need_one_connection(run: ResolvedRun) -> Iterator[Finding]:
    layout = run.layout
    split = [f"{name} {n}" for name, n in (("TP", layout.tp), ("CP", layout.cp)) if n > 1]
    exempt = run.fsdp or run.on("overlap_moe_expert_parallel_comm")
    if split and run.gpu.capability < (10, 0) and not exempt and run.env.get(CONNECTIONS) != "1":
        found = f"is {run.env[CONNECTIONS]}" if CONNECTIONS in run.env else "is not set"
        message = f"{' and '.join(split)} on GPUs before Blackwell needs {CONNECTIONS}=1, but it {found}"
        where = run.where(CONNECTIONS, "tensor_model_parallel_size", "context_parallel_size")
        yield Finding(message, where, f"set `env: {{{CONNECTIONS}: 1}}`")


@rule(
    "max-connections-1",
    "error",
    source="megatron/training/arguments.py:1014 and 1143",
    says=r"FSDP .*requires CUDA_DEVICE_MAX_CONNECTIONS",
    scope="megatron_lm",
)
def fsdp_needs_connections(run: ResolvedRun) -> Iterator[Finding]:
    if run.fsdp and run.env.get(CONNECTIONS) == "1":
        message = f"FSDP needs {CONNECTIONS} above 1 or unset, but it is 1"
        yield Finding(message, run.where(CONNECTIONS), f"set `env: {{{CONNECTIONS}: 32}}`, or to null to unset it")


@rule("expert-overlap-connections", "warning", source="megatron/training/arguments.py:1426-1435", scope="megatron_lm")
def expert_overlap_needs_connections(run: ResolvedRun) -> Iterator[Finding]:
    one = run.env.get(CONNECTIONS) == "1"
    if one and run.on("overlap_moe_expert_parallel_comm") and run.layout.tp == run.layout.cp == 1:
        message = f"overlap_moe_expert_parallel_comm cannot overlap anything while {CONNECTIONS} is 1"
        yield Finding(message, run.where(CONNECTIONS), f"set `env: {{{CONNECTIONS}: 32}}`")


def _expandable(run: ResolvedRun) -> str | None:
    """Return the name of the variable that enables expandable segments, if any."""
    return next((name for name in _ALLOCATOR if "expandable_segments:True" in run.env.get(name, "")), None)


@rule(
    "nccl-buffers-segments",
    "error",
    source="megatron/core/distributed/distributed_data_parallel_config.py:255",
    says=r"expandable_segments.*nccl_ub|nccl_ub.*expandable_segments",
)
def registered_buffers_do_not_move(run: ResolvedRun) -> Iterator[Finding]:
    name, torch = _expandable(run), run.software.pytorch
    if run.on("nccl_ub") and name is not None and torch is not None and torch < (2, 11):
        found = ".".join(map(str, torch))
        message = (
            f"use_nccl_ub does not work with expandable_segments before torch 2.11, and the job uses torch {found}"
        )
        yield Finding(
            message, run.where(name, "nccl_ub"), f"remove expandable_segments from {name}, or remove use_nccl_ub"
        )


@rule(
    "nccl-buffers-segments-unknown",
    "warning",
    source="megatron/core/distributed/distributed_data_parallel_config.py:255",
)
def registered_buffers_may_not_move(run: ResolvedRun) -> Iterator[Finding]:
    name = _expandable(run)
    if run.on("nccl_ub") and name is not None and run.software.pytorch is None:
        message = (
            "use_nccl_ub fails with expandable_segments before torch 2.11, and the job's torch version is not known"
        )
        yield Finding(
            message, run.where(name, "nccl_ub"), f"remove expandable_segments from {name}, or remove use_nccl_ub"
        )


@rule("nvls-overridden", "warning", source="megatron/core/nccl_allocator.py:154: use_nccl_ub sets NCCL_NVLS_ENABLE=1")
def registered_buffers_switch_nvls_on(run: ResolvedRun) -> Iterator[Finding]:
    if run.on("nccl_ub") and run.env.get("NCCL_NVLS_ENABLE") == "0":
        message = "use_nccl_ub sets NCCL_NVLS_ENABLE to 1 and ignores the 0 in the environment"
        yield Finding(message, run.where("NCCL_NVLS_ENABLE"), "remove the variable, or remove use_nccl_ub")


@rule("graph-segments", "error", source="megatron/core/transformer/cuda_graphs.py of 0.17 (1440) and 0.18 (1503)")
def graphs_do_not_register_moving_memory(run: ResolvedRun) -> Iterator[Finding]:
    """Megatron's validators check this only for Transformer Engine's graphs, not for Megatron's own."""
    name = _expandable(run)
    if (
        run.value("cuda_graph_impl") == "local"
        and run.megatron < (0, 19)
        and run.gpu.capability < (10, 0)
        and name == _ALLOCATOR[0]
        and run.env.get("NCCL_GRAPH_REGISTER") != "0"
    ):
        message = "on GPUs before Blackwell, CUDA graphs with expandable_segments fail unless NCCL_GRAPH_REGISTER is 0"
        yield Finding(message, run.where(name, "cuda_graph_impl"), "set `env: {NCCL_GRAPH_REGISTER: 0}`")


@rule("tensor-stats-graphs", "error", source="transformer_engine/debug: statistics decide on the host in every step")
def statistics_need_steps_without_graphs(run: ResolvedRun) -> Iterator[Finding]:
    graphs = run.value("cuda_graph_impl") not in (None, "none") or run.on("enable_cuda_graph")
    if run.loaded.recipe.launch.tensor_stats and graphs:
        message = "launch.tensor_stats reads values in the middle of a step, which is not possible in a CUDA graph"
        yield Finding(
            message, run.where("cuda_graph_impl"), "remove one of them; measure in a short run without CUDA graphs"
        )
