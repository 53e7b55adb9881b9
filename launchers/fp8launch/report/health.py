"""Training health as reports see it: the rules of `injob/supervisor/health_rules.py` on the logs of a run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fp8launch.injob.supervisor.health_rules import LIMITS, HealthLimits, HealthProblem, Series, problems_of
from fp8launch.logs import IterationTable, Validation
from fp8launch.logs.field_names import LOSS_PREFIX, NOT_FINITE
from fp8launch.report.steady_state import Line, SteadyState, field_names, values
from fp8launch.untyped import as_mapping
from fp8launch.wording import counted


def limits_of(manifest: Mapping[str, Any]) -> HealthLimits:
    """Return the limits of a run's recipe."""
    return HealthLimits.of_recipe(as_mapping(as_mapping(manifest.get("recipe")).get("health")))


def series_of(lines: Sequence[Line]) -> Series:
    """Return the columns of the lines of a run."""
    grad_norm = values(lines, "grad_norm")
    return Series(
        number=[line.number for line in lines],
        attempt=[line.attempt for line in lines],
        step_time_ms=[line.step_time_ms for line in lines],
        loss=values(lines, _main_loss(field_names(lines, LOSS_PREFIX))),
        mixed=[line.row in line.log.mixed_rows for line in lines],
        grad_norm=grad_norm,
        has_grad_norm=any(map(math.isfinite, grad_norm)),
        not_finite=values(lines, NOT_FINITE),
        skipped=values(lines, "skipped_iterations"),
        nan=values(lines, "nan_iterations"),
    )


def _series_of_tables(tables: Sequence[IterationTable]) -> Series:
    """Return the columns of parts of the logs of attempts, oldest first.

    Iterations that a later attempt repeats are left out.
    """
    rows: list[tuple[int, int, int]] = []
    for attempt, table in enumerate(tables):
        numbers = [int(number) for number in table.column("number")]
        if numbers:
            rows = [row for row in rows if row[0] < numbers[0]]
        rows += [(number, attempt, row) for row, number in enumerate(numbers)]

    def column(name: str) -> list[float]:
        columns = [table.column(name) for table in tables]
        return [columns[attempt][row] for _, attempt, row in rows]

    grad_norm = column("grad_norm")
    losses = sorted({name for table in tables for name in table.names if name.startswith(LOSS_PREFIX)})
    return Series(
        number=[number for number, _, _ in rows],
        attempt=[attempt for _, attempt, _ in rows],
        step_time_ms=column("step_time_ms"),
        loss=column(_main_loss(losses)),
        mixed=[row == 1 for _, _, row in rows],
        grad_norm=grad_norm,
        has_grad_norm=any(map(math.isfinite, grad_norm)),
        not_finite=column(NOT_FINITE),
        skipped=column("skipped_iterations"),
        nan=column("nan_iterations"),
    )


def _main_loss(names: Sequence[str]) -> str:
    """The language-model loss, or the first loss of another kind."""
    usual = LOSS_PREFIX + "lm loss"
    return usual if usual in names or not names else names[0]


def health_of(
    steady: SteadyState,
    validations: Sequence[Validation],
    arguments: Mapping[str, object],
    limits: HealthLimits = LIMITS,
) -> tuple[HealthProblem, ...]:
    """Return the health problems of a run. `arguments` are Megatron's, empty if unknown."""
    return _problems(series_of(steady.lines), series_of(steady.kept), validations, arguments, limits)


def health_of_tables(
    tables: Sequence[IterationTable],
    validations: Sequence[Validation],
    arguments: Mapping[str, object],
    limits: HealthLimits = LIMITS,
) -> tuple[HealthProblem, ...]:
    """Return the same for parts of the logs of attempts, oldest first, while a run is going."""
    series = _series_of_tables(tables)
    return _problems(series, series, validations, arguments, limits)


def _problems(
    series: Series,
    timed: Series,
    validations: Sequence[Validation],
    arguments: Mapping[str, object],
    limits: HealthLimits,
) -> tuple[HealthProblem, ...]:
    problems = problems_of(series, timed, arguments, limits)
    if series.number and "nan" not in limits.ignore:
        problems = (*problems, *_validation(series, validations))
    return problems


def _validation(series: Series, validations: Sequence[Validation]) -> Iterator[HealthProblem]:
    """Report validation losses that are NaN or infinite, although the training loss may not be."""
    bad = [i for i, one in enumerate(validations) if not all(map(math.isfinite, one.losses.values()))]
    if not bad:
        return
    # The line of the last evaluation has no iteration in it.
    last_line = series.number[-1]
    first, last = (
        last_line if validations[i].iteration is None else validations[i].iteration for i in (bad[0], bad[-1])
    )
    severity = "error" if bad[-1] == len(validations) - 1 else "warning"
    message = f"the validation loss is NaN or infinite in {counted(len(bad), 'evaluation')}"
    yield HealthProblem("nan", severity, message, first or last_line, last or last_line)
