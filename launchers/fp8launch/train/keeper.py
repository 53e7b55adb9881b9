"""Keeps a run going from attempt to attempt: `python keeper.py begin|watch|end RUN-FOLDER ATTEMPT [STATUS]`.

The batch script asks at its start whether there is something to do (`begin`) and tells at its end how the training
left (`end`); beside the training `watch` ends one that hangs. What to do is in `survive.json`, written when the run was
submitted; what happened is in `attempts.json`, which only the job that has its turn writes. Runs on the compute node's
own Python (3.7 or newer), outside the image.

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
import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import policy
import saved
import watch
from commands import say, slurm, tail

GIVEN_UP = 75  # "try again later" of sysexits.h: the training is not done
CANCELLED = "cancelled"
CLOCKS_AGREE, SLOW_START = 5, 600  # seconds; a prolog may take its time before the batch script begins
PHASE_END = "phase-end"
OF_PEERS = ("nccl", "network")  # told by those that miss somebody
_EXITING = re.compile(r"\[exiting program (after receiving|after [\d.]+ minutes|at iteration)")
_UNHEALTHY = re.compile(r"^([\w.-]+): bad: ", re.M)
_LABEL = re.compile(r"^\s*(\d+): ?")
# srun ends the other tasks of a step that failed in the words of a cancellation.
_STEP_ENDED = re.compile(r"\*\*\* STEP .*CANCELLED AT (?!.*DUE TO)")
# srun's own lines (its errors are those of the batch script) name the node of the first process that failed.
_NODE_FAILED = re.compile(r"srun: error: ([\w.-]+): tasks? [\d,-]+: (?!Terminated)")


class Run:
    """The run folder as this job sees it."""

    def __init__(self, folder: Path, attempt: Path, env: Mapping[str, str]) -> None:
        self.folder, self.attempt, self.env = folder, attempt, env
        self.plan: dict[str, Any] = json.loads((folder / "survive.json").read_text())
        try:
            self.record: dict[str, Any] = json.loads((folder / "attempts.json").read_text())
        except OSError:
            self.record = {"attempts": [], "waiting": None, "excluded": [], "stopped": None, "finished": False}
        self.checkpoint = folder / self.plan["checkpoint"]
        self.job = attempt.name.rpartition("-")[0]  # as Slurm's commands take it, a task of an array too

    @property
    def name(self) -> str:
        return self.attempt.name

    @property
    def batch_output(self) -> Path:
        return self.folder / "logs" / f"slurm-{self.job}.out"

    @property
    def attempts(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.record["attempts"]
        return found

    @property
    def counted(self) -> int:
        """Attempts that were used up, since the user last asked for the run to go on."""
        return sum(bool(one.get("counts")) for one in self.attempts[self.record.get("from", 0) :])

    @property
    def stuck(self) -> int:
        """Attempts without a newer checkpoint, at the end of those that counted."""
        count = 0
        for one in reversed([a for a in self.attempts[self.record.get("from", 0) :] if a.get("counts")]):
            if one["after"] > one["before"]:
                break
            count += 1
        return count

    @property
    def limits(self) -> policy.Limits:
        return policy.Limits(self.plan["attempts"], self.plan["stuck"])

    @property
    def done(self) -> bool:
        planned = self.plan["iterations"]
        return planned is not None and saved.latest(self.checkpoint) >= planned

    @property
    def phase(self) -> dict[str, Any] | None:
        """The phase to go on with, that of the newest checkpoint; None for a run without phases, or at its end."""
        there = saved.latest(self.checkpoint)
        return next((one for one in self.plan.get("phases", []) if one["end"] > there), None)

    @property
    def phase_over(self) -> bool:
        """The newest attempt has trained its phase to the end, and another one follows."""
        its = self.attempts[-1].get("phase")
        ends = [one["end"] for one in self.plan.get("phases", []) if one["name"] == its]
        return bool(ends) and saved.latest(self.checkpoint) >= ends[0] and self.phase is not None

    def save(self) -> None:
        """All of it or nothing: a job may be killed at any moment."""
        new = self.folder / ".attempts.json.new"
        with new.open("w") as file:
            json.dump(self.record, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        new.replace(self.folder / "attempts.json")

    def close(self, cause: str, node: str | None = None) -> policy.Decision:
        """Write down how the newest attempt ended, and decide what follows."""
        one = self.attempts[-1]
        after = saved.latest(self.checkpoint)
        ended = policy.Ended(cause, one["before"], after, node)
        verdict = policy.decide(ended, self.counted, self.stuck, self.limits, self.plan["rules"])
        one.update(ended=time.time(), after=after, cause=cause, counts=verdict.counts, node=node, then=verdict.reason)
        if not verdict.go_on:
            self.record["stopped"] = verdict.reason
        if verdict.exclude:
            self.record["excluded"] = sorted({*self.record["excluded"], *verdict.exclude.split(",")})
        return verdict


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
    prune(run)
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
    prune(run)
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


def prune(run: Run) -> None:
    keep = run.plan["keep"]
    removed = saved.prune(run.checkpoint, keep) if keep else []
    if removed:
        say(f"removed checkpoints {', '.join(map(str, removed))}: {keep} are kept")


def still_ours(shown: str) -> bool:
    """Not while Slurm ends the job by itself: a job that somebody cancelled could be started again by our word."""
    state = re.search(r"JobState=(\w+)", shown)
    return state is None or state.group(1) == "RUNNING"


def how_it_was_cut_off(run: Run, one: Mapping[str, Any]) -> str:
    """The cause of an end that the attempt's own script did not see."""
    text = "".join(tail(path) for path in (run.folder / "logs").glob(f"slurm-{one['job']}.out"))
    text += tail(run.folder / "logs" / f"{one['name']}.log")
    if one["job"] == run.job:
        # Slurm itself started this job again.
        return "preempted" if "DUE TO PREEMPTION" in text else "interrupted"
    shown = slurm("scontrol", "show", "job", one["job"]) or ""
    state = re.search(r"JobState=(\w+)", shown)
    causes = {"CANCELLED": "cancelled", "TIMEOUT": "time-limit", "PREEMPTED": "preempted", "NODE_FAIL": "interrupted"}
    return causes.get(state.group(1) if state else "", "interrupted")


class Cause(NamedTuple):
    """Why an attempt ended: the cause's code, the node where it was seen, and the line that told it."""

    code: str
    node: str | None = None
    line: str | None = None


def cause_of_end(run: Run, status: int, shown: str) -> Cause:
    """Why the training left before it was done; `shown` is what Slurm says of the job."""
    log = tail(run.attempt.with_suffix(".log"))
    hung = watch.HUNG.search(log)
    if hung is not None:
        return Cause("hang", hung.group(1), hung.group(0))
    left = _EXITING.search(log)
    if left is not None:
        # It has saved by then. A last SIGTERM may still hit it on its way out, and the exit status says nothing.
        if left.group(1) == "at iteration":
            return Cause("finished")  # as far as it was asked to go
        return Cause(who_asked(run, shown) if left.group(1) == "after receiving" else "time-limit")
    if status == 0:
        return Cause("unknown")
    # Slurm appends the words of a job that it starts again.
    batch = tail(run.batch_output, run.attempts[-1].get("said", 0))
    found = find_cause(log, run.plan) or find_cause(batch, run.plan)
    if found is None:
        return Cause("unknown")
    cause, line = found
    if cause == "cancelled" and who_asked(run, shown) != "signal":
        return Cause(who_asked(run, shown), None, line)  # the step was, before it could answer; the job runs
    if cause == "unhealthy-node":
        return Cause(cause, ",".join(_UNHEALTHY.findall(log)) or None, line)
    return Cause(cause, node_of_silence(log, run) if cause in OF_PEERS else node_of(line, batch, run.env), line)


def who_asked(run: Run, shown: str) -> str:
    """Why Slurm has sent SIGTERM to the training while the job runs on."""
    # In the grace time of a preemption the job still runs, and its end has moved to where that ends.
    if re.search(r"PreemptTime=\d", shown):
        return "preempted"
    near = time.time() > run.attempts[-1].get("until", 0) - run.plan["stop_before"] - 60
    return "time-limit" if near else "signal"


def find_cause(text: str, plan: Mapping[str, Any]) -> tuple[str, str] | None:
    """Code and line of the deepest cause: the earliest line of the lowest depth, as for `fp8launch parse`."""
    best: tuple[int, str, str] | None = None
    for depth, code, line in meanings(text, plan):
        if best is not None and _STEP_ENDED.search(line):
            continue
        if best is None or depth < best[0]:
            best = (depth, code, line)
    return (best[1], best[2]) if best else None


def meanings(text: str, plan: Mapping[str, Any]) -> Iterator[tuple[int, str, str]]:
    """Depth, code and text of each line that means a failure."""
    patterns = [(re.compile(expression), code, depth) for expression, code, depth in plan["patterns"]]
    needles, harmless = plan["needles"], re.compile(plan["harmless"])
    for line in text.splitlines():
        if any(needle in line for needle in needles):
            words = _LABEL.sub("", line)
            found = next(((depth, code) for expression, code, depth in patterns if expression.search(words)), None)
            if found and not harmless.search(words):
                yield (*found, line)


def node_of(line: str, batch: str, env: Mapping[str, str]) -> str | None:
    """The node of the process that printed a line, else the one whose process srun missed first."""
    label = _LABEL.match(line)
    nodes = watch.nodes_of([int(label.group(1))], env) if label else []
    missed = _NODE_FAILED.search(batch)
    return nodes[0] if nodes else missed.group(1) if missed else None


def node_of_silence(log: str, run: Run) -> str | None:
    """The node whose processes alone did not miss a peer: the peer that all others miss is there."""
    said = {_LABEL.match(line) for _, code, line in meanings(log, run.plan) if code in OF_PEERS}
    missed = {int(label.group(1)) for label in said if label}
    nodes = watch.nodes_of(sorted(set(range(int(run.env.get("SLURM_NTASKS") or 0))) - missed), run.env)
    return nodes[0] if len(nodes) == 1 else None


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
        if run.plan.get("hang"):
            watch.watch(attempt.with_suffix(".log"), run.checkpoint, run.job, os.environ, run.plan["hang"])
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
