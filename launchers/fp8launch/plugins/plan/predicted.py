"""A predicted step as text and JSON, for `estimate` and `plan`."""

from __future__ import annotations

from functools import partial
from typing import Any

from fp8launch.check.resolved_run import ResolvedRun
from fp8launch.cli.output import echo, show_table
from fp8launch.cluster.profile import Cluster
from fp8launch.megatron.model_arithmetic import why_not_counted
from fp8launch.plugins.estimate.cost import Throughput
from fp8launch.plugins.estimate.estimates import Prediction
from fp8launch.plugins.estimate.memory import MemoryEstimate
from fp8launch.plugins.plan.releases import RELEASE, older_releases, slower
from fp8launch.plugins.plan.speeds import DEVICES, Speeds
from fp8launch.plugins.plan.step_time import NOTICEABLE, StepTime, predict_step

BAR = 30


def estimate_step(run: ResolvedRun, memory: MemoryEstimate | None, cluster: Cluster | None) -> Prediction | str:
    """Predict the step time of a run on a cluster for `estimate`. Return a sentence if there is no prediction."""
    if not run.is_estimated:
        return "the speed model covers Megatron-Core with Transformer Engine's layers only"
    if run.gpu.name not in DEVICES:
        return f"the speed model has no rates for {run.gpu.name}"
    step = predict_step(run)
    if step is None:
        return why_not_counted(run.arguments) or "a size of the model is missing, or the layers do not divide"
    basis = f"predicted, {speed_range(step)}"
    return Prediction(
        fields={
            "predicted": predicted_as_json(step, memory),
            "terms": terms_as_json(step),
            "basis": basis_as_json(step),
        },
        print_text=partial(show_step_time, step),
        throughput=Throughput(step.tokens_per_s_per_gpu, basis, known=False),
        calibrated=step.speeds.calibration is not None and step.speeds.calibration.changes,
    )


def predicted_as_json(step: StepTime, memory: MemoryEstimate | None) -> dict[str, Any]:
    """Return a prediction as JSON: milliseconds, tokens/s and TFLOP/s per GPU, GiB, and the relative uncertainty."""
    least, most = step.range_ms
    return {
        "step_time_ms": step.ms,
        "step_time_ms_least": least,
        "step_time_ms_most": most,
        "step_time_ms_slow_host": step.slow_host_ms,
        "tokens_per_s_per_gpu": step.tokens_per_s_per_gpu,
        "tflops_per_gpu": step.tflops_per_gpu,
        "peak_memory_gib": memory and memory.peak / 2**30,
        "step_time_ms_untrained_router": step.first_ms,
        "uncertainty": step.uncertainty,
    }


def basis_as_json(step: StepTime) -> dict[str, Any]:
    """Return what a prediction rests on: the release, the speed of older ones, and how it differs from known runs."""
    return {
        "release": RELEASE,
        "extrapolations": step.extrapolations,
        "older_releases": _older_as_json(step),
        **speeds_as_json(step.speeds),
    }


def speeds_as_json(known: Speeds) -> dict[str, Any]:
    """Return the links that a prediction assumes, and the rates of the cluster that it uses."""
    links = known.device.links
    return {
        "links": {"gbit_per_gpu": 8 * links.network, "nvlink_domain": links.domain},
        "calibration": known.calibration and known.calibration.as_json(),
    }


def speeds_in_words(known: Speeds) -> list[str]:
    """Return sentences on what a cluster profile changes in a prediction."""
    found, links = [], known.device.links
    if links != DEVICES[known.gpu.name].links:
        size = f"NVLink domains of {links.domain} GPUs"
        found.append(f"Links of the cluster profile: {8 * links.network:g} Gbit/s per GPU, {size}.")
    if known.calibration is not None:
        found.append(known.calibration.in_words)
    return found


def _older_as_json(step: StepTime) -> list[dict[str, Any]]:
    """Return the speed in older releases of the NeMo container, oldest first."""
    terms = {term.name: term.ms for term in step.terms}
    found = []
    for release in older_releases(step.situation.gpu, step.situation.kind):
        speed = step.ms / slower(terms, release, step.unfused_ms)
        rate = speed * step.tokens_per_s_per_gpu
        found.append({"release": release.name, "speed": speed, "tokens_per_s_per_gpu": rate, "source": release.source})
    return found


def speed_range(step: StepTime) -> str:
    """Return by how much the real tokens/s may differ from the prediction."""
    if not step.depends_on_host:
        return f"± {step.uncertainty:.0%}"
    return f"{step.ms / step.range_ms[1] - 1:.0%} to +{step.uncertainty:.0%}"


def terms_as_json(step: StepTime) -> list[dict[str, Any]]:
    """Return the terms of a step, which add up to its time."""
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
    show_table(("step time", "(ms)", "share", "", "detail"), rows, drop=("",))
    echo(f"Predicted for NeMo {RELEASE}. The JSON output has factors for older releases.")
    for sentence in speeds_in_words(step.speeds):
        echo(sentence)
    if step.extrapolations:
        echo(f"Extrapolated: {step.extrapolations[0]}.")
        for reason in step.extrapolations[1:]:
            echo(f"  and {reason}.")
    if step.first_ms is not None and step.first_ms > (1 + NOTICEABLE) * step.ms:
        echo(f"Until the router is trained, a step takes up to {step.first_ms:,.0f} ms.")
    if step.depends_on_host:
        host = "A slow host"
        if any(term.name == "host" for term in step.terms):
            host = "The host"
        least, most = step.range_ms
        echo(f"{host} limits this step: {least:,.0f} to {most:,.0f} ms on the hosts measured.")
