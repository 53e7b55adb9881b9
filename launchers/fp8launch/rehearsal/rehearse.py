"""Rehearse runs: each role of each run in a process of its own, several side by side.

A rehearsal trains two iterations of a small model of the run's structure with Megatron's own code, and Transformer
Engine's own Python, as one rank of the run's whole world. What it refuses, the job would refuse.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from fp8launch.diagnostics import MACHINE_LACKS, error
from fp8launch.engines.base import EngineArguments, Layout, OwnProgram
from fp8launch.hardware.gpus import gpu
from fp8launch.megatron.argv import emit_argv
from fp8launch.megatron.schema import load_schema
from fp8launch.rehearsal.counting import Counts, NotCountable, counting_plan, counts
from fp8launch.rehearsal.roles import Role, roles_of
from fp8launch.rehearsal.shrink import Shrunk, shrink
from fp8launch.rehearsal.workers import LIMITS, Limits, Request, Result, Task, run_tasks

# What the extra `rehearse` brings.
PACKAGES = ("torch", "numpy", "einops", "psutil")

# Kernels that send data themselves.
UNCOUNTED = ("DeepEP's kernels", "HybridEP's kernels")

# A rehearsal beside the first one, with sizes so many times as large.
OTHER_SIZES = 3
# How long a run is has no part in what its layers say.
LENGTHS = ("train_iters", "global_batch_size")

# A refusal by this code says nothing about a run that is configured without a command line.
COMMAND_LINE = "megatron/training/"

# That of torch 2.11 from PyPI, where neither recipe nor image says.
CUDA = "13.0"

# Given the number of roles, a context whose value is called at the end of each.
Progress = Callable[[int], AbstractContextManager[Callable[[], None]]]


@dataclass(frozen=True)
class Plan:
    """A run to rehearse: its flags and layout, where it would run, and the software to run it with.

    `megatron` and `transformer_engine` are folders with the packages, None for Transformer Engine on a CPU run.
    `script` is the training script, None for fp8launch's own entry; `own` are arguments that only the script knows.
    `translated` says that the run itself does not use Megatron-LM's command line, `without` names what of its program
    is left out. With `program` that runs in place of the arguments, which still serve to count a step.
    """

    args: EngineArguments
    layout: Layout
    gpu: str
    gpus_per_node: int
    environment: dict[str, str]
    megatron: Path
    transformer_engine: Path | None
    script: Path | None = None
    own: tuple[str, ...] = ()
    cuda: str = CUDA
    translated: bool = False
    without: tuple[str, ...] = ()
    program: OwnProgram | None = None

    @property
    def key(self) -> str:
        """The same for plans that do the same: the runs of a repeated point are rehearsed once."""
        where = [self.gpu, self.gpus_per_node, self.environment, str(self.script), self.cuda]
        words = self.program.words if self.program else ()
        return json.dumps([self.args.argv, repr(self.layout), *where, *words])


@dataclass(frozen=True)
class Outcome:
    """How the rehearsal of one role ended. `unknown`: without a verdict, for the reason in `message`.

    `settings` are names of Megatron's attributes that the failing statement and the conditions around it read.
    `reasons` are Transformer Engine's own, where it found no attention for the run.
    `not_rehearsed` names kernels that it called and no rehearsal runs.
    `counts` is a step of the real run where that was asked for, or `uncounted` says why there is none.
    """

    role: Role
    ok: bool
    seconds: float = 0.0
    unknown: bool = False
    exception: str = ""
    message: str = ""
    at: str = ""
    traceback: str = ""
    settings: tuple[str, ...] = ()
    shrunk: dict[str, tuple[int, int]] | None = None
    memory_gib: float = 0.0
    not_rehearsed: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    counts: Counts | None = None
    uncounted: str = ""


def require_torch(asked_by: str = "--rehearse") -> None:
    """Raise UserError (exit code 3) where rehearsals cannot run; `asked_by` is the option or field that wants one."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise error(
            "no-torch",
            f"a rehearsal runs Megatron's own code, which needs {', '.join(missing)} in {sys.executable}",
            asked_by,
            "pip install 'fp8launch[rehearse]' (PyTorch for the CPU is enough); `check` without --rehearse needs none",
            exit_code=MACHINE_LACKS,
        )


def no_progress(roles: int) -> AbstractContextManager[Callable[[], None]]:
    return nullcontext(lambda: None)


def rehearse(
    plans: Sequence[Plan], progress: Progress = no_progress, limits: Limits = LIMITS, count: bool = False
) -> list[list[Outcome]]:
    """Rehearse every role of every run; the outcomes of each run, in order. `count` also counts a step of each.

    Raises UserError (exit code 3) where this Python lacks torch.
    """
    require_torch()
    distinct = {plan.key: plan for plan in plans}
    task = _counted if count else _rehearsal
    tasks = [(key, task(plan, role)) for key, plan in distinct.items() for role in roles_of(plan.layout)]
    with progress(len(tasks)) as done:
        outcomes = run_tasks([task for _, task in tasks], limits, done)
    found: dict[str, list[Outcome]] = {key: [] for key in distinct}
    for (key, _), outcome in zip(tasks, outcomes, strict=True):
        found[key].append(outcome)
    return [found[plan.key] for plan in plans]


def _rehearsal(plan: Plan, role: Role) -> Task[Outcome]:
    """Rehearse one role.

    A refusal that names a shrunk size is rehearsed again with other sizes of the same remainders: the same refusal
    there does not depend on them. Another one is without a verdict.
    """
    small = shrink(plan.args.values, plan.layout)
    outcome = _outcome(role, (yield request_of(plan, role, small)), small)
    own = plan.program is not None
    if not outcome.ok and plan.translated and not own and outcome.at.startswith(COMMAND_LINE):
        sentence = f"Megatron-LM's command line, which the run does not use, refuses it: {outcome.message}"
        return replace(outcome, unknown=True, message=sentence)
    if outcome.ok or outcome.unknown or not _speaks_of_sizes(outcome):
        return outcome
    larger = shrink(plan.args.values, plan.layout, OTHER_SIZES)
    again = _outcome(role, (yield request_of(plan, role, larger, scale=OTHER_SIZES)), larger)
    if again.ok or (again.exception, again.at) == (outcome.exception, outcome.at):
        return again
    sentence = f"{again.exception}: {again.message}; with smaller sizes: {outcome.exception}: {outcome.message}"
    return replace(again, unknown=True, message=sentence, traceback=again.traceback or outcome.traceback)


def _counted(plan: Plan, role: Role) -> Task[Outcome]:
    """Rehearse one role, and where it passes count its step, from up to four more rehearsals."""
    outcome = yield from _rehearsal(plan, role)
    if not outcome.ok:
        return outcome
    counting = counting_plan(plan.args, plan.layout)
    plan = replace(plan, program=None)
    recorded: list[Any] = []
    for small in chain(*counting.pairs):
        result = yield request_of(plan, role, small, record={"microbatches": list(counting.microbatches)})
        again = _outcome(role, result, small)
        if result.content is None or not again.ok:
            return replace(outcome, uncounted=f"{again.exception}: {again.message}".removeprefix(": "))
        recorded.append(result.content["recorded"])
    try:
        found = counts(counting, recorded)
    except NotCountable as reason:
        return replace(outcome, uncounted=str(reason))
    without = [name for name in outcome.not_rehearsed if name in UNCOUNTED]
    if plan.args.values.get("tp_comm_overlap"):
        without.append("userbuffers")
    return replace(outcome, counts=replace(found, without=tuple(without)))


def _speaks_of_sizes(outcome: Outcome) -> bool:
    """Whether a refusal names a shrunk flag or holds a number of the size of a rehearsed one."""
    numbers = {int(number) for number in re.findall(r"\d{1,9}", outcome.message)}
    sizes = {flag: sizes for flag, sizes in (outcome.shrunk or {}).items() if flag not in LENGTHS}
    return any(flag in outcome.message or rehearsed in numbers for flag, (_, rehearsed) in sizes.items())


def request_of(plan: Plan, role: Role, small: Shrunk, scale: int = 1, **more: Any) -> Request:
    """What the process that rehearses one role is given: a program makes its own sizes small, by `scale`."""
    card = gpu(plan.gpu)
    own = plan.program
    program = {"words": own.words, "model": own.model, "layout": asdict(plan.layout)} if own else None
    content = {
        "program": program,
        "scale": scale,
        "argv": [*emit_argv(small.values, load_schema(plan.args.version)), *plan.own],
        "script": str(plan.script) if plan.script else None,
        "translated": plan.translated,
        "rank": role.rank,
        "world": plan.layout.world,
        "local_world": min(plan.gpus_per_node, plan.layout.world),
        "env": plan.environment,
        "capability": card.capability,
        "memory_gib": card.memory_gib,
        "cuda": plan.cuda,
        "saves": bool(plan.args.values.get("save")),
        "te_site": str(plan.transformer_engine) if plan.transformer_engine else None,
        **more,
    }
    # As `python script` would: the checkout's own megatron package comes before the installed one.
    folders = [plan.script.resolve().parent] if plan.script else []
    packages = own.python_path if own else ()
    return Request(content, [str(folder) for folder in (*folders, plan.megatron, *packages)])


def _outcome(role: Role, result: Result, small: Shrunk) -> Outcome:
    answer = result.content
    if answer is None:
        return Outcome(
            role, False, result.processor_seconds, True, message=result.failure, memory_gib=result.memory_gib
        )
    return Outcome(
        role,
        answer["ok"],
        answer["seconds"],
        answer.get("unknown", False),
        answer.get("exception", ""),
        answer.get("message", ""),
        answer.get("at", ""),
        answer.get("traceback", ""),
        tuple(answer.get("settings", ())),
        answer.get("sizes") or small.sizes,
        answer["memory_mib"] / 1024 if "memory_mib" in answer else result.memory_gib,
        tuple(answer.get("not_rehearsed", ())),
        tuple(answer.get("reasons", ())),
    )
