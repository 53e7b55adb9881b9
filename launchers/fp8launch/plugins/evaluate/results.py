"""Results of evaluations in run folders, for `parse`, `compare` and `evaluate` itself."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fp8launch.injob.supervisor.run_records import json_mapping
from fp8launch.logs import ParsedLog
from fp8launch.plugins.evaluate.injob.folders import EVALUATIONS
from fp8launch.report.columns import NONE, Column
from fp8launch.report.rows import Row
from fp8launch.report.run_report import ReportField
from fp8launch.rundir.atomic_io import is_own_file
from fp8launch.untyped import as_int, as_mapping

FIELD = "evaluations"
# lm-eval's filter of metrics that need none.
_NO_FILTER = "none"


@dataclass(frozen=True)
class Score:
    """One metric of a task. `label` names everything that must be equal in a comparison: task, shots, limit, filter."""

    label: str
    metric: str
    value: float
    stderr: float | None
    samples: int | None
    iteration: int | None
    evaluation: str

    @property
    def text(self) -> str:
        where = "" if self.iteration is None else f" at iteration {self.iteration}"
        return f"{self.label}: {self.metric} {score_text(self.value, self.stderr)}{where}"


def score_text(value: float, stderr: float | None) -> str:
    """Render a value with its standard error; perplexities need fewer digits than accuracies."""
    digits = 4 if abs(value) < 10 else 2
    if stderr is None:
        return f"{value:.{digits}f}"
    return f"{value:.{digits}f} ± {stderr:.{digits}f}"


def scores_of(folder: Path) -> list[Score]:
    """Return the scores in a run folder, of evaluations and of the run's checkpoints, oldest iteration first."""
    found: list[Score] = []
    for file in sorted((folder / EVALUATIONS).glob("*.json")):
        if is_own_file(file):
            found += _scores(json_mapping(file))
    return sorted(found, key=lambda score: (score.iteration is None, score.iteration or 0))


def _scores(stated: Mapping[str, object]) -> Iterable[Score]:
    """Yield the scores of one result. Malformed entries are skipped."""
    tasks = stated.get("tasks")
    if stated.get("format") != 1 or not isinstance(tasks, list):
        return
    for task in map(as_mapping, tasks):
        metrics = task.get("metrics")
        if not isinstance(metrics, list):
            continue
        for each in map(as_mapping, metrics):
            value, error = each.get("value"), each.get("stderr")
            if not isinstance(value, int | float):
                continue
            if not isinstance(error, int | float):
                error = None
            yield Score(
                _label(task, each, as_int(stated.get("limit"))),
                str(each.get("metric")),
                float(value),
                error,
                as_int(task.get("samples")),
                as_int(stated.get("iteration")),
                str(stated.get("evaluation")),
            )


def _label(task: Mapping[str, object], metric: Mapping[str, object], limit: int | None) -> str:
    """Name a task with its settings, so that unlike evaluations never share a label."""
    details = []
    if shots := as_int(task.get("fewshot")):
        details.append(f"{shots}-shot")
    if limit is not None:
        details.append(f"first {limit}")
    if metric.get("filter") not in (None, _NO_FILTER):
        details.append(str(metric["filter"]))
    name = str(task.get("task"))
    if details:
        name += f" ({', '.join(details)})"
    return name


def report_field(logs: Sequence[ParsedLog]) -> ReportField | None:
    """Return the scores of a run's checkpoints, of the folder that has its logs."""
    folders = dict.fromkeys(log.path.absolute().parent.parent for log in logs)
    scores: list[Score] = []
    for folder in folders:
        scores += scores_of(folder)
    if not scores:
        return None
    value = {"scores": [vars(score) for score in scores]}
    lines = []
    for of_metric in _by_metric(scores).values():
        earlier = len({score.iteration for score in of_metric}) - 1
        more = f" ({earlier} earlier: --json)" if earlier else ""
        lines.append(of_metric[-1].text + more)
    return ReportField(value, tuple(lines))


def _by_metric(scores: Iterable[Score]) -> dict[tuple[str, str], list[Score]]:
    """Return scores by label and metric, in the same order."""
    found: dict[tuple[str, str], list[Score]] = {}
    for score in scores:
        found.setdefault((score.label, score.metric), []).append(score)
    return found


def row_scores(row: Row) -> list[dict[str, object]] | None:
    """Return the mean over the runs of a row for each metric, with the standard error of that mean.

    It is of each run's last evaluated iteration. `by_iteration` has the means of all iterations.
    """
    of_runs: dict[tuple[str, str], list[list[Score]]] = {}
    for run in row.runs:
        field = run.more.get(FIELD)
        if field is not None:
            scores = [Score(**stated) for stated in field.value["scores"]]  # type: ignore[attr-defined]
            for key, curve in _by_metric(scores).items():
                of_runs.setdefault(key, []).append(curve)
    found: list[dict[str, object]] = []
    for (label, metric), curves in of_runs.items():
        last = [curve[-1] for curve in curves]
        iterations = sorted({score.iteration for score in last if score.iteration is not None})
        more = {"samples": last[0].samples, "iterations": iterations, "by_iteration": _means_by_iteration(curves)}
        found.append({"task": label, "metric": metric, **_mean(last), **more})
    return found or None


def _means_by_iteration(curves: Sequence[Sequence[Score]]) -> list[dict[str, object]]:
    # A repeated evaluation replaces the earlier one of the same run and iteration.
    scores: dict[int, list[Score]] = {}
    for curve in curves:
        for iteration, score in {each.iteration: each for each in curve}.items():
            if iteration is not None:
                scores.setdefault(iteration, []).append(score)
    return [{"iteration": iteration, **_mean(scores[iteration])} for iteration in sorted(scores)]


def _mean(scores: Sequence[Score]) -> dict[str, object]:
    """Return the mean of scores, one of each run, with its standard error if all of them have one."""
    errors = [score.stderr for score in scores if score.stderr is not None]
    error = None
    if len(errors) == len(scores):
        error = math.sqrt(sum(each * each for each in errors)) / len(scores)
    return {"value": sum(score.value for score in scores) / len(scores), "stderr": error, "runs": len(scores)}


def _cell(row: Row) -> str:
    """Return the first metric of each task, as a table shows it."""
    first: dict[object, str] = {}
    for each in row_scores(row) or ():
        value, error = each["value"], each["stderr"]
        assert isinstance(value, float) and (error is None or isinstance(error, float))
        text = f"{each['task']}: {each['metric']} {score_text(value, error)}"
        iterations = each["iterations"]
        assert isinstance(iterations, list)
        if iterations:
            # Rows may have been evaluated at different iterations.
            text += f" (iteration {', '.join(map(str, iterations))})"
        first.setdefault(each["task"], text)
    return "; ".join(first.values()) or NONE


def _csv_cell(row: Row) -> str | None:
    return _cell(row) if row_scores(row) else None


COLUMN = Column(FIELD, row_scores, "evaluation ± standard error", _cell, csv={FIELD: _csv_cell}, number=False)
