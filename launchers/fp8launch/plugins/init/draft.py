"""What `init recipe` knows about the recipe that it writes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fp8launch.diagnostics import error, nearest
from fp8launch.hardware.gpus import GPUS
from fp8launch.hardware.quantization import BF16, quantization_recipes
from fp8launch.plugins.init.hf_config import read_config
from fp8launch.recipe.load import read_recipe
from fp8launch.resources import pack_folder
from fp8launch.untyped import as_int

LONGEST = 8192
IMAGE = "nemo-26.06"
# As in tiny_cpu: the flags of parts/pretrain that need a GPU are off.
CPU_FLAGS = {"num_workers": 0, "cross_entropy_loss_fusion": None, "cross_entropy_fusion_impl": None}


@dataclass(frozen=True)
class Draft:
    """A recipe before it is written.

    `model` is empty if a part of the pack describes the model. `data` are prefixes of indexed datasets; without any,
    tokens are generated. `flags` go under `megatron`, and `layout` under `parallel`. `sequence` is in tokens, `batch`
    and `micro` are in sequences.
    """

    name: str
    source: str
    extends: tuple[str, ...]
    model: Mapping[str, Any]
    notes: tuple[str, ...]
    gpu: str
    nodes: int
    gpus_per_node: int
    time: str
    sequence: int
    batch: int
    iterations: int
    data: tuple[str, ...] = ()
    tokenizer: str | None = None
    image: str | None = None
    gather: bool = False
    saves: bool = False
    layout: Mapping[str, Any] | None = None
    layout_note: str = ""
    micro: int = 1
    flags: Mapping[str, Any] | None = None


def model_draft(name: str) -> Draft:
    """Return the draft for a model of the pack or a Hugging Face configuration. Raises UserError for an unknown one."""
    empty = Draft("", "", (), {}, (), "", 1, 1, "", 1, 1, 1)
    parts = sorted(file.stem for file in (pack_folder("recipes") / "models").glob("*.yaml"))
    known = name.removeprefix("models/").removesuffix(".yaml")
    if known in parts:
        return replace(empty, name=known, source=known, extends=(f"models/{known}",))
    path = Path(name)
    if not path.exists():
        fix = f"use one of {', '.join(parts)}; or download the model's config.json and pass its path"
        near = nearest(known.lower().replace("-", "_").replace(".", "_").rpartition("/")[2], parts)
        if near:
            fix = f"did you mean '{near}'? {fix}"
        raise error("unknown-model", "is neither a model of the pack nor a file", name, fix)
    found = read_config(path)
    stem = path.stem
    if path.is_dir():
        stem = path.resolve().name
    elif path.name == "config.json":
        stem = path.resolve().parent.name
    word = re.sub(r"[\W_]", "_", stem.lower()).strip("_") or "model"
    return replace(empty, name=word, source=f"{stem} ({found.kind})", model=found.model, notes=found.notes)


def usual_gpus(gpu: str) -> int:
    """Return the GPUs per node of the pack's hardware part, or else of the GPU table."""
    part = pack_folder("recipes") / "hardware" / f"{gpu}.yaml"
    found = None
    if part.is_file():
        found = as_int(_stated(str(part), "resources", "gpus_per_node"))
    if found is None:
        return GPUS[gpu].per_node
    return found


def _stated(recipe: str, section: str, key: str) -> object:
    """Return a value that a part of the pack or one of its parents sets, None if none does."""
    found = read_recipe(recipe).tree.plain().get(section, {})
    return found.get(key)


def usual_precision(gpu: str) -> str:
    """Return the FP8 recipe that the GPU supports in hardware, BF16 for a GPU without FP8."""
    peaks = GPUS[gpu]
    if peaks.fp8 is None:
        return BF16
    if peaks.capability >= (10, 0):
        return "mxfp8"
    return "tensorwise"


def with_parts(draft: Draft, precision: str) -> Draft:
    """Return the draft with the parts of the pack for its GPU, precision and kind of model."""
    parts = [*draft.extends, "parts/pretrain"]
    flags: dict[str, Any] = {}
    if draft.gpu == "cpu":
        flags |= CPU_FLAGS
    else:
        parts.append("parts/distributed_optimizer")
        if draft.saves:
            parts.append("parts/long_run")
        if _has_experts(draft):
            parts.append("moe/alltoall")
            # For throughput runs the part forces a balanced load, and a forced router learns nothing.
            flags["moe_router_force_load_balancing"] = None
    parts.append(f"precision/{precision}")
    if (pack_folder("recipes") / "hardware" / f"{draft.gpu}.yaml").is_file():
        parts.append(f"hardware/{draft.gpu}")
    if draft.image == IMAGE:
        parts.append("images/nemo_26_06")
    recipe = quantization_recipes().get(precision)
    gather = recipe is not None and recipe.gather_is_proven and draft.gpu != "cpu"
    return replace(draft, extends=tuple(parts), flags=flags, gather=gather)


def _has_experts(draft: Draft) -> bool:
    if draft.model:
        return "num_experts" in draft.model
    return _stated(draft.extends[0], "model", "num_experts") is not None


def with_batch(draft: Draft, sequence: int | None) -> Draft:
    """Return the draft with a sequence length, and a global batch that every layout divides."""
    longest = _longest(draft)
    if sequence is not None and sequence > longest:
        message = f"the model has {longest} positions, fewer than {sequence}"
        raise error("sequence-too-long", message, "--sequence", f"use {longest} or less")
    world = draft.nodes * draft.gpus_per_node
    least = 8 if draft.gpu == "cpu" else 128
    batch = -(-least // world) * world
    return replace(draft, sequence=sequence or min(longest, LONGEST), batch=batch, layout={"tp": 1, "pp": 1})


def _longest(draft: Draft) -> int:
    if draft.model:
        return int(draft.model["max_position_embeddings"])
    found = as_int(_stated(draft.extends[0], "model", "max_position_embeddings"))
    if found is None:
        return LONGEST
    return found
