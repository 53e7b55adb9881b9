"""Continue a run from attempt to attempt: `supervisor.py begin|unpickle|skip|watch|end RUN-FOLDER ATTEMPT [STATUS]`.

The batch script calls `begin` before the training and `end` after it, and runs `watch` during the training. The plan is
in `survive.json`, written at submission. The history is in `attempts.json`, which only the run's current job writes.
`continuation` starts the next attempt.

begin     prints when to stop (seconds since 1970), and the phase of a run in phases; prints nothing if nothing is left
          to do; exits with 75 if the run may not continue
unpickle  prints the variable that lets Transformer Engine load the pickled state of a checkpoint, if the newest
          checkpoint was written by this run
skip      prints the arguments with which Megatron skips the batches of a rewind
watch     removes old checkpoints, and ends a training that hangs or is unhealthy
end       exits with 0 if the training is done or continues, otherwise with STATUS, or with 75 if STATUS is 0; prints
          "again" if the script must run itself again
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # Started by its path: imports go by the package's full names, never by bare names in this folder.
    sys.path[0] = str(Path(__file__).resolve().parents[3])

from fp8launch.injob.supervisor import checkpoint_owner, checkpoints, continuation, hang_watchdog
from fp8launch.injob.supervisor.attempt_log import CANCELLED, Run, batch_output
from fp8launch.injob.supervisor.failure_cause import cause_of_cut_off, cause_of_end
from fp8launch.injob.supervisor.failures import failures_of
from fp8launch.injob.supervisor.health_rules import Event
from fp8launch.injob.supervisor.health_watch import CAUSE as UNHEALTHY
from fp8launch.injob.supervisor.health_watch import Actions, event_of, slow_node_of_log
from fp8launch.injob.supervisor.log_lines import say, tail
from fp8launch.injob.supervisor.slow_node import SlowNode, recorded_in

GIVEN_UP = 75  # "try again later" of sysexits.h: the training is not done
PHASE_END = "phase-end"
WATCH_AGAIN = 60  # seconds before the watch starts again after an error


def begin(run: Run) -> int:
    """Decide whether this job has something to do, record its attempt, and print when it has to stop."""
    state = run.state
    if state.get("owner") not in (None, run.job) and state["waiting"] != run.job:
        say(f"job {state['owner']} has continued this run: nothing is left for job {run.job}")
        return 0
    if (run.folder / CANCELLED).exists():
        say("this run was cancelled")
        state["stopped"] = "cancelled by fp8launch cancel"
        run.save()
        return GIVEN_UP
    close_attempt_that_was_cut_off(run)
    if state["waiting"] == run.job:
        state["waiting"] = None
    state["owner"] = run.job
    repair_checkpoints(run)
    refused = claim_checkpoints(run)
    if refused is not None:
        say(refused)
        state["stopped"] = refused
        run.save()
        continuation.cancel_next(run)
        return GIVEN_UP
    if run.trained:
        state["finished"] = True
        say(f"all {run.plan['iterations']} iterations are done")
    if state["finished"] or state["stopped"]:
        run.save()
        continuation.cancel_next(run)
        if state["finished"]:
            return 0
        return GIVEN_UP
    if not run.attempts or run.attempts[-1]["name"] != run.name:
        run.attempts.append(new_attempt(run))
    run.save()
    hang_watchdog.prune(run.checkpoint, run.plan["keep"])
    continuation.prepare_next(run)
    start = run.attempts[-1]["before"]
    if start:
        say(f"attempt {len(run.attempts)}, from iteration {start}")
    else:
        say("from the beginning")
    words = [str(int(run.attempts[-1]["until"] - run.plan["stop_before"]))]
    if run.phase:
        words.append(run.phase["name"])
    print(*words)
    return 0


def close_attempt_that_was_cut_off(run: Run) -> None:
    """Record the end of an attempt whose own job could not do it: it was killed, or its node was lost."""
    if not run.attempts:
        return
    last = run.attempts[-1]
    if "ended" in last or last["name"] == run.name:
        return
    cause = cause_of_cut_off(run, last)
    if run.phase_is_over and run.plan["rules"].get(cause) != "stop":
        cause = PHASE_END
    # This attempt may have waited in the queue since then.
    decision = run.close_attempt(cause, ended=last_sign_of_life(run, last["name"]))
    say(f"attempt {last['name']} ended early: {decision.reason}")


def last_sign_of_life(run: Run, attempt: str) -> float | None:
    """Return when the log of an attempt was last written, in seconds since 1970; None if it has no log."""
    try:
        return (run.folder / "logs" / f"{attempt}.log").stat().st_mtime
    except OSError:
        return None


def new_attempt(run: Run) -> dict[str, Any]:
    """Return what is known about this attempt at its start."""
    attempt: dict[str, Any] = {
        "name": run.name,
        "job": run.job,
        "nodes": run.scheduler.node_list(),
        "began": time.time(),
        "until": continuation.end_time(run),
    }
    with contextlib.suppress(OSError):
        attempt["said"] = batch_output(run.folder, run.job).stat().st_size
    if run.phase:
        attempt["phase"] = run.phase["name"]
    attempt["before"] = checkpoints.latest(run.checkpoint)
    return attempt


def repair_checkpoints(run: Run) -> None:
    for words in checkpoints.repair(run.checkpoint):
        say(words)


def claim_checkpoints(run: Run) -> str | None:
    """Record this run as the owner of its checkpoint folder. Return why it may not train there; None if it may."""
    identity = run.plan.get("owner")
    if identity is None:
        return None  # submitted by an earlier version
    try:
        record = checkpoint_owner.read_owner(run.checkpoint)
        if record is None:
            # Checkpoints that precede the first attempt are not this run's work.
            inherited = 0 if run.attempts else checkpoints.latest(run.checkpoint)
            record = checkpoint_owner.claim(run.checkpoint, identity, inherited)
    except ValueError as problem:
        say(f"the owner of the checkpoints is unknown: {problem}")
        return None
    if checkpoint_owner.is_owner(record, identity) or run.plan.get("continues_another"):
        return None
    return (
        f"{run.checkpoint} belongs to the run {record.get('run')}: this run would continue its training and remove its "
        "checkpoints; submit it with another checkpoint.dir, or with checkpoint.load set to this folder to continue "
        "that run on purpose"
    )


def unpickle(run: Run) -> int:
    """Print the variable that lets Transformer Engine load pickled state, if the checkpoint can be trusted."""
    name = checkpoint_owner.UNPICKLE
    if name in run.env:
        return 0  # the user decided
    newest = checkpoints.latest(run.checkpoint)
    identity, group_is_trusted = run.plan.get("owner") or {}, bool(run.plan.get("trust_run_root"))
    reason = checkpoint_owner.why_not_trusted(run.checkpoint, identity, newest, group_is_trusted)
    if reason is None:
        words = f"{name}=1 for this job: checkpoint {newest} is this run's own"
        print(f"{name}=1")
    else:
        words = f"{name} is not set, so Transformer Engine 2.18 and later refuse FP8 state: {reason}"
    say(words)
    with contextlib.suppress(OSError), run.log.open("a") as log:
        print("fp8launch:", words, file=log)
    return 0


def end(run: Run, status: int) -> int:
    """Decide what follows this attempt, and start it."""
    state = run.scheduler.state()
    if state.ending:
        say("the scheduler is ending this job; the next start decides how the run continues")
        return status
    repair_checkpoints(run)
    hang_watchdog.prune(run.checkpoint, run.plan["keep"])
    cause, node, line, whole = cause_of_end(run, status, state.preempted)
    log = tail(run.log)
    slow = note_slow_node(run, log)
    if run.phase_is_over and (status == 0 or cause == "finished"):
        cause = PHASE_END
    elif cause == "finished" and run.phase is not None:
        cause = "unknown"  # it exited at its phase's last iteration, but there is no checkpoint of that iteration
    if run.trained or cause == "finished":
        if run.trained or whole:
            status = 0  # the run is complete even if processes had to be killed after its end
        return finish(run, status)
    if line:
        run.attempts[-1]["line"] = line.strip()[:300]
    if cause == "missing-checkpoint":
        if any(code == "storage" for code, _ in failures_of(log)):
            cause = "storage"  # the next attempt may read the same checkpoint
        elif set_aside_checkpoint(run):
            cause = "damaged-checkpoint"
    actions = Actions.of_plan(run.plan)
    event = event_of(cause, line, log, actions)
    detail = ""
    if event is not None:
        cause, detail = answer_to(event, run)
    given_up = None
    if slow is not None and actions.slow_node is not None and not was_given_up(slow.node, run):
        given_up = slow.node
        if cause == "signal" and recorded_in(log):
            # The training exited because the supervisor told it to.
            cause, node, detail = "slow-node", slow.node, slow.sentence
    decision = run.close_attempt(cause, node, detail=detail, slow=given_up)
    if given_up is not None:
        run.attempts[-1]["slow_node"]["excluded"] = decision.continues
    run.save()
    checkpoint = f"Checkpoint: iteration {run.attempts[-1]['after']}"
    if not decision.continues:
        say(f"the run ends here. {decision.reason}. {checkpoint}")
        continuation.cancel_next(run)
        return status or GIVEN_UP
    say(f"the run continues. {decision.reason}. {checkpoint}")
    if continuation.start_next(run, decision):
        return 0
    run.state["stopped"] = f"{cause}: no further attempt could be submitted"
    run.save()
    return status or GIVEN_UP


def note_slow_node(run: Run, log: str) -> SlowNode | None:
    """Record in the newest attempt which node slowed it at its end. Return it; None if no single node did."""
    slow = recorded_in(log) or slow_node_of_log(log, Actions.of_plan(run.plan))
    if slow is None or slow.node not in run.scheduler.hosts():
        return None
    say(slow.sentence)
    run.attempts[-1]["slow_node"] = slow.as_json()
    return slow


def was_given_up(node: str, run: Run) -> bool:
    """Return whether the run excluded a slow node before: it is in use again because too few others are left."""
    earlier = [attempt.get("slow_node", {}) for attempt in run.attempts[:-1]]
    return any(slow.get("node") == node and slow.get("excluded") for slow in earlier)


def answer_to(event: Event, run: Run) -> tuple[str, str]:
    """Carry out the plan's action for a health event. Return the attempt's cause, and details of it."""
    actions = Actions.of_plan(run.plan)
    attempt = run.attempts[-1]
    good = attempt["before"] if event.good is None else event.good
    back = actions.checkpoints_back(event.code)
    attempt["health"] = {"code": event.code, "message": event.message, "good": good, "until": event.until}
    target = checkpoint_before(good, back, run)
    if target is None:
        return UNHEALTHY, f"{event.message}; there is no checkpoint of this run before it"
    if back and run.rewinds >= actions.max_rewinds:
        return UNHEALTHY, f"{event.message}; health.max_rewinds {actions.max_rewinds} is used up"
    if back:
        # Recorded before anything is renamed: should this process be killed, the next attempt meets the event again.
        attempt["health"].update(rewound_to=target, skipped=[target + 1, event.until])
        run.state["skip"] = [*run.state.get("skip", []), [target + 1, event.until]]
        run.save()
    for words in checkpoints.go_back_to(run.checkpoint, target):
        say(words)
    if not back:
        return UNHEALTHY, event.message
    skipped = f"the batches of iterations {target + 1} to {event.until} are skipped"
    return "rewind", f"{event.message}; back to checkpoint {target}, {skipped}"


def checkpoint_before(good: int, back: int, run: Run) -> int | None:
    """Return the iteration of the `back`th newest complete checkpoint up to iteration `good`, or of the oldest one if
    there are fewer. None if the run may not go back to any.

    Checkpoints from before the run's first attempt are not its own: it never renames them.
    """
    inherited = inherited_iteration(run)
    if inherited is None:
        return None
    candidates = [i for i in checkpoints.whole_iterations(run.checkpoint, up_to=good) if i >= inherited]
    return candidates[-min(max(back, 1), len(candidates))] if candidates else None


def skip(run: Run) -> int:
    """Print the arguments with which Megatron skips the batches of a rewind."""
    actions = Actions.of_plan(run.plan)
    reached = checkpoints.latest(run.checkpoint)
    numbers = set(actions.skipped)
    for first, last in run.state.get("skip", []):
        numbers.update(range(int(first), int(last) + 1))
    left = sorted(number for number in numbers if number > reached)
    if actions.skip_flag and left:
        print(actions.skip_flag, *left)
    return 0


def inherited_iteration(run: Run) -> int | None:
    """Return the newest checkpoint from before the run's first attempt; None if the folder is not the run's own."""
    try:
        record = checkpoint_owner.read_owner(run.checkpoint) or {}
    except (OSError, ValueError):
        return None
    inherited = record.get("inherited")
    if not isinstance(inherited, int) or not checkpoint_owner.is_owner(record, run.plan.get("owner") or {}):
        return None
    return inherited


def set_aside_checkpoint(run: Run) -> bool:
    """Set aside the checkpoint that this attempt could not load, if it is the run's own and an older one is whole."""
    newest = checkpoints.latest(run.checkpoint)
    if not newest or newest != run.attempts[-1]["before"]:
        return False  # it loaded a checkpoint and trained
    inherited = inherited_iteration(run)
    if inherited is None or newest <= inherited:
        return False
    done = checkpoints.set_aside(run.checkpoint, newest)
    for words in done:
        say(words)
    return bool(done)


def finish(run: Run, status: int) -> int:
    """Record that the training is done."""
    reached = checkpoints.latest(run.checkpoint)
    run.attempts[-1].update(ended=time.time(), after=reached, cause="finished", counts=True)
    run.state["finished"] = True
    run.save()
    continuation.cancel_next(run)
    say(f"the training is done, at iteration {reached}")
    return status


def watch(run: Run) -> int:
    """Watch the training until the batch script ends this process."""

    def replaceable(node: str) -> bool:
        in_use = node in run.scheduler.hosts()
        return in_use and not was_given_up(node, run) and run.scheduler.has_free_node(run.state["excluded"])

    # The batch script ends this process after the training. Exit without a message, which the shell would print.
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))
    hang, keep, actions = run.plan.get("hang"), run.plan.get("keep"), Actions.of_plan(run.plan)
    while True:
        try:
            hang_watchdog.watch(run.log, run.checkpoint, run.scheduler, hang, keep, actions, replaceable)
            return 0
        except OSError as problem:  # the training may be healthy, and it reads the log and checkpoints itself
            say(f"the watch over the training starts again: {problem}")
        time.sleep(WATCH_AGAIN)


def main(words: list[str]) -> int:
    what, folder, attempt = words[0], Path(words[1]), Path(words[2])
    status = int(words[3]) if what == "end" else 0
    try:
        run = checkpoints.again(lambda: Run(folder, attempt, os.environ))
    except (OSError, ValueError) as problem:
        again = (
            f"`fp8launch submit {folder} --set checkpoint.load=FOLDER` continues from its checkpoints as another run"
        )
        say(f"this run cannot continue: {problem}; {again}")
        return status or GIVEN_UP
    if what == "begin" and run.damage:
        say(run.damage)
    if what == "watch":
        return watch(run)
    try:
        if what == "begin":
            return begin(run)
        if what == "unpickle":
            return unpickle(run)
        if what == "skip":
            return skip(run)
        return end(run, status)
    except OSError as problem:  # a full disk, say
        place = problem.filename or folder
        with contextlib.suppress(OSError):
            if run.trained:
                say(f"the training is done, but {place} cannot be written: {problem.strerror}")
                return 0
        say(f"the run stops here: {place}: {problem.strerror}")
        return status or GIVEN_UP


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
