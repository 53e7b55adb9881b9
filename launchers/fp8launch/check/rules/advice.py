"""Advice on whether FP8 pays off, from published measurements."""

from __future__ import annotations

from collections.abc import Iterator

from fp8launch.check.resolved_run import ResolvedRun
from fp8launch.check.rule import Finding, rule
from fp8launch.hardware.quantization import DEFAULT_RECIPE

LEAST_HIDDEN = 1024
# FP8 is told to be slower than bf16 below this share of its predicted speed, with as many experts on a GPU: measured
# were 64, and NVIDIA publishes FP8 with up to 32.
MUCH_SLOWER = 0.9
MANY_EXPERTS = 33
# A prediction that may be off by more, as those of hybrids are, does not tell which is faster.
MOST_UNCERTAIN = 0.2


@rule(
    "fp8-small-batch",
    "warning",
    source="benchmark of torchao's FP8 on B200 (2025): plateaus at batch 2 or less; Megatron on H200 does not "
    "(benchmarks/h200/numerics.md)",
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


@rule("fp8-experts-slower", "warning", source="benchmarks/h200/layouts.md; fp8launch.planning")
def experts_gain_from_quantization(run: ResolvedRun) -> Iterator[Finding]:
    """Quantized experts that wait for the host to launch their kernels, by the prediction of `estimate`."""
    experts = run.integer("num_experts") // max(run.layout.ep, 1)
    if not run.quantized or not run.is_estimated or experts < MANY_EXPERTS:
        return
    # Only mixtures of experts pay for this import.
    from fp8launch.planning.step_time import step_time

    world, batch = run.layout.world, run.layout.global_batch
    in_bf16 = {**run.arguments, **dict.fromkeys(DEFAULT_RECIPE)}
    quantized, plain = (step_time(args, world, batch, run.gpu) for args in (run.arguments, in_bf16))
    if quantized is None or plain is None or quantized.uncertainty > MOST_UNCERTAIN:
        return
    speed = plain.ms / quantized.ms
    if speed >= MUCH_SLOWER:
        return
    message = (
        f"{run.precision} is predicted to run at {speed:.2f} times the speed of bf16: the host "
        f"launches kernels that quantize the inputs of each of {experts} experts of a GPU. Measured on two H200 with 64"
        " of them, Qwen3 30B-A3B at 12 layers: tensorwise 0.71, blockwise 0.85, delayed 0.91 times"
    )
    fix = "use bf16, a larger micro batch, or a larger ep; `fp8launch estimate` shows the time of the host"
    yield Finding(message, run.where(*DEFAULT_RECIPE, "num_experts"), fix)
