"""Plan the supervisor of a run (`injob/supervisor`), which reads its plan from `survive.json` on the compute node."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fp8launch.cluster.profile import Cluster
from fp8launch.diagnostics import did_you_mean, error
from fp8launch.engines.base import EngineArguments
from fp8launch.injob.supervisor.retry_policy import RULES
from fp8launch.job.build_job import continue_by, stop_before
from fp8launch.job.job import Job
from fp8launch.job.prepared import Prepared
from fp8launch.recipe.schema import Recipe
from fp8launch.recipe.sections import Rewind
from fp8launch.schedulers.base import Capabilities, Scheduler
from fp8launch.untyped import as_int

# The shortest silence, in seconds, that counts as a hang by default.
_HANG_AFTER = 1800


def survival_text(
    prepared: Prepared, cluster: Cluster, job: Job, scheduler: Scheduler, owner: Mapping[str, str] | None = None
) -> str | None:
    """Return the content of `survive.json`, or None if no further attempt is possible.

    That is the case without checkpoints, or if the scheduler cannot start another attempt. `owner` identifies the run
    as the owner of its checkpoints. Raises UserError for a rule about an unknown cause.
    """
    capabilities = scheduler.capabilities
    if job.survival is None or not capabilities.resumes:
        return None
    loaded, args, recipe = prepared.loaded, prepared.args, prepared.loaded.recipe
    _refuse_unknown_causes(cluster.rules, "cluster profile: rules")
    _refuse_unknown_causes(recipe.survive.rules, loaded.where("survive", "rules"))
    # As set in the profile, if the scheduler supports it.
    ways, preferred = capabilities.continue_by, continue_by(cluster)
    plan: dict[str, Any] = {
        "format": 1,
        "checkpoint": job.survival.checkpoint,
        "iterations": as_int(args.attributes.get("train_iters")),
        "phases": [{"name": one.name, "end": one.end} for one in job.phases],
        "attempts": recipe.survive.attempts,
        "stuck": recipe.survive.stuck,
        "stop_before": stop_before(recipe),
        "hang": hang_plan(recipe, args),
        "health": health_plan(recipe, args, job),
        "keep": recipe.checkpoint.keep,
        "continue_by": preferred if preferred in ways else ways[0],
        "rules": _rules(cluster, recipe, capabilities),
        "owner": owner,
        "continues_another": recipe.continues_its_folder,
        "trust_run_root": cluster.trust_run_root,
        **scheduler.plan_for_supervisor(job),
    }
    if capabilities.time_limits:
        plan["limit"] = int(recipe.resources.hours * 3600)
    return json.dumps(plan, indent=1) + "\n"


def _rules(cluster: Cluster, recipe: Recipe, capabilities: Capabilities) -> dict[str, str]:
    """Return the actions by cause. If there is only one node, nothing is excluded."""
    rules = {**RULES, **cluster.rules, **recipe.survive.rules}
    if not capabilities.several_nodes:
        rules = {cause: "go-on" if action == "exclude" else action for cause, action in rules.items()}
    return rules


def hang_plan(recipe: Recipe, args: EngineArguments) -> dict[str, Any] | None:
    """Return how many seconds the log may be silent before the hang watchdog acts; None if the run is not watched.

    The default is longer than the timeout of Megatron's collectives, because that timeout ends the training itself and
    names the collective that hangs. It is also longer than the time between log lines with an evaluation in between.
    """
    stated = recipe.survive.hang_after
    if stated == 0 or (stated is None and args.attributes.get("full_validation")):
        return None  # the time for the whole validation set is unknown
    between = _number(args, "log_interval", 100)
    after = stated or max(_HANG_AFTER, 2 * 60 * _number(args, "distributed_timeout_minutes", 10))
    quiet = between + 2 * _number(args, "eval_iters", 100)  # validation, and the test at the end
    return {
        "after": after,
        "stated": stated is not None,
        "quiet": quiet,
        "start": 2 * max(after, _HANG_AFTER) + 60 * between,
    }


def health_plan(recipe: Recipe, args: EngineArguments, job: Job) -> dict[str, Any] | None:
    """Return the job's actions on unhealthy training, or None if the recipe has none."""
    actions: dict[str, Any] = {}
    for code, action in recipe.health.actions.items():
        if isinstance(action, Rewind):
            actions[code] = {"rewind": action.rewind}
        elif action != "continue":
            actions[code] = action
    if not actions or job.survival is None:
        return None
    return {
        "actions": actions,
        "limits": recipe.health.model_dump(mode="json", exclude={"actions", "max_rewinds"}),
        "max_rewinds": recipe.health.max_rewinds,
        "log_interval": _number(args, "log_interval", 100),
        "skip_flag": job.survival.skip_flag,
        "skipped": args.attributes.get("iterations_to_skip") or [],
    }


def _number(args: EngineArguments, name: str, default: int) -> int:
    value = as_int(args.attributes.get(name))
    return default if value is None else value


def _refuse_unknown_causes(rules: Mapping[str, str], where: str) -> None:
    for cause in rules:
        if cause not in RULES:
            hint = did_you_mean(cause, RULES, f"valid causes: {', '.join(RULES)}")
            raise error("unknown-cause", f"'{cause}' is not a known cause of failure", where, hint)
