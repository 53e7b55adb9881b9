"""Looks after a training while it runs: `keeper.py watch` runs beside srun on the batch host.

It keeps the newest checkpoints only, and notices a training that hangs, and ends it.

A hang is a log that stops growing. How long it may be silent is in `survive.json` under `hang`: `after` seconds once
iterations are printed (with `stated: false`, more where this training's own iterations and silences are long), `start`
seconds before. A checkpoint that is being written is no silence. Then every process is asked for its stack, the log is
told what was seen, and the training step is ended; the batch script goes on as after any failure.
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

import saved
from commands import say, slurm, tail

ASK = "USR1"  # helpers.py answers it with the stack
ANSWERS_WITHIN = 10  # seconds
MARGIN = 4  # times what was seen of this training, before silence is a hang
_ITERATION = re.compile(r"iteration\s+(\d+)/\s*\d+ \|(?:[^\n]*elapsed time per iteration \(ms\): ([\d.]+))?")
# "3: Stack (most recent call first):" of a task, or "0: [rank3]: Stack ..." of a rank of torchrun's.
_STACK = re.compile(
    r"^\s*(?P<task>\d+): (?:\[rank(?P<rank>\d+)\]: )?(?:"
    r"(?P<none>no stack)|(?:Stack|Current thread)[^\n]*\n\s*\d+: (?:\[rank\d+\]: )?\s*(?P<frame>File [^\n]*|<[^\n]*))",
    re.M,
)
_FRAME = re.compile(r'File "(?:.*/)?([^"]*)", line (\d+) in (\S+)')
# As the log tells it: the iteration, the silence, and the nodes of the processes that do not answer.
HUNG = re.compile(r"^fp8launch: hang: .*?(?: on ([\w.,-]+))?$", re.M)


@dataclass
class Progress:
    """What a log has shown so far. Times are in seconds, `silent` counted only while this process runs too: a job that
    Slurm suspends does not hang."""

    size: int = 0
    iteration: int | None = None
    per_iteration: float = 0.0
    silent: float = 0.0
    longest: float = 0.0  # silence between two growths, once iterations are printed
    beside: Any = field(default=None)  # what the checkpoint's folder looked like when it was last looked at

    def grown(self, size: int, text: str) -> None:
        """The log has `size` bytes now, `text` is what was added."""
        if self.iteration is not None:
            self.longest = max(self.longest, self.silent)
        for found in _ITERATION.finditer(text):
            self.iteration = int(found.group(1))
            if found.group(2):
                self.per_iteration = float(found.group(2)) / 1000
        self.size, self.silent, self.beside = size, 0.0, None


def patience(seen: Progress, plan: Mapping[str, Any]) -> float:
    """Seconds of silence that are no hang yet."""
    if seen.iteration is None:
        return float(plan["start"])
    if plan["stated"]:
        return float(plan["after"])
    return float(max(plan["after"], MARGIN * seen.per_iteration * plan["quiet"], MARGIN * seen.longest))


def watch(
    log: Path, checkpoint: Path, job: str, env: Mapping[str, str], plan: Mapping[str, Any] | None, keep: int | None
) -> None:
    """Return once the training was ended for a hang; until then, look. The batch script ends this process.

    Without a plan no silence is a hang; without `keep` all checkpoints stay.
    """
    seen = Progress()
    every = max(0.5, min(10.0, plan["after"] / 6)) if plan else 10.0
    before = time.monotonic()
    newest = saved.latest(checkpoint)
    while plan or keep:
        time.sleep(every)
        was, newest = newest, saved.latest(checkpoint)
        if newest != was:
            # Not before: what was there at the start may still be read.
            prune(checkpoint, keep)
        if plan is None:
            continue
        now = time.monotonic()
        seen.silent += min(now - before, 2 * every)
        before = now
        with contextlib.suppress(OSError):  # srun has not made it yet
            size = log.stat().st_size
            if size != seen.size:
                seen.grown(size, tail(log, min(seen.size, size)))
        limit = patience(seen, plan)
        if seen.silent <= limit / 2:
            continue
        # Looked at only now: a checkpoint of many ranks is many files.
        beside = saved.look(checkpoint)
        if seen.beside is not None and beside != seen.beside:
            seen.silent = 0.0
        seen.beside = beside
        if seen.silent > limit and end_hung(log, job, env, seen):
            return


def prune(checkpoint: Path, keep: int | None) -> None:
    removed = saved.prune(checkpoint, keep) if keep else []
    if removed:
        say(f"removed checkpoints {', '.join(map(str, removed))}: {keep} are kept")


def end_hung(log: Path, job: str, env: Mapping[str, str], seen: Progress) -> bool:
    """Ask for stacks, tell what was seen, end the training step. False where Slurm names no step to end."""
    steps = [
        s for s in (slurm("squeue", "-h", "-s", "-j", job, "-o", "%i") or "").split() if s.split(".")[-1].isdigit()
    ]
    if not steps:
        return False
    try:
        _append(log, f"fp8launch: nothing for {seen.silent:.0f} s: asking all processes for their stacks\n")
    except OSError as problem:  # the very reason why it does not grow
        say(f"the log cannot grow, so nobody can say whether the training does: {os.strerror(problem.errno or 0)}")
        seen.silent = 0.0
        return False
    where = f"since iteration {seen.iteration}" if seen.iteration is not None else "and there was no iteration yet"
    told = f"hang: the log has not grown for {seen.silent:.0f} s {where}"
    slurm("scancel", f"--signal={ASK}", *steps)
    time.sleep(ANSWERS_WITHIN)
    words, tasks = verdict(stacks(tail(log, seen.size)), int(env.get("SLURM_NTASKS") or 0))
    nodes = nodes_of(tasks, env)
    line = f"fp8launch: {told}; {words}" + (f" on {','.join(nodes)}" if nodes else "")
    with contextlib.suppress(OSError):
        _append(log, line + "\n")
    say(line.partition(" ")[2])
    return slurm("scancel", *steps) is not None


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


def stacks(text: str) -> list[Stack]:
    """The answers in what was added to a log, by rank, one for each."""
    found: dict[int, Stack] = {}
    for match in _STACK.finditer(text):
        frame = _FRAME.search(match["frame"] or "")
        place = f"{frame.group(3)} ({frame.group(1)}:{frame.group(2)})" if frame else match["frame"]
        one = Stack(int(match["task"]), int(match["rank"]) if match["rank"] else None, place)
        if one.frame is not None or one.name not in found:
            found[one.name] = one
    return [found[name] for name in sorted(found)]


def verdict(answers: list[Stack], tasks: int) -> tuple[str, list[int]]:
    """What the answers say, in words that end with the processes that gave none, and the tasks of these."""
    at: dict[str, list[int]] = {}
    for one in answers:
        if one.frame is not None:
            at.setdefault(one.frame, []).append(one.name)
    if not at:
        return "no process gave its stack", []
    # The few that stand elsewhere are what the many wait for.
    groups = sorted(at.items(), key=lambda group: len(group[1]))[:4]
    words = [f"{_ranks(ranks)} in {frame}" for frame, ranks in groups]
    answered = {one.task for one in answers}
    missing = [one for one in answers if one.frame is None]
    missing += [Stack(task, None, None) for task in range(tasks) if task not in answered]
    if missing:
        words.append(f"no stack from {_ranks([one.name for one in missing])}")
    return "; ".join(words), [one.task for one in missing]


def _ranks(ranks: list[int]) -> str:
    if len(ranks) > 4:
        return f"{len(ranks)} ranks"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def nodes_of(tasks: list[int], env: Mapping[str, str]) -> list[str]:
    """The nodes of some tasks of the training step, whose tasks fill one node after the other."""
    if not tasks:
        return []
    hosts = (slurm("scontrol", "show", "hostnames", env.get("SLURM_JOB_NODELIST", "")) or "").split()
    each = re.match(r"\d+", env.get("SLURM_TASKS_PER_NODE", ""))
    if not hosts or not each:
        return []
    numbers = sorted({task // int(each.group(0)) for task in tasks})
    return [hosts[number] for number in numbers if number < len(hosts)]
