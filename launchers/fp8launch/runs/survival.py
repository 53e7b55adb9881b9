"""What a run's keeper (`train/keeper.py`) must know on the compute node, as `survive.json` in the run folder."""

from __future__ import annotations

import json
from collections.abc import Mapping

from fp8launch.job.cluster import Cluster
from fp8launch.job.job import Job
from fp8launch.job.plan import continue_by, stop_before
from fp8launch.logs.failure_patterns import EXCEPTION, NEEDLES, PATTERNS
from fp8launch.logs.failures import HARMLESS
from fp8launch.megatron.translate import MegatronArgs
from fp8launch.problems import error, nearest
from fp8launch.recipe.load import LoadedRecipe
from fp8launch.train.policy import RULES, merged

SURVIVE = "survive.json"


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
        "keep": recipe.checkpoint.keep,
        "continue_by": continue_by(cluster),
        "rules": merged({**cluster.rules, **recipe.survive.rules}),
        "patterns": patterns,
        "needles": [needle.decode() for needle in NEEDLES],
        "harmless": HARMLESS.pattern,
    }
    return json.dumps(plan, indent=1) + "\n"


def _refuse_unknown_causes(rules: Mapping[str, str], where: str) -> None:
    for cause in rules:
        if cause not in RULES:
            near = nearest(cause, RULES)
            hint = f"did you mean '{near}'?" if near else f"there are: {', '.join(RULES)}"
            raise error("unknown-cause", f"no attempt ends by '{cause}'", where, hint)
