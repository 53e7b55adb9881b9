"""Evaluate the checkpoints of a run while it trains: `python follow.py -- --run=... --checkpoints=... OPTIONS...`

Every Nth checkpoint (`--every` times `--interval` iterations) is evaluated by evaluate.py as soon as it is complete,
and the last one when the run has ended. The results in the run folder show which checkpoints remain, so a second start
continues where the first one ended. Only reads the run, except for its `evaluations/`. Started like worker.py, with
the same exit codes, as a single process.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

if __name__ == "__main__":
    # Started by path: use the package's full names in imports, never bare names in this folder.
    sys.path[0] = str(Path(__file__).resolve().parents[4])

from fp8launch.injob.rank import worker
from fp8launch.injob.supervisor import checkpoint_owner, checkpoints
from fp8launch.injob.supervisor.attempt_log import ATTEMPTS, CANCELLED, PLAN
from fp8launch.injob.supervisor.run_records import json_mapping
from fp8launch.plugins.evaluate.injob import evaluate
from fp8launch.plugins.evaluate.injob.folders import EVALUATIONS
from fp8launch.plugins.evaluate.injob.programs import OutOfTime, run_program

POLL = 5.0  # seconds
# How often a checkpoint of a run that is over is tried, if a file cannot be read. Each try takes half a minute.
TRIES = 20
_MODELS = Path("models")


class Saved(NamedTuple):
    """A checkpoint. After a rewind, a run writes another one with the same iteration, at another time."""

    iteration: int
    written: int  # nanoseconds since 1970


class Unreadable(Exception):
    """A file of a checkpoint cannot be read now, which says nothing about the checkpoint."""


class ToldToStop(Exception):
    """SIGTERM: of a cancellation, a preemption or the time limit."""


def arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = evaluate.parser("follow.py")
    parser.add_argument("--checkpoints", type=Path, required=True, help="folder of the run's checkpoints")
    parser.add_argument("--every", type=int, required=True, help="evaluate each Nth checkpoint")
    parser.add_argument("--interval", type=int, required=True, help="iterations from one checkpoint to the next")
    parser.add_argument("--patience", type=int, default=120, help="minutes of silence after which a run is over")
    parser.add_argument("--keep", action="store_true", help="keep the converted models")
    return parser.parse_args([word for word in words if word != "--"])


def due(saved: Iterable[Saved], step: int, over: bool) -> list[Saved]:
    """Return the checkpoints to evaluate, oldest first: each multiple of `step` and, once the run is over, the last."""
    ordered = sorted(saved)
    return [each for each in ordered if each.iteration % step == 0 or (over and each == ordered[-1])]


def saved_in(folder: Path) -> list[Saved]:
    """Return the checkpoints up to the one that Megatron's tracker names, which is written last."""
    newest = checkpoints.latest(folder)
    there = [iteration for iteration in checkpoints.iterations(folder) if 0 < iteration <= newest]
    return [Saved(each, evaluate.written_at(checkpoints.place(folder, each))) for each in there]


def evaluated_in(run: Path, settings: Mapping[str, Any]) -> Iterator[Saved]:
    """Yield the checkpoints that have a result with these settings in a run's folder."""
    for file in (run / EVALUATIONS).glob("*.json"):
        stated = json_mapping(file)
        if stated.get("settings") == settings:
            yield Saved(stated.get("iteration") or 0, stated.get("written") or 0)


def why_over(run: Path, folder: Path, patience: float) -> str | None:
    """Return why a run writes no further checkpoint; None as long as it may.

    A job that was killed together with its supervisor leaves no record, so a run that has begun and then shows no sign
    of life for `patience` seconds counts as ended.
    """
    if not run.is_dir():
        return "its folder was deleted"
    state = json_mapping(run / ATTEMPTS)
    if state.get("finished"):
        return "its training is done"
    if (run / CANCELLED).exists():
        return "it was cancelled"
    if state.get("stopped"):
        return f"it has stopped: {state['stopped']}"
    if not (run / PLAN).exists() and any((run / "logs").glob("*.exit")):
        return "its job has ended"  # nothing supervises such a run
    attempts = state.get("attempts") or [{"ended": not any((run / "logs").glob("*.log"))}]
    silent = time.time() - _last_sign_of_life(run, folder)
    if not attempts[-1].get("ended") and silent > patience:
        return f"its log has been silent for {silent / 60:.0f} minutes"
    return None


def _last_sign_of_life(run: Path, folder: Path) -> float:
    signs = [run / ATTEMPTS, folder / checkpoints.TRACKER, *(run / "logs").glob("*.log")]
    return max((sign.stat().st_mtime for sign in signs if sign.exists()), default=time.time())


def follow(ours: argparse.Namespace, words: Sequence[str]) -> None:
    """Evaluate checkpoints until the run is over and its last one is evaluated."""
    settings, step = evaluate.settings_of(ours), ours.every * ours.interval
    until = float(os.environ.get("FP8LAUNCH_STOP_AT") or "inf")
    skipped: set[Saved] = set()
    unread: Counter[Saved] = Counter()
    reached = checkpoints.latest(ours.checkpoints)
    while True:
        over = why_over(ours.run, ours.checkpoints, 60 * ours.patience)
        there = saved_in(ours.checkpoints)  # after the question above: the last checkpoint precedes the end
        done = {*evaluated_in(ours.run, settings), *skipped}
        newest = max((each.iteration for each in there), default=reached)
        for missed in set(range(reached + 1, newest + 1)) - {each.iteration for each in there}:
            if missed % step == 0:
                print(f"fp8launch: checkpoint {missed} was removed before it was evaluated", flush=True)
        reached = newest
        waiting = [each for each in due(there, step, over is not None) if each not in done]
        if waiting:
            first = min(waiting, key=lambda each: unread[each])  # do not let one that cannot be read block the others
            try:
                if not evaluate_one(ours, words, first.iteration, until):
                    skipped.add(first)
                continue
            except Unreadable as problem:
                unread[first] += 1
                if over is not None and unread[first] >= TRIES:
                    skipped.add(first)
                    print(f"fp8launch: checkpoint {first.iteration} is skipped: {problem}", flush=True)
                elif unread[first] == 1:
                    print(f"fp8launch: checkpoint {first.iteration} is tried again later: {problem}", flush=True)
        elif over is not None:
            print(f"fp8launch: the run {ours.run.name} is over ({over}), and every checkpoint is evaluated", flush=True)
            return
        if time.time() > until:
            raise OutOfTime
        time.sleep(POLL)


def evaluate_one(ours: argparse.Namespace, words: Sequence[str], iteration: int, until: float) -> bool:
    """Evaluate a checkpoint, and remove the converted model. Return False if the checkpoint is damaged or removed.

    Raises Unreadable if it cannot be read now. Exits with the evaluation's status if it fails for another reason.
    """
    place = checkpoints.place(ours.checkpoints, iteration)
    more = [f"--checkpoint={place}", f"--name={Path.cwd().name}-{iteration:07d}", f"--out={_MODELS / place.name}"]
    damage = _damage(place)
    if damage is None:
        print(f"fp8launch: evaluating checkpoint {iteration}", flush=True)
        try:
            status = run_program(Path(evaluate.__file__), [*words, *more], _trust(ours, iteration), until)
        finally:
            if not ours.keep:
                shutil.rmtree(_MODELS, ignore_errors=True)
        if status == 0:
            return True
        if status == 128 + signal.SIGTERM:
            raise ToldToStop
        damage = _damage(place)  # `checkpoint.keep` of the run may have removed it meanwhile
        if damage is None:
            worker.stop(status, f"the evaluation of checkpoint {iteration} failed; its reason is above")
    print(f"fp8launch: checkpoint {iteration} is skipped: it {damage}", flush=True)
    return False


def _damage(place: Path) -> str | None:
    try:
        return checkpoints.damage(place)
    except OSError as problem:
        raise Unreadable(f"a file cannot be read now ({problem.strerror})") from None


def _trust(ours: argparse.Namespace, iteration: int) -> Mapping[str, str]:
    """Return the variable with which FP8 state is unpickled, if the run itself wrote this checkpoint."""
    plan = json_mapping(ours.run / PLAN)
    trusted = bool(plan.get("trust_run_root"))
    if checkpoint_owner.why_not_trusted(ours.checkpoints, plan.get("owner") or {}, iteration, trusted) is not None:
        return {}
    return {checkpoint_owner.UNPICKLE: "1"}


def follow_to_the_end(ours: argparse.Namespace, words: Sequence[str]) -> None:
    """Follow the run. Before the time limit and at SIGTERM, exit as Megatron does, so that another attempt follows."""

    def stop(number: int, frame: object) -> NoReturn:
        raise ToldToStop

    signal.signal(signal.SIGTERM, stop)
    try:
        # Before hours of waiting: lm-eval must know the tasks.
        evaluate.find_tasks(ours.tasks, ours.task_folder)
        follow(ours, words)
    except OutOfTime:
        # The supervisor knows these two lines of Megatron's.
        print("[exiting program after the time of this job] fp8launch: the next attempt continues", flush=True)
        sys.exit(0)
    except ToldToStop:
        print("[exiting program after receiving SIGTERM] fp8launch: the evaluation in progress is lost", flush=True)
        sys.exit(0)


def main() -> None:
    words = [word for word in sys.argv[1:] if word != "--"]
    ours = arguments(words)
    device = worker.begin()
    evaluate.check_packages(("torch", "lm_eval", "transformers"))
    worker.announce()
    worker.prepare_process(device)
    if not ours.run.is_dir():
        worker.stop(worker.WRONG_REQUEST, f"evaluate.run: there is no run folder {ours.run}")
    own = ("--checkpoints=", "--every=", "--interval=", "--patience=", "--keep")
    of_evaluation = [word for word in words if not word.startswith(own)]
    worker.run_to_the_end(lambda: follow_to_the_end(ours, of_evaluation))


if __name__ == "__main__":
    main()
