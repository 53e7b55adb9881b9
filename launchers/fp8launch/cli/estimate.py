"""`fp8launch estimate`: parameters, memory per GPU and time of a step by term, FLOPs, GPU-hours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import click

from fp8launch.check.checker import check
from fp8launch.check.memory import run_estimate
from fp8launch.check.resolved_run import ResolvedRun, resolve_run
from fp8launch.cli import complete
from fp8launch.cli.names import recipe_named
from fp8launch.cli.output import (
    echo,
    eprint,
    json_option,
    print_problems,
    recipe_options,
    show_json,
    show_table,
    with_gpu,
    with_options,
)
from fp8launch.cli.predicted import predicted_as_json, show_step_time, speed_range, terms_as_json
from fp8launch.diagnostics import errors_in
from fp8launch.hardware.gpus import GPUS
from fp8launch.job.prepared import Prepared, prepare
from fp8launch.megatron.cost import Cost, Throughput, cost
from fp8launch.megatron.flops import why_not_counted
from fp8launch.megatron.memory import MIB, MemoryEstimate
from fp8launch.megatron.parameters import Parameters, parameters
from fp8launch.planning.step_time import StepTime, step_time

BAR = 30


@click.command()
@click.argument("recipe", metavar="RECIPE|RUN", shell_complete=complete.recipes)
@with_options(*recipe_options)
@click.option("--gpu", type=click.Choice(tuple(GPUS)), help="Estimate for this GPU instead of the recipe's.")
@click.option(
    "--tokens-per-second-per-gpu",
    "speed",
    type=click.FloatRange(min=0, min_open=True),
    help="Throughput in tokens/s/GPU, for GPU-hours.",
)
@json_option
def estimate(
    recipe: str, overrides: tuple[str, ...], nodes: int | None, gpu: str | None, speed: float | None, as_json: bool
) -> int:
    """Estimate parameters, memory of the fullest GPU, time of a step, FLOPs, tokens and GPU-hours of a run.

    Nothing runs. Exit code 0, also when the run does not fit; `check` makes that an error.
    """
    prepared = prepare(recipe_named(recipe), with_gpu(overrides, gpu), nodes)
    refused = errors_in(check(prepared, layers=("rules",)).problems)
    if refused:
        eprint(f"`check` refuses this run, so what is estimated need not hold: {refused[0].message}")
    estimated = [_estimated(part, steps, gpu, speed) for part, steps in _parts(prepared)]
    if as_json:
        show_json(_all_as_json(prepared, list(map(_as_json, estimated))))
        return 0
    for i, one in enumerate(estimated):
        if i:
            echo()
        if prepared.phases:
            phase = prepared.phases[i]
            echo(f"phase {phase.name}, iterations {phase.span}")
        _show(one)
    return 0


def _all_as_json(prepared: Prepared, each: list[dict[str, Any]]) -> dict[str, Any]:
    """A run as it is; of one with phases that which needs most memory, what all cost together, and each by itself."""
    if not prepared.phases:
        return each[0]
    fullest = max(each, key=_needed_mib)
    found = dict(fullest)
    for name in ("steps", "tokens", "gpu_hours"):
        values = [one[name] for one in each]
        found[name] = None if None in values else sum(values)
    found["gpu_hours_at_most"] = prepared.gpu_hours_at_most
    found["phases"] = []
    for phase, one in zip(prepared.phases, each, strict=True):
        found["phases"].append({"name": phase.name, "begin": phase.begin, "end": phase.end, **one})
    return found


def _needed_mib(one: dict[str, Any]) -> int:
    if not one["memory"]:
        return 0
    return int(one["memory"]["total_mib"])


def _parts(prepared: Prepared) -> list[tuple[Prepared, int | None]]:
    """What is estimated by itself, and its number of steps where that is not the whole training's."""
    if not prepared.phases:
        return [(prepared, None)]
    found: list[tuple[Prepared, int | None]] = []
    for part, phase in zip(prepared.parts, prepared.phases, strict=True):
        found.append((part, phase.end - phase.begin))
    return found


@dataclass(frozen=True)
class _Estimated:
    """What is known of a run, or of one of its phases, without running it."""

    prepared: Prepared
    run: ResolvedRun
    parameters: Parameters | None
    memory: MemoryEstimate | None
    step: StepTime | None
    cost: Cost


def _estimated(prepared: Prepared, steps: int | None, gpu: str | None, speed: float | None) -> _Estimated:
    run = resolve_run(prepared)
    args = {**run.defaults, **run.given}
    if steps:
        args["train_iters"] = steps
    world, batch = run.layout.world, run.layout.global_batch
    memory, step = None, None
    if run.is_estimated:
        step = step_time(args, world, batch, run.gpu)
    if run.is_estimated and run.gpu.memory_gib:
        memory = run_estimate(run)
    throughput = _throughput(prepared, gpu, speed)
    if throughput is None and step is not None:
        throughput = Throughput(step.tokens_per_s_per_gpu, f"predicted, {speed_range(step)}", known=False)
    return _Estimated(prepared, run, parameters(args, world), memory, step, cost(args, world, batch, throughput))


def _throughput(prepared: Prepared, what_if: str | None, stated: float | None) -> Throughput | None:
    """What is known of this run's speed: what the user says, else the reference published for the recipe's own GPU."""
    if stated is not None:
        return Throughput(stated, "stated by --tokens-per-second-per-gpu", known=True)
    reference = prepared.loaded.recipe.reference
    if reference is None or what_if is not None:
        return None
    basis = f"published for {reference.gpus} GPUs: {reference.source}"
    return Throughput(reference.tokens_per_s_per_gpu, basis, known=True)


# --- JSON -----------------------------------------------------------------------------------------------------------


def _as_json(one: _Estimated) -> dict[str, Any]:
    prepared, run, counted, memory, costs = one.prepared, one.run, one.parameters, one.memory, one.cost
    return {
        "recipe": prepared.loaded.recipe.name,
        "gpu": run.gpu.name,
        "gpus": run.layout.world,
        "parameters": counted
        and {
            "total": counted.total,
            "active": counted.active,
            "active_without_embedding": counted.multiplied,
            "per_stage": list(counted.per_stage),
            "padded_vocab": counted.padded_vocab,
        },
        "memory": memory
        and {
            "device_mib": round(run.gpu.memory_gib * 1024),
            "fits": memory.least <= run.gpu.memory_gib * 1024 * MIB,
            "peak_allocated_mib": round(memory.peak / MIB),
            "total_mib": round(memory.total / MIB),
            "uncertainty": memory.uncertainty,
            "stage": memory.stage,
            "stages": memory.stages,
            "terms": [
                {"name": t.name, "bytes": round(t.bytes), "certainty": t.certainty, "note": t.note}
                for t in memory.terms
            ],
        },
        "predicted": one.step and predicted_as_json(one.step, memory),
        "terms": one.step and terms_as_json(one.step),
        "flop_per_token": costs.flops_per_token,
        "tokens_per_step": costs.tokens_per_step,
        "steps": costs.steps,
        "tokens": costs.tokens,
        "throughput": costs.throughput
        and {
            "tokens_per_s_per_gpu": costs.throughput.tokens_per_s_per_gpu,
            "basis": costs.throughput.basis,
            "known": costs.throughput.known,
        },
        "step_time_ms": costs.step_time_s and costs.step_time_s * 1000,
        "gpu_hours": costs.gpu_hours,
        "gpu_hours_at_most": prepared.gpu_hours_at_most,
    }


# --- text -----------------------------------------------------------------------------------------------------------


def _show(one: _Estimated) -> None:
    prepared, run, counted, memory, costs = one.prepared, one.run, one.parameters, one.memory, one.cost
    if counted is None:
        reason = why_not_counted(run.arguments) or "the layers do not divide as asked, or a size is missing"
        eprint(f"{reason}, so parameters, memory and the time of a step are not estimated")
    else:
        _show_parameters(run, counted)
    if memory is not None:
        _show_memory(run, memory)
    if one.step is not None:
        show_step_time(one.step)
        echo()
    _show_cost(prepared, run, costs)
    if memory is not None:
        from fp8launch.check.memory import problems

        print_problems(p for p in problems(run) if not run.silences(p))


def _show_parameters(run: ResolvedRun, counted: Parameters) -> None:
    rows = [("total", f"{counted.total:,}", _billions(counted.total))]
    if counted.active != counted.total:
        rows.append(("active for one token", f"{counted.active:,}", _billions(counted.active)))
        if counted.multiplied != counted.active:
            rows.append(("without the embedding", f"{counted.multiplied:,}", _billions(counted.multiplied)))
    if len(counted.per_stage) > 1 or counted.per_stage[0] != counted.total:
        for count, ranks in _runs(counted.per_stage):
            where = "on a GPU"
            if len(ranks) > 1:
                where = f"on a GPU of stages {ranks[0]} to {ranks[-1]}"
            elif run.layout.pp > 1:
                where = f"on a GPU of stage {ranks[0]}"
            rows.append((where, f"{count:,}", _billions(count)))
    show_table(("parameters", "(count)", "(10^9)"), rows)
    echo()


def _runs(counts: tuple[int, ...]) -> list[tuple[int, list[int]]]:
    """Neighbouring stages of the same size together."""
    found: list[tuple[int, list[int]]] = []
    for rank, count in enumerate(counts):
        if found and found[-1][0] == count:
            found[-1][1].append(rank)
        else:
            found.append((count, [rank]))
    return found


def _show_memory(run: ResolvedRun, memory: MemoryEstimate) -> None:
    device = run.gpu.memory_gib * 1024 * MIB
    rows = []
    for term in memory.terms:
        rows.append((term.name, _gib(term.bytes), _bar(term.bytes, device), str(term.certainty), term.note))
    rows.append(("PyTorch's max allocated", _gib(memory.peak), _bar(memory.peak, device), "", "all but the reserves"))
    share = f"{memory.total / device:.0%} of {_gib(device)} GiB, ± {memory.uncertainty:.0%}"
    rows.append(("total", _gib(memory.total), _bar(memory.total, device), "", share))
    title = f"memory of one {run.gpu.name}"
    if memory.stages > 1:
        title += f", pipeline stage {memory.stage} of 0 to {memory.stages - 1}"
    show_table((title, "(GiB)", "of the device", "", "what"), rows)
    echo()


def _show_cost(prepared: Prepared, run: ResolvedRun, costs: Cost) -> None:
    rows = []
    if costs.flops_per_token:
        rows.append(("FLOP per token", f"{costs.flops_per_token:.4g}", "as Megatron counts them"))
    if costs.tokens_per_step:  # else no length of a sequence is stated
        batch = f"{run.layout.global_batch} sequences of {costs.tokens_per_step // run.layout.global_batch}"
        rows.append(("tokens per step", f"{costs.tokens_per_step:,}", batch))
    if costs.tokens:
        rows.append(("tokens in all", f"{costs.tokens:,}", f"{costs.steps:,} steps"))
    if costs.throughput is not None:
        rows.append(("tokens/s/GPU", f"{costs.throughput.tokens_per_s_per_gpu:,.0f}", costs.throughput.basis))
    if costs.step_time_s is not None:
        rows.append(("seconds per step", f"{costs.step_time_s:.3g}", f"on {costs.gpus} GPUs"))
    if costs.gpu_hours is not None:
        rows.append(("GPU-hours", f"{costs.gpu_hours:,.2f}", "training steps only"))
    if prepared.gpu_hours_at_most:
        limit = f"the time limit of {prepared.loaded.recipe.resources.time}"
        if prepared.jobs_at_most > 1:
            limit = f"{prepared.jobs_at_most} times {limit}"
        limit = f"{costs.gpus} GPUs for {limit}"
        rows.append(("GPU-hours at most", f"{prepared.gpu_hours_at_most:,.2f}", limit))
    show_table(("cost", "(value)", "rests on"), rows)


def _bar(size: float, whole: float) -> str:
    """A bar that is full at the size of the device, and open-ended beyond it."""
    length = round(BAR * size / whole)
    if length > BAR:
        return "█" * BAR + "▶"
    return "█" * length


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f}"


def _billions(count: int) -> str:
    return f"{count / 1e9:.2f}"
