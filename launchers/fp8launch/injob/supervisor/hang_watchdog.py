"""Looks after a training while it runs: `supervisor.py watch` runs beside srun on the batch host,
or beside torchrun on a machine without Slurm.

It keeps only the newest checkpoints, and ends a training that hangs, or whose health calls for an action
(`health_watch`).

A hang is a log that stops growing. How long it may be silent is in `survive.json` under `hang`: `after` seconds once
iterations are printed (with `stated: false`, more where this training's own iterations and silences are long), `start`
seconds before. A checkpoint that is being written is not silence. Then every process is asked for its stack, what was
seen is written to the log, and the training step is ended; the batch script continues as after any failure.

Standard library only, on any Python from 3.7: this runs on a compute node's own Python, outside the image.
"""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fp8launch.injob.supervisor import checkpoints
from fp8launch.injob.supervisor.failures import ALL_WRITTEN
from fp8launch.injob.supervisor.health_rules import Event
from fp8launch.injob.supervisor.health_watch import Actions, HealthWatch, record_of
from fp8launch.injob.supervisor.log_lines import LONGEST_LINE
from fp8launch.injob.supervisor.slurm_cli import say, slurm, tail
from fp8launch.injob.supervisor.training_step import training_step

ANSWERS_WITHIN = 10  # seconds
AFTER_THE_END = 300.0  # seconds that processes may stay once everything is written; they leave by themselves sooner
HEALTH_EVERY = 2.0  # seconds between two looks at the health
MARGIN = 4  # times what was seen of this training, before silence is a hang
HUNG = "fp8launch: hang: "
_ITERATION = re.compile(r"iteration\s{1,20}(\d{1,15})/\s{0,20}\d{1,15} \|")
_ELAPSED = re.compile(r"elapsed time per iteration \(ms\): (\d{1,12}(?:\.\d{1,9})?)(?![\d.])")
# "3: Stack (most recent call first):" of a task, or "0: [rank3]: Stack ..." of a rank that torchrun started, there
# without the task's number where torchrun was not started by srun.
_LABELLED = re.compile(r"\s{0,20}(?=\d|\[)(?:(\d{1,9}): )?(?:\[rank(\d{1,9})\]: )?\s{0,20}(.*)")
_FRAME = re.compile(r'File "([^"]{1,1000})", line (\d{1,9}) in (\S{1,500})')
_NODES = re.compile(r"[\w.,-]{1,1000}\Z")


@dataclass
class Progress:
    """The progress of a log so far. Times are in seconds, `silent` counted only while this process runs too: a job that
    Slurm suspends does not hang."""

    size: int = 0
    iteration: int | None = None
    per_iteration: float = 0.0
    silent: float = 0.0
    longest: float = 0.0  # silence between two growths, once iterations are printed
    over: bool = False  # everything is written
    checkpoint_seen: Any = field(default=None)  # the state of the checkpoint folder when it was last looked at

    def grown(self, size: int, text: str) -> None:
        """Take note that the log has `size` bytes now, and that `text` was added."""
        if self.iteration is not None:
            self.longest = max(self.longest, self.silent)
        for line in text.splitlines():
            self.over = self.over or ALL_WRITTEN in line
            found = _ITERATION.search(line[:LONGEST_LINE])
            if found is None:
                continue
            self.iteration = int(found.group(1))
            elapsed = _ELAPSED.search(line[:LONGEST_LINE], found.end())
            if elapsed:
                self.per_iteration = float(elapsed.group(1)) / 1000
        self.size, self.silent, self.checkpoint_seen = size, 0.0, None


def patience(seen: Progress, plan: Mapping[str, Any]) -> float:
    """Seconds of silence that are not a hang yet."""
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
    job: str,
    env: Mapping[str, str],
    plan: Mapping[str, Any] | None,
    keep: int | None,
    actions: Actions,
) -> None:
    """Return once the training was ended, for a hang or for its health; until then, look. The batch script ends this
    process.

    Without a plan no silence is a hang; without `keep` all checkpoints stay; without `actions` health is not watched.
    """
    seen = Progress()
    health = HealthWatch(actions)
    every = 10.0
    if plan:
        every = max(0.5, min(every, plan["after"] / 6))
    if actions.by_code:
        every = min(every, HEALTH_EVERY)
    before = time.monotonic()
    newest = checkpoints.latest(checkpoint)
    while plan or keep or actions.by_code:
        time.sleep(every)
        was, newest = newest, checkpoints.latest(checkpoint)
        if newest != was:
            # Not before: what was there at the start may still be read.
            prune(checkpoint, keep)
        event = health.look(log)
        if event is not None and end_unhealthy(log, job, env, event):
            return
        if plan is None:
            continue
        now = time.monotonic()
        seen.silent += min(now - before, 2 * every)
        before = now
        read_growth(log, seen)
        limit = patience(seen, plan)
        if seen.silent > limit / 2:
            notice_a_save(checkpoint, seen)
        if seen.silent > limit and end_hung(log, job, env, seen):
            return


def end_unhealthy(log: Path, job: str, env: Mapping[str, str], event: Event) -> bool:
    """Report an event and end the training step. False where there is no step to end.

    It gets no time to save: the checkpoint would hold broken weights.
    """
    step = training_step(job, env)
    if step is None:
        return False
    line = record_of(event)
    with contextlib.suppress(OSError):
        _append(log, line + "\n")
    say(line.partition(" ")[2])
    return step.end(at_once=True)


def read_growth(log: Path, seen: Progress) -> None:
    with contextlib.suppress(OSError):  # srun has not made it yet
        size = log.stat().st_size
        if size != seen.size:
            seen.grown(size, tail(log, min(seen.size, size)))


def notice_a_save(checkpoint: Path, seen: Progress) -> None:
    """A checkpoint that grows ends the silence. Only asked in a silence: a checkpoint of many ranks is many files."""
    state = checkpoints.state_of_newest(checkpoint)
    if seen.checkpoint_seen is not None and state != seen.checkpoint_seen:
        seen.silent = 0.0
    seen.checkpoint_seen = state


def prune(checkpoint: Path, keep: int | None) -> None:
    """Remove old checkpoints, and say which."""
    if not keep:
        return
    removed = checkpoints.prune(checkpoint, keep)
    if removed:
        say(f"removed checkpoints {', '.join(map(str, removed))}: {keep} are kept")


def end_hung(log: Path, job: str, env: Mapping[str, str], seen: Progress) -> bool:
    """Ask for stacks, report what was seen, end the training step. False where there is no step to end."""
    step = training_step(job, env)
    if step is None:
        return False
    try:
        _append(log, f"fp8launch: nothing for {seen.silent:.0f} s: asking all processes for their stacks\n")
    except OSError as problem:  # the very reason why it does not grow
        say(f"the log cannot be written, so a hang cannot be detected: {os.strerror(problem.errno or 0)}")
        seen.silent = 0.0
        return False
    where = "and there was no iteration yet"
    if seen.iteration is not None:
        where = f"since iteration {seen.iteration}"
    step.ask_for_stacks()
    time.sleep(ANSWERS_WITHIN)
    words, tasks = describe_stacks(parse_stacks(tail(log, seen.size)), int(env.get("SLURM_NTASKS") or 0))
    nodes = nodes_of(tasks, env)
    line = f"{HUNG}the log has not grown for {seen.silent:.0f} s {where}; {words}"
    if nodes:
        line += f" on {','.join(nodes)}"
    with contextlib.suppress(OSError):
        _append(log, line + "\n")
    say(line.partition(" ")[2])
    return step.end()


def hung_nodes(line: str) -> str | None:
    """The nodes of the processes without a stack, as `end_hung` wrote them at the end of its line."""
    _, found, nodes = line.rstrip().rpartition(" on ")
    if not found or not _NODES.match(nodes):
        return None
    return nodes


def _append(log: Path, text: str) -> None:
    with log.open("a") as file:  # srun appends too
        file.write(text)


@dataclass(frozen=True)
class Stack:
    """A process's answer: its Slurm task, its rank where torchrun started it, its innermost frame; None for no
    answer."""

    task: int
    rank: int | None
    frame: str | None

    @property
    def name(self) -> int:
        return self.task if self.rank is None else self.rank


def parse_stacks(text: str) -> list[Stack]:
    """The answers in what was added to a log, by rank, one for each."""
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
    """What the answers show, in words that end with the processes that gave none, and the tasks of these."""
    ranks_at: dict[str, list[int]] = {}
    for answer in answers:
        if answer.frame is not None:
            ranks_at.setdefault(answer.frame, []).append(answer.name)
    if not ranks_at:
        return "no process gave its stack", []
    # The few that stand elsewhere are what the many wait for.
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


def nodes_of(tasks: list[int], env: Mapping[str, str]) -> list[str]:
    """The nodes of some tasks of the training step. Its tasks fill one node after the other."""
    if not tasks:
        return []
    hosts = (slurm("scontrol", "show", "hostnames", env.get("SLURM_JOB_NODELIST", "")) or "").split()
    each = re.match(r"\d{1,9}", env.get("SLURM_TASKS_PER_NODE", ""))
    if not hosts or not each:
        return []
    numbers = sorted({task // int(each.group(0)) for task in tasks})
    return [hosts[number] for number in numbers if number < len(hosts)]
