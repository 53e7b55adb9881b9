"""The command `fp8launch plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from fp8launch.cli import complete
from fp8launch.cli.output import echo, eprint, json_option, overrides_text, set_option, show_json, show_table
from fp8launch.cluster.profile import load_cluster
from fp8launch.hardware.gpus import GPUS, gpu_of_model
from fp8launch.plugins.estimate.memory import LIMIT
from fp8launch.plugins.plan.calibration import Rates, corrections, keep, measure, read_file
from fp8launch.plugins.plan.files import PlanFiles
from fp8launch.plugins.plan.inputs import is_model, precisions_of
from fp8launch.plugins.plan.plans import TOP, Plan, Planned, PlanRequest, plan_layouts
from fp8launch.plugins.plan.predicted import (
    basis_as_json,
    predicted_as_json,
    show_step_time,
    speed_range,
    terms_as_json,
)
from fp8launch.plugins.plan.search import not_varied
from fp8launch.plugins.plan.speeds import speeds
from fp8launch.plugins.plan.step_time import step_time_at
from fp8launch.plugins.plan.term_groups import difference
from fp8launch.plugins.plots.figures import require_drawable
from fp8launch.recipe.load import load_recipe
from fp8launch.rundir.names import recipe_named


@click.command()
@click.argument("recipe", metavar="RECIPE|MODEL|RUN", shell_complete=complete.recipes)
@set_option
@click.option("--gpu", "gpu_name", type=click.Choice([name for name in GPUS if name != "cpu"]),
              help="GPU type (default: the recipe's; h100 for a model).")  # fmt: skip
@click.option("--gpus", type=click.IntRange(min=1), help="Number of GPUs (default: the recipe's).")
@click.option("--nodes", type=click.IntRange(min=1), help="Number of nodes, instead of --gpus. Keeps the global batch.")
@click.option("--sequence", type=click.IntRange(min=1), help="Tokens per sequence.")
@click.option("--global-batch", type=click.IntRange(min=1), help="Sequences per step.")
@click.option("--precision", metavar="A,B", help="Precisions to compare (default: the recipe's).")
@click.option("--top", type=click.IntRange(min=1), default=TOP, show_default=True, help="Layouts to show.")
@click.option(
    "--sort", type=click.Choice(["speed", "memory"]), default="speed", show_default=True, help="What to rank by."
)
@click.option("--cluster", metavar="NAME", help="Cluster profile whose `network` has speed and NVLink domain.")
@click.option("--calibrate", is_flag=True,
              help="Measure this machine's GPU first, and keep its rates for the cluster profile.")  # fmt: skip
@click.option("--rates", type=click.Path(path_type=Path), metavar="FILE",
              help="Keep rates for the cluster profile that --calibrate's program measured elsewhere.")  # fmt: skip
@click.option("--write", type=click.Path(path_type=Path),
              help="Write the best layout as a recipe. With {} in the name: every layout, numbered.")  # fmt: skip
@click.option("--study", metavar="NAME",
              help="Write all layouts as recipes of a study, in the folder NAME-layouts.")  # fmt: skip
@click.option("--picture", type=click.Path(path_type=Path), metavar="FILE",
              help="Draw the layouts, their terms, and the time on more GPUs (.png, .svg, .pdf).")  # fmt: skip
@json_option
def plan(
    recipe: str,
    overrides: tuple[str, ...],
    gpu_name: str | None,
    gpus: int | None,
    nodes: int | None,
    sequence: int | None,
    global_batch: int | None,
    precision: str | None,
    top: int,
    sort: str,
    cluster: str | None,
    calibrate: bool,
    rates: Path | None,
    write: Path | None,
    study: str | None,
    picture: Path | None,
    as_json: bool,
) -> int:
    """Predict the fastest layouts of a recipe or model that fit the GPUs.

    \b
    fp8launch plan llama3_1_405b --gpu h100 --gpus 512
    fp8launch plan llama8b_fp8 --nodes 4 --write best.yaml

    RECIPE may be a recipe, bridge:NAME, or a model such as llama3_1_405b. Nothing runs. Each layout is a list of
    overrides for `--set`. The exit code is 1 if no layout fits.
    """
    if gpus is not None and nodes is not None:
        raise click.UsageError("--gpus and --nodes exclude each other")
    if (calibrate or rates is not None) and cluster is None:
        raise click.UsageError("--calibrate and --rates need --cluster NAME, the profile that keeps the rates")
    if calibrate and rates is not None:
        raise click.UsageError("--calibrate and --rates exclude each other")
    files = PlanFiles(write, study, top)
    files.refuse_existing()
    if picture is not None:
        require_drawable(picture, "--picture")
    profile = load_cluster(cluster) if cluster else None
    kept = None
    if profile is not None and rates is not None:
        kept = keep(read_file(rates), str(rates), profile)
    elif profile is not None and calibrate:
        kept = keep(measure(profile.python, eprint), "--calibrate", profile)
    request = PlanRequest(
        recipe if is_model(recipe) else recipe_named(recipe, say=eprint),
        overrides,
        gpu=gpu_name,
        gpus=gpus,
        nodes=nodes,
        sequence=sequence,
        global_batch=global_batch,
        precisions=precisions_of(precision, gpu_name),
        cluster=profile,
        top=top,
        by_memory=sort == "memory",
    )
    found = plan_layouts(request, eprint)
    if kept is not None:
        _show_calibration(*kept, found)
    if picture is not None:
        from fp8launch.plugins.plan.pictures import draw_plan

        draw_plan(picture, found)
        eprint(f"wrote {picture}")
    files.write_layouts(found.parents, found.layouts, load_recipe(found.source, found.overrides).recipe)
    if as_json:
        show_json([_as_json(layout) for layout in found.layouts])
    else:
        _show(found)
        if found.own is not None and not request.by_memory:
            echo()
            echo(_compare_own(found, found.own))
    files.print_next_step(cluster)
    return 0


# --- output ----------------------------------------------------------------------------------------------------------


def _as_json(one: Planned) -> dict[str, Any]:
    return {
        "layout": one.layout.short,
        "overrides": list(one.overrides),
        "predicted": predicted_as_json(one.step, one.memory),
        "terms": terms_as_json(one.step),
        "basis": basis_as_json(one.step),
    }


def _show(plan: Plan) -> None:
    """Print the table of layouts, the terms of the best one, and why other layouts are missing."""
    best, target = plan.layouts[0], plan.target
    sequence = best.step.tokens // target.global_batch
    echo(
        f"{target.gpus} {target.gpu.name}, global batch {target.global_batch}, sequence {sequence}, "
        f"{speed_range(best.step)}; {plan.found.legal:,} legal divisions"
    )
    echo()
    rows = []
    for number, one in enumerate(plan.layouts, 1):
        tflops = peak = ""
        if one.step.tflops_per_gpu is not None:
            tflops = f"{one.step.tflops_per_gpu:,.0f}"
        if one.memory:
            peak = f"{one.memory.peak / 2**30:.1f}"
        speed = f"{one.step.tokens_per_s_per_gpu:,.0f}"
        rows.append((str(number), speed, tflops, f"{one.step.ms:,.0f}", peak, one.layout.short))
    show_table(("", "tokens/s/GPU", "TFLOP/s/GPU", "step (ms)", "peak (GiB)", "layout"), rows)
    echo()
    show_step_time(best.step)
    if plan.found.misses:
        usable = LIMIT * target.gpu.memory_gib
        eprint(
            f"Does not fit in {usable:.1f} GiB ({LIMIT:.0%} of {target.gpu.memory_gib:g} GiB) even with all memory "
            "savings:"
        )
    for miss in plan.found.misses:
        eprint(f"  {miss.memory.total / 2**30:,.1f} GiB: {miss.sizes}")
    for reason in plan.refused[:3]:
        eprint(f"Refused by a rule: {reason}")
    if missing := not_varied(plan.bases[0].args, target):
        eprint(f"Not varied, because recipes of this engine cannot set them: {', '.join(missing)}")
    if batch := target.batch_for_all_gpus:
        eprint(
            f"The global batch of {target.global_batch} is not a multiple of {target.odd_factor}, a factor of "
            f"{target.gpus} GPUs, so only PP can divide the model by it. --global-batch {batch} allows data "
            "parallelism."
        )
    echo()
    echo(f"To use layout 1: {overrides_text(best.overrides)}")


def _show_calibration(rates: Rates, file: Path, plan: Plan) -> None:
    """Print what measured rates change, and a prediction before and after."""
    target = plan.target
    eprint(f"Rates of {rates.device} of {rates.date}, kept in {file}:")
    for one in corrections(rates, target.gpu):
        eprint(f"  {one.group}: {one.in_words}")
    measured = gpu_of_model(rates.device)
    if measured is not target.gpu:
        eprint(f"The plan is for {target.gpu.name}, so these rates do not change it.")
        return
    planned = plan.own or plan.layouts[0]
    assumed = speeds(target.gpu, target.speeds.device.links)
    assert assumed is not None
    before = step_time_at(planned.layout.change.args, target.gpus, target.global_batch, assumed)
    assert before is not None  # only the rates differ
    old, new = before.tokens_per_s_per_gpu, planned.step.tokens_per_s_per_gpu
    eprint(f"{planned.layout.short}: {old:,.0f} tokens/s/GPU before, {new:,.0f} after ({new / old - 1:+.1%})")


def _compare_own(plan: Plan, own: Planned) -> str:
    """Return how the recipe's own layout compares with the best one, and with the best one of the same sizes."""
    best, target = plan.layouts[0], plan.target
    text = f"The recipe's own layout ({own.layout.short}) "
    if not own.layout.memory.fits(target.gpu):
        need = own.layout.memory.total / 2**30
        text += f"needs {need:,.0f} GiB, more than {LIMIT:.0%} of {target.gpu.memory_gib:g}; it "
    text += f"is predicted to be {difference(own.step, best.step)}"
    alike = plan.faster_alike
    if alike is None:
        return text
    behind = alike.step.ms / best.step.ms - 1
    return f"{text}; the best layout of the same sizes ({alike.short}) is {behind:.1%} slower"
