"""`fp8launch plan`: the fastest layouts of a model on a number of GPUs, predicted."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from fp8launch.cli import complete
from fp8launch.cli.output import echo, eprint, json_option, overrides_text, set_option, show_json, show_table
from fp8launch.cli.plan_files import PlanFiles
from fp8launch.cli.plan_input import SEQUENCE, base_of, precisions_of, resource_overrides, source_of, target_of
from fp8launch.cli.planned import Planned, accepted, own_layout
from fp8launch.cli.predicted import predicted_as_json, show_step_time, speed_range, terms_as_json
from fp8launch.cluster.profile import load_cluster
from fp8launch.diagnostics import ANSWER_IS_NO, UserError, error
from fp8launch.hardware.gpus import GPUS
from fp8launch.megatron.memory import TIGHT
from fp8launch.megatron.model_arithmetic import whole
from fp8launch.planning.change import Change, Target
from fp8launch.planning.fitting import fits
from fp8launch.planning.layouts import Search
from fp8launch.planning.search import not_varied, search
from fp8launch.planning.term_groups import difference
from fp8launch.recipe.load import load_recipe

TOP = 5


@click.command()
@click.argument("recipe", metavar="RECIPE|MODEL|RUN", shell_complete=complete.recipes)
@set_option
@click.option("--gpu", "gpu_name", type=click.Choice([name for name in GPUS if name != "cpu"]),
              help="GPU type (default: the recipe's; h100 for a model).")  # fmt: skip
@click.option("--gpus", type=click.IntRange(min=1), help="Number of GPUs (default: the recipe's).")
@click.option("--nodes", type=click.IntRange(min=1), help="Number of nodes instead; the global batch stays.")
@click.option("--sequence", type=click.IntRange(min=1), help="Tokens per sequence.")
@click.option("--global-batch", type=click.IntRange(min=1), help="Sequences per step.")
@click.option("--precision", metavar="A,B", help="Precisions to compare (default: the recipe's).")
@click.option("--top", type=click.IntRange(min=1), default=TOP, show_default=True, help="Layouts to show.")
@click.option("--sort", type=click.Choice(["speed", "memory"]), default="speed", show_default=True, help="Best first.")
@click.option("--cluster", metavar="NAME", help="Profile whose `network` states speed and NVLink domain.")
@click.option("--write", type=click.Path(path_type=Path),
              help="Write the best layout as a recipe; with {} in the name every layout, numbered.")  # fmt: skip
@click.option("--study", metavar="NAME",
              help="Write all layouts as recipes of a study, in the folder NAME-layouts; submits nothing.")  # fmt: skip
@click.option("--picture", type=click.Path(path_type=Path), metavar="FILE",
              help="Draw memory against speed, the terms, time against GPUs (.png, .svg, .pdf).")  # fmt: skip
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
    write: Path | None,
    study: str | None,
    picture: Path | None,
    as_json: bool,
) -> int:
    """Predict the fastest layouts that fit the GPUs: of RECIPE, bridge:NAME, or a model such as llama3_1_405b.

    Nothing runs. Each layout is a list of overrides for `--set`; exit code 1 if none fits.
    """
    if gpus is not None and nodes is not None:
        raise click.UsageError("--gpus and --nodes exclude each other")
    files = PlanFiles(write, study, top)
    files.refuse_existing()
    if picture is not None:
        from fp8launch.report.plots import require_drawable

        require_drawable(picture, "--picture")
    precisions = precisions_of(precision, gpu_name)
    with tempfile.TemporaryDirectory() as folder:
        source, parents = source_of(recipe, gpu_name, precisions, Path(folder))
        asked = [*overrides, *resource_overrides(source, overrides, gpu_name, gpus, nodes)]
        if sequence is None and len(parents) > 1:
            # A model has no sequence length of its own, and the written recipe needs one.
            sequence = SEQUENCE
        if sequence:
            asked.append(f"batch.sequence={sequence}")
        if global_batch:
            asked.append(f"batch.global={global_batch}")
        bases = [base_of(source, asked, name) for name in precisions or (None,)]
        profile = own = None
        if cluster:
            profile = load_cluster(cluster)
        target = target_of(source, asked, overrides, profile)
        is_recipe = len(parents) == 1  # a model of the pack has no layout of its own
        found = search(bases, target, 2 * top + 4, by_memory=sort == "memory", own=is_recipe)
        planned, refused = accepted(found, source, asked, target, top)
        if planned and is_recipe:
            own = own_layout(source, asked, target)
        if planned and picture is not None:
            from fp8launch.cli.plan_picture import Drawn, draw_plan

            draw_plan(picture, Drawn(source, asked, target, bases, planned, own))
            eprint(f"wrote {picture}")
    if not planned:
        raise _nothing(found, bases, target, refused)
    files.write_layouts(parents, planned, load_recipe(source, asked).recipe)
    if as_json:
        show_json(list(map(_as_json, planned)))
    else:
        _show(planned, found, bases, target, refused)
        if own is not None and sort == "speed":
            echo()
            echo(_of_own(own, planned[0], found, target))
    files.print_next_step(cluster)
    return 0


# --- which layouts are good ------------------------------------------------------------------------------------------


def _nothing(found: Search, bases: Sequence[Change], target: Target, refused: Sequence[str]) -> UserError:
    """Why there is no layout at all, in one sentence."""
    on = f"{target.gpus} {target.gpu.name}"
    if refused:
        return error("no-layout", f"the rules refuse every layout on {on}: {refused[0]}", None, None, ANSWER_IS_NO)
    if found.misses:
        least = found.misses[0]
        message = (
            f"the model does not fit {on}: the smallest layout found ({least.short}) needs "
            f"{least.memory.total / 2**30:,.0f} GiB, more than {TIGHT:.0%} of {target.gpu.memory_gib:g}"
        )
        return error("does-not-fit", message, "--gpus", "use more GPUs, or GPUs with more memory", ANSWER_IS_NO)
    if not found.legal:
        return _nothing_divides(bases, target)
    message = f"the model does not fit {on}: its weights and gradients alone exceed {target.gpu.memory_gib:g} GiB a GPU"
    return error("does-not-fit", message, "--gpus", "use more GPUs, or GPUs with more memory", ANSWER_IS_NO)


def _nothing_divides(bases: Sequence[Change], target: Target) -> UserError:
    """No division is legal, because of what is set, of the batch or of the model."""
    layers = whole(bases[0].args, "num_layers")
    message = f"no division of {target.gpus} {target.gpu.name} "
    message += f"fits a global batch of {target.global_batch} and {layers} layers"
    stated = []
    for key, value in target.fixed.items():
        if key.startswith(("parallel.", "batch.micro")):
            stated.append(f"{key}={value}")
    if stated:
        message += f" with {', '.join(stated)}"
        return error("no-layout", message, "--set", "leave out what is set, or set what divides them", ANSWER_IS_NO)
    more = -(-target.global_batch // target.gpus) * target.gpus
    fix = "another number of GPUs"
    if more != target.global_batch:
        fix = f"for example --global-batch {more}"
    return error("no-layout", message, "--gpus", fix, ANSWER_IS_NO)


# --- output ----------------------------------------------------------------------------------------------------------


def _as_json(one: Planned) -> dict[str, Any]:
    return {
        "layout": one.layout.short,
        "overrides": list(one.overrides),
        "predicted": predicted_as_json(one.step, one.memory),
        "terms": terms_as_json(one.step),
    }


def _show(
    planned: Sequence[Planned], found: Search, bases: Sequence[Change], target: Target, refused: Sequence[str]
) -> None:
    sequence = planned[0].step.tokens // target.global_batch
    echo(
        f"{target.gpus} {target.gpu.name}, global batch {target.global_batch}, sequence {sequence}, "
        f"{speed_range(planned[0].step)}; {found.legal:,} legal divisions"
    )
    echo()
    rows = []
    for number, one in enumerate(planned, 1):
        tflops = peak = ""
        if one.step.tflops_per_gpu is not None:
            tflops = f"{one.step.tflops_per_gpu:,.0f}"
        if one.memory:
            peak = f"{one.memory.peak / 2**30:.1f}"
        speed = f"{one.step.tokens_per_s_per_gpu:,.0f}"
        rows.append((str(number), speed, tflops, f"{one.step.ms:,.0f}", peak, one.layout.short))
    show_table(("", "tokens/s/GPU", "TFLOP/s/GPU", "step (ms)", "peak (GiB)", "layout"), rows)
    echo()
    show_step_time(planned[0].step)
    if found.misses:
        usable = TIGHT * target.gpu.memory_gib
        eprint(f"does not fit {usable:.2f} GiB ({TIGHT:.0%} of {target.gpu.memory_gib:g}), whatever is saved:")
    for miss in found.misses:
        eprint(f"  {miss.memory.total / 2**30:,.2f} GiB: {miss.sizes}")
    for reason in refused[:3]:
        eprint(f"refused by a rule: {reason}")
    if missing := not_varied(bases[0].args, target):
        eprint(f"not varied: {', '.join(missing)}, for which the recipe's engine has no field here")
    if indivisible := _indivisible(target):
        eprint(indivisible)
    echo()
    echo(f"the first one: {overrides_text(planned[0].overrides)}")


def _indivisible(target: Target) -> str:
    """A sentence where the global batch keeps data parallelism from a factor of the GPUs."""
    factor = target.gpus
    while factor % 2 == 0:
        factor //= 2
    if target.global_batch % factor == 0:
        return ""
    most = math.ceil(target.global_batch / target.gpus) * target.gpus
    return (
        f"a global batch of {target.global_batch} is not a multiple of {factor}, which {target.gpus} GPUs are, so only "
        f"PP divides the model by it; --global-batch {most} allows data parallelism"
    )


def _of_own(own: Planned, best: Planned, found: Search, target: Target) -> str:
    """How the recipe's own layout compares with the best one."""
    text = f"the recipe's own layout ({own.layout.short}) "
    if not fits(own.layout.memory, target):
        need = own.layout.memory.total / 2**30
        text += f"needs {need:,.0f} GiB, more than {TIGHT:.0%} of {target.gpu.memory_gib:g}; it "
    text += f"is predicted to be {difference(own.step, best.step)}"
    alike = next((layout for layout in found.layouts if layout.family == own.layout.family), None)
    if alike is None or alike.step.ms > 0.99 * own.step.ms or alike.step.ms <= best.step.ms:
        return text
    behind = alike.step.ms / best.step.ms - 1
    return f"{text}; the best layout of these sizes ({alike.short}) is {behind:.1%} slower"
