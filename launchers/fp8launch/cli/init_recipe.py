"""`fp8launch init recipe`: a recipe from a model, a GPU, a number of nodes and datasets."""

from __future__ import annotations

import re
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from fp8launch.check.checker import check
from fp8launch.check.first_layout import FirstLayout, first_layout
from fp8launch.check.resolved_run import resolve_run
from fp8launch.cli import complete
from fp8launch.cli.asking import Asker
from fp8launch.cli.output import echo, eprint, print_problems, with_options
from fp8launch.cluster.profile import load_cluster
from fp8launch.diagnostics import ANSWER_IS_NO, error, nearest
from fp8launch.hardware.gpus import GPUS
from fp8launch.hardware.quantization import BF16, PRECISIONS, QUANTIZATION
from fp8launch.job.prepared import prepare
from fp8launch.recipe.first_recipe import Draft, recipe_text
from fp8launch.recipe.hf_config import read_config
from fp8launch.recipe.load import read_recipe
from fp8launch.resources import pack_folder
from fp8launch.rundir.atomic_io import write_atomically
from fp8launch.untyped import as_int

LONGEST = 8192
IMAGE = "nemo-26.06"
# Of tiny_cpu: what of parts/pretrain needs a GPU.
CPU_FLAGS = {"num_workers": 0, "cross_entropy_loss_fusion": None, "cross_entropy_fusion_impl": None}
_options = (
    click.option("--gpu", type=click.Choice(tuple(GPUS)), help="GPU model of the nodes."),
    click.option("--nodes", type=click.IntRange(min=1), help="Number of nodes (default: 1)."),
    click.option(
        "--gpus-per-node", type=click.IntRange(min=1), help="GPUs per node (default: of the GPU's usual node)."
    ),
    click.option("--data", "data", multiple=True, metavar="PREFIX", help="Indexed dataset without .bin; repeatable."),
    click.option("--tokenizer", metavar="DIR", help="Folder of the data's Hugging Face tokenizer."),
    click.option("--precision", type=click.Choice(PRECISIONS), help="Default: what suits the GPU."),
    click.option("--sequence", type=click.IntRange(min=1), help=f"Tokens per sequence (default: up to {LONGEST})."),
    click.option("--iterations", type=click.IntRange(min=1), default=1000, show_default=True, help="Training steps."),
    click.option("--time", default="04:00:00", show_default=True, help="Time limit of the job."),
    click.option("--image", default=IMAGE, show_default=True, help="Container image, or none."),
    click.option("--name", metavar="NAME", help="Name of the recipe (default: from the model and the GPU)."),
    click.option("--cluster", shell_complete=complete.clusters, help="Cluster profile that the recipe is checked for."),
    click.option("--out", metavar="FILE|-", help="File to write, or - for stdout (default: NAME.yaml)."),
    click.option("--force", is_flag=True, help="Replace the file."),
    click.option("--yes", is_flag=True, help="Accept every proposal without asking."),
)


@click.command()
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
    """Write a commented recipe and check it. MODEL is one of the pack, or the config.json of a Hugging Face model.

    The layout is the one with the least overhead that is estimated to fit. Exit code 1 if the check finds an error,
    or if nothing fits.
    """
    ask = Asker(yes)
    draft = _model(model)
    chosen = ask.choose("GPU", "--gpu", gpu, tuple(GPUS), None) or ""
    count = nodes or ask.count("Number of nodes", 1)
    if not data and ask.asks:
        data = tuple(ask.text("Dataset prefixes, or `mock` for generated tokens", None, "mock").split())
        if data == ("mock",):
            data = ()
    per_node = gpus_per_node or _usual_gpus(chosen)
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
    draft = _with_parts(draft, precision or _usual_precision(chosen))
    target = None
    if out != "-":
        target = Path(out or f"{draft.name}.yaml")
    if target is not None and target.exists() and not force:
        raise error("file-exists", "already exists", str(target), "pass another --name, or --force to replace it")
    with tempfile.TemporaryDirectory() as folder:
        draft = _with_layout(_with_batch(draft, sequence), Path(folder))
    text = recipe_text(draft)
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


def _model(name: str) -> Draft:
    """The draft of a model: a part of the pack, or a Hugging Face configuration."""
    empty = Draft("", "", (), {}, (), "", 1, 1, "", 1, 1, 1)
    parts = sorted(file.stem for file in (pack_folder("recipes") / "models").glob("*.yaml"))
    known = name.removeprefix("models/").removesuffix(".yaml")
    if known in parts:
        return replace(empty, name=known, source=known, extends=(f"models/{known}",))
    path = Path(name)
    if not path.exists():
        fix = f"use one of {', '.join(parts)}; or download the model's config.json and pass its path"
        near = nearest(known.lower().replace("-", "_").replace(".", "_").rpartition("/")[2], parts)
        if near:
            fix = f"did you mean '{near}'? {fix}"
        raise error("unknown-model", "is neither a model of the pack nor a file", name, fix)
    found = read_config(path)
    stem = path.stem
    if path.is_dir():
        stem = path.resolve().name
    elif path.name == "config.json":
        stem = path.resolve().parent.name
    word = re.sub(r"[\W_]", "_", stem.lower()).strip("_") or "model"
    return replace(empty, name=word, source=f"{stem} ({found.kind})", model=found.model, notes=found.notes)


def _usual_gpus(gpu: str) -> int:
    """GPUs of the node that the pack describes."""
    part = pack_folder("recipes") / "hardware" / f"{gpu}.yaml"
    found = None
    if part.is_file():
        found = as_int(_stated(str(part), "resources", "gpus_per_node"))
    if found is None:
        return GPUS[gpu].per_node
    return found


def _stated(recipe: str, section: str, key: str) -> object:
    """A value that a part of the pack or its parents state; None where none does."""
    found = read_recipe(recipe).tree.plain().get(section, {})
    return found.get(key)


def _usual_precision(gpu: str) -> str:
    """FP8 with the scaling that the GPU has hardware for; bf16 on those without FP8."""
    peaks = GPUS[gpu]
    if peaks.fp8 is None:
        return BF16
    if peaks.capability >= (10, 0):
        return "mxfp8"
    return "tensorwise"


def _with_parts(draft: Draft, precision: str) -> Draft:
    """The draft with the parts of the pack for its GPU, precision and kind of model."""
    parts = [*draft.extends, "parts/pretrain"]
    flags: dict[str, Any] = {}
    if draft.gpu == "cpu":
        flags |= CPU_FLAGS
    else:
        parts.append("parts/distributed_optimizer")
        if draft.saves:
            parts.append("parts/long_run")
        if _has_experts(draft):
            parts.append("moe/alltoall")
            # Of a throughput run; a router that is forced learns nothing.
            flags["moe_router_force_load_balancing"] = None
    parts.append(f"precision/{precision}")
    if (pack_folder("recipes") / "hardware" / f"{draft.gpu}.yaml").is_file():
        parts.append(f"hardware/{draft.gpu}")
    if draft.image == IMAGE:
        parts.append("images/nemo_26_06")
    recipe = QUANTIZATION.get(precision)
    gather = recipe is not None and recipe.gather_is_proven and draft.gpu != "cpu"
    return replace(draft, extends=tuple(parts), flags=flags, gather=gather)


def _has_experts(draft: Draft) -> bool:
    if draft.model:
        return "num_experts" in draft.model
    return _stated(draft.extends[0], "model", "num_experts") is not None


def _with_batch(draft: Draft, sequence: int | None) -> Draft:
    """The draft with a sequence length and a global batch that every layout divides."""
    longest = _longest(draft)
    if sequence is not None and sequence > longest:
        message = f"the model has {longest} positions, fewer than {sequence}"
        raise error("sequence-too-long", message, "--sequence", f"use {longest} or less")
    world = draft.nodes * draft.gpus_per_node
    least = 8 if draft.gpu == "cpu" else 128
    batch = -(-least // world) * world
    return replace(draft, sequence=sequence or min(longest, LONGEST), batch=batch, layout={"tp": 1, "pp": 1})


def _longest(draft: Draft) -> int:
    if draft.model:
        return int(draft.model["max_position_embeddings"])
    found = as_int(_stated(draft.extends[0], "model", "max_position_embeddings"))
    if found is None:
        return LONGEST
    return found


def _with_layout(draft: Draft, folder: Path) -> Draft:
    """The draft with a layout that is estimated to fit. Raises UserError (exit code 1) where none is."""
    if draft.gpu == "cpu":
        return replace(draft, layout_note="Every process has the whole model.")
    run = resolve_run(prepare(_written(draft, folder)))
    layout = first_layout(run)
    if layout is None:
        raise error(
            "nothing-fits",
            f"no layout of {draft.source} is estimated to fit {draft.nodes} x {draft.gpus_per_node} {draft.gpu}",
            "--nodes",
            "use more nodes, a shorter --sequence, or GPUs with more memory",
            ANSWER_IS_NO,
        )
    sizes: dict[str, Any] = {"tp": layout.tp, "pp": layout.pp}
    if _has_experts(draft):
        sizes["ep"] = layout.ep
    sizes["sequence"] = "auto"
    fits = "memory is not estimated"
    if layout.gib:
        fits = f"estimated at {layout.gib:.0f} of {GPUS[draft.gpu].memory_gib:.0f} GiB per GPU"
    note = f"The layout with the least overhead that fits: {fits}{_recomputed(layout)}."
    return replace(draft, layout=sizes, layout_note=note, flags={**(draft.flags or {}), **layout.flags})


def _written(draft: Draft, folder: Path) -> str:
    file = folder / "draft.yaml"
    file.write_text(recipe_text(draft), encoding="utf-8")
    return str(file)


def _recomputed(layout: FirstLayout) -> str:
    if layout.recompute == "none":
        return ""
    if layout.recompute == "all":
        return ", with every layer recomputed"
    return f", with {layout.recompute_layers} layers of each pipeline stage recomputed"
