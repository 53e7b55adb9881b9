"""`fp8launch export`: runs handed to W&B, MLflow or TensorBoard."""

from __future__ import annotations

from pathlib import Path

import click

from fp8launch.cli.compare import measure_all
from fp8launch.cli.output import json_option, say, show_json
from fp8launch.hardware.gpus import GPUS
from fp8launch.problems import ANSWER_IS_NO, error
from fp8launch.report.trackers import TRACKERS, tracked
from fp8launch.report.trackers import export as hand_over


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="RUN|STUDY|LOG...")
@click.option("--to", type=click.Choice(list(TRACKERS)), required=True, help="The tracker; each is an extra.")
@click.option("--project", metavar="NAME", help="W&B project, MLflow experiment, folder; default: the study's name.")
@click.option(
    "--dir", "folder", type=click.Path(file_okay=False, path_type=Path), default="fp8launch-export", show_default=True,
    help="Where to write what stays on this machine.",
)  # fmt: skip
@click.option("--offline", is_flag=True, help="Write files in --dir instead of asking a server.")
@click.option("--gpu", type=click.Choice(list(GPUS)), help="GPU model of logs, for MFU; a run knows its own.")
@json_option
def export(
    names: tuple[str, ...], to: str, project: str | None, folder: Path, offline: bool, gpu: str | None, as_json: bool
) -> int:
    """Hand iterations, medians and arguments of runs to an experiment tracker.

    W&B and MLflow take their address and login from their own variables (WANDB_API_KEY, MLFLOW_TRACKING_URI).
    """
    runs = [run for run in measure_all(names, gpu) if run.report.lines]
    if not runs:
        raise error("nothing-to-export", "no run has an iteration to export", exit_code=ANSWER_IS_NO)
    studies = {run.study.name for run in runs if run.study}
    project = project or (studies.pop() if len(studies) == 1 else "fp8launch")
    places = hand_over([tracked(run) for run in runs], to, project, folder, offline)
    if as_json:
        show_json([{"run": run.name, "place": place} for run, place in zip(runs, places, strict=True)])
    else:
        for run, place in zip(runs, places, strict=True):
            click.echo(f"{run.name}  {place}")
    if to == "tensorboard":
        say(f"tensorboard --logdir {folder / project}")
    elif to == "wandb" and offline:
        say(f"wandb sync {folder}/wandb/offline-run-*")
    elif offline:
        say(f"mlflow ui --backend-store-uri sqlite:///{folder.absolute()}/mlflow.db")
    return 0
