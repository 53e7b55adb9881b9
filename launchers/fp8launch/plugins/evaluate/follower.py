"""A job that follows a run and evaluates its checkpoints while it trains: its settings, before it is submitted."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fp8launch import schedulers
from fp8launch.diagnostics import ANSWER_IS_NO, UserError, error
from fp8launch.plugins.convert.cli import checkpoint_folders, run_of
from fp8launch.plugins.convert.conversion import model_named, model_of
from fp8launch.plugins.evaluate.evaluation import RUN_PREFIX
from fp8launch.rundir.registry import need_mine
from fp8launch.rundir.run_dir import RunFolder, run_folders
from fp8launch.schedulers.base import Scheduler
from fp8launch.untyped import as_int, as_mapping

# What two followers of one run would both evaluate.
_SAME = ("run", "tasks")


def stated_follower(source: str, model: str | None, every: int) -> dict[str, Any]:
    """Return the section `evaluate` of a job that follows the named run. Raises UserError if that is impossible."""
    run = run_of(source)
    if run is None:
        message = f"--every follows a run, but {source} is a folder of checkpoints"
        raise error("evaluate-every", message, source, "name a run of `fp8launch runs`, or leave out --every")
    need_mine(run)
    folder, *earlier = checkpoint_folders(run, source)
    arguments = as_mapping(run.manifest().get("arguments"))
    interval = as_int(arguments.get("save_interval"))
    if interval is None:
        message = f"{run.run_id} writes no checkpoints while it trains"
        raise error("evaluate-every", message, source, "name a run with checkpoint.interval", ANSWER_IS_NO)
    if (form := arguments.get("ckpt_format", "torch_dist")) != "torch_dist":
        message = f"{run.run_id} writes checkpoints in the format {form}, but only torch_dist can be converted"
        raise error("evaluate-every", message, source, "train with megatron.ckpt_format: torch_dist", ANSWER_IS_NO)
    places = [*sorted(folder.glob("iter_*"))[-1:], folder, *earlier]
    named = model or next(filter(None, map(model_of, places)), None)
    if named is None:
        message = f"{run.run_id} does not record which Hugging Face model it corresponds to"
        fix = "name one with --model: a folder with its config.json and tokenizer, or a name on the hub"
        raise error("evaluate-model", message, "--model", fix)
    return {
        "model": model_named(named, "--model"),
        "run": str(run.path),
        "checkpoints": str(folder.resolve()),
        "every": every,
        "interval": interval,
    }


def follower_time(run: RunFolder, scheduler: Scheduler) -> dict[str, Any]:
    """Return the follower's time limit and attempts: as many as the run's, so that it can last as long."""
    recipe = as_mapping(run.manifest().get("recipe"))
    attempts = as_int(as_mapping(recipe.get("survive")).get("attempts")) or 1
    attempts += max(0, len(as_mapping(recipe.get("phases"))) - 1)
    if not scheduler.capabilities.resumes:
        attempts = 1
    time = as_mapping(recipe.get("resources")).get("time")
    return {"attempts": attempts, **({"time": str(time)} if time else {})}


def refuse_second_follower(stated: Mapping[str, Any], root: Path) -> None:
    """Raise UserError if another job follows this run with the same tasks."""
    for run in run_folders(root):
        if not run.run_id.startswith(RUN_PREFIX):
            continue
        try:
            other = as_mapping(as_mapping(run.manifest().get("recipe")).get("evaluate"))
            same = other.get("every") and all(other.get(key) == stated[key] for key in _SAME)
            ended = not same or schedulers.of_run(run).state(run).final
        except UserError:
            continue
        if not ended:
            message = f"{run.run_id} follows {Path(stated['run']).name} with these tasks already"
            fix = f"wait for it, or `fp8launch cancel {run.run_id}`"
            raise error("evaluate-every", message, stated["run"], fix, ANSWER_IS_NO)
