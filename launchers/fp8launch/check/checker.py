"""Run all layers of the check, and return the problems, the silenced warnings and the state of each layer."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any, Protocol

from fp8launch import plugin_registry, schedulers
from fp8launch.check import checkpoints, login_node, memory, phases
from fp8launch.check.job_paths import JobPaths, job_paths
from fp8launch.check.login_node import Inspection
from fp8launch.check.resolved_run import ResolvedRun, resolve_run
from fp8launch.check.rule import Rule, all_rules
from fp8launch.check.validation import CODES, Validation, validate
from fp8launch.cluster.profile import Cluster
from fp8launch.cluster.runtimes import Runtime
from fp8launch.diagnostics import MACHINE_LACKS, Problem, UserError, did_you_mean, errors_in
from fp8launch.job.job import Job
from fp8launch.job.prepared import Prepared
from fp8launch.recipe.phases import merge_phase_problems
from fp8launch.resources import pack_folder
from fp8launch.schedulers.base import Scheduler

LAYERS = ("schema", "megatron", "rules", "memory", "machine")
NOT_ASKED = "not run: not requested"


@dataclass(frozen=True)
class Silenced:
    """A warning that the recipe silences, with the stated reason."""

    problem: Problem
    reason: str

    def as_json(self) -> dict[str, str | None]:
        return {**self.problem.as_json(), "reason": self.reason}


class LayerReport(Protocol):
    """What a plugin's layer reports in addition to problems: a JSON object, and details for `check -v`."""

    def as_json(self) -> dict[str, Any]: ...

    @property
    def details(self) -> str: ...


@dataclass(frozen=True)
class CheckResult:
    """The problems found. `layers` maps each layer to "ran", or to "not run: " and the reason.

    `exit_code` is the command's exit code, or 0 to let `ok` decide. It is MACHINE_LACKS if Megatron's verdict was
    requested but is not available. `extra` has the reports of plugin layers by name. `job` is the job that was checked,
    still without a run folder. It is None if no job could be planned or the layer `machine` was not requested.
    """

    problems: tuple[Problem, ...]
    layers: Mapping[str, str]
    silenced: tuple[Silenced, ...] = ()
    exit_code: int = field(default=0)
    extra: Mapping[str, LayerReport] = field(default_factory=dict)
    job: Job | None = None

    @property
    def ok(self) -> bool:
        return not errors_in(self.problems)

    def as_json(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "problems": [p.as_json() for p in self.problems],
            "layers": dict(self.layers),
            "silenced": [s.as_json() for s in self.silenced],
            **{name: report.as_json() for name, report in self.extra.items()},
        }


def check(
    prepared: Prepared,
    cluster: Cluster | None = None,
    environment: Mapping[str, str] | None = None,
    say: Callable[[str], None] = lambda message: None,
    layers: Collection[str] = LAYERS,
) -> CheckResult:
    """Check one run (see `check_all`)."""
    return check_all([prepared], cluster, environment, say, layers)[0]


def check_all(
    runs: Sequence[Prepared],
    cluster: Cluster | None = None,
    environment: Mapping[str, str] | None = None,
    say: Callable[[str], None] = lambda message: None,
    layers: Collection[str] = LAYERS,
    scheduler: Scheduler | None = None,
) -> list[CheckResult]:
    """Check several runs. Results are in the order of `runs`.

    Megatron's validators run in a separate process, in parallel with the other layers. Each phase of a run is checked
    like a run, followed by the transitions between phases.

    `cluster` is the profile of the machine that the runs are for; None means this machine's default. Slurm commands
    run in `environment`. `say` receives messages about downloads. Only the layers in `layers` run. `scheduler` will
    receive the jobs, by default the cluster's scheduler.
    """
    site = cluster or Cluster()
    shell = os.environ if environment is None else environment
    divided = [_parts(run, site) for run in runs]
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(_ask_megatron, list(chain.from_iterable(divided)), say, layers)
        if "machine" in layers:
            inspected = [login_node.inspect_run(run, site, shell, scheduler) for run in runs]
        else:
            inspected = [Inspection()] * len(runs)
        looked = []
        for parts, inspection in zip(divided, inspected, strict=True):
            looked.append([_look(part, site, shell, inspection.runtime, layers) for part in parts])
        answers = iter(asked.result())
    results = []
    for run, parts, inspection, found in zip(runs, divided, inspected, looked, strict=True):
        answered = list(islice(answers, len(parts)))
        results.append(_run_result(run, parts, inspection, found, answered, layers))
    return results


@dataclass(frozen=True)
class _Part:
    """A run without phases, or one phase of a run."""

    prepared: Prepared
    run: ResolvedRun
    paths: JobPaths


@dataclass(frozen=True)
class _Findings:
    """The problems of one part, except for those from Megatron. `fired` are the rules that found a problem."""

    problems: tuple[Problem, ...]
    fired: tuple[Rule, ...]


def _parts(run: Prepared, site: Cluster) -> list[_Part]:
    return [_Part(part, resolve_run(part, site), job_paths(part.loaded, site)) for part in run.parts]


def _ask_megatron(parts: Sequence[_Part], say: Callable[[str], None], layers: Collection[str]) -> list[Validation]:
    if "megatron" not in layers:
        return [Validation(NOT_ASKED)] * len(parts)
    return validate([part.run for part in parts], [part.paths for part in parts], say)


def _look(
    part: _Part, site: Cluster, environment: Mapping[str, str], runtime: Runtime | None, layers: Collection[str]
) -> _Findings:
    """Run the layers `rules` and `memory`, and the part of `machine` that looks at files."""
    problems: list[Problem] = []
    fired: list[Rule] = []
    if "rules" in layers:
        run = part.run
        if "machine" in layers and checkpoints.continues_another(run.arguments):
            run = replace(run, before=checkpoints.arguments_before(run.value("load"), part.paths))
        for rule in all_rules().values():
            said = list(rule.problems(run))
            if said:
                fired.append(rule)
            problems += said
        problems += part.prepared.engine.warnings(part.prepared.loaded)
    if "memory" in layers and (model := memory.memory_model()):
        problems += model.problems(part.run)
    if "machine" in layers:
        problems += login_node.file_problems(part.prepared, site, environment, runtime)
    return _Findings(tuple(problems), tuple(fired))


def _run_result(
    run: Prepared,
    parts: Sequence[_Part],
    inspection: Inspection,
    found: Sequence[_Findings],
    answers: Sequence[Validation],
    layers: Collection[str],
) -> CheckResult:
    """Return the result of a run, merged from the results of its phases."""
    if not run.phases:
        result = _part_result(parts[0], found[0], answers[0], layers, inspection.problems)
    else:
        each = [_part_result(*one, layers) for one in zip(parts, found, answers, strict=True)]
        result = _together(run, [part.run for part in parts], each, layers, inspection.problems)
    return replace(result, job=inspection.job)


def _part_result(
    part: _Part, found: _Findings, answer: Validation, layers: Collection[str], more: Sequence[Problem] = ()
) -> CheckResult:
    problems = [*answer.problems(found.fired), *found.problems, *more]
    states = dict.fromkeys(LAYERS, NOT_ASKED)
    for name in (*layers, "schema"):
        states[name] = "ran"
    states["megatron"] = answer.state
    if "memory" in layers:
        states["memory"] = memory.state()
    result = silence(part.run, problems, states)
    if answer.lacking:
        result = replace(result, exit_code=MACHINE_LACKS)
    return result


def _together(
    run: Prepared,
    seen: Sequence[ResolvedRun],
    results: Sequence[CheckResult],
    layers: Collection[str],
    of_the_run: Sequence[Problem],
) -> CheckResult:
    """Merge the results of a run's phases with the problems of the whole run."""
    names = [one.name for one in run.phases]
    ran = {name: _state_of_phases(name, results) for name in LAYERS}
    problems = list(of_the_run)
    if "rules" in layers:
        problems = [*phases.problems(run.phases, seen), *problems]
    borders = silence(seen[0], problems, ran)
    found = merge_phase_problems(zip(names, [result.problems for result in results], strict=True), len(names))
    everything = dict.fromkeys([*found, *borders.problems])
    silenced = dict.fromkeys(chain.from_iterable(result.silenced for result in (*results, borders)))
    code = max(result.exit_code for result in results)
    return CheckResult(tuple(sorted(everything, key=by_place)), ran, tuple(silenced), code)


def _state_of_phases(layer: str, results: Sequence[CheckResult]) -> str:
    """Return the state of a layer over all phases: `ran`, or why it did not run for a phase."""
    for result in results:
        if result.layers[layer] != "ran":
            return result.layers[layer]
    return "ran"


def by_place(problem: Problem) -> tuple[str, str, int, str]:
    """Return the sort key of a problem: errors first, then by file and line."""
    where = problem.where or ""
    place, _, line = where.rpartition(":")
    if line.isdecimal() and len(line) < 10:
        return problem.severity, place, int(line), problem.code
    return problem.severity, where, 0, problem.code


def in_the_pack(problem: Problem) -> Problem:
    """Rewrite a place inside the installation for users: `pack: models/llama3_8b, line 11`."""
    place, _, line = (problem.where or "").rpartition(":")
    prefix = f"{pack_folder('recipes')}/"
    if not line.isdecimal() or not place.startswith(prefix):
        return problem
    return replace(problem, where=f"pack: {place.removeprefix(prefix).removesuffix('.yaml')}, line {line}")


def silence(run: ResolvedRun, problems: Iterable[Problem], layers: Mapping[str, str]) -> CheckResult:
    """Remove the warnings that the recipe silences, and report invalid entries of `silence` as problems."""
    stated: Mapping[str, str] = run.loaded.recipe.silence
    problems = list(dict.fromkeys(problems))
    wrong = list(_bad_silences(run, stated, problems))
    shown, silenced = list(wrong), []
    for problem in problems:
        if run.silences(problem):
            silenced.append(Silenced(problem, stated[problem.code]))
        else:
            shown.append(problem)
    shown.sort(key=by_place)
    return CheckResult(tuple(map(in_the_pack, shown)), layers, tuple(silenced))


def _bad_silences(run: ResolvedRun, stated: Mapping[str, str], problems: Sequence[Problem]) -> Iterator[Problem]:
    if not stated:
        return
    severities = {problem.code: problem.severity for problem in problems}
    severities |= {code: rule.severity for code, rule in all_rules().items()} | schedulers.problem_codes()
    for codes in (CODES, phases.CODES, memory.CODES, login_node.CODES):
        severities |= codes
    for code in stated:
        where = run.loaded.where("silence", code)
        if code not in severities:
            if plugin_registry.absent_plugin("rules", code):
                continue
            hint = did_you_mean(
                code, severities, "use the code that `fp8launch check` prints in brackets after a warning"
            )
            yield Problem("error", "unknown-code", f"'silence.{code}': no check has the code {code}", where, hint)
        elif severities[code] == "error":
            message = f"'silence.{code}': {code} is an error, and only warnings can be silenced"
            yield Problem("error", "cannot-silence", message, where, "correct the error, and remove this entry")


def schema_result(refused: UserError) -> CheckResult:
    """Return the result for a recipe that cannot be loaded, translated or laid out. No other layer can run on it."""
    layers = dict.fromkeys(LAYERS, "not run: the recipe has errors") | {"schema": "ran"}
    problems = tuple(map(in_the_pack, sorted(refused.problems, key=by_place)))
    return CheckResult(problems, layers, exit_code=refused.exit_code)
