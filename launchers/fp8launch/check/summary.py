"""Summarize a run in four lines: size, memory, data and image."""

from __future__ import annotations

from pathlib import Path

from fp8launch.check.memory import memory_model
from fp8launch.check.resolved_run import resolve_run
from fp8launch.job.prepared import Prepared
from fp8launch.wording import and_more


def summary(prepared: Prepared) -> list[str]:
    """Return the four lines. For a run with phases, they describe the first one."""
    first = prepared.parts[0]
    return [_size(first), _memory(first), _data(first), _image(first)]


def _size(prepared: Prepared) -> str:
    size, need = prepared.layout, prepared.loaded.recipe.resources
    split = {"TP": size.tp, "PP": size.pp, "VP": size.vp, "CP": size.cp, "EP": size.ep}
    others = "".join(f", {name} {count}" for name, count in split.items() if count > 1)
    micro = f"{size.microbatches} micro batches of {size.micro_batch} per step"
    world = f"{need.nodes} x {need.gpus_per_node} {need.gpu}, world size {size.world}"
    return f"size    {world}: data parallel size {size.dp}{others}, {micro}"


def _memory(prepared: Prepared) -> str:
    model = memory_model()
    return f"memory  {model.summary(resolve_run(prepared)) if model else 'not estimated for this run'}"


def _data(prepared: Prepared) -> str:
    data = prepared.loaded.recipe.data
    if data is None:
        return "data    set by the arguments"
    if data.kind == "mock":
        return "data    mock: generated tokens"
    paths = [entry for entry in data.blend or [] if isinstance(entry, str) and "/" in entry]
    names = [Path(path).name for path in paths]
    return f"data    indexed: {and_more(names, 3)}"


def _image(prepared: Prepared) -> str:
    return f"image   {prepared.loaded.recipe.container.image or 'none: the Python of the cluster profile'}"
