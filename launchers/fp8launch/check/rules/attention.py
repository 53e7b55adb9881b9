"""Attention that Transformer Engine has no kernel for: the first step ends with "No dot product attention backend"."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fp8launch.check.resolved_run import ResolvedRun
from fp8launch.check.rule import Finding, rule
from fp8launch.megatron.model_arithmetic import head_width

_TE_ATTENTION = "transformer_engine/pytorch/attention/dot_product_attention"


def _cp_comm_types(run: ResolvedRun) -> list[str]:
    kinds: Any = run.value("cp_comm_type") or ["p2p"]
    return [kinds] if isinstance(kinds, str) else list(kinds)


def _sinks(run: ResolvedRun) -> bool:
    return run.uses_te and run.value("softmax_type") not in (None, "vanilla")


@rule("flash-attention-kernel", "error", source=f"{_TE_ATTENTION}/utils.py:831 and 1223 (2.20.2)")
def flash_attention_has_the_kernel(run: ResolvedRun) -> Iterator[Finding]:
    if not run.uses_te or run.value("attention_backend") != "flash":
        return
    if _sinks(run):
        message = f"FlashAttention does not support softmax_type {run.value('softmax_type')}"
        yield Finding(message, run.where("attention_backend", "softmax_type"), "set attention_backend to fused or auto")
    engine = run.software.transformer_engine
    if run.on("multi_latent_attention") and run.gpu.capability >= (10, 0) and engine and engine < (2, 20):
        message = "FlashAttention 2, the only one on Blackwell before Transformer Engine 2.20, does not support MLA"
        fix = "set attention_backend to fused or auto"
        yield Finding(message, run.where("attention_backend", "multi_latent_attention"), fix)
    for name in ("qk_clip", "log_max_attention_logit"):
        if run.on(name):
            message = f"FlashAttention does not return the largest logits, which {name} needs"
            fix = f"set attention_backend to auto, or remove {name}"
            yield Finding(message, run.where("attention_backend", name), fix)
            return


@rule("max-logit-cudnn", "error", source="transformer_engine/common/fused_attn (2.20.2): cuDNN 9.21, H200")
def cudnn_returns_the_largest_logits(run: ResolvedRun) -> Iterator[Finding]:
    engine, cuda = run.software.transformer_engine, run.software.cuda
    if not run.uses_te or not engine or engine < (2, 20) or not cuda or cuda[:2] != (13, 0):
        return
    # Unfused attention, which returns them too, has no context parallelism.
    fused_only = run.value("attention_backend") == "fused" or (
        run.value("attention_backend") in (None, "auto") and run.layout.cp > 1
    )
    for name in ("qk_clip", "log_max_attention_logit"):
        if fused_only and run.on(name):
            message = f"fused attention returns the largest logits, which {name} needs, from cuDNN 9.21 on"
            fix = f"set attention_backend to unfused with CP 1, use an image with CUDA 13.1 or newer, or remove {name}"
            yield Finding(message, run.where("attention_backend", name), fix)
            return


@rule("window-dropout", "error", source=f"{_TE_ATTENTION}/utils.py (2.20.2): get_attention_backend, sliding windows")
def fused_windows_drop_nothing(run: ResolvedRun) -> Iterator[Finding]:
    if not run.uses_te or run.value("attention_backend") != "fused" or not run.on("window_size"):
        return
    if "attention_dropout" not in run.given and not run.engine.covers("megatron_lm"):
        return  # the engine's model has a default of its own
    dropout = run.value("attention_dropout")
    if isinstance(dropout, float) and dropout > 0:
        message = f"fused attention has no sliding window with attention_dropout {dropout:g}"
        fix = "set `model: {attention_dropout: 0.0}`, or remove attention_backend"
        yield Finding(message, run.where("attention_dropout", "attention_backend", "window_size"), fix)


@rule("sinks-context-parallel", "error", source=f"{_TE_ATTENTION}/utils.py:1250 (2.20.2; 749 in 2.14, 959 in 2.16)")
def sinks_need_whole_heads(run: ResolvedRun) -> Iterator[Finding]:
    other = [kind for kind in _cp_comm_types(run) if kind != "a2a"]
    if _sinks(run) and run.layout.cp > 1 and other:
        message = (
            f"softmax_type {run.value('softmax_type')} does not support CP {run.layout.cp} with cp_comm_type {other[0]}"
        )
        # With a2a, the gradient of a learnable sink is CP times too large (advisory `sinks-a2a-grad`).
        fix = "set parallel.cp to 1"
        if run.value("softmax_type") != "learnable":
            fix += ", or cp_comm_type to a2a"
        yield Finding(message, run.where("softmax_type", "cp_comm_type", "context_parallel_size"), fix)


@rule("fused-head-width", "error", source="transformer_engine/common/fused_attn/fused_attn.cpp (2.18): head sizes")
def blackwell_has_the_head_width(run: ResolvedRun) -> Iterator[Finding]:
    width = head_width(run.arguments)
    if run.gpu.capability < (10, 0) or not run.uses_te or run.on("multi_latent_attention"):
        return
    if run.value("attention_backend") == "fused" and width > 128 and width != 256:
        message = f"cuDNN's fused attention does not train heads that are {width} wide on {run.gpu.name}"
        fix = "use attention_backend auto"
        yield Finding(message, run.where("attention_backend", "kv_channels"), fix)


@rule("unfused-context-parallel", "error", source=f"{_TE_ATTENTION}/dot_product_attention.py:2899, H200")
def context_parallel_attention_is_fused(run: ResolvedRun) -> Iterator[Finding]:
    if not run.uses_te or run.layout.cp == 1:
        return
    if run.value("attention_backend") == "unfused":
        message = f"Transformer Engine's unfused attention does not support CP {run.layout.cp}"
        fix = "set attention_backend to fused or auto, or parallel.cp to 1"
        yield Finding(message, run.where("attention_backend", "context_parallel_size"), fix)
    elif run.precision == "fp32":
        message = (
            f"Transformer Engine's fused attention has no fp32, and its unfused one does not support CP {run.layout.cp}"
        )
        yield Finding(message, run.where("context_parallel_size"), "set parallel.cp to 1, or use another precision")


@rule("window-context-parallel", "error", source=f"{_TE_ATTENTION}/context_parallel.py:5691; H200")
def windows_and_rings_exclude_each_other(run: ResolvedRun) -> Iterator[Finding]:
    ring = [kind for kind in _cp_comm_types(run) if kind in ("p2p", "a2a+p2p")]
    if run.uses_te and run.layout.cp > 1 and run.on("window_size") and ring:
        message = f"sliding window attention does not support CP {run.layout.cp} with cp_comm_type {ring[0]}"
        fix = "set cp_comm_type to a2a or all_gather, or parallel.cp to 1"
        yield Finding(message, run.where("window_size", "cp_comm_type", "context_parallel_size"), fix)


@rule("qk-layer-scaling", "error", source="megatron/core/extensions/transformer_engine.py:1812, H200")
def scaled_scores_have_their_variable(run: ResolvedRun) -> Iterator[Finding]:
    stated = run.env.get("NVTE_APPLY_QK_LAYER_SCALING", "0") not in ("", "0")
    if run.uses_te and run.on("apply_query_key_layer_scaling") and not stated:
        message = "apply_query_key_layer_scaling needs NVTE_APPLY_QK_LAYER_SCALING=1 with Transformer Engine"
        fix = "add `env: {NVTE_APPLY_QK_LAYER_SCALING: 1}`"
        yield Finding(message, run.where("apply_query_key_layer_scaling"), fix)


@rule("attention-head-width", "warning", source="cuDNN fused attention trains head widths up to 128; outcome not run")
def fused_attention_fits(run: ResolvedRun) -> Iterator[Finding]:
    width = head_width(run.arguments)
    blackwell = run.gpu.capability >= (10, 0)
    if (
        run.value("attention_backend") == "fused"
        and width > 128
        and not (blackwell or run.on("multi_latent_attention"))
    ):
        message = (
            f"attention_backend is fused and heads are {width} wide, but cuDNN may support training only up to 128"
        )
        yield Finding(message, run.where("attention_backend", "kv_channels"), "use attention_backend auto")


@rule("latent-l2-norm", "error", source="megatron/core/models/gpt/gpt_layer_specs.py:245 (0.19), H200")
def latent_attention_has_no_l2_norm(run: ResolvedRun) -> Iterator[Finding]:
    if run.on("multi_latent_attention") and run.on("qk_l2_norm"):
        message = "qk_l2_norm does not support multi_latent_attention"
        yield Finding(message, run.where("qk_l2_norm", "multi_latent_attention"), "remove qk_l2_norm")
