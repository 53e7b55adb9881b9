"""Rehearse runs: each role of each run in its own process, several at a time.

A rehearsal trains a small model with the run's structure for two iterations, as one rank of the run's whole world. It
runs Megatron's own code and Transformer Engine's own Python code, so whatever they refuse would also fail in the job.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from fp8launch.check.extra_layers import Progress, no_progress
from fp8launch.diagnostics import MACHINE_LACKS, error
from fp8launch.engines.base import EngineArguments, Layout, OwnProgram
from fp8launch.hardware.gpus import gpu
from fp8launch.megatron.flag_problems import emit_argv
from fp8launch.megatron.schema import load_schema
from fp8launch.plugins.rehearse.shrink import Shrunk, shrink
from fp8launch.plugins.rehearse.workers import LIMITS, Limits, Request, Result, Task, run_tasks

# The packages of the extra `rehearse`.
PACKAGES = ("torch", "numpy", "einops", "psutil")

# A second rehearsal uses sizes that are larger by this factor.
OTHER_SIZES = 3
# Training length does not affect what layers accept or refuse.
LENGTHS = ("train_iters", "global_batch_size")

# A refusal from this code says nothing about a run that is configured without Megatron-LM's command line.
COMMAND_LINE = "megatron/training/"

# Defaults to the version that torch 2.11 from PyPI ships.
CUDA = "13.0"


@dataclass(frozen=True)
class Role:
    """A rank, and the name of the ranks that it represents."""

    rank: int
    name: str


def roles_of(layout: Layout) -> list[Role]:
    """Return the ranks that represent all ranks of a run.

    These are the first rank of the first, the second and the last pipeline stage, each of which is also the first rank
    of its TP, CP, EP and DP groups, and the last rank of the run, which is also the last rank of all its groups.

    Megatron numbers ranks by tensor, context, data and pipeline parallel position, with the tensor parallel position
    varying fastest (megatron/core/parallel_state.py, order "tp-cp-ep-dp-pp").
    """
    stage_ranks = layout.world // layout.pp
    found = []
    if layout.pp == 1:
        found.append(Role(0, "first rank"))
    else:
        found.append(Role(0, "first stage"))
    if layout.pp > 2:
        found.append(Role(stage_ranks, "second stage"))
    if layout.pp > 1:
        found.append(Role((layout.pp - 1) * stage_ranks, "last stage"))
    if stage_ranks > 1:
        found.append(Role(layout.world - 1, "last rank"))
    return found


@dataclass(frozen=True)
class Plan:
    """A run to rehearse: its flags, layout, hardware and software.

    `megatron` and `transformer_engine` are folders with the packages; a CPU run has no Transformer Engine. `script` is
    the training script, or None for fp8launch's own entry; `own` holds arguments that only the script knows.
    `translated` is true if the engine does not use Megatron-LM's command line itself. `without` names the parts of the
    engine's program that are left out. `program`, if set, runs instead of the arguments.
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
        """Identify equal rehearsals, so that repeated points are rehearsed once."""
        where = [self.gpu, self.gpus_per_node, self.environment, str(self.script), self.cuda]
        words = self.program.words if self.program else ()
        return json.dumps([self.args.argv, repr(self.layout), *where, *words])


@dataclass(frozen=True)
class Outcome:
    """The result of rehearsing one role. If `unknown`, there is no verdict, and `message` says why.

    `settings` are Megatron's attributes that the failing statement and the conditions around it read. `reasons` are
    Transformer Engine's reasons for rejecting every attention backend. `not_rehearsed` names kernels that were called
    but that no rehearsal runs.
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


def require_torch(asked_by: str = "--rehearse") -> None:
    """Raise UserError (exit code 3) if packages are missing; `asked_by` is the option or field to blame."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise error(
            "no-torch",
            f"a rehearsal runs Megatron's own code, which needs {', '.join(missing)} in {sys.executable}",
            asked_by,
            "pip install 'fp8launch[rehearse]' (PyTorch for the CPU is enough); `check` without --rehearse needs none",
            exit_code=MACHINE_LACKS,
        )


def rehearse(plans: Sequence[Plan], progress: Progress = no_progress, limits: Limits = LIMITS) -> list[list[Outcome]]:
    """Rehearse every role of every run and return the outcomes of each run, in order.

    Raises UserError (exit code 3) if this Python lacks torch.
    """
    require_torch()
    distinct = {plan.key: plan for plan in plans}
    tasks = [(key, _rehearsal(plan, role)) for key, plan in distinct.items() for role in roles_of(plan.layout)]
    with progress(len(tasks)) as done:
        outcomes = run_tasks([task for _, task in tasks], limits, done)
    found: dict[str, list[Outcome]] = {key: [] for key in distinct}
    for (key, _), outcome in zip(tasks, outcomes, strict=True):
        found[key].append(outcome)
    return [found[plan.key] for plan in plans]


def _rehearsal(plan: Plan, role: Role) -> Task[Outcome]:
    """Rehearse one role.

    A refusal that names a shrunk size may be due to the shrinking. The rehearsal is then repeated with larger sizes
    that leave the same remainders. If it passes or is refused in the same way, that is the outcome; any other refusal
    gives no verdict.
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


def _speaks_of_sizes(outcome: Outcome) -> bool:
    """Return whether a refusal names a shrunk flag or contains the value of one."""
    numbers = {int(number) for number in re.findall(r"\d{1,9}", outcome.message)}
    sizes = {flag: sizes for flag, sizes in (outcome.shrunk or {}).items() if flag not in LENGTHS}
    return any(flag in outcome.message or rehearsed in numbers for flag, (_, rehearsed) in sizes.items())


def request_of(plan: Plan, role: Role, small: Shrunk, scale: int = 1) -> Request:
    """Return the request for the process that rehearses one role. An engine's program shrinks by `scale` itself."""
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
    }
    # As with `python script`, the checkout's own megatron package comes before the installed one.
    folders = [plan.script.resolve().parent] if plan.script else []
    if not _is_found_anyway(plan.megatron):
        folders.append(plan.megatron)
    packages = own.python_path if own else ()
    return Request(content, [str(folder) for folder in (*folders, *packages)])


def _is_found_anyway(megatron: Path) -> bool:
    """Return whether this Python, and so the worker, imports this Megatron without PYTHONPATH.

    Its folder then keeps its place. Put first, a base environment's folder would hide the newer packages of the virtual
    environment on top of it, with which transformers refuses to be imported.
    """
    added = {Path(folder).resolve() for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder}
    for folder in map(Path, sys.path):
        if folder.resolve() not in added and (folder / "megatron" / "core").is_dir():
            return folder.resolve() == megatron.resolve()
    return False


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
