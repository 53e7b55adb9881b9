"""What one GPU can do at most in a Llama-3 8B step: its GEMMs, attention and LM head alone, each timed by itself.

    python3 ceiling.py gemm|cudnn|cudnn_fp8|flash3|flash2
    python3 ceiling.py sustained_cudnn|sustained_flash3

M = 8192 tokens (micro batch 1, sequence 8192), random data, median of 20 after 5. One JSON object a line. 32 x (FP8
GEMMs + attention) + LM head is the micro batch that no step with these kernels beats. Alone each kernel is short, and
runs at a clock that a step at the power limit does not have: `sustained_...` runs whole micro batches of them, one
after the other for 20 s, as a step does, and says power (W) and clock (MHz) too. Start one on each GPU at once.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

TOKENS, HIDDEN, FFN, HEADS, GROUPS, DIM, VOCAB = 8192, 4096, 14336, 32, 8, 128, 128256
LAYERS = 32
LINEARS = {
    "qkv": (HIDDEN, (HEADS + 2 * GROUPS) * DIM),
    "proj": (HEADS * DIM, HIDDEN),
    "fc1": (HIDDEN, 2 * FFN),
    "fc2": (FFN, HIDDEN),
}

# TE's choice of attention is read when it is imported.
SWITCHES = {
    "cudnn": {"NVTE_FUSED_ATTN": "1", "NVTE_FLASH_ATTN": "0", "NVTE_UNFUSED_ATTN": "0"},
    # Before Blackwell cuDNN's FP8 attention takes delayed scales only.
    "cudnn_fp8": {
        "NVTE_FUSED_ATTN": "1",
        "NVTE_FLASH_ATTN": "0",
        "NVTE_UNFUSED_ATTN": "0",
        "NVTE_DPA_FP8_RECIPE": "DelayedScaling",
        "NVTE_DPA_FP8DS_AMAX_ALGO": "most_recent",
        "NVTE_DPA_FP8DS_AMAX_HISTLEN": "1",
    },
    "flash3": {"NVTE_FUSED_ATTN": "0", "NVTE_FLASH_ATTN": "1", "NVTE_UNFUSED_ATTN": "0"},
    "flash2": {"NVTE_FUSED_ATTN": "0", "NVTE_FLASH_ATTN": "1", "NVTE_FLASH_ATTN_V3": "0"},
}


def median_ms(run: Callable[[], object], times: int = 20) -> float:
    import torch

    for _ in range(5):
        run()
    found = []
    for _ in range(times):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end))
    return statistics.median(found)


def fp8_gemm(m: int, n: int, k: int, gradient: bool) -> Callable[[], object]:
    import torch

    one = torch.ones((), device="cuda")
    left = torch.randn(m, k, device="cuda").to(torch.float8_e5m2 if gradient else torch.float8_e4m3fn)
    right = torch.randn(n, k, device="cuda").to(torch.float8_e4m3fn).t()
    return lambda: torch._scaled_mm(left, right, one, one, out_dtype=torch.bfloat16)


def bf16_gemm(m: int, n: int, k: int) -> Callable[[], object]:
    import torch

    left = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    right = torch.randn(n, k, device="cuda", dtype=torch.bfloat16).t()
    return lambda: left @ right


def shapes_of(inner: int, outer: int) -> list[tuple[int, int, int, bool]]:
    """Rows, columns and inner size of the forward, dgrad and wgrad GEMM, and whether an operand is a gradient."""
    return [(TOKENS, outer, inner, False), (TOKENS, inner, outer, True), (outer, inner, TOKENS, True)]


def gemms() -> None:
    """Forward, dgrad and wgrad GEMM of each linear, in FP8 (one scale a tensor) and bf16, and the LM head in bf16."""
    total = {"fp8": 0.0, "bf16": 0.0}
    flops = 0
    for name, (inner, outer) in LINEARS.items():
        shapes = shapes_of(inner, outer)
        row = {
            "linear": name,
            "fp8": [median_ms(fp8_gemm(*shape)) for shape in shapes],
            "bf16": [median_ms(bf16_gemm(*shape[:3])) for shape in shapes],
        }
        print(json.dumps(row), flush=True)
        for kind in total:
            total[kind] += sum(row[kind])
        flops += 3 * 2 * TOKENS * inner * outer
    for kind, ms in total.items():
        print(json.dumps({"gemms of a layer": kind, "ms": ms, "tflops": flops / ms / 1e9}), flush=True)
    head = [median_ms(bf16_gemm(*shape[:3])) for shape in shapes_of(HIDDEN, VOCAB)]
    print(json.dumps({"lm head": "bf16", "ms": sum(head), "each": head}), flush=True)


def sustained(kind: str, seconds: float = 20.0) -> None:
    """Whole micro batches of GEMMs, attention and LM head for some seconds: TFLOP/s as Megatron counts a step's."""
    import torch

    linears = [fp8_gemm(*shape) for inner, outer in LINEARS.values() for shape in shapes_of(inner, outer)]
    head = [bf16_gemm(*shape[:3]) for shape in shapes_of(HIDDEN, VOCAB)]
    attend = attention_calls()
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    query = ["nvidia-smi", f"--id={gpu}", "--query-gpu=power.draw,clocks.sm", "--format=csv,noheader,nounits"]
    parameters = LAYERS * sum(inner * outer for inner, outer in LINEARS.values()) + HIDDEN * VOCAB
    flops = 6 * TOKENS * parameters + LAYERS * 3 * 4 * TOKENS**2 * HEADS * DIM / 2

    def micro_batch() -> None:
        for _ in range(LAYERS):
            for gemm in linears:
                gemm()
            attend(False)
        for gemm in head:
            gemm()

    times, readings, queued = [], [], deque[tuple[torch.cuda.Event, torch.cuda.Event]]()
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        micro_batch()
        end.record()
        queued.append((begin, end))
        readings.append([float(each) for each in subprocess.check_output(query, text=True).split(",")])
        if len(queued) > 4:  # the GPU never waits for the host
            begin, end = queued.popleft()
            end.synchronize()
            times.append(begin.elapsed_time(end))
    late = slice(len(times) // 2, len(times))
    ms = statistics.median(times[late])
    watts, clock = (statistics.median(column) for column in zip(*readings[late], strict=True))
    row = {"sustained": kind, "ms": ms, "tflops": flops / ms / 1e9, "first ms": times[1], "W": watts, "MHz": clock}
    print(json.dumps(row), flush=True)


def attention_calls(alone: bool = False) -> Callable[[bool], list[torch.Tensor]]:
    """Causal attention of one layer as Transformer Engine calls it, in FP8 or not; without the backward if `alone`."""
    import torch
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8CurrentScaling, Format

    torch.manual_seed(1)
    shape = {"q": HEADS, "k": GROUPS, "v": GROUPS}
    q, k, v = (
        torch.randn(TOKENS, 1, n, DIM, device="cuda", dtype=torch.bfloat16, requires_grad=True) for n in shape.values()
    )
    grad = torch.randn(TOKENS, 1, HEADS * DIM, device="cuda", dtype=torch.bfloat16)
    core = te.DotProductAttention(HEADS, DIM, GROUPS, attn_mask_type="causal", qkv_format="sbhd")
    recipe = Float8CurrentScaling(fp8_format=Format.HYBRID, fp8_dpa=True)

    def run(fp8: bool) -> list[torch.Tensor]:
        with te.fp8_autocast(enabled=fp8, fp8_recipe=recipe):
            out = core(q, k, v)
        return [out] if alone else [out, *torch.autograd.grad(out, (q, k, v), grad)]

    return run


def attention(kind: str) -> None:
    """Attention of one layer, forward and backward; FP8 with its error."""
    import torch

    forward, both = attention_calls(alone=True), attention_calls()
    fp8 = kind == "cudnn_fp8"
    with torch.no_grad():
        alone = median_ms(lambda: forward(fp8))
    ms = median_ms(lambda: both(fp8))
    flops = 3.5 * 4 * TOKENS**2 * HEADS * DIM / 2
    row = {"attention": kind, "forward": alone, "ms": ms, "tflops": flops / ms / 1e9}
    if fp8:
        exact, near = both(False), both(True)
        row["relative error"] = {
            name: float((a.float() - b.float()).norm() / a.float().norm())
            for name, a, b in zip(("out", "dq", "dk", "dv"), exact, near, strict=True)
        }
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        both(fp8)
        torch.cuda.synchronize()
    row["kernels"] = {e.key[:90]: round(e.device_time_total) for e in profiler.key_averages() if e.device_time_total}
    print(json.dumps(row), flush=True)


def main() -> None:
    part = sys.argv[1] if len(sys.argv) == 2 else ""
    if part == "gemm":
        gemms()
    elif part.removeprefix("sustained_") in SWITCHES:
        kind = part.removeprefix("sustained_")
        os.environ.update(SWITCHES[kind])
        if kind == part:
            attention(kind)
        else:
            sustained(kind)
    else:
        sys.exit(f"usage: ceiling.py {'|'.join(['gemm', *SWITCHES, 'sustained_cudnn', 'sustained_flash3'])}")


if __name__ == "__main__":
    main()
