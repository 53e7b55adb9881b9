"""Check what is recomputed or offloaded, for what ends in the first backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fp8launch.check.resolved_run import ResolvedRun
from fp8launch.check.rule import Finding, rule
from fp8launch.megatron.dtype_sizes import recomputed_modules


@rule("fp8-recompute-mlp-bias", "error", source="transformer_engine/pytorch/distributed.py:271 (2.20.2), H200")
def recomputed_mlps_return_no_bias(run: ResolvedRun) -> Iterator[Finding]:
    """With a bias beside its output the MLP is computed again more often than forward (pop from empty list)."""
    if not run.quantized or not run.uses_te or "mlp" not in recomputed_modules(run.arguments):
        return
    if run.on("num_experts") or ("add_bias_linear" not in run.given and not run.engine.covers("megatron_lm")):
        return
    if run.on("add_bias_linear"):
        message = f"recompute_modules mlp cannot be used in {run.precision} with biases of linear layers"
        yield Finding(
            message, run.where("recompute_modules", "add_bias_linear"), "set disable_bias_linear, or remove mlp"
        )


@rule(
    "offload-recomputed-input",
    "error",
    source="megatron/core/transformer/transformer_layer.py:705 (0.19; 690 in 0.18, 653 in 0.17), H200",
)
def recomputed_layers_keep_their_input(run: ResolvedRun) -> Iterator[Finding]:
    """Offloading of attn_norm frees the layer's input, which full recompute reads: an illegal memory access. Without
    latent attention the norm is part of the linear layer after it, and attn_norm offloads nothing."""
    offloaded: Any = run.value("offload_modules") or ()
    if not run.on("fine_grained_activation_offloading") or "attn_norm" not in offloaded:
        return
    if run.on("multi_latent_attention") and run.value("recompute_granularity") == "full":
        message = "offload_modules attn_norm frees what full recompute reads again: an illegal memory access"
        fix = "remove attn_norm from offload_modules, or use selective recompute"
        yield Finding(message, run.where("offload_modules", "recompute_granularity"), fix)
