"""Ways to bring about the next attempt at a run, by the name that `continue_by` has in the plan.

`requeue`: the scheduler starts the same job again. `dependency`: a second job of the same script, submitted when this
one starts, waits for its end, so the run continues however this one ends. Only a waiting job can exclude a bad node, so
`requeue` also submits one in that case. `rerun`, without a scheduler: the script runs itself again when `end` prints
"again".
"""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import time

from fp8launch.injob.supervisor.attempt_log import Run
from fp8launch.injob.supervisor.job_scheduler import PAUSES
from fp8launch.injob.supervisor.log_lines import say
from fp8launch.injob.supervisor.retry_policy import Decision

WAYS = ("requeue", "dependency", "rerun")
UNLIMITED = 365 * 86400


def prepare_next(run: Run) -> None:
    """At the start of an attempt, submit the job that waits for its end, if the run continues that way."""
    more_may_follow = run.used + 1 < run.plan["attempts"] or not run.in_last_phase
    if run.plan["continue_by"] == "dependency" and more_may_follow and not run.state["waiting"]:
        submit_next(run)


def start_next(run: Run, decision: Decision) -> bool:
    """At the end of an attempt, leave it to the waiting job, or restart or submit one. Return False if that failed."""
    if run.plan["continue_by"] == "rerun":
        print("again")
        return True
    if run.plan["continue_by"] not in WAYS:
        say(f"the plan says to continue by {run.plan['continue_by']!r}; this supervisor knows {', '.join(WAYS)}")
        return False
    excludes = decision.exclude is not None
    if excludes:
        drop_impossible_exclusions(run)
        excludes = bool(run.state["excluded"])
    waiting = run.state["waiting"]
    if waiting:
        if decision.exclude is not None:
            run.scheduler.exclude(waiting, run.state["excluded"])
        return True
    may_restart = run.plan["continue_by"] == "requeue" and not excludes and not decision.new_job
    if may_restart and run.scheduler.restart():
        return True
    return submit_next(run)


def submit_next(run: Run) -> bool:
    """Submit a second job of the same script, which starts when this one has ended, however it ends."""
    key = f"{run.folder.name}.{len(run.attempts)}"
    for pause in PAUSES:
        time.sleep(pause)
        answer = run.scheduler.submit_next(key, run.state["excluded"])
        if answer.job is not None:
            run.state["waiting"] = answer.job
            run.save()
            return True
        if answer.impossible and run.state["excluded"]:
            _exclude_only(run, [])
        elif not (answer.passing or answer.impossible):
            return False
    return False


def drop_impossible_exclusions(run: Run) -> None:
    """Use excluded nodes again if too few others are left: first the nodes excluded earlier, then all.

    A node that failed once is better than no attempt at all.
    """
    candidates = [run.state["excluded"], []]
    newest = run.attempts[-1].get("node")
    if newest:
        candidates.insert(1, newest.split(","))
    for nodes in candidates:
        if not nodes or run.scheduler.can_run_without(nodes):
            if nodes != run.state["excluded"]:
                _exclude_only(run, nodes)
            return


def _exclude_only(run: Run, nodes: list[str]) -> None:
    """Exclude only these nodes, and record that the run cannot do without the rest."""
    needed = [node for node in run.state["excluded"] if node not in nodes]
    run.state["excluded"] = nodes
    words = f"{', '.join(needed)} may be used again, because too few other nodes are left"
    run.attempts[-1]["then"] = f"{run.attempts[-1].get('then', '')}; {words}"
    run.save()
    say(words)


def cancel_next(run: Run) -> None:
    """Cancel the job that waits for this one to end."""
    if run.state["waiting"]:
        run.scheduler.cancel(run.state["waiting"])
        run.state["waiting"] = None
        run.save()


def end_time(run: Run) -> float:
    """Return when this job will be ended, in seconds since 1970 by this node's clock. Called when the job begins."""
    ends = run.scheduler.end_time()
    if ends is None:
        return time.time() + float(run.plan.get("limit", UNLIMITED))
    return ends
