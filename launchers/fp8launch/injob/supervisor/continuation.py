"""Ways to bring about the next attempt at a run, by the name that `continue_by` has in the plan.

`requeue`: Slurm starts the same job again. `dependency`: a further job of the same script waits from the start of this
one for its end, so that the run continues however this one ends. A bad node can only be left out by a job that waits,
so `requeue` also submits one in that case. `rerun`, without Slurm: the script runs itself again, when `end` prints so.

Standard library only, on any Python from 3.7: this runs on a compute node's own Python, outside the image.
"""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import os
import re
import time

from fp8launch.injob.supervisor.attempt_log import Run
from fp8launch.injob.supervisor.retry_policy import Decision
from fp8launch.injob.supervisor.slurm_cli import PAUSES, ask, say, slurm, will_pass

CLOCKS_AGREE, SLOW_START = 5, 600  # seconds; a prolog may take its time before the batch script begins
WAYS = ("requeue", "dependency", "rerun")
UNLIMITED = 365 * 86400
# sbatch on a job that no nodes can run; one whose nodes are only busy or down is accepted, and waits.
_IMPOSSIBLE = (
    "Requested node configuration is not available",
    "Invalid node name specified",
    "Node count specification invalid",
    "Requested nodes are unavailable",
    "More nodes requested than",
)
# States in which sinfo shows nodes that an administrator took out of service for a while.
_COME_BACK = ("drain", "maint", "reboot", "reserved")


def prepare_next(run: Run) -> None:
    """At the start of an attempt: submit the job that waits for its end, where the run continues that way."""
    more_may_follow = run.used + 1 < run.plan["attempts"] or not run.in_last_phase
    if run.plan["continue_by"] == "dependency" and more_may_follow and not run.state["waiting"]:
        submit_next(run)


def start_next(run: Run, decision: Decision) -> bool:
    """At the end of an attempt: let the job that waits begin, or start this one again. False where Slurm does not."""
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
            nodes = ",".join(run.state["excluded"])
            slurm("scontrol", "update", f"JobId={waiting}", f"ExcNodeList={nodes}")
        return True
    if run.plan["continue_by"] == "requeue" and not excludes and not decision.new_job:
        # From here on Slurm may end this script at any moment.
        if slurm("scontrol", "requeue", run.job) is not None:
            return True
        say("this site does not requeue jobs; submitting another job")
    return submit_next(run)


def submit_next(run: Run) -> bool:
    """Submit a further job of the same script that begins when this one has ended, however it ends.

    Its key is looked for in Slurm's queue first: an answer that was lost must not make two of it.
    """
    key = f"fp8launch:{run.folder.name}.{len(run.attempts)}"
    comment = f"{key} {run.plan.get('comment', '')}".rstrip()
    options = ["--parsable", f"--dependency=afterany:{run.job}", f"--comment={comment}"]
    job = None
    for pause in PAUSES:
        time.sleep(pause)
        queue = slurm("squeue", "-h", "-o", "%i|%k|%o", "-u", str(os.getuid()))
        if queue is None:
            break  # nobody knows whether it is there already: not again
        job = _job_with_key(queue, key)
        if job is None:
            answer = ask("sbatch", *options, *_exclude(run.state["excluded"]), _script(run), key, tries=1)
            job = answer.output
            if job is None and run.state["excluded"] and is_impossible(answer.complaint):
                _exclude_only(run, [])
            elif job is None and not (will_pass(answer.complaint) or is_impossible(answer.complaint)):
                break
        if job is not None:
            break
    if job is None:
        return False
    run.state["waiting"] = job.strip().partition(";")[0]
    run.save()
    return True


def is_impossible(complaint: str) -> bool:
    """Slurm says that no nodes of this cluster, whether free or not, can run the job."""
    return any(words in complaint for words in _IMPOSSIBLE)


def drop_impossible_exclusions(run: Run) -> None:
    """Use excluded nodes again where too few others are left: first those excluded earlier, then all.

    A node that failed once is better than no attempt at all.
    """
    candidates = [run.state["excluded"], []]
    newest = run.attempts[-1].get("node")
    if newest:
        candidates.insert(1, newest.split(","))
    for nodes in candidates:
        if not nodes or _possible_without(nodes, run):
            if nodes != run.state["excluded"]:
                _exclude_only(run, nodes)
            return


def _possible_without(nodes: list[str], run: Run) -> bool:
    answer = ask("sbatch", "--test-only", *_exclude(nodes), _script(run), tries=1)
    return not is_impossible(answer.complaint) or _can_wait_without(nodes, run)


def _can_wait_without(nodes: list[str], run: Run) -> bool:
    """Whether enough other nodes are left once those come back that are only drained, reserved or rebooting.

    `sbatch --test-only` refuses a job for them that sbatch accepts, and that waits.
    """
    needed = run.env.get("SLURM_JOB_NUM_NODES", "")
    if not needed.isdigit() or "ReqNodeList=(null)" not in (slurm("scontrol", "show", "job", run.job, tries=1) or ""):
        return False
    shown = slurm("sinfo", "-h", "-N", "-p", run.env.get("SLURM_JOB_PARTITION", ""), "-o", "%N %T", tries=1) or ""
    others = dict(line.split(" ", 1) for line in shown.splitlines() if line.split(" ", 1)[0] not in nodes)
    # A trailing * marks a node that does not respond, and a down node may never come back.
    usable = [node for node, state in others.items() if not state.startswith(("down", "fail")) and "*" not in state]
    away = [node for node in usable if others[node].startswith(_COME_BACK)]
    if not away or len(usable) < int(needed):
        return False
    say(f"the next attempt may wait for {', '.join(away)} rather than use {', '.join(nodes)} again")
    return True


def _exclude_only(run: Run, nodes: list[str]) -> None:
    """Exclude these nodes and no others, and write down that the run could not do without the rest."""
    needed = [node for node in run.state["excluded"] if node not in nodes]
    run.state["excluded"] = nodes
    words = f"{', '.join(needed)} may be used again, because too few other nodes are left"
    run.attempts[-1]["then"] = f"{run.attempts[-1].get('then', '')}; {words}"
    run.save()
    say(words)


def _exclude(nodes: list[str]) -> list[str]:
    return [f"--exclude={','.join(nodes)}"] if nodes else []


def _script(run: Run) -> str:
    return str(run.folder / "job.sbatch")


def _job_with_key(queue: str, key: str) -> str | None:
    """Return the job whose comment or command has this key; sites may replace comments."""
    for line in queue.splitlines():
        job, _, rest = line.partition("|")
        if key in rest.replace("|", " ").split():
            return job
    return None


def cancel_next(run: Run) -> None:
    """Cancel the job that waits for the end of this one."""
    if run.state["waiting"]:
        slurm("scancel", run.state["waiting"])
        run.state["waiting"] = None
        run.save()


def is_ending_by_itself(shown: str) -> bool:
    """Whether Slurm, not we, ends the job now, by what `scontrol show job` says.

    Then nothing may be started from here: that could bring back a job that somebody cancelled.
    """
    state = re.search(r"JobState=(\w+)", shown)
    return state is not None and state.group(1) != "RUNNING"


def end_time(run: Run) -> float:
    """When Slurm will end this job, in seconds since 1970 by this node's clock; asked for when the job begins.

    Slurm's times are those of the controller's clock, and this node's may differ.
    """
    now = time.time()
    times = _start_and_end(run)
    if times is None:
        return now + float(run.plan.get("limit", UNLIMITED))
    began, ends = times
    if began - CLOCKS_AGREE < now < began + SLOW_START:
        return ends
    say(f"this node's clock is {now - began:+.0f} s from Slurm's: the time limit is counted from now")
    return now + ends - began


def _start_and_end(run: Run) -> tuple[float, float] | None:
    """Slurm's times for this job; None for an unlimited one, or where nobody answers."""
    start, end = run.env.get("SLURM_JOB_START_TIME", ""), run.env.get("SLURM_JOB_END_TIME", "")  # since Slurm 23
    if start.isdigit() and end.isdigit():
        return float(start), float(end)
    answer = (slurm("squeue", "-h", "-j", run.job, "-o", "%S %e") or "").split()
    try:
        began, ends = (time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S")) for text in answer)
    except ValueError:
        return None
    return began, ends
