"""Watch a training while it runs. `supervisor.py watch` runs alongside it, on the host of the batch script.

It removes old checkpoints, and ends a training that hangs or whose health requires an action (`health_watch`).

A training hangs if its log stops growing. `hang` in `survive.json` says how long the log may be silent: `start` seconds
before the first iteration, and `after` seconds later (with `stated: false`, longer if this training's own iterations
and silences are long). Silence while a checkpoint is being written does not count. On a hang, every process dumps its
stack, the finding is written to the log, and the training step is ended. The batch script then continues as after any
failure.
"""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import contextlib
import math
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8launch.injob.supervisor import checkpoints, slow_node
from fp8launch.injob.supervisor.failures import ALL_WRITTEN
from fp8launch.injob.supervisor.health_rules import Event
from fp8launch.injob.supervisor.health_watch import Actions, HealthWatch, record_of, values_of
from fp8launch.injob.supervisor.job_scheduler import JobScheduler
from fp8launch.injob.supervisor.log_lines import LONGEST_LINE, say, tail

ANSWERS_WITHIN = 10  # seconds
# Seconds that processes may take to exit once everything is written. `rank/leaving.py` needs less.
AFTER_THE_END = 300.0
HEALTH_EVERY = 2.0  # seconds between two health checks
SPARE_EVERY = 60.0  # seconds between two requests for a node to replace a slow one
MARGIN = 4  # a hang is this many times as long as the longest silence of this training so far
HUNG = "fp8launch: hang: "
# "3: Stack (most recent call first):" from a task, or "0: [rank3]: Stack ..." from a rank started by torchrun. Without
# srun, the task number is missing.
_LABELLED = re.compile(r"\s{0,20}(?=\d|\[)(?:(\d{1,9}): )?(?:\[rank(\d{1,9})\]: )?\s{0,20}(.*)")
_FRAME = re.compile(r'File "([^"]{1,1000})", line (\d{1,9}) in (\S{1,500})')
_NODES = re.compile(r"[\w.,-]{1,1000}\Z")


@dataclass
class Progress:
    """The progress of a log so far, in seconds.

    `silent` counts only while this process runs as well, because a suspended job does not hang.
    """

    size: int = 0
    iteration: int | None = None
    per_iteration: float = 0.0
    silent: float = 0.0
    longest: float = 0.0  # longest silence so far, once iterations are printed
    over: bool = False  # everything is written
    checkpoint_seen: Any = None  # the state of the checkpoint folder at the last check

    def grown(self, size: int, text: str) -> None:
        """Record that the log now has `size` bytes, after `text` was appended."""
        if self.iteration is not None:
            self.longest = max(self.longest, self.silent)
        for line in text.splitlines():
            self.over = self.over or ALL_WRITTEN in line
            row = values_of(line[:LONGEST_LINE])
            if row is not None:
                self.iteration = int(row["number"])
                step_ms = row.get("step_time_ms", math.nan)
                if math.isfinite(step_ms):
                    self.per_iteration = step_ms / 1000
        self.size, self.silent, self.checkpoint_seen = size, 0.0, None


def patience(seen: Progress, plan: Mapping[str, Any]) -> float:
    """Return how many seconds the log may be silent before this counts as a hang."""
    if seen.over:
        return min(AFTER_THE_END, float(plan["after"]))
    if seen.iteration is None:
        return float(plan["start"])
    if plan["stated"]:
        return float(plan["after"])
    return float(max(plan["after"], MARGIN * seen.per_iteration * plan["quiet"], MARGIN * seen.longest))


def watch(
    log: Path,
    checkpoint: Path,
    scheduler: JobScheduler,
    plan: Mapping[str, Any] | None,
    keep: int | None,
    actions: Actions,
    replaceable: Callable[[str], bool] = lambda node: False,
) -> None:
    """Watch until the training has been ended because of a hang or its health, or until the batch script ends us.

    Without a plan, silence is never a hang. Without `keep`, all checkpoints are kept. Without `actions`, health is not
    watched. `replaceable` says whether a free node can replace another one.
    """
    seen = Progress()
    health = HealthWatch(actions)
    every = 10.0
    if plan:
        every = max(0.5, min(every, plan["after"] / 6))
    if actions.watch:
        every = min(every, HEALTH_EVERY)
    leaving = False
    asked_for_spare = -SPARE_EVERY
    before = time.monotonic()
    newest = checkpoints.latest(checkpoint)
    while plan or keep or actions.watch:
        time.sleep(every)
        was, newest = newest, checkpoints.latest(checkpoint)
        if newest != was:
            # Not earlier, because the training may still be reading the checkpoint from which it starts.
            prune(checkpoint, keep)
        event = health.look(log)
        if event is not None and end_unhealthy(log, scheduler, event):
            return
        now = time.monotonic()
        if actions.slow_node == "exclude" and not leaving and now - asked_for_spare >= SPARE_EVERY:
            slow = health.news_of_nodes()
            if slow is not None and slow_node.lasts(slow):
                asked_for_spare = now
                leaving = replaceable(slow.node) and leave_slow_node(log, scheduler, slow)
        if plan is None:
            continue
        seen.silent += min(now - before, 2 * every)
        before = now
        read_growth(log, seen)
        limit = patience(seen, plan)
        if seen.silent > limit / 2:
            notice_a_save(checkpoint, seen)
        if seen.silent > limit and end_hung(log, scheduler, seen):
            return


def end_unhealthy(log: Path, scheduler: JobScheduler, event: Event) -> bool:
    """Report a health event and end the training step. Return False if there is no step to end.

    The step gets no time to save, because the checkpoint would contain broken weights.
    """
    step = scheduler.training()
    if step is None:
        return False
    line = record_of(event)
    with contextlib.suppress(OSError):
        _append(log, line + "\n")
    say(line.partition(" ")[2])
    return step.end(at_once=True)


def leave_slow_node(log: Path, scheduler: JobScheduler, slow: slow_node.SlowNode) -> bool:
    """Ask the training to save and exit because of a slow node. Return False if there is no step to ask."""
    step = scheduler.training()
    if step is None:
        return False
    with contextlib.suppress(OSError):
        _append(log, slow_node.record_of(slow) + "\n")
    say(f"{slow.sentence}; the training saves and exits")
    return step.ask_to_save()


def read_growth(log: Path, seen: Progress) -> None:
    with contextlib.suppress(OSError):  # the log may not exist yet
        size = log.stat().st_size
        if size != seen.size:
            seen.grown(size, tail(log, min(seen.size, size)))


def notice_a_save(checkpoint: Path, seen: Progress) -> None:
    """End the silence if a checkpoint grows. Call this only during a silence, because it looks at every file."""
    try:
        state = checkpoints.state_of_newest(checkpoint)
    except OSError:
        return  # it cannot be known now
    if seen.checkpoint_seen is not None and state != seen.checkpoint_seen:
        seen.silent = 0.0
    seen.checkpoint_seen = state


def prune(checkpoint: Path, keep: int | None) -> None:
    """Remove old checkpoints and report which ones."""
    if not keep:
        return
    try:
        removed = checkpoints.prune(checkpoint, keep)
    except OSError as problem:
        say(f"old checkpoints stay until the next one is written: {problem}")
        return
    if removed:
        say(f"removed checkpoints {', '.join(map(str, removed))}: {keep} are kept")


def end_hung(log: Path, scheduler: JobScheduler, seen: Progress) -> bool:
    """Ask for stacks, report them, and end the training step. Return False if there is no step to end."""
    step = scheduler.training()
    if step is None:
        return False
    try:
        _append(log, f"fp8launch: nothing for {seen.silent:.0f} s: asking all processes for their stacks\n")
    except OSError as problem:  # the log does not grow because it cannot be written
        say(f"the log cannot be written, so a hang cannot be detected: {os.strerror(problem.errno or 0)}")
        seen.silent = 0.0
        return False
    where = "and there was no iteration yet" if seen.iteration is None else f"since iteration {seen.iteration}"
    step.ask_for_stacks()
    time.sleep(ANSWERS_WITHIN)
    words, tasks = describe_stacks(parse_stacks(tail(log, seen.size)), scheduler.tasks())
    nodes = scheduler.nodes_of(tasks)
    line = f"{HUNG}the log has not grown for {seen.silent:.0f} s {where}; {words}"
    if nodes:
        line += f" on {','.join(nodes)}"
    with contextlib.suppress(OSError):
        _append(log, line + "\n")
    say(line.partition(" ")[2])
    return step.end()


def hung_nodes(line: str) -> str | None:
    """Return the nodes of processes without a stack, from the end of the line written by `end_hung`."""
    _, found, nodes = line.rstrip().rpartition(" on ")
    if not found or not _NODES.match(nodes):
        return None
    return nodes


def _append(log: Path, text: str) -> None:
    """Append lines to the log. The training writes to it too, and may be in the middle of a line."""
    with log.open("a") as file:
        file.write(f"\n{text}")


@dataclass(frozen=True)
class Stack:
    """The answer of a process: its task, its rank if torchrun started it, and its innermost frame.

    The frame is None if the process did not answer.
    """

    task: int
    rank: int | None
    frame: str | None

    @property
    def name(self) -> int:
        return self.task if self.rank is None else self.rank


def parse_stacks(text: str) -> list[Stack]:
    """Return the answers in a part of the log, one per rank, ordered by rank."""
    found: dict[int, Stack] = {}
    begun: set[tuple[str | None, str | None]] = set()
    for line in text.splitlines():
        labelled = _LABELLED.match(line[:LONGEST_LINE])
        if labelled is None:
            continue
        task, rank, words = labelled.groups()
        if task is None and rank is None:
            continue
        if words.startswith(("Stack", "Current thread")):
            begun.add((task, rank))
            continue
        frame = None
        if not words.startswith("no stack"):
            if (task, rank) not in begun:
                continue
            begun.discard((task, rank))
            if not words.startswith(("File ", "<")):
                continue
            frame = _place(words)
        answer = Stack(int(task or 0), int(rank) if rank else None, frame)
        if answer.frame is not None or answer.name not in found:
            found[answer.name] = answer
    return [found[name] for name in sorted(found)]


def _place(words: str) -> str:
    frame = _FRAME.search(words)
    if frame is None:
        return words
    return f"{frame.group(3)} ({frame.group(1).rpartition('/')[2]}:{frame.group(2)})"


def describe_stacks(answers: list[Stack], tasks: int) -> tuple[str, list[int]]:
    """Describe the answers, ending with the processes that did not answer. Return the text and their tasks."""
    ranks_at: dict[str, list[int]] = {}
    for answer in answers:
        if answer.frame is not None:
            ranks_at.setdefault(answer.frame, []).append(answer.name)
    if not ranks_at:
        return "no process gave its stack", []
    # Most processes wait for the few that are somewhere else, so show the small groups first.
    groups = sorted(ranks_at.items(), key=lambda group: len(group[1]))[:4]
    words = [f"{_in_words(ranks)} in {frame}" for frame, ranks in groups]
    answered = {answer.task for answer in answers}
    missing = [answer for answer in answers if answer.frame is None]
    missing += [Stack(task, None, None) for task in range(tasks) if task not in answered]
    if missing:
        words.append(f"no stack from {_in_words([answer.name for answer in missing])}")
    return "; ".join(words), [answer.task for answer in missing]


def _in_words(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 4:
        return f"{len(ranks)} ranks"
    return f"ranks {', '.join(map(str, ranks))}"
