"""A predicted step as tables and JSON, for `estimate` and `plan`."""

from __future__ import annotations

from typing import Any

from fp8launch.cli.output import echo, show_table
from fp8launch.megatron.memory import MemoryEstimate
from fp8launch.planning.step_time import StepTime

BAR = 30


def predicted_as_json(step: StepTime, memory: MemoryEstimate | None) -> dict[str, Any]:
    """What a script reads of a prediction: milliseconds, tokens/s and TFLOP/s per GPU, GiB, and the uncertainty."""
    least, most = step.range_ms
    return {
        "step_time_ms": step.ms,
        "step_time_ms_least": least,
        "step_time_ms_most": most,
        "step_time_ms_slow_host": step.slow_host_ms,
        "tokens_per_s_per_gpu": step.tokens_per_s_per_gpu,
        "tflops_per_gpu": step.tflops_per_gpu,
        "peak_memory_gib": memory and memory.peak / 2**30,
        "uncertainty": step.uncertainty,
    }


def speed_range(step: StepTime) -> str:
    """By how much the real tokens/s may differ from the predicted."""
    if not step.depends_on_host:
        return f"± {step.uncertainty:.0%}"
    return f"{step.ms / step.range_ms[1] - 1:.0%} to +{step.uncertainty:.0%}"


def terms_as_json(step: StepTime) -> list[dict[str, Any]]:
    """The terms of a step, which add up to its time."""
    return [{"name": term.name, "ms": term.ms, "note": term.note} for term in step.terms]


def show_step_time(step: StepTime) -> None:
    """Print the terms of a step, the largest first."""
    rows = []
    for term in sorted(step.terms, key=lambda term: -term.ms):
        share = term.ms / step.ms
        rows.append((term.name, f"{term.ms:,.1f}", f"{share:.1%}", "█" * round(BAR * share), term.note))
    tflops = "" if step.tflops_per_gpu is None else f", {step.tflops_per_gpu:,.0f} TFLOP/s/GPU"
    total = f"{step.tokens_per_s_per_gpu:,.0f} tokens/s/GPU{tflops}, {speed_range(step)}"
    rows.append(("step", f"{step.ms:,.1f}", "", "", total))
    show_table(("time of a step", "(ms)", "share", "", "of what"), rows, drop=("",))
    if step.depends_on_host:
        host = "A slow host"
        if any(term.name == "host" for term in step.terms):
            host = "The host"
        least, most = step.range_ms
        echo(f"{host} limits this step: {least:,.0f} to {most:,.0f} ms on the hosts measured.")
