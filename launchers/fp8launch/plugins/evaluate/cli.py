"""`fp8launch evaluate`: evaluate a model or a checkpoint with lm-evaluation-harness, in a job."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from fp8launch.cli import complete
from fp8launch.cli.destination import destination_options
from fp8launch.cli.output import echo, json_option, print_problems, set_option, show_json, with_options
from fp8launch.diagnostics import ANSWER_IS_NO, error, exit_code
from fp8launch.hardware.gpus import GPUS
from fp8launch.plugins.convert.cli import checkpoint_of, run_of, submit_or_show
from fp8launch.plugins.convert.conversion import BRIDGES_CONFIG, is_own_work, model_named
from fp8launch.plugins.evaluate.evaluation import recipe_of, task_folder_at, tasks_named
from fp8launch.plugins.evaluate.follower import follower_time, refuse_second_follower, stated_follower
from fp8launch.plugins.evaluate.results import Score, scores_of
from fp8launch.rundir.names import has_runs
from fp8launch.rundir.registry import job_ids, run_root
from fp8launch.rundir.run_dir import RunFolder
from fp8launch.schedulers.base import Scheduler
from fp8launch.submit.destination import destination

_TOKEN = "HF_TOKEN"
# Without these, libraries of Hugging Face look for newer versions of what is in their caches.
_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
_size = click.IntRange(min=1)


@click.command()
@click.argument("source", metavar="RUN|DIR|MODEL", shell_complete=complete.runs)
@click.option("--tasks", metavar="A,B", help="Tasks of lm-eval; omit to show results.")
@click.option(
    "--task-folder", type=click.Path(path_type=Path, exists=True), help="Folder with your own tasks (*.yaml)."
)
@click.option("--model", metavar="MODEL", help="Hugging Face model of a checkpoint.")
@click.option("--iteration", type=click.IntRange(min=0), metavar="N", help="Checkpoint (default: the newest).")
@click.option("--every", type=_size, metavar="N", help="Follow the RUN: each Nth checkpoint.")
@click.option("--keep", is_flag=True, help="With --every: keep the converted models.")
@click.option("--fewshot", type=click.IntRange(min=0), metavar="N", help="Examples (default: the task's).")
@click.option("--limit", type=_size, metavar="N", help="Questions per task (default: all).")
@click.option("--batch-size", type=_size, metavar="N", default=1, help="Questions at once (default: 1).")
@click.option("--max-length", type=_size, metavar="N", help="Longest input, in tokens.")
@click.option("--dtype", type=click.Choice(["bf16", "fp16", "fp32"]), help="Weight type (default: the model's).")
@click.option("--engine", type=click.Choice(["hf", "megatron"]), default="hf", help="lm-eval's backend (default: hf).")
@click.option("--tp", type=_size, metavar="N", default=1, help="Tensor parallel size (megatron).")
@click.option("--pp", type=_size, metavar="N", default=1, help="Pipeline parallel size (megatron).")
@click.option("--ep", type=_size, metavar="N", default=1, help="Expert parallel size (megatron).")
@click.option("--offline", is_flag=True, help="Use what this machine has, never the hub.")
@click.option(
    "--gpu", type=click.Choice(tuple(GPUS)), metavar="GPU", default="cpu", help="GPU model, or cpu (default: cpu)."
)
@click.option("--image", metavar="IMAGE", help="Container image (default: none).")
@with_options(set_option, *destination_options)
@click.option("--dry-run", is_flag=True, help="Check and print only; submit nothing.")
@click.option("--wait", is_flag=True, help="Follow to the end; exit code 1 on failure.")
@json_option
def evaluate(
    source: str,
    tasks: str | None,
    task_folder: Path | None,
    model: str | None,
    iteration: int | None,
    every: int | None,
    keep: bool,
    overrides: tuple[str, ...],
    as_json: bool,
    **options: Any,
) -> int:
    """Evaluate a model with lm-evaluation-harness in a job.

    The model is a Hugging Face model, or a checkpoint of a RUN or a folder, which the job converts first. With
    --every, the job follows a RUN until it ends, and evaluates its checkpoints while it trains.
    """
    if tasks is None:
        return _show_known(source, as_json)
    if every is not None:
        if iteration is not None or options["engine"] != "hf":
            message = "--every evaluates every Nth checkpoint with --engine hf"
            raise error("evaluate-every", message, "--every", "leave out --iteration and --engine")
        stated = stated_follower(source, model, every)
        if keep:
            stated["keep"] = True
    elif keep:
        raise error("evaluate-every", "--keep has no effect without --every", "--keep", "leave it out")
    else:
        stated, own_work = _stated(source, model, iteration)
        if own_work:
            overrides = ("checkpoint.allow_pickle=true", *overrides)
    stated["tasks"] = tasks_named(tasks)
    if task_folder is not None:
        stated["task_folder"] = str(task_folder_at(task_folder))
    return _run(stated, overrides, as_json=as_json, **options)


def _stated(source: str, model: str | None, iteration: int | None) -> tuple[dict[str, Any], bool]:
    """Return the model, checkpoint and run to evaluate, and whether the run itself wrote the checkpoint."""
    folder = Path(source).expanduser()
    if (folder / "config.json").is_file() or not (folder.exists() or has_runs(source)):
        if model is not None or iteration is not None:
            message = f"{source} is a Hugging Face model, which has neither --model nor --iteration"
            raise error("evaluate-model", message, "--model, --iteration", "leave them out")
        return {"model": model_named(source, "RUN|DIR|MODEL")}, False
    run, checkpoint, named = checkpoint_of(source, iteration, model, "evaluate-model")
    found = {"model": named, "checkpoint": str(checkpoint)}
    if run is None:
        return found, False
    if run.is_mine:
        found["run"] = str(run.path)
    return found, is_own_work(run.path, checkpoint)


def _run(
    stated: dict[str, Any],
    overrides: tuple[str, ...],
    fewshot: int | None,
    limit: int | None,
    batch_size: int,
    max_length: int | None,
    dtype: str | None,
    engine: str,
    tp: int,
    pp: int,
    ep: int,
    offline: bool,
    gpu: str,
    image: str | None,
    cluster: str | None,
    backend_name: str | None,
    root: str | None,
    dry_run: bool,
    wait: bool,
    as_json: bool,
    **slurm: Any,
) -> int:
    """Submit the evaluation."""
    stated |= {
        "backend": engine,
        "fewshot": fewshot,
        "limit": limit,
        "batch_size": batch_size,
        "max_length": max_length,
        "dtype": dtype,
    }
    if engine == "megatron" and stated.get("checkpoint") is None:
        message = f"--engine megatron evaluates a Megatron checkpoint, but {stated['model']} is a Hugging Face model"
        raise error("evaluate-backend", message, "--engine", "use --engine hf")
    if engine == "megatron" and Path(stated["checkpoint"], BRIDGES_CONFIG).is_file():
        # Megatron-LM's loader takes the model's shape from arguments in the checkpoint, which Bridge does not save.
        message = f"--engine megatron cannot load {stated['checkpoint']}, which Megatron-Bridge wrote"
        raise error("evaluate-backend", message, "--engine", "use --engine hf, which converts it first")
    profile, scheduler = destination("evaluate", cluster, backend_name, slurm, print_problems)
    place = run_root(profile, root)
    env = dict(_OFFLINE) if offline else {}
    more: dict[str, Any] = {}
    if stated.get("every"):
        refuse_second_follower(stated, place)
        more = follower_time(RunFolder(Path(stated["run"])), scheduler)
    source = recipe_of(stated, {"tp": tp, "pp": pp, "ep": ep}, gpu, image, env, _secrets(offline), **more)
    run = submit_or_show(source, overrides, slurm, profile, place, scheduler, dry_run)
    if isinstance(run, str):
        if as_json:
            _show(stated, None, "dry run", as_json, script=run)
        else:
            echo(run, nl=False)
        return 0
    status = "submitted"
    if wait:
        status = _follow(run, scheduler, needs_scores=not stated.get("every"))
    _show(stated, run, status, as_json)
    return exit_code(status != "failed")


def _follow(run: RunFolder, scheduler: Scheduler, needs_scores: bool) -> str:
    """Wait for the job. Return whether it wrote its results; if it did not, show the end of its log.

    A job that follows a run has none if all checkpoints were evaluated before.
    """
    from fp8launch.cli.follow import show_end, watch_to_end

    state = watch_to_end(run, scheduler, "evaluation")
    if state.status == "completed" and (scores_of(run.path) or not needs_scores):
        return "finished"
    show_end(run)
    return "failed"


def _secrets(offline: bool) -> list[str]:
    """Return the hub token's name if this shell has one that the job can use."""
    if offline or not os.environ.get(_TOKEN):
        return []
    return [_TOKEN]


def _show_known(source: str, as_json: bool) -> int:
    """Show the results in a run's folder."""
    run = run_of(source)
    if run is None:
        raise error("evaluate-tasks", "no task is named", "--tasks", "name one, such as --tasks arc_easy")
    scores = scores_of(run.path)
    if not scores:
        message = f"{run.run_id} has no results of evaluations"
        raise error("evaluate-none", message, source, "name tasks, such as --tasks arc_easy", ANSWER_IS_NO)
    if as_json:
        show_json({"run": run.run_id, "scores": [vars(score) for score in scores]})
    else:
        _print(scores)
    return 0


def _show(stated: dict[str, Any], run: RunFolder | None, status: str, as_json: bool, **more: Any) -> None:
    scores = scores_of(run.path) if run else []
    if as_json:
        of_run: dict[str, Any] = {"run": None, "folder": None, "jobs": []}
        if run:
            of_run = {"run": run.run_id, "folder": str(run.path), "jobs": job_ids(run)}
        asked = {"tasks": stated["tasks"], "model": stated["model"], "checkpoint": stated.get("checkpoint")}
        show_json({"status": status, **asked, **of_run, "scores": [vars(score) for score in scores], **more})
    elif status == "finished":
        _print(scores)
    elif run is not None:
        echo(run.run_id)


def _print(scores: list[Score]) -> None:
    for score in scores:
        echo(score.text)
