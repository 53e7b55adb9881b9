"""`fp8launch export`: runs exported to W&B, MLflow or TensorBoard."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from fp8launch.cli.compare import gpu_option
from fp8launch.cli.output import echo, eprint, json_option, logs_argument, show_json
from fp8launch.diagnostics import ANSWER_IS_NO, error
from fp8launch.plugins.tracking.injob.tracked_run import file_name
from fp8launch.plugins.tracking.trackers import TRACKERS, tracked
from fp8launch.plugins.tracking.trackers import export as hand_over
from fp8launch.report.named_runs import read_runs
from fp8launch.report.run_report import RunReport


@click.command()
@logs_argument
@click.option(
    "--to",
    type=click.Choice(list(TRACKERS)),
    required=True,
    help="Experiment tracker; each needs the extra of its name.",
)
@click.option("--project", metavar="NAME", help="W&B project, MLflow experiment, folder; default: the study's name.")
@click.option(
    "--dir", "folder", type=click.Path(file_okay=False, path_type=Path), default="fp8launch-export", show_default=True,
    help="Output directory for TensorBoard and --offline.",
)  # fmt: skip
@click.option("--offline", is_flag=True, help="Write files to --dir instead of contacting a server.")
@gpu_option
@json_option
def export(
    names: tuple[str, ...], to: str, project: str | None, folder: Path, offline: bool, gpu: str | None, as_json: bool
) -> int:
    """Export iterations, medians and arguments of runs to an experiment tracker.

    W&B and MLflow take their address and login from their own variables (WANDB_API_KEY, MLFLOW_TRACKING_URI).
    """
    runs = [run for run in read_runs(names, gpu, eprint) if run.training.lines]
    if not runs:
        raise error("nothing-to-export", "no run has iterations to export", exit_code=ANSWER_IS_NO)
    project = project or _study_name(runs) or "fp8launch"
    places = hand_over(list(map(tracked, runs)), to, project, folder, offline)
    if as_json:
        show_json([{"run": run.name, "place": place} for run, place in zip(runs, places, strict=True)])
    else:
        for run, place in zip(runs, places, strict=True):
            echo(f"{run.name}  {place}")
    if to == "tensorboard":
        eprint(f"tensorboard --logdir {folder / project}")
    elif to == "wandb" and offline:
        eprint(f"wandb sync {folder}/wandb/offline-run-*")
    elif offline:
        eprint(f"mlflow ui --backend-store-uri sqlite:///{folder.absolute()}/mlflow.db")
    return 0


def _study_name(runs: Sequence[RunReport]) -> str | None:
    """The study that all runs belong to, as the name of a folder: a manifest may hold any text."""
    studies = {run.study.name for run in runs if run.study}
    return file_name(studies.pop()) if len(studies) == 1 else None
