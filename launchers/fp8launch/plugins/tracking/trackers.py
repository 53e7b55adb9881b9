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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8launch.diagnostics import MACHINE_LACKS, error
from fp8launch.megatron.schema import load_schema
from fp8launch.megatron.versions import DEFAULT
from fp8launch.plugins.tracking.injob.event_file import SUFFIX, EventFile, event
from fp8launch.plugins.tracking.injob.log_rows import Row, validation_name
from fp8launch.plugins.tracking.injob.mlflow_run import SERVER, MlflowRun
from fp8launch.plugins.tracking.injob.tracked_run import Scalar, TrackedRun, file_name, scalar, text
from fp8launch.plugins.tracking.injob.wandb_run import WandbRun
from fp8launch.report.losses import losses
from fp8launch.report.run_report import RunReport, Statistic
from fp8launch.report.steady_state import numbers_of
from fp8launch.secrets import redacted

_MEDIANS = ("step_time_ms", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu", "energy_j_per_gpu")
_NUMBERS = ("loss_last", "grad_norm_last", "iterations", "nan_iterations", "skipped_iterations")
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

    `history` has a row for each iteration line, and `summary` the results: medians over the steady state, in the units
    that their names state.
    """

    identity: TrackedRun
    status: str
    history: tuple[Row, ...]
    summary: Mapping[str, float]

    @property
    def name(self) -> str:
        return self.identity.name

    @property
    def config(self) -> Mapping[str, Scalar]:
        return self.identity.config

    @property
    def last_step(self) -> int:
        return self.history[-1].step if self.history else 0

    @property
    def failed(self) -> bool:
        return self.status == "failed"


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
        group = text(run.study.name)
    return Tracked(TrackedRun(text(run.name), group, _config(run)), run.status, _history(run), summary)


def _config(run: RunReport) -> dict[str, Scalar]:
    facts = dict(run.facts)
    if run.study:
        for key, value in run.study.point.items():
            facts[f"axis {key}"] = value
    config: dict[str, Scalar] = {}
    for name, value in facts.items():
        if value is not None:
            config[text(name)] = scalar(value)
    if run.study:
        config["repeat"] = scalar(run.study.repeat)
    if run.command:
        config["command"] = text(run.command)
    return config


def _history(run: RunReport) -> tuple[Row, ...]:
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
    validations: dict[int, dict[str, float]] = {}
    for one in run.training.validations:
        values = validations.setdefault(one["iteration"], {})
        for label, value in one["losses"].items():
            values[validation_name(label, one["name"])] = value
    rows = []
    for i, number in enumerate(numbers):
        values = {name: column[i] for name, column in columns.items()} | validations.get(number, {})
        row = {name: value for name, value in values.items() if math.isfinite(value)}
        rows.append(Row(number, 0.0, {**row, "counted": float(number in kept)}))
    return tuple(rows)


def export(runs: Sequence[Tracked], to: str, project: str, folder: Path, offline: bool) -> list[str]:
    """Export the runs. Return the place of each, in their order. `folder` takes local files.

    Raises UserError without the library (exit code 3), or where the tracker refuses.
    """
    if importlib.util.find_spec(to) is None:
        fix = f"pip install 'fp8launch[{to}]'"
        raise error("no-tracker", f"exporting to {to} needs its library", f"--to {to}", fix, MACHINE_LACKS)
    return TRACKERS[to](runs, project, folder, offline)


def _to_tensorboard(runs: Sequence[Tracked], project: str, folder: Path, offline: bool) -> list[str]:
    """Write a folder of event files for each run, and replace files of live tracking or of an earlier export."""
    hparams: Any = importlib.import_module("tensorboard.plugins.hparams.summary_v2")
    event_pb2: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
    places = []
    for run in runs:
        place = folder / project / file_name(run.name)
        for part in (place.parent, place):
            if part.is_symlink():
                fix = "remove the link, or choose another --dir"
                raise error("output-is-a-link", f"{part} is a link to {part.readlink()}", "--dir", fix)
        for old in place.glob(f"*{SUFFIX}"):
            old.unlink()
        settings = hparams.hparams_pb(dict(run.config), trial_id=run.name)
        summary = {f"summary/{name}": value for name, value in run.summary.items()}
        try:
            out = EventFile(place)
            out.add(event_pb2.Event(step=0, summary=settings).SerializeToString())
            out.log(run.history)
            out.add(event(0.0, run.last_step, summary))
            out.close(run.status, run.failed)
        except OSError as exc:  # of a full disk, which names no file
            raise OSError(exc.errno, exc.strerror, str(place)) from None
        places.append(str(place))
    return places


def _to_wandb(runs: Sequence[Tracked], project: str, folder: Path, offline: bool) -> list[str]:
    """Write one W&B run per run, under the id of live tracking, so that an export only adds new values."""
    wandb: Any = importlib.import_module("wandb")
    fix = "set WANDB_API_KEY (`wandb login`), or add --offline and `wandb sync` later"
    settings = {"project": project, "mode": "offline" if offline else "online"}
    places = []
    for run in runs:
        with _refusals("wandb", fix, wandb.Error):
            out = WandbRun(run.identity, settings, folder, [run.status])
            last = out.last
            out.log([row for row in run.history if row.step > last])
            out.run.summary.update(dict(run.summary))
            out.close(run.status, run.failed)
        places.append(out.place)
    return places


def _to_mlflow(runs: Sequence[Tracked], project: str, folder: Path, offline: bool) -> list[str]:
    """Write one MLflow run per run into the experiment `project`, or complete the run of live tracking."""
    uri = os.environ.get(SERVER)
    if offline:
        folder.mkdir(parents=True, exist_ok=True)
        # A database, because newer versions refuse a folder of files.
        uri = f"sqlite:///{folder.absolute()}/mlflow.db"
    if not uri:
        raise error("no-tracker", "no MLflow server is set", "--to mlflow", f"set {SERVER}, or add --offline")
    places = []
    mlflow: Any = importlib.import_module("mlflow")
    with _refusals(
        "mlflow", f"is {_without_login(uri)} there, and may you write to it?", mlflow.exceptions.MlflowException
    ):
        for run in runs:
            settings = {"uri": uri, "experiment": project}
            out = MlflowRun(run.identity, settings, readable(run.config), _artifacts(folder, offline))
            last = out.last
            out.log([row for row in run.history if row.step > last])
            out.summarize(run.summary, run.last_step)
            out.close(run.status, run.failed)
            places.append(f"{_without_login(uri)}, {out.place}")
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
