"""The check layer `rehearsal`: run Megatron's own code for each role, without a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.version import Version

from fp8launch.check.checker import CheckResult, by_place, in_the_pack
from fp8launch.check.extra_layers import Progress, no_progress
from fp8launch.check.job_paths import JobPaths, job_paths
from fp8launch.check.resolved_run import ResolvedRun, resolve_run
from fp8launch.cluster.profile import Cluster
from fp8launch.diagnostics import MACHINE_LACKS, Problem
from fp8launch.engines.base import NotRehearsable
from fp8launch.job.prepared import Prepared
from fp8launch.megatron.arguments import words_of
from fp8launch.plugins.rehearse.not_rehearsed import not_rehearsed
from fp8launch.plugins.rehearse.rehearse import CUDA, Outcome, Plan, rehearse, require_torch
from fp8launch.plugins.rehearse.report import RehearsalReport, RehearsedRole
from fp8launch.plugins.rehearse.software import NoTransformerEngine, transformer_engine_for
from fp8launch.plugins.rehearse.workers import LIMITS, Limits
from fp8launch.plugins.validators.megatron_core import NoMegatron, megatron_for, site_of
from fp8launch.plugins.validators.refusals import NAMELESS, fix_for, names_in, recipe_field
from fp8launch.recipe.phases import merge_phase_problems
from fp8launch.wording import shortened

LAYER = "rehearsal"
CODE = "rehearsal"
# Environment variable that injob/rank/config_fields.py reads.
CONFIG = "FP8LAUNCH_CONFIG"
# Problems cut longer messages; --json and -v show them in full.
LONGEST = 300
# Problems show this many settings: the ones that the failing code reads last.
MOST_SETTINGS = 3


class NoScript(Exception):
    """The training script cannot be run here; the message says why."""


@dataclass(frozen=True)
class _Part:
    """A phase of a run, or the whole run (`phase` is None), with its rehearsal plan."""

    phase: str | None
    seen: ResolvedRun
    plan: Plan


def with_rehearsal(
    runs: Sequence[Prepared],
    results: Sequence[CheckResult],
    cluster: Cluster,
    say: Callable[[str], None] = lambda message: None,
    progress: Progress = no_progress,
    limits: Limits = LIMITS,
    asked_by: str = "--rehearse",
) -> list[CheckResult]:
    """Rehearse the runs that passed the check, and add refusals and the layer `rehearsal` to the results.

    Raises UserError (exit code 3) if this Python lacks torch.
    """
    require_torch(asked_by)
    planned: list[list[_Part]] = []
    extended = list(results)
    for index, (run, result) in enumerate(zip(runs, results, strict=True)):
        planned.append([])
        if not result.ok:
            extended[index] = _without(result, "not run: the check has errors")
            continue
        if not run.engine.description.rehearsal:
            state = f"not run: recipes of the engine {run.engine.name} cannot be rehearsed yet"
            extended[index] = replace(_without(result, state), exit_code=MACHINE_LACKS)
            continue
        try:
            planned[index] = _parts(run, cluster, say)
        except (NoMegatron, NoTransformerEngine, NoScript, NotRehearsable) as exc:
            extended[index] = replace(_without(result, f"not run: {exc}"), exit_code=MACHINE_LACKS)
    outcomes = iter(rehearse([part.plan for parts in planned for part in parts], progress, limits))
    for index, parts in enumerate(planned):
        if parts:
            extended[index] = _with_outcomes(extended[index], [(part, next(outcomes)) for part in parts])
    return extended


def _without(result: CheckResult, state: str) -> CheckResult:
    return replace(result, layers={**result.layers, LAYER: state}, extra={**result.extra, LAYER: RehearsalReport()})


def _parts(run: Prepared, cluster: Cluster, say: Callable[[str], None]) -> list[_Part]:
    names: Sequence[str | None] = [phase.name for phase in run.phases] or [None]
    found = []
    for name, part in zip(names, run.parts, strict=True):
        seen = resolve_run(part, cluster)
        found.append(_Part(name, seen, plan_of(part, seen, cluster, say)))
    return found


def plan_of(
    run: Prepared, seen: ResolvedRun, cluster: Cluster, say: Callable[[str], None] = lambda message: None
) -> Plan:
    """Plan a run's rehearsal. Raises NoMegatron, NoTransformerEngine, NoScript or NotRehearsable."""
    step = run.engine.rehearsal(run.args, run.layout, run.loaded)
    resources = run.loaded.recipe.resources
    on_gpu = seen.gpu.name != "cpu"
    te = Version(seen.transformer_engine)
    paths = job_paths(run.loaded, cluster)
    script = _script(run, paths)
    config = {CONFIG: json.dumps(step.config)} if step.config else {}
    return Plan(
        args=step.args,
        layout=run.layout,
        gpu=resources.gpu,
        gpus_per_node=resources.gpus_per_node,
        environment={**seen.env, **config},
        megatron=site_of(megatron_for(run.args.version, say)),
        transformer_engine=transformer_engine_for(te, say) if on_gpu else None,
        script=script,
        # Without a script the released Megatron is rehearsed, which refuses the flags of a fork.
        own=words_of(run.args.own) if script else (),
        translated=step.translated,
        without=step.without,
        program=step.program,
        cuda=".".join(map(str, seen.software.cuda or ())) or step.cuda or CUDA,
    )


def _script(run: Prepared, paths: JobPaths) -> Path | None:
    """Return the training script on this machine. Raises NoScript if only the container has it."""
    script = run.engine.entry(run.loaded, paths.mounts is not None, check_paths=False).script
    if script is None:
        return None
    here = paths.here(script)
    if here is None or not here.is_file():
        raise NoScript(f"the script {script} is not on this machine; mount a checkout, and name the script in it")
    return here


def _with_outcomes(result: CheckResult, found: Sequence[tuple[_Part, Sequence[Outcome]]]) -> CheckResult:
    told = []
    for part, outcomes in found:
        refused = [outcome for outcome in outcomes if not outcome.ok and not outcome.unknown]
        problems = dict.fromkeys(problem_of(part.seen, outcome) for outcome in _first_of_each(refused))
        told.append((part.phase or "", tuple(map(in_the_pack, problems))))
    everything = sorted(dict.fromkeys([*merge_phase_problems(told, len(told)), *result.problems]), key=by_place)
    extended = replace(result, problems=tuple(everything), extra={**result.extra, LAYER: _report(found)})
    for _, outcomes in found:
        for outcome in outcomes:
            if outcome.unknown:
                state = f"not run to its end: no verdict on the {outcome.role.name}: {outcome.message}"
                return replace(extended, layers={**result.layers, LAYER: state}, exit_code=MACHINE_LACKS)
    return replace(extended, layers={**result.layers, LAYER: "ran"})


def _first_of_each(refused: Iterable[Outcome]) -> list[Outcome]:
    """Return one outcome per message, because all roles usually fail in the same way."""
    found: dict[tuple[str, str], Outcome] = {}
    for outcome in refused:
        found.setdefault((outcome.message, outcome.at), outcome)
    return list(found.values())


def problem_of(seen: ResolvedRun, outcome: Outcome) -> Problem:
    """Describe a refusal in the recipe's terms: Megatron's message and place, the settings involved, and the fix."""
    said = shortened(outcome.message, LONGEST)
    message = f"fails in a rehearsal of the {outcome.role.name}: {outcome.exception}: {said}"
    if outcome.at:
        message += f" ({outcome.at})"
    message += _why(outcome)
    named = names_in(seen, outcome.message)
    stated = (*named, *_stated(seen, outcome.settings))
    involved = [name for name in stated if recipe_field(seen, name)]
    if seen.engine.covers("megatron_lm"):
        fix = fix_for(seen, outcome.message, involved[:MOST_SETTINGS])
    else:
        # The advice names the keys of Megatron-LM recipes, which this engine does not use.
        shown = [f"{name} ({seen.arguments.get(name)})" for name in dict.fromkeys(stated) if name in seen.places]
        fix = NAMELESS
        if shown:
            fix = f"change {' or '.join(shown[:MOST_SETTINGS])}"
    if fix == NAMELESS:
        fix = "`fp8launch check RECIPE --rehearse -v` shows the code that refuses it"
    return Problem("error", CODE, message, seen.where(*named, *involved, *names_in(seen, fix)), fix)


def _why(outcome: Outcome) -> str:
    """Return Transformer Engine's reasons, without disabled backends (NVTE_...) if there are others."""
    telling = [reason for reason in outcome.reasons if "NVTE_" not in reason] or outcome.reasons
    return "".join(f"; {reason.split(' (')[0]}" for reason in telling)


def _stated(seen: ResolvedRun, settings: Sequence[str]) -> list[str]:
    """Return the attributes that the failing code reads and that the recipe sets."""
    names = names_in(seen, " ".join(settings))
    return [name for name in names if name in seen.places]


def _report(found: Sequence[tuple[_Part, Sequence[Outcome]]]) -> RehearsalReport:
    roles = []
    of_parts: list[str] = []
    of_roles: list[str] = []
    programs: dict[str, None] = {}
    for part, outcomes in found:
        of_parts += (*part.plan.without, *not_rehearsed(part.seen))
        if part.plan.program:
            programs[part.plan.program.title] = None
            if part.seen.on("save"):
                of_parts.append("writing and loading checkpoints with Megatron-Bridge")
        for outcome in outcomes:
            roles.append(_role(part.phase, outcome))
            of_roles += outcome.not_rehearsed
    left_out = tuple(dict.fromkeys([*of_parts, *of_roles]))
    return RehearsalReport(tuple(roles), left_out, ", ".join(programs) or None)


def _role(phase: str | None, outcome: Outcome) -> RehearsedRole:
    result, reason = "passed", None
    if outcome.unknown:
        result, reason = "no verdict", outcome.message
    elif not outcome.ok:
        result, reason = "refused", f"{outcome.exception}: {outcome.message}"
    return RehearsedRole(
        role=outcome.role.name,
        rank=outcome.role.rank,
        result=result,
        seconds=outcome.seconds,
        memory_gib=round(outcome.memory_gib, 2),
        phase=phase,
        reason=reason,
        traceback=outcome.traceback or None,
    )
