"""A run in MLflow. Only its own library reads the login (MLFLOW_TRACKING_USERNAME, ..._PASSWORD, ..._TOKEN)."""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from fp8launch.plugins.tracking.injob.log_rows import Row
from fp8launch.plugins.tracking.injob.tracked_run import Scalar, TrackedRun

T = TypeVar("T")
SERVER = "MLFLOW_TRACKING_URI"
# MLflow's limits for one request.
_METRICS_AT_ONCE, _PARAMS_AT_ONCE = 1000, 100
_LONGEST_PARAM = 500
# By default, the library retries for minutes if the server cannot be reached, and prints addresses.
_DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
# The newest iteration that MLflow has, as a metric: a request stores all of its metrics, or none.
_ITERATION = "iteration"


class MlflowRun:
    """The run with our tag. Another attempt, or `export`, continues it. `last` is the newest iteration that it has."""

    def __init__(
        self,
        run: TrackedRun,
        settings: Mapping[str, Any],
        params: Mapping[str, Scalar],
        artifacts: str | None = None,
    ) -> None:
        """`params` are shown in tables. `artifacts` is the place for files in a new experiment."""
        for name, value in _DEFAULTS.items():
            os.environ.setdefault(name, value)
        mlflow: Any = importlib.import_module("mlflow")
        self._entities: Any = importlib.import_module("mlflow.entities")
        uri = settings.get("uri") or os.environ.get(SERVER)
        if not uri:
            raise ValueError(f"neither tracking.mlflow.uri nor {SERVER} names a server")
        self.client = client = mlflow.MlflowClient(tracking_uri=uri)
        name = settings.get("experiment") or run.project
        experiment = client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else client.create_experiment(name, artifacts)
        found = client.search_runs([number], f"tags.`fp8launch.run` = '{run.id}'")
        if found:
            data = found[0].data
            self.run_id = found[0].info.run_id
            client.update_run(self.run_id, "RUNNING")
            self.last = int(data.metrics.get(_ITERATION, 0))
            known = set(data.params)
        else:
            tags = {"fp8launch.run": run.id}
            if run.group:
                tags["study"] = run.group
            self.run_id = client.create_run(number, run_name=run.name, tags=tags).info.run_id
            # Parameters are what people compare in a table; the rest is for reading.
            client.log_dict(self.run_id, dict(run.config), "config.json")
            self.last = 0
            known = set()
        new = [self._entities.Param(_key(key), str(value)[:_LONGEST_PARAM]) for key, value in params.items()]
        # MLflow refuses to change a parameter.
        for some in _batches([param for param in new if param.key not in known], _PARAMS_AT_ONCE):
            client.log_batch(self.run_id, params=some)
        self.place = f"experiment {name}, run {self.run_id}"

    def log(self, rows: Sequence[Row]) -> None:
        waiting: list[Any] = []
        for row in rows:
            values = {**row.values, _ITERATION: float(row.step)}
            if len(waiting) + len(values) > _METRICS_AT_ONCE:
                self.client.log_batch(self.run_id, metrics=waiting)
                waiting = []
            for name, value in values.items():
                waiting.append(self._entities.Metric(_key(name), value, int(row.time * 1000), row.step))
        if waiting:
            self.client.log_batch(self.run_id, metrics=waiting)
            self.last = rows[-1].step

    def summarize(self, values: Mapping[str, float], step: int) -> None:
        metrics = [self._entities.Metric(_key(name), value, 0, step) for name, value in values.items()]
        self.client.log_batch(self.run_id, metrics=metrics)

    def close(self, state: str, failed: bool) -> None:
        self.client.set_tag(self.run_id, "status", state)
        if state != "running":
            self.client.set_terminated(self.run_id, "FAILED" if failed else "FINISHED")


def _batches(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for begin in range(0, len(items), size):
        yield items[begin : begin + size]


def _key(name: str) -> str:
    return re.sub(r"[^\w .:/-]+", "_", name)[:250]
