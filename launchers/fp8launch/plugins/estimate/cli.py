"""`fp8launch estimate`: estimate parameters, memory and step time by term, FLOPs and GPU-hours."""

from __future__ import annotations

import itertools

import click

from fp8launch.check.checker import check
from fp8launch.check.resolved_run import ResolvedRun
from fp8launch.cli import complete
from fp8launch.cli.output import (
    FiniteRange,
    cluster_option,
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
from fp8launch.cluster.profile import load_cluster
from fp8launch.diagnostics import errors_in
from fp8launch.hardware.gpus import GPUS
from fp8launch.job.prepared import prepare
from fp8launch.megatron.model_arithmetic import why_not_counted
from fp8launch.megatron.parameters import Parameters
from fp8launch.plugins.estimate.estimates import Estimate, estimate_run, of_length, run_costs
from fp8launch.plugins.estimate.estimates import as_json as estimate_as_json
from fp8launch.plugins.estimate.fit import problems
from fp8launch.plugins.estimate.memory import LIMIT, MIB, MemoryEstimate
from fp8launch.rundir.names import recipe_named
from fp8launch.wording import counted

BAR = 30


@click.command()
@click.argument("recipe", metavar="RECIPE|RUN", shell_complete=complete.recipes)
@with_options(*recipe_options)
@click.option("--gpu", type=click.Choice(tuple(GPUS)), help="Estimate for this GPU instead of the recipe's.")
@click.option(
    "--tokens-per-second-per-gpu",
    "speed",
    type=FiniteRange(min=0, min_open=True),
    help="Throughput in tokens/s/GPU, for GPU-hours.",
)
@click.option(
    "--tokens", type=FiniteRange(min=0, min_open=True), help="Tokens to train instead of the recipe's, such as 15e12."
)
@cluster_option
@json_option
def estimate(
    recipe: str,
    overrides: tuple[str, ...],
    nodes: int | None,
    gpu: str | None,
    speed: float | None,
    tokens: float | None,
    cluster: str | None,
    as_json: bool,
) -> int:
    """Estimate a run's parameters, memory on the fullest GPU, step time, FLOPs, tokens and GPU-hours.

    Nothing runs. The exit code is 0 even if the run does not fit; `check` reports that as an error.
    """
    profile = load_cluster(cluster)
    prepared = prepare(recipe_named(recipe, say=eprint), with_gpu(overrides, gpu), nodes)
    refused = errors_in(check(prepared, profile, layers=("rules",)).problems)
    if refused:
        eprint(f"`check` refuses this run, so the estimate may be wrong: {refused[0].message}")
    estimated = estimate_run(prepared, gpu, speed, profile)
    if tokens is not None:
        estimated = of_length(estimated, tokens)
    costs = run_costs(estimated, profile)
    if as_json:
        fields = {"run_cost": None, "run_cost_reason": costs} if isinstance(costs, str) else costs.fields
        show_json({**estimate_as_json(prepared, estimated), **fields})
        return 0
    for i, one in enumerate(estimated):
        if i:
            echo()
        if prepared.phases:
            phase = prepared.phases[i]
            echo(f"phase {phase.name}, iterations {phase.span}")
        _show(one)
    if not isinstance(costs, str):
        echo()
        costs.print_text()
    elif cluster is not None or tokens is not None:
        eprint(f"No cost and finish date: {costs}")
    return 0


def _show(one: Estimate) -> None:
    run, counted, memory = one.run, one.parameters, one.memory
    if counted is None:
        reason = why_not_counted(run.arguments) or "the layers cannot be divided as requested, or a size is missing"
        eprint(f"{reason}, so parameters, memory and step time are not estimated")
    else:
        _show_parameters(run, counted)
    if memory is not None:
        _show_memory(run, memory)
    for prediction in one.predictions.values():
        prediction.print_text()
        echo()
    _show_cost(one)
    if memory is not None:
        print_problems(p for p in problems(run) if not run.silences(p))


def _show_parameters(run: ResolvedRun, counted: Parameters) -> None:
    rows = [("total", f"{counted.total:,}", _billions(counted.total))]
    if counted.active != counted.total:
        rows.append(("active for one token", f"{counted.active:,}", _billions(counted.active)))
        if counted.multiplied != counted.active:
            rows.append(("without the embedding", f"{counted.multiplied:,}", _billions(counted.multiplied)))
    if len(counted.per_stage) > 1 or counted.per_stage[0] != counted.total:
        for count, stages in itertools.groupby(enumerate(counted.per_stage), key=lambda stage: stage[1]):
            ranks = [rank for rank, _ in stages]
            where = "on a GPU"
            if len(ranks) > 1:
                where = f"on a GPU of stages {ranks[0]} to {ranks[-1]}"
            elif run.layout.pp > 1:
                where = f"on a GPU of stage {ranks[0]}"
            rows.append((where, f"{count:,}", _billions(count)))
    show_table(("parameters", "(count)", "(10^9)"), rows)
    echo()


def _show_memory(run: ResolvedRun, memory: MemoryEstimate) -> None:
    device = run.gpu.memory_gib * 1024 * MIB
    rows = []
    for term in memory.terms:
        rows.append((term.name, _gib(term.bytes), _bar(term.bytes, device), str(term.certainty), term.note))
    rows.append(("PyTorch's max allocated", _gib(memory.peak), _bar(memory.peak, device), "", "all but the reserves"))
    certainty = f"± {memory.uncertainty:.0%}" if run.gpu.measured else "never measured"
    share = f"{memory.total / device:.0%} of {_gib(device)} GiB, {certainty}"
    if not memory.fits(run.gpu):
        share += f", above the limit of {LIMIT:.0%}"
    rows.append(("total", _gib(memory.total), _bar(memory.total, device), "", share))
    title = f"memory of one {run.gpu.name}"
    if memory.stages > 1:
        title += f", pipeline stage {memory.stage} of 0 to {memory.stages - 1}"
    show_table((title, "(GiB)", "of the device", "", "what"), rows)
    echo()


def _show_cost(one: Estimate) -> None:
    prepared, run, costs = one.prepared, one.run, one.cost
    rows = []
    if costs.flops_per_token:
        rows.append(("FLOP per token", f"{costs.flops_per_token:.4g}", "as Megatron counts them"))
    if costs.tokens_per_step:  # 0 if the recipe has no sequence length
        batch = f"{run.layout.global_batch} sequences of {costs.tokens_per_step // run.layout.global_batch}"
        rows.append(("tokens per step", f"{costs.tokens_per_step:,}", batch))
    if costs.tokens:
        rows.append(("tokens in all", f"{costs.tokens:,}", f"{costs.steps:,} steps"))
    if costs.throughput is not None:
        rows.append(("tokens/s/GPU", f"{costs.throughput.tokens_per_s_per_gpu:,.0f}", costs.throughput.basis))
    if costs.step_time_s is not None:
        rows.append(("seconds per step", f"{costs.step_time_s:.3g}", f"on {counted(costs.gpus, 'GPU')}"))
    if costs.gpu_hours is not None:
        rows.append(("GPU-hours", f"{costs.gpu_hours:,.2f}", "training steps only"))
    if one.gpu_hours_at_most:
        limit = f"the time limit of {prepared.loaded.recipe.resources.time}"
        if prepared.jobs_at_most > 1:
            limit = f"{prepared.jobs_at_most} times {limit}"
        if costs.gpu_hours is not None and costs.gpu_hours > one.gpu_hours_at_most:
            limit += ", less than the steps need"
        rows.append(("GPU-hours at most", f"{one.gpu_hours_at_most:,.2f}", f"{counted(costs.gpus, 'GPU')} for {limit}"))
    show_table(("cost", "(value)", "rests on"), rows)


def _bar(size: float, whole: float) -> str:
    """Return a bar that is full at the device's memory. An arrow marks memory beyond it."""
    length = round(BAR * size / whole)
    if length > BAR:
        return "█" * BAR + "▶"
    return "█" * length


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f}"


def _billions(count: int) -> str:
    return f"{count / 1e9:.2f}"
