"""Runs handed to an experiment tracker, by its own library: Weights & Biases, MLflow, TensorBoard.

Each is an extra, imported when it is asked for. Secrets (WANDB_API_KEY, MLFLOW_TRACKING_TOKEN) are the libraries' own
business: they read them from the environment, and nothing here does.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8launch.diagnostics import MACHINE_LACKS, error
from fp8launch.report.loss_curves import losses
from fp8launch.report.pieces import pieces
from fp8launch.report.run_data import RunData
from fp8launch.report.run_report import Statistic
from fp8launch.report.steady_state import NUMBER, values
from fp8launch.secrets import redacted

Scalar = float | int | str | bool
_MEDIANS = ("step_time_ms", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu", "energy_j_per_gpu")
_NUMBERS = ("peak_memory_mib", "loss_last", "grad_norm_last", "iterations", "nan_iterations", "skipped_iterations")
# MLflow takes no more at a time.
_METRICS_AT_ONCE, _PARAMS_AT_ONCE = 1000, 100
_LONGEST_PARAM = 500


@dataclass(frozen=True)
class Tracked:
    """The values of a run that a tracker receives.

    `history` has a row for each iteration line, `config` what the run was started with, `summary` its numbers: medians
    by the warm-up rule, in the units of their names.
    """

    name: str
    group: str | None
    status: str
    config: Mapping[str, Scalar]
    history: tuple[tuple[int, Mapping[str, float]], ...]
    summary: Mapping[str, float]

    @property
    def last_step(self) -> int:
        if not self.history:
            return 0
        return self.history[-1][0]


def tracked(run: RunData) -> Tracked:
    report = run.report
    summary = {}
    for name in _MEDIANS:
        value = getattr(report, name)
        if isinstance(value, Statistic):
            summary[f"{name}_median"] = value.median
    for name in _NUMBERS:
        value = getattr(report, name)
        if value is not None:
            summary[name] = float(value)
    group = None
    if run.study:
        group = _text(run.study.name)
    return Tracked(
        name=_text(run.name),
        group=group,
        status=report.status,
        config=_config(run),
        history=_history(run),
        summary=summary,
    )


def _config(run: RunData) -> dict[str, Scalar]:
    facts = dict(run.facts)
    if run.study:
        for key, value in run.study.point.items():
            facts[f"axis {key}"] = value
    config: dict[str, Scalar] = {}
    for name, value in facts.items():
        if value is not None:
            config[_text(name)] = _scalar(value)
    if run.study:
        config["repeat"] = _scalar(run.study.repeat)
    if run.command:
        config["command"] = _text(run.command)
    return config


def _history(run: RunData) -> tuple[tuple[int, Mapping[str, float]], ...]:
    """Every iteration line; `counted` is 1 for those that the medians are over."""
    lines = run.steady_state.lines
    loss = losses(run)
    kept = set(map(NUMBER, run.kept))
    columns = {
        "step_time_ms": values(lines, "step_time_ms"),
        "tokens_per_s_per_gpu": run.tokens_per_s(lines),
        "loss": [loss.get(line.number, math.nan) for line in lines],
    }
    for name in ("tflops_per_gpu", "grad_norm", "energy_j_per_gpu"):
        columns[name] = values(lines, name)
    rows = []
    for i, line in enumerate(lines):
        row = {}
        for name, column in columns.items():
            if math.isfinite(column[i]):
                row[name] = column[i]
        row["counted"] = float(line.number in kept)
        rows.append((line.number, row))
    return tuple(rows)


def _scalar(value: object) -> Scalar:
    """A value that every tracker takes: numbers of 64 bits, texts in UTF-8."""
    if isinstance(value, bool | float) or (isinstance(value, int) and abs(value) < 1 << 63):
        return value
    return _text(str(value))


def _text(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def export(runs: Sequence[Tracked], to: str, project: str, folder: Path, offline: bool) -> list[str]:
    """Export the runs. Return the place of each, in their order. `folder` takes local files.

    Raises UserError without the library (exit code 3), or where the tracker refuses.
    """
    if importlib.util.find_spec(to) is None:
        fix = f"pip install 'fp8launch[{to}]'"
        raise error("no-tracker", f"exporting to {to} needs its library", f"--to {to}", fix, MACHINE_LACKS)
    return TRACKERS[to](runs, project, folder, offline)


def _to_tensorboard(runs: Sequence[Tracked], project: str, folder: Path, offline: bool) -> list[str]:
    """Write a folder of event files for each run, and replace those of an earlier export."""
    writer: Any = importlib.import_module("tensorboard.summary.writer.event_file_writer")
    hparams: Any = importlib.import_module("tensorboard.plugins.hparams.summary_v2")
    event: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
    proto: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2")
    places = []
    for run in runs:
        place = folder / project / file_name(run.name)
        for part in (place.parent, place):
            if part.is_symlink():
                fix = "remove the link, or choose another --dir"
                raise error("output-is-a-link", f"{part} is a link to {part.readlink()}", "--dir", fix)
        for old in place.glob(f"*{_SUFFIX}"):
            old.unlink()
        out = writer.EventFileWriter(str(place), filename_suffix=_SUFFIX)
        out.add_event(event.Event(step=0, summary=hparams.hparams_pb(dict(run.config), trial_id=run.name)))
        summary = {}
        for name, value in run.summary.items():
            summary[f"summary/{name}"] = value
        for step, row in (*run.history, (run.last_step, summary)):
            scalars = [proto.Summary.Value(tag=name, simple_value=value) for name, value in row.items()]
            out.add_event(event.Event(step=step, summary=proto.Summary(value=scalars)))
        out.close()
        places.append(str(place))
    return places


_SUFFIX = ".fp8launch"


def _to_wandb(runs: Sequence[Tracked], project: str, folder: Path, offline: bool) -> list[str]:
    """Write one W&B run for each run, under its name: a second export adds new values only."""
    wandb: Any = importlib.import_module("wandb")
    quiet = {"silent": True, "console": "off", "disable_git": True, "save_code": False, "init_timeout": 60}
    where = {"resume": "allow"}
    if offline:
        where = {"mode": "offline"}
    fix = "set WANDB_API_KEY (`wandb login`), or add --offline and `wandb sync` later"
    places = []
    folder.mkdir(parents=True, exist_ok=True)
    for run in runs:
        with _refusals("wandb", fix, wandb.Error):
            out = wandb.init(
                project=project,
                id=file_name(run.name)[-64:],
                name=run.name,
                group=run.group,
                tags=["fp8launch", run.status],
                config=dict(run.config),
                dir=str(folder),
                settings=wandb.Settings(**quiet),
                **where,
            )
            for step, row in run.history:
                out.log(dict(row), step=step)
            out.summary.update({**run.summary, "status": run.status})
            place = out.url
            if out.offline:
                place = Path(out.dir).parent
            out.finish(exit_code=int(run.status == "failed"))
        places.append(str(place))
    return places


def _to_mlflow(runs: Sequence[Tracked], project: str, folder: Path, offline: bool) -> list[str]:
    """One MLflow run each in the experiment `project`; an earlier export of the same run is deleted."""
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    if offline:
        folder.mkdir(parents=True, exist_ok=True)
        # A database: newer versions refuse a folder of files.
        uri = f"sqlite:///{folder.absolute()}/mlflow.db"
    if not uri:
        raise error("no-tracker", "no MLflow server is set", "--to mlflow", "set MLFLOW_TRACKING_URI, or add --offline")
    # By default the library retries for minutes if the server cannot be reached.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    mlflow: Any = importlib.import_module("mlflow")
    entities: Any = importlib.import_module("mlflow.entities")
    places = []
    with _refusals(
        "mlflow", f"is {_without_login(uri)} there, and may you write to it?", mlflow.exceptions.MlflowException
    ):
        client = mlflow.MlflowClient(tracking_uri=uri)
        found = client.get_experiment_by_name(project)
        experiment = found.experiment_id if found else client.create_experiment(project, _artifacts(folder, offline))
        for run in runs:
            for old in client.search_runs([experiment], f"tags.`fp8launch.run` = '{file_name(run.name)}'"):
                client.delete_run(old.info.run_id)
            tags = {"fp8launch.run": file_name(run.name), "status": run.status}
            if run.group:
                tags["study"] = run.group
            made = client.create_run(experiment, run_name=run.name, tags=tags).info.run_id
            params = []
            for name, value in run.config.items():
                params.append(entities.Param(_key(name), str(value)[:_LONGEST_PARAM]))
            for some in pieces(params, _PARAMS_AT_ONCE):
                client.log_batch(made, params=some)
            for some in pieces(_mlflow_metrics(entities, run), _METRICS_AT_ONCE):
                client.log_batch(made, metrics=some)
            state = "FINISHED"
            if run.status == "failed":
                state = "FAILED"
            client.set_terminated(made, state)
            places.append(f"{_without_login(uri)}, experiment {project}, run {made}")
    return places


def _mlflow_metrics(entities: Any, run: Tracked) -> list[Any]:
    metrics = []
    for step, row in (*run.history, (run.last_step, run.summary)):
        for name, value in row.items():
            metrics.append(entities.Metric(_key(name), value, 0, step))
    return metrics


TRACKERS: Mapping[str, Callable[[Sequence[Tracked], str, Path, bool], list[str]]] = {
    "wandb": _to_wandb,
    "mlflow": _to_mlflow,
    "tensorboard": _to_tensorboard,
}


@contextlib.contextmanager
def _refusals(to: str, fix: str, *kinds: type[Exception]) -> Iterator[None]:
    """Turn a tracker's own exceptions into a UserError with a fix."""
    try:
        yield
    except kinds as problem:
        said = _without_login(" ".join(str(problem).split()))[:300]
        raise error("tracker-refused", f"{to} says: {said}", f"--to {to}", fix, MACHINE_LACKS) from None


def _artifacts(folder: Path, offline: bool) -> str | None:
    if not offline:
        return None
    return (folder.absolute() / "artifacts").as_uri()


def _without_login(uri: str) -> str:
    """An address may hold a password, which may hold a slash or another @."""
    return redacted(re.sub(r"//\S*@", "//", uri))


def file_name(name: str) -> str:
    """Turn a name from a manifest into the name of one file or folder: never `..`, never a path."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", name[:200]).lstrip(".") or "_"


def _key(name: str) -> str:
    return re.sub(r"[^\w .:/-]+", "_", name)[:250]
