"""Write runs to an experiment tracker with its own library: Weights & Biases, MLflow or TensorBoard.

Each library is an extra and is imported only when it is used. It reads its secrets (WANDB_API_KEY,
MLFLOW_TRACKING_TOKEN) from the environment; this module never does.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fp8launch.diagnostics import MACHINE_LACKS, error
from fp8launch.megatron.schema import load_schema
from fp8launch.megatron.versions import DEFAULT
from fp8launch.report.losses import losses
from fp8launch.report.run_report import RunReport, Statistic
from fp8launch.report.steady_state import numbers_of
from fp8launch.secrets import redacted

T = TypeVar("T")
Scalar = float | int | str | bool
_MEDIANS = ("step_time_ms", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu", "energy_j_per_gpu")
_NUMBERS = ("loss_last", "grad_norm_last", "iterations", "nan_iterations", "skipped_iterations")
# MLflow's limits for one request.
_METRICS_AT_ONCE, _PARAMS_AT_ONCE = 1000, 100
_LONGEST_PARAM = 500
# Facts about a run that are not arguments of Megatron.
_FACTS = (
    "recipe",
    "precision",
    "gpu",
    "nodes",
    "world_size",
    "script",
    "image",
    "commit",
    "fp8launch",
    "repeat",
    "command",
)


@dataclass(frozen=True)
class Tracked:
    """The values of a run that a tracker receives.

    `history` has a row for each iteration line, `config` the settings that the run was started with, and `summary` its
    results: medians over the steady state, in the units that their names state.
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


def tracked(run: RunReport) -> Tracked:
    """Return what a tracker receives of a run."""
    summary = {}
    for name in _MEDIANS:
        value = getattr(run.speed, name)
        if isinstance(value, Statistic):
            summary[f"{name}_median"] = value.median
    if run.peak_memory_mib is not None:
        summary["peak_memory_mib"] = run.peak_memory_mib
    for name in _NUMBERS:
        value = getattr(run.training, name)
        if value is not None:
            summary[name] = float(value)
    group = None
    if run.study:
        group = _text(run.study.name)
    return Tracked(
        name=_text(run.name),
        group=group,
        status=run.status,
        config=_config(run),
        history=_history(run),
        summary=summary,
    )


def _config(run: RunReport) -> dict[str, Scalar]:
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


def _history(run: RunReport) -> tuple[tuple[int, Mapping[str, float]], ...]:
    """Return every iteration line; `counted` is 1 for lines in the steady state, which the medians use."""
    lines = run.steady_state.lines
    numbers = numbers_of(lines)
    loss = losses(run)
    kept = set(numbers_of(run.steady_state.kept))
    columns: dict[str, Sequence[float]] = {
        "step_time_ms": lines.column("step_time_ms"),
        "tokens_per_s_per_gpu": run.tokens_per_s_per_gpu(lines),
        "loss": [loss.get(number, math.nan) for number in numbers],
    }
    for name in ("tflops_per_gpu", "grad_norm", "energy_j_per_gpu"):
        columns[name] = lines.column(name)
    rows = []
    for i, number in enumerate(numbers):
        row = {}
        for name, column in columns.items():
            if math.isfinite(column[i]):
                row[name] = column[i]
        row["counted"] = float(number in kept)
        rows.append((number, row))
    return tuple(rows)


def _scalar(value: object) -> Scalar:
    """Return a value that every tracker accepts: a number of at most 64 bits, or text in UTF-8."""
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
    """Write a folder of event files for each run, and replace files of an earlier export."""
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
        with _named_errors(place):
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


@contextlib.contextmanager
def _named_errors(place: Path) -> Iterator[None]:
    """Raise OSErrors with the folder, including errors in TensorBoard's thread, which would print a traceback."""
    failed: list[BaseException | None] = []
    before, threading.excepthook = threading.excepthook, lambda caught: failed.append(caught.exc_value)
    try:
        yield
    except OSError as exc:
        failed.append(exc)
    finally:
        threading.excepthook = before
    for error_in_thread in failed:
        if isinstance(error_in_thread, OSError):
            raise OSError(error_in_thread.errno, error_in_thread.strerror, str(place)) from None
    if failed and failed[0] is not None:
        raise failed[0]


_SUFFIX = ".fp8launch"


def _to_wandb(runs: Sequence[Tracked], project: str, folder: Path, offline: bool) -> list[str]:
    """Write one W&B run per run, under its name, so that a second export only adds new values."""
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
    """Write one MLflow run per run into the experiment `project`; it replaces an earlier export of the run."""
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    if offline:
        folder.mkdir(parents=True, exist_ok=True)
        # A database, because newer versions refuse a folder of files.
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
            for name, value in readable(run.config).items():
                params.append(entities.Param(_key(name), str(value)[:_LONGEST_PARAM]))
            for some in _batches(params, _PARAMS_AT_ONCE):
                client.log_batch(made, params=some)
            # Parameters are what people compare in a table; the rest is for reading.
            client.log_dict(made, dict(run.config), "config.json")
            for some in _batches(_mlflow_metrics(entities, run), _METRICS_AT_ONCE):
                client.log_batch(made, metrics=some)
            state = "FINISHED"
            if run.status == "failed":
                state = "FAILED"
            client.set_terminated(made, state)
            places.append(f"{_without_login(uri)}, experiment {project}, run {made}")
    return places


def readable(config: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Return the settings that people compare: arguments other than Megatron's defaults, and facts about the run.

    Megatron's log lists about 550 arguments, most of them defaults or derived from others.
    """
    schema = load_schema(DEFAULT)
    found = {}
    for name, value in config.items():
        flag = schema.find(name)
        is_fact = flag is None and (name in _FACTS or name.startswith("axis "))
        if is_fact or (flag is not None and str(flag.default) != str(value)):
            found[name] = value
    return found


def _batches(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for begin in range(0, len(items), size):
        yield items[begin : begin + size]


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
    """Remove the login from an address. A password may contain a slash or another @."""
    return redacted(re.sub(r"//\S*@", "//", uri))


def file_name(name: str) -> str:
    """Turn a name from a manifest into the name of one file or folder: never `..`, never a path."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", name[:200]).lstrip(".") or "_"


def _key(name: str) -> str:
    return re.sub(r"[^\w .:/-]+", "_", name)[:250]
