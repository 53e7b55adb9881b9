"""Advice on whether FP8 pays off, from published measurements."""

from __future__ import annotations

from collections.abc import Iterator

from fp8launch.check.resolved_run import ResolvedRun
from fp8launch.check.rule import Finding, rule

LEAST_HIDDEN = 1024


@rule(
    "fp8-small-batch",
    "warning",
    source="benchmark of torchao's FP8 on B200 (2025): plateaus at batch 2 or less; Megatron on H200 does not "
    "(benchmarks/h200/NOTES.md)",
)
def one_gpu_has_a_batch(run: ResolvedRun) -> Iterator[Finding]:
    if run.quantized and run.layout.world == 1 and run.layout.global_batch <= 2:
        message = (
            f"{run.precision} on one GPU with a global batch of {run.layout.global_batch}: in a benchmark of "
            "torchao's FP8 such runs stopped learning; with Megatron on an H200 they learned as well as bf16, at "
            "batch 1, 2 and 4"
        )
        fix = (
            "compare the loss with a bf16 run on your data; if it agrees, silence this warning with `silence: "
            "{fp8-small-batch: reason}`"
        )
        yield Finding(message, run.where("global_batch_size", "micro_batch_size"), fix)


@rule("fp8-small-model", "warning", source="FSDP2 codebase's FP8 page: marginal below a width of about 1024")
def layers_are_wide_enough(run: ResolvedRun) -> Iterator[Finding]:
    hidden = run.integer("hidden_size")
    if run.quantized and 0 < hidden < LEAST_HIDDEN:
        message = (
            f"{run.precision} gains little with hidden_size {hidden}: quantization takes the time that small matrix "
            "products save"
        )
        yield Finding(message, run.where("hidden_size"), f"use bf16 for models with a hidden_size below {LEAST_HIDDEN}")


@rule(
    "delayed-bf16-layers",
    "error",
    source="megatron/core/transformer/transformer_config.py:1401; megatron/core/fp8_utils.py:825",
    says="Delayed scaling does not support first / last layer in BF16",
)
def delayed_keeps_no_bf16_layers(run: ResolvedRun) -> Iterator[Finding]:
    if run.precision == "delayed" and run.on("first_last_layers_bf16"):
        message = "delayed scaling cannot keep first or last layers in bf16: its amax history covers all layers"
        yield Finding(message, run.where("first_last_layers_bf16"), "remove precision.bf16_layers, or use tensorwise")
