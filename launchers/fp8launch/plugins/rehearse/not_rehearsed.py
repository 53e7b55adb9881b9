"""Features that rehearsals do not run. Reports list them, so that nobody assumes they were checked."""

from __future__ import annotations

from collections.abc import Callable

from fp8launch.check.resolved_run import ResolvedRun


def _graphs(run: ResolvedRun) -> bool:
    by_name = run.value("cuda_graph_impl") not in (None, "none")
    return by_name or run.on("enable_cuda_graph") or run.on("external_cuda_graph")


def _flex_backend(run: ResolvedRun, name: str) -> bool:
    if run.value("moe_token_dispatcher_type") != "flex":
        return False
    return name == (run.value("moe_flex_dispatcher_backend") or "deepep")


def _triton_kernels(run: ResolvedRun) -> bool:
    if run.gpu.name == "cpu":
        return False
    mla_rope = run.on("multi_latent_attention") and run.on("apply_rope_fusion")
    fused_loss = run.on("cross_entropy_loss_fusion") and run.value("cross_entropy_fusion_impl") == "te"
    return run.on("moe_permute_fusion") or mla_rope or fused_loss


def _offloads(run: ResolvedRun) -> bool:
    names = ("optimizer_cpu_offload", "cpu_offloading_num_layers", "fine_grained_activation_offloading")
    return any(map(run.on, names))


def _packs(run: ResolvedRun) -> bool:
    names = ("sft", "rl_use_sequence_packing", "dataloader_inter_document_masking", "hybrid_context_parallel")
    return any(map(run.on, names))


def _loads_from_elsewhere(run: ResolvedRun) -> bool:
    return run.on("pretrained_checkpoint") or (run.on("load") and run.value("load") != run.value("save"))


# Features that no rehearsal runs, each with a predicate for runs that use it.
NOT_REHEARSED: tuple[tuple[str, Callable[[ResolvedRun], bool]], ...] = (
    ("values read on the host inside CUDA graphs", _graphs),
    ("DeepEP's kernels", lambda run: _flex_backend(run, "deepep")),
    ("HybridEP's kernels", lambda run: _flex_backend(run, "hybridep")),
    ("Triton kernels", _triton_kernels),
    ("packed sequences", _packs),
    ("userbuffers of tp_comm_overlap", lambda run: run.on("tp_comm_overlap")),
    ("FSDP's streams", lambda run: run.fsdp),
    ("copies to host memory", _offloads),
    ("NCCL user buffers", lambda run: run.on("nccl_ub")),
    ("reading the dataset", lambda run: run.on("data_path") or run.on("data_args_path")),
    ("loading a checkpoint of another run", _loads_from_elsewhere),
    ("the parts of a checkpoint that other ranks write", lambda run: run.on("save") and run.layout.world > 1),
    ("asynchronous saving", lambda run: run.on("save") and run.on("async_save")),
    ("loading checkpoints of FSDP", lambda run: run.on("save") and run.fsdp),
)


def not_rehearsed(run: ResolvedRun) -> tuple[str, ...]:
    """Return the features of this run that no rehearsal runs."""
    return tuple(name for name, asked in NOT_REHEARSED if asked(run))
