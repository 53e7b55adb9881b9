"""`fp8launch init recipe`: a recipe from a model, a GPU, a number of nodes and datasets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from fp8launch.check.checker import check
from fp8launch.cli import complete
from fp8launch.cli.output import echo, eprint, print_problems, with_options
from fp8launch.cluster.profile import load_cluster
from fp8launch.diagnostics import ANSWER_IS_NO, error
from fp8launch.hardware.gpus import GPUS
from fp8launch.hardware.quantization import precision_names
from fp8launch.job.prepared import prepare
from fp8launch.plugins.init.draft import (
    IMAGE,
    LONGEST,
    model_draft,
    usual_gpus,
    usual_precision,
    with_batch,
    with_parts,
)
from fp8launch.plugins.init.layout import with_layout
from fp8launch.plugins.init.questions import Asker
from fp8launch.plugins.init.recipe_text import recipe_text
from fp8launch.rundir.atomic_io import write_atomically

_options = (
    click.option("--gpu", type=click.Choice(tuple(GPUS)), help="GPU model of the nodes."),
    click.option("--nodes", type=click.IntRange(min=1), help="Number of nodes (default: 1)."),
    click.option("--gpus-per-node", type=click.IntRange(min=1), help="GPUs per node (default: usual for the GPU)."),
    click.option("--data", "data", multiple=True, metavar="PREFIX", help="Indexed dataset, without .bin; repeatable."),
    click.option("--tokenizer", metavar="DIR", help="Folder of the Hugging Face tokenizer of the data."),
    click.option("--precision", type=click.Choice(precision_names()), help="Precision (default: what suits the GPU)."),
    click.option("--sequence", type=click.IntRange(min=1), help=f"Tokens per sequence (default: up to {LONGEST})."),
    click.option("--iterations", type=click.IntRange(min=1), default=1000, show_default=True, help="Training steps."),
    click.option("--time", default="04:00:00", show_default=True, help="Time limit of the job."),
    click.option("--image", default=IMAGE, show_default=True, help="Container image, or none."),
    click.option("--name", metavar="NAME", help="Name of the recipe (default: made from model and GPU)."),
    click.option("--cluster", shell_complete=complete.clusters, help="Check the recipe for this cluster profile."),
    click.option("--out", metavar="FILE|-", help="File to write, or - for stdout (default: NAME.yaml)."),
    click.option("--force", is_flag=True, help="Replace an existing file."),
    click.option("--yes", is_flag=True, help="Accept every proposal without asking."),
)


@click.command(short_help="write a recipe from a model, a GPU and your data")
@click.argument("model", metavar="MODEL|CONFIG.JSON", shell_complete=complete.models)
@with_options(*_options)
def recipe(
    model: str,
    gpu: str | None,
    nodes: int | None,
    gpus_per_node: int | None,
    data: tuple[str, ...],
    tokenizer: str | None,
    precision: str | None,
    sequence: int | None,
    iterations: int,
    time: str,
    image: str,
    name: str | None,
    cluster: str | None,
    out: str | None,
    force: bool,
    yes: bool,
) -> int:
    """Write a commented recipe and check it.

    MODEL is a model of the pack or the config.json of a Hugging Face model. The layout is the fastest one that is
    predicted to fit (see `fp8launch plan`). The exit code is 1 if no layout fits or the check finds an error.
    """
    ask = Asker(yes)
    draft = model_draft(model)
    chosen = ask.choose("GPU", "--gpu", gpu, tuple(GPUS), None) or ""
    count = nodes or ask.count("Number of nodes", 1)
    if not data and ask.asks:
        data = tuple(ask.text("Dataset prefixes, or `mock` for generated tokens", None, "mock").split())
        if data == ("mock",):
            data = ()
    per_node = gpus_per_node or usual_gpus(chosen)
    uses_image = image != "none" and chosen != "cpu"
    draft = replace(
        draft,
        name=name or f"{draft.name}_{chosen}x{count * per_node}",
        gpu=chosen,
        nodes=count,
        gpus_per_node=per_node,
        time=time,
        iterations=iterations,
        data=tuple(str(Path(one).absolute()) for one in data),
        tokenizer=tokenizer and str(Path(tokenizer).absolute()),
        image=image if uses_image else None,
        saves=bool(data),
    )
    draft = with_parts(draft, precision or usual_precision(chosen))
    target = None
    if out != "-":
        target = Path(out or f"{draft.name}.yaml")
    if target is not None and target.exists() and not force:
        raise error("file-exists", "already exists", str(target), "pass another --name, or --force to replace it")
    text = recipe_text(with_layout(with_batch(draft, sequence)))
    if target is None:
        echo(text, nl=False)
        return 0
    write_atomically(target, text)
    eprint(f"wrote {target}")
    profile = load_cluster(cluster)
    result = check(prepare(str(target.absolute()), cluster=profile), profile, say=eprint)
    print_problems(result.problems)
    if not result.ok:
        return ANSWER_IS_NO
    eprint(f"`fp8launch check` finds no errors. Next: fp8launch submit {target} --dry-run")
    return 0
