"""What one GPU can do at most in a Llama-3 8B step: its GEMMs, attention and LM head alone, each timed by itself.

    python3 ceiling.py gemm|cudnn|cudnn_fp8|flash3|flash2

M = 8192 tokens (micro batch 1, sequence 8192), random data, median of 20 after 5. One JSON object a line. 32 x (FP8
GEMMs + attention) + LM head is the micro batch that no step with these kernels beats.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable

TOKENS, HIDDEN, FFN, HEADS, GROUPS, DIM, VOCAB = 8192, 4096, 14336, 32, 8, 128, 128256
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


def gemms() -> None:
    """Forward, dgrad and wgrad GEMM of each linear, in FP8 (one scale a tensor) and bf16, and the LM head in bf16."""
    import torch

    one = torch.ones((), device="cuda")

    def fp8(m: int, n: int, k: int, gradient: bool) -> float:
        left = torch.randn(m, k, device="cuda").to(torch.float8_e5m2 if gradient else torch.float8_e4m3fn)
        right = torch.randn(n, k, device="cuda").to(torch.float8_e4m3fn).t()
        return median_ms(lambda: torch._scaled_mm(left, right, one, one, out_dtype=torch.bfloat16))

    def bf16(m: int, n: int, k: int) -> float:
        left = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        right = torch.randn(n, k, device="cuda", dtype=torch.bfloat16).t()
        return median_ms(lambda: left @ right)

    total = {"fp8": 0.0, "bf16": 0.0}
    flops = 0
    for name, (inner, outer) in LINEARS.items():
        shapes = [(TOKENS, outer, inner, False), (TOKENS, inner, outer, True), (outer, inner, TOKENS, True)]
        row = {"linear": name, "fp8": [fp8(*s) for s in shapes], "bf16": [bf16(*s[:3]) for s in shapes]}
        print(json.dumps(row), flush=True)
        for kind in total:
            total[kind] += sum(row[kind])
        flops += 3 * 2 * TOKENS * inner * outer
    for kind, ms in total.items():
        print(json.dumps({"gemms of a layer": kind, "ms": ms, "tflops": flops / ms / 1e9}), flush=True)
    head = [bf16(TOKENS, VOCAB, HIDDEN), bf16(TOKENS, HIDDEN, VOCAB), bf16(VOCAB, HIDDEN, TOKENS)]
    print(json.dumps({"lm head": "bf16", "ms": sum(head), "each": head}), flush=True)


def attention(kind: str) -> None:
    """Causal attention of one layer, forward and backward, as Transformer Engine calls it; FP8 with its error."""
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

    def forward(fp8: bool) -> torch.Tensor:
        with te.fp8_autocast(enabled=fp8, fp8_recipe=recipe):
            return core(q, k, v)

    def both(fp8: bool) -> list[torch.Tensor]:
        out = forward(fp8)
        return [out, *torch.autograd.grad(out, (q, k, v), grad)]

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
    elif part in SWITCHES:
        os.environ.update(SWITCHES[part])
        attention(part)
    else:
        sys.exit(f"usage: ceiling.py {'|'.join(['gemm', *SWITCHES])}")


if __name__ == "__main__":
    main()
