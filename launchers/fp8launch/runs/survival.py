"""What a run's keeper (`train/keeper.py`) must know on the compute node, as `survive.json` in the run folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fp8launch.job.cluster import Cluster
from fp8launch.job.job import Job
from fp8launch.job.plan import continue_by, stop_before
from fp8launch.logs.failure_patterns import EXCEPTION, NEEDLES, PATTERNS
from fp8launch.logs.failures import HARMLESS
from fp8launch.megatron.translate import MegatronArgs
from fp8launch.problems import error, nearest
from fp8launch.recipe.load import LoadedRecipe
from fp8launch.recipe.schema import Recipe
from fp8launch.train.policy import RULES, merged

SURVIVE = "survive.json"
HANG_AFTER = 1800


def survival_text(loaded: LoadedRecipe, args: MegatronArgs, cluster: Cluster, job: Job) -> str | None:
    """The content of `survive.json`; None for a run that leaves no checkpoints. UserError for a rule of no known cause.

    The patterns travel with it: the keeper has no fp8launch to import.
    """
    if job.survival is None:
        return None
    recipe = loaded.recipe
    _refuse_unknown_causes(cluster.rules, "cluster profile: rules")
    _refuse_unknown_causes(recipe.survive.rules, loaded.where("survive", "rules"))
    iterations = args.values.get("train_iters")
    # A program's own exception, of which nothing more is known, is its own fault and no peer's.
    patterns = [(p.expression.pattern, p.code, p.depth) for p in PATTERNS]
    patterns.append((r"^(?:\w+\.)*\w*(?:Error|Exception)(?:: |$)", "exception", EXCEPTION))
    plan = {
        "format": 1,
        "checkpoint": job.survival.checkpoint,
        "iterations": iterations if isinstance(iterations, int) else None,
        "phases": [{"name": one.name, "end": one.end} for one in job.phases],
        "attempts": recipe.survive.attempts,
        "stuck": recipe.survive.stuck,
        "stop_before": stop_before(recipe),
        "limit": int(recipe.resources.hours * 3600),
        "hang": hang_plan(recipe, args),
        "keep": recipe.checkpoint.keep,
        "continue_by": continue_by(cluster),
        "rules": merged({**cluster.rules, **recipe.survive.rules}),
        "patterns": patterns,
        "needles": [needle.decode() for needle in NEEDLES],
        "harmless": HARMLESS.pattern,
    }
    return json.dumps(plan, indent=1) + "\n"


def hang_plan(recipe: Recipe, args: MegatronArgs) -> dict[str, Any] | None:
    """What `train/watch.py` must know of silences that are no hang, in seconds; None for a run that is not watched.

    Without a number of the user's own: longer than the time-out of Megatron's collectives, which names the one that
    hangs and ends the training by itself; and as long as from one line to the next, with an evaluation between them.
    """
    stated = recipe.survive.hang_after
    if stated == 0 or (stated is None and args.values.get("full_validation")):
        return None  # how long the whole validation set takes, nobody can say
    between = _number(args, "log_interval", 100)
    after = stated or max(HANG_AFTER, 2 * 60 * _number(args, "distributed_timeout_minutes", 10))
    quiet = between + 2 * _number(args, "eval_iters", 100)  # validation, and at the end the test
    return {
        "after": after,
        "stated": stated is not None,
        "quiet": quiet,
        "start": 2 * max(after, HANG_AFTER) + 60 * between,
    }


def _number(args: MegatronArgs, name: str, default: int) -> int:
    value = args.values.get(name)
    return value if isinstance(value, int) else default


def _refuse_unknown_causes(rules: Mapping[str, str], where: str) -> None:
    for cause in rules:
        if cause not in RULES:
            near = nearest(cause, RULES)
            hint = f"did you mean '{near}'?" if near else f"there are: {', '.join(RULES)}"
            raise error("unknown-cause", f"no attempt ends by '{cause}'", where, hint)
