"""`fp8launch convert`: convert weights from Hugging Face to Megatron and back, in a job."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from fp8launch.cli import complete
from fp8launch.cli.check import refuse_errors
from fp8launch.cli.destination import destination_options
from fp8launch.cli.output import echo, eprint, json_option, print_problems, set_option, show_json, with_options
from fp8launch.cluster.profile import Cluster
from fp8launch.diagnostics import ANSWER_IS_NO, error, exit_code
from fp8launch.hardware.gpus import GPUS
from fp8launch.job.prepared import prepare_loaded
from fp8launch.plugins.convert.conversion import (
    Conversion,
    checkpoint_in,
    conversion,
    is_finished,
    is_own_work,
    model_named,
    model_of,
    recipe_of,
    unfinished_run,
)
from fp8launch.plugins.convert.section import ConvertDtype
from fp8launch.recipe.load import RecipeSource, load_recipe
from fp8launch.recipe.yaml_source import is_folder
from fp8launch.rundir.names import has_runs, is_own_folder, run_named
from fp8launch.rundir.registry import is_written_as_path, job_ids, run_root
from fp8launch.rundir.run_dir import RunFolder
from fp8launch.schedulers.base import Scheduler
from fp8launch.submit.destination import destination, time_override
from fp8launch.submit.new_run import dry_script
from fp8launch.submit.submission import record_reported
from fp8launch.submit.submit import single, submit_run

_TOKEN = "HF_TOKEN"
_size = click.IntRange(min=1)
_job_options: tuple[Callable[[Any], Any], ...] = (
    click.option("--dtype", type=click.Choice(["bf16", "fp16", "fp32"]), help="Output type (default: the model's)."),
    click.option("--tp", type=_size, default=1, help="Tensor parallel size of the conversion (default: 1)."),
    click.option("--pp", type=_size, default=1, help="Pipeline parallel size of the conversion (default: 1)."),
    click.option("--ep", type=_size, default=1, help="Expert parallel size of the conversion (default: 1)."),
    click.option("--gpu", type=click.Choice(tuple(GPUS)), default="cpu", help="GPU model, or cpu (default: cpu)."),
    click.option("--image", metavar="IMAGE", help="Container image (default: none, the job's Python is the host's)."),
    set_option,
    *destination_options,
    click.option("--dry-run", is_flag=True, help="Check, and print the script; submit nothing."),
    click.option("--wait", is_flag=True, help="Follow the job to its end; exit code 1 if it fails."),
    json_option,
)


@click.group()
def convert() -> None:
    """Convert weights between Hugging Face and Megatron in a job that runs Megatron-Bridge's AutoBridge.

    The job has TP x PP x EP processes, each with a GPU unless --gpu is cpu. Checkpoints load in any layout.
    """


@convert.command("hf-to-megatron", short_help="convert a Hugging Face model to a Megatron checkpoint")
@click.argument("model")
@click.argument("out", metavar="DIR", type=click.Path(path_type=Path))
@with_options(*_job_options)
def hf_to_megatron(model: str, out: Path, dtype: ConvertDtype | None, **options: Any) -> int:
    """Convert MODEL, a folder or a name on the Hugging Face hub, to a Megatron checkpoint in DIR.

    To start a run from it, use --set checkpoint.load=DIR --set megatron.finetune=true.
    """
    found = model_named(model, "MODEL")
    folder = Path(found)
    if folder.is_dir() and not any(folder.glob("*.safetensors")):
        message = f"{folder} has no weights in *.safetensors"
        raise error("convert-model", message, "MODEL", "save it with transformers' save_pretrained")
    return _run(conversion("hf-to-megatron", found, out, dtype=dtype), **options)


@convert.command("megatron-to-hf", short_help="convert a Megatron checkpoint to a Hugging Face model")
@click.argument("source", metavar="RUN|DIR", shell_complete=complete.runs)
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
@click.option("--model", help="Hugging Face model that supplies configuration and tokenizer.")
@click.option("--iteration", type=click.IntRange(min=0), help="Iteration of the checkpoint (default: the newest).")
@with_options(*_job_options)
def megatron_to_hf(
    source: str, out: Path, model: str | None, iteration: int | None, dtype: ConvertDtype | None, **options: Any
) -> int:
    """Convert a checkpoint from a RUN or a checkpoint folder to a Hugging Face model in OUT.

    --model is needed only if the checkpoint does not record which model it was converted from.
    """
    run, checkpoint, named = checkpoint_of(source, iteration, model, "convert-model")
    if run is not None and is_own_work(run.path, checkpoint):
        options["overrides"] = ("checkpoint.allow_pickle=true", *options["overrides"])
    return _run(conversion("megatron-to-hf", named, out, checkpoint, dtype), **options)


def checkpoint_of(
    source: str, iteration: int | None, model: str | None, code: str
) -> tuple[RunFolder | None, Path, str]:
    """Return the run that `source` names, its checkpoint, and the Hugging Face model that belongs to the checkpoint.

    The run is None for a folder of checkpoints. `code` is the code of the error if no model is known.
    """
    run = run_of(source)
    places = [Path(source).expanduser()] if run is None else checkpoint_folders(run, source)
    checkpoint = checkpoint_in(places[0], iteration)
    named = model or next(filter(None, map(model_of, [checkpoint, *places[1:]])), None)
    if named is None:
        message = f"{checkpoint} does not record which Hugging Face model it corresponds to"
        fix = "name one with --model: a folder with its config.json and tokenizer, or a name on the hub"
        raise error(code, message, "--model", fix)
    return run, checkpoint, model_named(named, "--model")


def run_of(source: str) -> RunFolder | None:
    """Return the named run, or None for a folder of checkpoints."""
    folder = Path(source).expanduser()
    if is_folder(folder) and not is_own_folder(source) and (is_written_as_path(source) or not has_runs(source)):
        return None
    return run_named(source, eprint)


def checkpoint_folders(run: RunFolder, source: str) -> list[Path]:
    """Return the folder of a run's checkpoints, followed by the folder that it started from."""
    stated = run.manifest().get("recipe", {}).get("checkpoint") or {}
    if not stated.get("dir"):
        message = f"{run.run_id} writes no checkpoints"
        fix = "name a folder of checkpoints, or a run with checkpoint.dir and checkpoint.interval"
        raise error("convert-checkpoint", message, source, fix, ANSWER_IS_NO)
    return [run.path / str(stated[key]) for key in ("dir", "load") if stated.get(key)]


def _run(
    wanted: Conversion,
    tp: int,
    pp: int,
    ep: int,
    gpu: str,
    image: str | None,
    overrides: tuple[str, ...],
    cluster: str | None,
    backend_name: str | None,
    root: str | None,
    dry_run: bool,
    wait: bool,
    as_json: bool,
    **slurm: Any,
) -> int:
    """Submit the conversion, unless its output exists or another run is writing it."""
    if is_finished(wanted):
        eprint(f"already converted: {wanted.out}")
        _show(wanted, None, "finished", as_json)
        return 0
    profile, scheduler = destination("convert", cluster, backend_name, slurm, print_problems)
    place = run_root(profile, root)
    run = None
    if not dry_run:
        run = unfinished_run(wanted, place)
    if run is not None:
        eprint(f"{run.run_id} is converting this already")
    else:
        sizes = {"tp": tp, "pp": pp, "ep": ep}
        source = recipe_of(wanted, sizes, gpu, image, _secrets(wanted.model))
        done = submit_or_show(source, overrides, slurm, profile, place, scheduler, dry_run)
        if isinstance(done, str):
            if as_json:
                _show(wanted, None, "dry run", as_json, script=done)
            else:
                echo(done, nl=False)
            return 0
        run = done
    status = "submitted"
    if wait:
        status = _follow(wanted, run, scheduler)
    _show(wanted, run, status, as_json)
    return exit_code(status != "failed")


def submit_or_show(
    source: RecipeSource,
    overrides: Sequence[str],
    slurm: Mapping[str, Any],
    profile: Cluster,
    place: Path,
    scheduler: Scheduler,
    dry_run: bool,
) -> RunFolder | str:
    """Check a recipe and submit it as a run below `place`; with `dry_run`, return the job's script instead.

    `slurm` has the options of the command line for the job.
    """
    prepared = prepare_loaded(load_recipe(source, (*overrides, *time_override(slurm))), profile)
    checked = refuse_errors([prepared], profile.model_copy(update={"run_root": str(place)}), scheduler)[0]
    if dry_run:
        return dry_script(prepared, profile, place, scheduler, checked.job)
    scheduler.require()
    run = submit_run(single(prepared, checked.as_json(), checked.job), profile, place, scheduler)
    eprint(f"submitted {run.run_id} as job {', '.join(job_ids(run))} ({scheduler.name})\n{run.path}")
    record_reported(run)
    return run


def _follow(wanted: Conversion, run: RunFolder, scheduler: Scheduler) -> str:
    """Wait for the job. Return whether it wrote the whole output; if it did not, show the end of its log."""
    from fp8launch.cli.follow import show_end, watch_to_end

    state = watch_to_end(run, scheduler, "conversion")
    if state.status == "completed" and is_finished(wanted):
        return "finished"
    show_end(run)
    return "failed"


def _secrets(model: str) -> list[str]:
    """Return the hub token's name if the job downloads the model, and warn if this shell has no token."""
    if Path(model).is_absolute():
        return []
    if os.environ.get(_TOKEN):
        return [_TOKEN]
    eprint(
        f"warning: the job reads {model} from the Hugging Face hub without a token: export {_TOKEN} for a model "
        "that needs one (it is passed by name), or name a local folder"
    )
    return []


def _show(wanted: Conversion, run: RunFolder | None, status: str, as_json: bool, **more: Any) -> None:
    if as_json:
        of_run: dict[str, Any] = {"run": None, "folder": None, "jobs": []}
        if run:
            of_run = {"run": run.run_id, "folder": str(run.path), "jobs": job_ids(run)}
        show_json({"status": status, "direction": wanted.direction, "out": str(wanted.out), **of_run, **more})
    elif status == "finished" or run is None:
        echo(wanted.out)
    else:
        echo(run.run_id)
