"""Check runs or the points of a study before submission."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from fp8launch import plugin_registry
from fp8launch.check.checker import CheckResult, check_all
from fp8launch.check.extra_layers import Bar, extra_layers, with_extra_layers
from fp8launch.cluster.profile import Cluster
from fp8launch.diagnostics import ANSWER_IS_NO, Problem, UserError, errors_in, problems_of
from fp8launch.job.prepared import Prepared
from fp8launch.schedulers.base import Scheduler
from fp8launch.submit.grid import Point
from fp8launch.submit.recipe_kinds import Part, named
from fp8launch.submit.submit import GridPoint


@dataclass(frozen=True)
class LeftOut:
    """A point that `--skip-bad` left out, with its problems."""

    point: Point
    problems: Sequence[Problem]

    @property
    def reason(self) -> str:
        codes = dict.fromkeys(problem.code for problem in errors_in(self.problems))
        return f"fails the check: {', '.join(codes)}"


@dataclass(frozen=True)
class CheckedRuns:
    """Results in the order of the runs, warnings, and notes about what was not checked."""

    results: list[CheckResult]
    warnings: list[Problem]
    notes: list[str]


def check_before_submission(
    runs: Sequence[Prepared],
    cluster: Cluster,
    scheduler: Scheduler,
    say: Callable[[str], None],
    bar: Bar,
    skip: bool = False,
    asked: Mapping[str, bool | None] | None = None,
    parts: Sequence[Part] = (),
) -> CheckedRuns:
    """Check runs that `scheduler` will receive. Raises UserError (exit code 1) for errors unless `skip` is set.

    `parts` are the runs as a sequence, with problems of their own. `asked` maps each plugin layer to the user's choice;
    None leaves the choice to the cluster profile.
    """
    results = check_all(runs, cluster, say=say, scheduler=scheduler)
    choices = dict.fromkeys(extra_layers()) if asked is None else asked
    results = with_extra_layers(runs, results, cluster, choices, say, bar)
    for i, part in enumerate(parts):
        results[i] = replace(results[i], problems=named(part.name, (*part.problems, *results[i].problems)))
    problems = problems_of(results)
    if errors_in(problems) and not skip:
        raise UserError(problems, ANSWER_IS_NO)
    notes = []
    # A profile requests a layer with a section named after the layer's option.
    for option, plugin in plugin_registry.absent("check_layers").items():
        if getattr(cluster, option, None):
            notes.append(f"the cluster profile has `{option}`, but the plugin {plugin} is not active")
    for result in results:
        state = result.layers["megatron"]
        if result.exit_code and state != "ran":
            notes.append(f"Megatron's own validators did not check this run: {state}")
        for name in result.extra:
            if result.ok and result.layers[name] != "ran":
                notes.append(f"{name} {result.layers[name]}")
    warnings = [problem for problem in problems if problem.severity == "warning"]
    return CheckedRuns(results, warnings, list(dict.fromkeys(notes)))


def prepare_points(
    points: Sequence[Point],
    prepare_point: Callable[[Point], Prepared],
    skip: bool = False,
    progress: Callable[[Sequence[Point], str], Iterable[Point]] = lambda points, title: points,
) -> tuple[list[tuple[Point, Prepared]], list[LeftOut]]:
    """Prepare points. Raises UserError with the problems of all failing points, unless `skip` is set.

    With `skip`, failing points are left out, except for a single point.
    """
    prepared: list[tuple[Point, Prepared]] = []
    left_out: list[LeftOut] = []
    worst = 0
    for point in progress(points, "reading recipes"):
        try:
            prepared.append((point, prepare_point(point)))
        except UserError as exc:
            left_out.append(LeftOut(point, exc.problems))
            worst = max(worst, exc.exit_code)
    if left_out and (not skip or len(points) == 1):
        raise UserError(problems_of(left_out), worst)
    return prepared, left_out


def ready_points(
    prepared: Sequence[tuple[Point, Prepared]], results: Sequence[CheckResult]
) -> tuple[list[GridPoint], list[LeftOut]]:
    """Separate checked points into points to submit and points with errors."""
    ready: list[GridPoint] = []
    left_out: list[LeftOut] = []
    for (point, run), result in zip(prepared, results, strict=True):
        if result.ok:
            ready.append(GridPoint(point, run, result.as_json(), result.job))
        else:
            left_out.append(LeftOut(point, result.problems))
    return ready, left_out
