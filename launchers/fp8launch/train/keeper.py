"""Keeps a run going from attempt to attempt: `python keeper.py begin|watch|end RUN-FOLDER ATTEMPT [STATUS]`.

The batch script asks at its start whether there is something to do (`begin`) and tells at its end how the training
left (`end`); beside the training `watch` removes old checkpoints, and ends a training that hangs. What to do is in
`survive.json`, written when the run was submitted; what happened is in `attempts.json`, which only the job that has its
turn writes. Runs on the compute node's own Python (3.7 or newer), outside the image.

Another attempt comes in one of two ways. `requeue`: Slurm starts the same job again. `dependency`: a further job of the
same script waits from the start of this one for its end, so that the run goes on however this one ends. A bad node can
only be left out by a job that waits, so `requeue` also submits one in that case.

begin: prints when to stop (seconds since 1970) and, for a run in phases, which of them is to go on; nothing when there
is nothing left to do; exits with 75 when the run may not go on. end: exits with 0 when the training is done or goes on,
else with STATUS, or 75 where that is 0.
"""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import policy
import saved
import watch
from cause import cause_of_end, how_it_was_cut_off
from commands import say, slurm
from record import Run

GIVEN_UP = 75  # "try again later" of sysexits.h: the training is not done
CANCELLED = "cancelled"
CLOCKS_AGREE, SLOW_START = 5, 600  # seconds; a prolog may take its time before the batch script begins
PHASE_END = "phase-end"


def begin(run: Run) -> int:
    """Whether this job has something to do; what the attempt starts from."""
    record = run.record
    if record.get("owner") not in (None, run.job) and record["waiting"] != run.job:
        say(f"job {record['owner']} has gone on with this run: nothing is left for job {run.job}")
        return 0
    if (run.folder / CANCELLED).exists():
        say("this run was cancelled")
        record["stopped"] = "cancelled by fp8launch cancel"
        run.save()
        return GIVEN_UP
    if run.attempts and "ended" not in run.attempts[-1] and run.attempts[-1]["name"] != run.name:
        cause = how_it_was_cut_off(run, run.attempts[-1])
        if run.phase_over and run.plan["rules"].get(cause) != "stop":
            cause = PHASE_END
        verdict = run.close(cause)
        say(f"attempt {run.attempts[-1]['name']} ended early: {verdict.reason}")
    if record["waiting"] == run.job:
        record["waiting"] = None
    record["owner"] = run.job
    for words in saved.repair(run.checkpoint):
        say(words)
    if run.done:
        record["finished"] = True
        say(f"all {run.plan['iterations']} iterations are done")
    if record["finished"] or record["stopped"]:
        run.save()
        drop_waiting(run)
        return GIVEN_UP if record["stopped"] and not record["finished"] else 0
    if not run.attempts or run.attempts[-1]["name"] != run.name:
        nodes = run.env.get("SLURM_JOB_NODELIST", "")
        start: dict[str, Any] = {
            "name": run.name,
            "job": run.job,
            "nodes": nodes,
            "began": time.time(),
            "until": end_time(run),
        }
        with contextlib.suppress(OSError):
            start["said"] = run.batch_output.stat().st_size
        if run.phase is not None:
            start["phase"] = run.phase["name"]
        run.attempts.append({**start, "before": saved.latest(run.checkpoint)})
    run.save()
    watch.prune(run.checkpoint, run.plan["keep"])
    more = run.counted + 1 < run.plan["attempts"] or not is_last(run.phase, run.plan)
    if run.plan["continue_by"] == "dependency" and more and not record["waiting"]:
        submit_next(run)
    from_there = run.attempts[-1]["before"]
    say(f"attempt {len(run.attempts)}, from iteration {from_there}" if from_there else "from the beginning")
    print(int(run.attempts[-1]["until"] - run.plan["stop_before"]), *([run.phase["name"]] if run.phase else []))
    return 0


def end(run: Run, status: int) -> int:
    """What follows this attempt, and making it follow."""
    shown = slurm("scontrol", "show", "job", run.job) or ""
    if not still_ours(shown):
        say("Slurm is ending this job: what follows is decided at the next start")
        return status
    for words in saved.repair(run.checkpoint):
        say(words)
    watch.prune(run.checkpoint, run.plan["keep"])
    cause, node, line = cause_of_end(run, status, shown)
    if run.phase_over and (status == 0 or cause == "finished"):
        cause = PHASE_END
    elif cause == "finished" and run.phase is not None:
        cause = "unknown"  # it left at its phase's last iteration, and no checkpoint of that is there
    if run.done or cause == "finished":
        run.attempts[-1].update(ended=time.time(), after=saved.latest(run.checkpoint), cause="finished", counts=True)
        run.record["finished"] = True
        run.save()
        drop_waiting(run)
        say(f"the training is done, at iteration {saved.latest(run.checkpoint)}")
        return 0 if run.done else status
    if line:
        run.attempts[-1]["line"] = line.strip()[:300]
    verdict = run.close(cause, node)
    run.save()
    if not verdict.go_on:
        say(f"the run ends here. {verdict.reason}. Checkpoint: iteration {run.attempts[-1]['after']}")
        drop_waiting(run)
        return status or GIVEN_UP
    say(f"the run goes on. {verdict.reason}. Checkpoint: iteration {run.attempts[-1]['after']}")
    if go_on(run, verdict):
        return 0
    run.record["stopped"] = f"{cause}: Slurm took no further attempt"
    run.save()
    return status or GIVEN_UP


def is_last(phase: Mapping[str, Any] | None, plan: Mapping[str, Any]) -> bool:
    return phase is None or phase == plan["phases"][-1]


def go_on(run: Run, verdict: policy.Decision) -> bool:
    """Bring the next attempt about: let a job that waits begin, or start this one again."""
    waiting = run.record["waiting"]
    if waiting and verdict.exclude:
        nodes = ",".join(run.record["excluded"])
        slurm("scontrol", "update", f"JobId={waiting}", f"ExcNodeList={nodes}")
    if waiting:
        return True
    if run.plan["continue_by"] == "requeue" and not verdict.exclude:
        # From here on Slurm may end this script at any moment.
        if slurm("scontrol", "requeue", run.job) is not None:
            return True
        say("this site starts no job again: submitting another")
    return submit_next(run)


def submit_next(run: Run) -> bool:
    """A further job of the same script that begins when this one has ended, however it ends.

    Its name is found in Slurm's queue first: an answer that was lost must not make two of it.
    """
    key = f"fp8launch:{run.folder.name}.{len(run.attempts)}"
    exclude = [f"--exclude={','.join(run.record['excluded'])}"] if run.record["excluded"] else []
    options = ["--parsable", f"--dependency=afterany:{run.job}", f"--comment={key}", *exclude]
    answer = None
    for _ in range(3):
        queue = slurm("squeue", "-h", "-o", "%i|%k", "-u", str(os.getuid()))
        if queue is None:
            break  # whether it is there already, nobody knows: not again
        there = [line.partition("|")[0] for line in queue.splitlines() if line.partition("|")[2] == key]
        answer = there[0] if there else slurm("sbatch", *options, str(run.folder / "job.sbatch"), tries=1)
        if answer is not None:
            break
    if answer is None:
        return False
    run.record["waiting"] = answer.strip().partition(";")[0]
    run.save()
    return True


def drop_waiting(run: Run) -> None:
    if run.record["waiting"]:
        slurm("scancel", run.record["waiting"])
        run.record["waiting"] = None
        run.save()


def still_ours(shown: str) -> bool:
    """Not while Slurm ends the job by itself: a job that somebody cancelled could be started again by our word."""
    state = re.search(r"JobState=(\w+)", shown)
    return state is None or state.group(1) == "RUNNING"


def end_time(run: Run) -> float:
    """When Slurm will end this job, in seconds since 1970 by this node's clock; asked for when the job begins.

    Slurm's times are those of the controller's clock, and this node's may differ.
    """
    now = time.time()
    start, end = run.env.get("SLURM_JOB_START_TIME", ""), run.env.get("SLURM_JOB_END_TIME", "")  # since Slurm 23
    if start.isdigit() and end.isdigit():
        began, ends = float(start), float(end)
    else:
        told = (slurm("squeue", "-h", "-j", run.job, "-o", "%S %e") or "").split()
        try:
            began, ends = (time.mktime(time.strptime(one, "%Y-%m-%dT%H:%M:%S")) for one in told)
        except ValueError:
            return now + float(run.plan.get("limit", 365 * 86400))  # unlimited, or nobody answers
    if began - CLOCKS_AGREE < now < began + SLOW_START:
        return ends
    say(f"this node's clock is {now - began:+.0f} s from Slurm's: the time limit is counted from now")
    return now + ends - began


def main(words: list[str]) -> int:
    what, folder, attempt = words[0], Path(words[1]), Path(words[2])
    run = Run(folder, attempt, os.environ)
    if what == "watch":
        # The batch script ends it once the training has left, and the shell has nothing to say about that.
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))
        log, plan = attempt.with_suffix(".log"), run.plan
        watch.watch(log, run.checkpoint, run.job, os.environ, plan.get("hang"), plan.get("keep"))
        return 0
    try:
        return begin(run) if what == "begin" else end(run, int(words[3]))
    except OSError as problem:  # a full disk, say
        if run.done:
            say(f"the training is done, but {problem.filename or folder} cannot be written: {problem.strerror}")
            return int(words[3]) if what == "end" else 0
        say(f"the run stops here: {problem.filename or folder}: {problem.strerror}")
        return GIVEN_UP if what == "begin" else int(words[3]) or GIVEN_UP


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
