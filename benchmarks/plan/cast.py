"""Time the cast of master weights to FP8 parameters for one rank of N: results in cast.md.

    python benchmarks/plan/cast.py

Needs one Hopper GPU and Transformer Engine. The weights have the shapes of eight layers of Llama-3 8B. The
distributed optimizer gives each rank a contiguous range, so one rank of N holds the masters of 1/N of the parameters.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from transformer_engine.pytorch.tensor.utils import cast_master_weights_to_fp8, post_all_gather_processing

SHAPES = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)] * 8
REPEATS = 5


def shard(weights: list[torch.Tensor], ranks: int) -> tuple[list[torch.Tensor | None], list[int | None]]:
    """Return the masters of the first of `ranks` ranks, and where each begins in its weight."""
    end = sum(weight.numel() for weight in weights) // ranks
    masters: list[torch.Tensor | None] = []
    offsets: list[int | None] = []
    at = 0
    for weight in weights:
        held = min(end - at, weight.numel())
        masters.append(torch.randn(held, device="cuda") if held > 0 else None)
        offsets.append(0 if held > 0 else None)
        at += weight.numel()
    return masters, offsets


def timed(run: Callable[[], object]) -> float:
    """Return the mean milliseconds of a call on the GPU."""
    for _ in range(3):
        run()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(REPEATS):
        run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / REPEATS


def main() -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511", RANK="0", WORLD_SIZE="1")
    dist.init_process_group("nccl")
    print("recipe | ranks | cast, ms | ps per parameter of the shard | transposes after the gather, ms")
    for recipe in (Float8CurrentScaling(), DelayedScaling(), Float8BlockScaling()):
        with te.quantized_model_init(enabled=True, recipe=recipe):
            layers = [te.Linear(k, n, bias=False, params_dtype=torch.bfloat16, device="cuda") for n, k in SHAPES]
        weights = [layer.weight for layer in layers]
        total = sum(weight.numel() for weight in weights)
        for ranks in (1, 2, 8, 64):
            masters, offsets = shard(weights, ranks)
            cast = timed(partial(cast_master_weights_to_fp8, weights, masters, offsets, dist.group.WORLD))
            after = timed(partial(post_all_gather_processing, weights))
            print(f"{type(recipe).__name__} | {ranks} | {cast:.2f} | {1e9 * cast * ranks / total:.1f} | {after:.2f}")


if __name__ == "__main__":
    main()
