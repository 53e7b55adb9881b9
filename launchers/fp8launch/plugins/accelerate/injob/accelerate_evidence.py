"""The output of `accelerate_train.py`: iterations in Megatron's format, FP8 modules, and how weights are sharded."""

# mypy: disable-error-code="import-not-found, import-untyped"

from __future__ import annotations

import argparse
import os
import sys
from datetime import datetime
from typing import Any

from fp8launch.injob.rank import module_facts

SHARDING = "fp8launch-sharding: "
MIB = 2**20


def sharding_of(args: argparse.Namespace, model: Any, optimizer: Any, parameters: int) -> dict[str, Any]:
    """Return the requested and the actual sharding, and the number of elements on each rank, of `parameters` in total.

    The optimizer's elements are counted by its first moments, after its first step. All ranks must call this.
    """
    import torch

    names = []
    while not isinstance(optimizer, torch.optim.Optimizer) or hasattr(optimizer, "optimizer"):
        names.append(type(optimizer).__name__)
        optimizer = optimizer.optimizer
    names.append(type(optimizer).__name__)
    moments = sum(held(state["exp_avg"]) for state in optimizer.state.values() if "exp_avg" in state)
    weights = sum(map(held, model.parameters()))
    counts: list[Any] = [None] * int(os.environ["WORLD_SIZE"])
    if len(counts) > 1:
        torch.distributed.all_gather_object(counts, (moments, weights))
    else:
        counts = [(moments, weights)]
    return {
        "v": 1,
        "rank": 0,
        "iteration": 1,
        "asked": args.sharding,
        "in_effect": in_effect(model),
        "optimizer": names,
        "parameters": parameters,
        "optimizer_elements": [each[0] for each in counts],
        "weight_elements": [each[1] for each in counts],
    }


def held(tensor: Any) -> int:
    """Count the elements of a tensor on this rank. FSDP2 has a local part in the tensor, ZeRO 3 keeps it separately."""
    if hasattr(tensor, "ds_tensor"):
        return int(tensor.ds_tensor.numel())
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    return int(tensor.numel())


def in_effect(model: Any) -> str:
    """Return how the prepared model is sharded, judged by its type."""
    from torch.distributed.fsdp import FSDPModule
    from torch.nn.parallel import DistributedDataParallel

    if hasattr(model, "zero_optimization_stage"):
        return f"zero{int(model.zero_optimization_stage())}"
    if isinstance(model, FSDPModule):
        return "fsdp2"
    if isinstance(model, DistributedDataParallel):
        return "ddp"
    return "none"


def precision_of(args: argparse.Namespace, model: Any) -> dict[str, Any]:
    """Return how many linear layers ran in FP8, in the format of fp8launch's probe."""
    import torch

    asked = {"fp8": args.fp8_format, "fp8_recipe": args.fp8_recipe, "num_layers": args.num_layers,
             "fp8_param_gather": args.fp8_param_gather}  # fmt: skip
    totals = {"linears": 0, "fp8": 0, "explained": 0, "unexplained": 0, "weights": 0, "fp8_weights": 0}
    groups: dict[tuple[object, ...], dict[str, Any]] = {}
    for name, module in model.named_modules():
        kind, head = type(module).__name__, name.endswith("lm_head")
        if kind.endswith("Experts"):
            # Two grouped GEMMs. Their weights are no linear layers, so neither library converts them.
            found = {"class": kind, "ran_fp8": False, "recipe": None, "why": "grouped experts stay in bf16"}
            if not args.fp8_format:
                found["why"] = "FP8 was not requested"
            totals["linears"] += 2
            totals["explained"] += 2
            totals["weights"] += 2
            add_group(groups, found, 2)
            continue
        te_linear = kind == "Linear" and type(module).__module__.startswith("transformer_engine")
        if not (isinstance(module, torch.nn.Linear) or te_linear):
            continue
        weight = getattr(module.weight, "_local_tensor", module.weight)
        totals["weights"] += 1
        # torchao's class of a weight that FSDP2 gathers in FP8, or a quantized tensor of Transformer Engine.
        totals["fp8_weights"] += "Float8" in type(weight).__name__
        found = {"class": kind, **fp8_of(module, args)}
        if not found["ran_fp8"]:
            found["why"] = reason(args, head, te_linear)
        if head and not found["ran_fp8"]:
            continue
        totals["linears"] += 1
        if found["ran_fp8"]:
            totals["fp8"] += 1
        elif found["why"]:
            totals["explained"] += 1
        else:
            totals["unexplained"] += 1
        add_group(groups, found, 1)
    return {"v": 1, "rank": 0, "tp": 0, "pp": 0, "iteration": 1, "asked": asked, "software": software(),
            "totals": totals, "groups": list(groups.values())}  # fmt: skip


def add_group(groups: dict[tuple[object, ...], dict[str, Any]], found: dict[str, Any], count: int) -> None:
    """Count layers with the same facts together."""
    key = tuple(sorted((k, str(v)) for k, v in found.items()))
    group = groups.setdefault(key, {"modules": "linears of the layers", "role": "linear", "n": 0, **found})
    group["n"] += count


def fp8_of(module: Any, args: argparse.Namespace) -> dict[str, Any]:
    if type(module).__name__ == "Float8Linear":
        return {"ran_fp8": True, "recipe": f"torchao.{args.fp8_recipe}"}
    found = module_facts.facts(module)
    return {"ran_fp8": found["ran_fp8"], "recipe": found["recipe"]}


def reason(args: argparse.Namespace, head: bool, te_linear: bool) -> str | None:
    """Return why a linear layer did not run in FP8, or None if it did."""
    if not args.fp8_format:
        return "FP8 was not requested"
    if args.fp8_library != "torchao" or te_linear:
        return None
    if head:
        return "the LM head"
    return "Accelerate keeps the first linear in bf16"


def software() -> dict[str, Any]:
    names = ("torch", "accelerate", "transformers", "deepspeed", "torchao", "transformer_engine")
    return {name: getattr(sys.modules[name], "__version__", None) for name in names if name in sys.modules}


def iteration_line(args: argparse.Namespace, iteration: int, milliseconds: float, loss: float) -> str:
    fields = (
        f" [{datetime.now()}] iteration {iteration:8d}/{args.train_iters:8d}",
        f"consumed samples: {iteration * args.global_batch_size:12d}",
        f"elapsed time per iteration (ms): {milliseconds:.1f}",
        f"learning rate: {args.lr:.6E}",
        f"global batch size: {args.global_batch_size:5d}",
        f"lm loss: {loss:.6E}",
    )
    return " | ".join(fields) + " |"


def memory_line(iteration: int, on_cpu: bool) -> str:
    import torch

    counts = {
        "allocated": torch.cuda.memory_allocated,
        "max allocated": torch.cuda.max_memory_allocated,
        "reserved": torch.cuda.memory_reserved,
        "max reserved": torch.cuda.max_memory_reserved,
    }
    sizes = []
    for name, count in counts.items():
        size = 0.0
        if not on_cpu:
            size = count() / MIB
        sizes.append(f"{name}: {size:.2f}")
    return f"[Rank 0] (after {iteration} iterations) memory (MB) | " + " | ".join(sizes)
