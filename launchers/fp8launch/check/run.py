"""All layers of the check, one result: what is wrong with a run, what was silenced, and which layers looked."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from types import ModuleType
from typing import Any

from fp8launch.check import phases
from fp8launch.check.facts import Facts, facts
from fp8launch.check.rule import Rule, all_rules
from fp8launch.check.verdicts import CODES, problem, verdict_problems
from fp8launch.job.cluster import Cluster
from fp8launch.megatron.validators import Verdict
from fp8launch.problems import Problem, UserError, nearest
from fp8launch.recipe.phases import told_by_phase
from fp8launch.runs.submit import Prepared

LAYERS = ("schema", "megatron", "rules", "memory", "machine")
NOT_ASKED = "not run: not asked for"


@dataclass(frozen=True)
class Silenced:
    """A warning that the recipe silences, and its reason."""

    problem: Problem
    reason: str

    def as_json(self) -> dict[str, str | None]:
        return {**self.problem.as_json(), "reason": self.reason}


@dataclass(frozen=True)
class CheckResult:
    """What was found. `layers` says for each layer "ran", or "not run: " and why."""

    problems: tuple[Problem, ...]
    layers: Mapping[str, str]
    silenced: tuple[Silenced, ...] = ()
    exit_code: int = field(default=0)

    @property
    def ok(self) -> bool:
        return not any(p.severity == "error" for p in self.problems)

    def as_json(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "problems": [p.as_json() for p in self.problems],
            "layers": dict(self.layers),
            "silenced": [s.as_json() for s in self.silenced],
        }


def check(
    prepared: Prepared,
    cluster: Cluster | None = None,
    environment: Mapping[str, str] | None = None,
    say: Callable[[str], None] = lambda message: None,
    layers: Collection[str] = LAYERS,
) -> CheckResult:
    """Check one run; see `check_all`."""
    return check_all([prepared], cluster, environment, say, layers)[0]


def check_all(
    runs: Sequence[Prepared],
    cluster: Cluster | None = None,
    environment: Mapping[str, str] | None = None,
    say: Callable[[str], None] = lambda message: None,
    layers: Collection[str] = LAYERS,
) -> list[CheckResult]:
    """Check runs, in order: Megatron's validators in a process of their own, the other layers meanwhile.

    Of a run with phases each is checked like a run, and then whether they can follow one another.
    `cluster` is the profile of the machine that they will run on, None for this machine's default; `environment` that
    in which Slurm's commands run. `say` hears of a download. Of the layers only those named in `layers` look.
    """
    site = cluster or Cluster()
    parts = [part for run in runs for part in run.parts]
    seen = [facts(part, {name: str(value) for name, value in site.env.items()}) for part in parts]
    results = _check_parts(seen, parts, site, os.environ if environment is None else environment, say, layers)
    both = iter(zip(seen, results, strict=True))
    return [_together(run, list(islice(both, len(run.parts))), layers) for run in runs]


def _check_parts(
    seen: Sequence[Facts],
    runs: Sequence[Prepared],
    site: Cluster,
    environment: Mapping[str, str],
    say: Callable[[str], None],
    layers: Collection[str],
) -> list[CheckResult]:
    """Each run, or phase of one, by itself."""
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(verdict_problems, seen if "megatron" in layers else [], say)
        found = [_look(run, prepared, site, environment, layers) for run, prepared in zip(seen, runs, strict=True)]
        verdicts, states = asked.result()
        if "megatron" not in layers:
            verdicts, states = [None] * len(runs), [NOT_ASKED] * len(runs)
    return [
        _result(run, verdict, state, *looked)
        for run, verdict, state, looked in zip(seen, verdicts, states, found, strict=True)
    ]


def _together(run: Prepared, parts: Sequence[tuple[Facts, CheckResult]], layers: Collection[str]) -> CheckResult:
    """The result of a run from those of its phases; a run without any is one part."""
    if not run.phases:
        return parts[0][1]
    seen, results = zip(*parts, strict=True)
    names = [one.name for one in run.phases]
    ran = {name: next((r.layers[name] for r in results if r.layers[name] != "ran"), "ran") for name in LAYERS}
    borders = silence(seen[0], phases.problems(run.phases, seen) if "rules" in layers else (), ran)
    found = told_by_phase([(n, r.problems) for n, r in zip(names, results, strict=True)], len(names))
    everything = dict.fromkeys([*found, *borders.problems])
    silenced = dict.fromkeys(s for result in (*results, borders) for s in result.silenced)
    return CheckResult(tuple(sorted(everything, key=lambda p: p.severity)), ran, tuple(silenced))


def _look(
    run: Facts, prepared: Prepared, cluster: Cluster, environment: Mapping[str, str], layers: Collection[str]
) -> tuple[list[Problem], list[Rule], dict[str, str]]:
    """What rules, memory and machine say; the rules that fired; how each layer fared."""
    problems: list[Problem] = []
    fired: list[Rule] = []
    for rule in all_rules().values() if "rules" in layers else ():
        said = list(rule.problems(run))
        problems += said
        fired += [rule] * bool(said)
    states = {"rules": "ran" if "rules" in layers else NOT_ASKED}
    arguments: Mapping[str, tuple[Any, ...]] = {"memory": (run,), "machine": (prepared, cluster, environment)}
    for name, given in arguments.items():
        module = _module(name)
        states[name] = ("ran" if module else "not run: not part of this installation") if name in layers else NOT_ASKED
        problems += module.problems(*given) if module and name in layers else ()
    return problems, fired, states


def _module(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(f"fp8launch.check.{name}")
    except ModuleNotFoundError as exc:
        if exc.name != f"fp8launch.check.{name}":
            raise
        return None


def _result(
    run: Facts, verdict: Verdict | None, state: str, problems: list[Problem], fired: list[Rule], layers: dict[str, str]
) -> CheckResult:
    refusal = problem(run, verdict, fired) if verdict else None
    everything = [*([refusal] if refusal else []), *problems]
    everything.sort(key=lambda p: p.severity)
    states = {"schema": "ran", "megatron": state, **layers}
    return silence(run, everything, {name: states[name] for name in LAYERS})


def silence(run: Facts, problems: Iterable[Problem], layers: Mapping[str, str]) -> CheckResult:
    """Take the warnings out that the recipe silences; a silence that cannot be is a problem of its own."""
    stated: Mapping[str, str] = run.loaded.recipe.silence
    problems = list(dict.fromkeys(problems))
    wrong = list(_bad_silences(run, stated, problems))
    kept = [p for p in problems if not run.silences(p)]
    silenced = [Silenced(p, stated[p.code]) for p in problems if p not in kept]
    return CheckResult((*wrong, *kept), layers, tuple(silenced))


def _bad_silences(run: Facts, stated: Mapping[str, str], problems: Sequence[Problem]) -> Iterator[Problem]:
    severities = {code: rule.severity for code, rule in all_rules().items()} | dict.fromkeys(CODES.values(), "error")
    severities |= phases.CODES
    for name in ("memory", "machine"):
        severities |= getattr(_module(name), "CODES", {})
    severities |= {p.code: p.severity for p in problems if p.code not in severities}
    for code in stated:
        where = run.loaded.where("silence", code)
        if code not in severities:
            near = nearest(code, severities)
            hint = f"did you mean '{near}'?" if near else "the code is the word in brackets after a warning"
            yield Problem("error", "unknown-code", f"'silence.{code}': no check has this code", where, hint)
        elif severities[code] == "error":
            message = f"'silence.{code}': is an error, and only warnings can be silenced"
            yield Problem("error", "cannot-silence", message, where, "put right what it says")


def schema_result(refused: UserError) -> CheckResult:
    """The result for a recipe that cannot be loaded, translated or divided: no other layer has anything to look at."""
    layers = dict.fromkeys(LAYERS, "not run: the recipe has errors") | {"schema": "ran"}
    return CheckResult(refused.problems, layers, exit_code=refused.exit_code)
