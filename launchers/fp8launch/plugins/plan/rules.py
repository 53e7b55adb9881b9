"""Rules of `check` that need a predicted step time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fp8launch.check.resolved_run import ResolvedRun
from fp8launch.check.rule import Finding, rule
from fp8launch.diagnostics import UserError
from fp8launch.hardware.quantization import DEFAULT_RECIPE

# FP8 is reported as slower than bf16 below this share of the speed of bf16, on GPUs with at least this many experts.
# 64 experts were measured, and NVIDIA publishes FP8 recipes with up to 32.
MUCH_SLOWER = 0.9
MANY_EXPERTS = 33


@rule("gpu-never-measured", "warning", source="docs/gpus.md; benchmarks/plan/accuracy.md")
def gpu_never_measured(run: ResolvedRun) -> Iterator[Finding]:
    """Warn about predictions for a GPU on which no run was measured."""
    if not run.gpu.measured:
        message = (
            f"no run on {run.gpu.name} was measured: its memory and peaks are NVIDIA's preliminary figures, and "
            "predictions assume the efficiency of Blackwell"
        )
        fix = "measure a short run before you rely on predictions of memory or time"
        yield Finding(message, run.loaded.where("resources", "gpu"), fix)


@rule("fp8-experts-slower", "warning", source="benchmarks/h200/layouts.md; the speed model")
def fp8_experts_slower(run: ResolvedRun) -> Iterator[Finding]:
    """Warn about quantized experts that are predicted to wait for the host to launch their kernels."""
    experts = run.integer("num_experts") // max(run.layout.ep, 1)
    if not run.quantized or not run.is_estimated or experts < MANY_EXPERTS:
        return
    # Every check imports this module, but few runs reach this point. The speed model is slow to import.
    from fp8launch.plugins.plan.step_time import predict_step

    in_bf16 = replace(run, given={**run.given, **dict.fromkeys(DEFAULT_RECIPE)})
    try:
        quantized, plain = predict_step(run), predict_step(in_bf16)
    except UserError:
        return  # the cluster's rates cannot be read, which `estimate` and `plan` report
    if quantized is None or plain is None:
        return
    speed = plain.ms / quantized.ms
    # A prediction as uncertain as it is for some models cannot tell which precision is faster.
    if speed >= MUCH_SLOWER or speed * (1 + quantized.uncertainty) >= 1:
        return
    message = (
        f"{run.precision} is predicted to run at {speed:.2f} times the speed of bf16: the host "
        f"launches kernels that quantize the inputs of each of {experts} experts of a GPU. Measured on two H200 with 64"
        " of them, Qwen3 30B-A3B at 12 layers: tensorwise 0.71, blockwise 0.85, delayed 0.91 times"
    )
    fix = "use bf16, a larger micro batch, or a larger ep; `fp8launch estimate` shows the time of the host"
    yield Finding(message, run.where(*DEFAULT_RECIPE, "num_experts"), fix)
