"""The parts of a run that are proven: its phases, each with the arguments that Megatron-LM would get."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fp8launch.check.resolved_run import ResolvedRun, resolve_run
from fp8launch.diagnostics import MACHINE_LACKS, UserError, error
from fp8launch.engines.base import NotRehearsable
from fp8launch.job.prepared import Prepared
from fp8launch.megatron.arguments import FlagValue
from fp8launch.plugins.prove.settings import CPU, CUDA
from fp8launch.plugins.rehearse.rehearse import require_torch
from fp8launch.plugins.validators.megatron_core import NoMegatron, megatron_for, site_of


@dataclass(frozen=True)
class Part:
    """A run, or a phase of one, and the folder with the Megatron to train with. `without` is not covered by a proof."""

    phase: str | None
    seen: ResolvedRun
    values: Mapping[str, FlagValue]
    megatron: Path
    without: tuple[str, ...] = ()
    device: str = CPU

    @property
    def like_te(self) -> bool:
        """Whether layers divide work as Transformer Engine's do, see `te_layers`."""
        return self.seen.uses_te or not self.seen.engine.covers("megatron_lm")


def parts_of(run: Prepared, say: Callable[[str], None], asked_by: str = "prove", device: str = CPU) -> list[Part]:
    """Return the parts of a run to prove on a device.

    Raises UserError (exit code 3) if this machine, or the run's engine, cannot.
    """
    require_torch(asked_by)
    if device == CUDA:
        _require_gpu()
    if not run.engine.description.rehearsal:
        raise cannot_prove(f"the engine {run.engine.name} does not train with Megatron-Core")
    names: Sequence[str | None] = [phase.name for phase in run.phases] or [None]
    found = []
    for name, part in zip(names, run.parts, strict=True):
        recipe = part.loaded.recipe
        try:
            step = part.engine.rehearsal(part.args, part.layout, part.loaded)
            megatron = site_of(megatron_for(part.args.version, say))
        except (NotRehearsable, NoMegatron) as missing:
            raise cannot_prove(str(missing)) from None
        without = list(step.without)
        if recipe.launch.script:
            without.append(f"launch.script ({recipe.launch.script}): fp8launch's own entry trains")
        without += [f"launch.config.{key}: no flag sets it" for key in recipe.launch.config]
        found.append(Part(name, resolve_run(part), step.args.values, megatron, tuple(without), device))
    return found


def onwards_of(parts: Sequence[Part], others: Sequence[Part]) -> list[list[Part]]:
    """Return, for each part, the parts that resume its checkpoint: the next phase, and the same part in `others`."""
    found: list[list[Part]] = []
    for position, part in enumerate(parts):
        following = [other for other in parts[position + 1 : position + 2] if other.seen.layout != part.seen.layout]
        found.append([*following, *others[position : position + 1]])
    return found


def _require_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise cannot_prove(f"torch {torch.__version__} sees no GPU")
    if importlib.util.find_spec("transformer_engine") is None:
        raise cannot_prove(f"Transformer Engine is not installed for {sys.executable}")


def cannot_prove(why: str) -> UserError:
    """Return the error for a run without a verdict."""
    return error("no-proof", f"this run cannot be proven: {why}", "prove", exit_code=MACHINE_LACKS)
