"""Rules of `check` that need a predicted step time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from fp8launch.check.resolved_run import ResolvedRun
from fp8launch.check.rule import Finding, rule
from fp8launch.diagnostics import UserError
from fp8launch.hardware.quantization import DEFAULT_RECIPE
from fp8launch.job.build_job import stop_before
from fp8launch.megatron.model_arithmetic import steps_of_run
from fp8launch.wording import counted

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


# A published speed was measured with other software and on another cluster.
KNOWN_DOUBT = 0.1


@rule(
    "time-limit-too-short",
    "warning",
    source="megatron/training/training.py checkpoint_and_decide_exit; the speed model",
)
def time_limit_too_short(run: ResolvedRun) -> Iterator[Finding]:
    """Warn about a run that is predicted to lose its training at the time limit.

    A run with `checkpoint.dir` and `checkpoint.interval` saves before the limit (`survive.stop_before`), which helps
    unless a single step takes longer.
    """
    recipe = run.loaded.recipe
    limit = 3600 * recipe.resources.hours
    leaves = 60 * run.integer("exit_duration_in_mins")
    if not limit or not run.is_estimated or run.on("skip_train") or 0 < leaves < limit or run.on("exit_signal_handler"):
        return
    steps = steps_of_run(run.arguments, run.layout.global_batch)
    speed = _seconds_per_step(run) if steps else None
    if not steps or speed is None:
        return
    seconds, least, basis = speed
    where = run.loaded.where("resources", "time")
    if recipe.goes_on:
        margin = stop_before(recipe)
        # The job rounds the time until it leaves down to minutes.
        if least > margin + 60:
            message = (
                f"a step takes {seconds:,.0f} s ({basis}), but the run starts to save {margin} s before its time "
                "limit: the limit may end it before that, and the iterations since its last checkpoint are lost"
            )
            fix = (
                f"set survive.stop_before to {2 * math.ceil(seconds)} or more; it counts up to a quarter of "
                "resources.time"
            )
            yield Finding(message, where, fix)
        return
    interval = run.integer("save_interval")
    saves = run.on("save")
    first = min(interval or steps, steps) if saves else steps
    if first * least <= limit or (saves and run.on("non_persistent_save_interval")):
        return
    what = f"the first checkpoint, after {counted(first, 'iteration')}," if saves else counted(first, "iteration")
    lost = "nothing is saved by then" if saves else "the run saves no checkpoints"
    message = (
        f"{what} {'needs' if saves or first == 1 else 'need'} {_duration(first * seconds)} ({seconds:.3g} s each, "
        f"{basis}), but resources.time {recipe.resources.time} ends the run after about {int(limit / seconds):,}: "
        f"{lost}, so its training is lost"
    )
    fix = (
        f"set resources.time to more than {_duration(first * seconds)}, or set checkpoint.dir and checkpoint.interval: "
        "such a run saves before its time limit, and continues from there (survive.attempts, `fp8launch resume`)"
    )
    yield Finding(message, where, fix)


def _seconds_per_step(run: ResolvedRun) -> tuple[float, float, str] | None:
    """Return the seconds of a step as `estimate` shows them, the least that they may be, and what they rest on."""
    from fp8launch.plugins.estimate.estimates import quoted_throughput
    from fp8launch.plugins.plan.calibration import stored_rates

    try:
        quoted = quoted_throughput(run.loaded)
        if quoted is not None and (run.cluster is None or stored_rates(run.cluster, run.gpu) is None):
            tokens = run.layout.global_batch * run.integer("seq_length")
            seconds = tokens / (quoted.tokens_per_s_per_gpu * run.layout.world)
            return seconds, (1 - KNOWN_DOUBT) * seconds, quoted.basis.partition(":")[0]
        # The speed model is slow to import.
        from fp8launch.plugins.plan.predicted import speed_range
        from fp8launch.plugins.plan.step_time import predict_step

        step = predict_step(run)
    except UserError:
        return None  # as in `fp8_experts_slower`
    return None if step is None else (step.ms / 1000, step.range_ms[0] / 1000, f"predicted, {speed_range(step)}")


def _duration(seconds: float) -> str:
    if seconds < 7200:
        return f"{seconds / 60:,.0f} minutes"
    hours = seconds / 3600
    return f"{hours:,.0f} hours" if hours >= 100 else f"{hours:.1f} hours"
