"""Measure the rates of kernels on one GPU, for `fp8launch plan --calibrate`. Needs torch and nothing of fp8launch.

    python rates.py rates.json

takes 40 seconds on an H100: matrix products of a Llama-3 8B layer in bf16 and FP8, the core of attention, copies
in the GPU's memory, and the time in which the host launches small layers. They run as `benchmarks/h200/ceiling.py` and
`benchmarks/plan/attention.py` ran the kernels whose rates `reference_rates.csv` has, so the two can be compared.
Without a GPU the CPU is measured, with small sizes, and its file says so. What cannot be measured is listed with the
reason.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

try:
    import torch
except ImportError as exc:
    sys.exit(f"rates.py needs torch: {exc}")

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
# Tokens, hidden size, inner size and width of the key-value heads: of a Llama-3 8B layer, or of a small one on a CPU.
TOKENS, HIDDEN, FFN, KEYS = (8192, 4096, 14336, 1024) if ON_GPU else (64, 256, 896, 64)
LAYER = "8B layer" if ON_GPU else "small layer"
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768) if ON_GPU else (128, 256)
COPIED = 1 << 30 if ON_GPU else 1 << 24
# Matrix products run for so long before the sustained rate is taken, because the power limit then sets the clock.
SUSTAINED_S = 15.0 if ON_GPU else 0.2
WARM_UP, TIMES = (5, 20) if ON_GPU else (1, 3)

Row = dict[str, Any]


def median_s(run: Callable[[], object]) -> float:
    """Return the median seconds of a call, without the time that the host needs to launch it."""
    for _ in range(WARM_UP):
        run()
    found = []
    for _ in range(TIMES):
        if ON_GPU:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            run()
            end.record()
            end.synchronize()
            found.append(float(begin.elapsed_time(end)) / 1000)
        else:
            began = time.perf_counter()
            run()
            found.append(time.perf_counter() - began)
    return statistics.median(found)


def products() -> list[tuple[str, int, int, int, bool]]:
    """Return name, rows, columns and inner size of the layer's products, and whether an operand is a gradient."""
    linears = {
        "qkv": (HIDDEN, HIDDEN + 2 * KEYS),
        "proj": (HIDDEN, HIDDEN),
        "fc1": (HIDDEN, 2 * FFN),
        "fc2": (FFN, HIDDEN),
    }
    found = []
    for name, (inner, outer) in linears.items():
        found.append((f"{name} output", TOKENS, outer, inner, False))
        found.append((f"{name} input gradient", TOKENS, inner, outer, True))
        found.append((f"{name} weight gradient", outer, inner, TOKENS, True))
    return found


def bf16_product(m: int, n: int, k: int, gradient: bool) -> Callable[[], object]:
    left = torch.randn(m, k, device=DEVICE, dtype=torch.bfloat16)
    right = torch.randn(n, k, device=DEVICE, dtype=torch.bfloat16).t()
    return lambda: left @ right


def fp8_product(m: int, n: int, k: int, gradient: bool) -> Callable[[], object]:
    """Return a product with one scale for each tensor, as delayed and tensorwise scaling have."""
    if not ON_GPU:
        raise RuntimeError("a CPU only emulates FP8")
    one = torch.ones((), device=DEVICE)
    left = torch.randn(m, k, device=DEVICE).to(torch.float8_e5m2 if gradient else torch.float8_e4m3fn)
    right = torch.randn(n, k, device=DEVICE).to(torch.float8_e4m3fn).t()
    return lambda: torch._scaled_mm(left, right, one, one, out_dtype=torch.bfloat16)


def matrix_products(kind: str, make: Callable[[int, int, int, bool], Callable[[], object]]) -> list[Row]:
    """Return TFLOP/s of each product, of all together, and of all together at the power limit."""
    rows, calls, flops, seconds = [], [], 0.0, 0.0
    for name, m, n, k, gradient in products():
        call = make(m, n, k, gradient)
        own = median_s(call)
        rows.append(_row(f"gemm {kind}", f"{name}, {m} x {n} x {k}", 2 * m * n * k / own / 1e12, "TFLOP/s"))
        calls.append(call)
        flops += 2 * m * n * k
        seconds += own
    rows.append(_row(f"gemm {kind}", LAYER, flops / seconds / 1e12, "TFLOP/s"))
    until = time.monotonic() + SUSTAINED_S
    rate = 0.0
    while time.monotonic() < until:
        began = time.perf_counter()
        for _ in range(4):
            for call in calls:
                call()
        _wait()
        rate = 4 * flops / (time.perf_counter() - began) / 1e12
    rows.append(_row(f"gemm {kind}", f"{LAYER}, sustained", rate, "TFLOP/s"))
    return rows


def attention() -> list[Row]:
    """Return TFLOP/s of both passes under a causal mask: 2.5 times the FLOPs of the forward pass backward."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    heads, width = 16, 128
    backend = SDPBackend.CUDNN_ATTENTION if ON_GPU else SDPBackend.FLASH_ATTENTION
    rows = []
    for length in LENGTHS:
        shape = (max(max(LENGTHS) // length, 1), heads, length, width)
        query, key, value = (
            torch.randn(shape, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
        )
        gradient = torch.randn_like(query)

        def both(query=query, key=key, value=value, gradient=gradient) -> None:  # type: ignore[no-untyped-def]
            scaled_dot_product_attention(query, key, value, is_causal=True).backward(gradient)

        with sdpa_kernel(backend):
            seconds = median_s(both)
        flops = 3.5 * 2 * shape[0] * heads * width * length**2
        rows.append(_row("attention", f"{length} tokens", flops / seconds / 1e12, "TFLOP/s"))
    return rows


def memory() -> list[Row]:
    """Return GB/s of a copy, which reads and writes every byte."""
    source = torch.randn(COPIED // 2, device=DEVICE, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    seconds = median_s(lambda: target.copy_(source))
    return [_row("memory", "copy", 2 * COPIED / seconds / 1e9, "GB/s")]


def host() -> list[Row]:
    """Return the microseconds in which the host launches both passes of a small layer.

    The kernels are so small that the GPU waits for every one of them.
    """
    if not ON_GPU:
        raise RuntimeError("there is no GPU to launch kernels on")
    layers, width = 16, 64
    blocks = []
    for _ in range(layers):
        parts = (
            torch.nn.LayerNorm(width),
            torch.nn.Linear(width, width),
            torch.nn.GELU(),
            torch.nn.Linear(width, width),
        )
        blocks.append(torch.nn.Sequential(*parts))
    model = torch.nn.Sequential(*blocks).to(device=DEVICE, dtype=torch.bfloat16)
    inputs = torch.randn(16, width, device=DEVICE, dtype=torch.bfloat16)

    def both() -> None:
        model(inputs).sum().backward()

    found = []
    for attempt in range(WARM_UP + TIMES):
        _wait()
        began = time.perf_counter()
        both()
        both()
        _wait()
        if attempt >= WARM_UP:
            found.append((time.perf_counter() - began) / 2 / layers)
    return [_row("host", "small layers", 1e6 * statistics.median(found), "microseconds per layer")]


def _wait() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def _row(kernel: str, shape: str, rate: float, unit: str) -> Row:
    print(f"{kernel:10s} {shape:48s} {rate:12,.3f} {unit}", file=sys.stderr, flush=True)
    return {"kernel": kernel, "shape": shape, "rate": rate, "unit": unit}


def _cpu() -> str:
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()


PARTS: tuple[tuple[str, Callable[[], list[Row]]], ...] = (
    ("gemm bf16", lambda: matrix_products("bf16", bf16_product)),
    ("gemm fp8", lambda: matrix_products("fp8", fp8_product)),
    ("attention", attention),
    ("memory", memory),
    ("host", host),
)


def measured() -> dict[str, Any]:
    """Measure all parts. A part that fails is skipped with the reason."""
    if not ON_GPU:
        torch.set_num_threads(1)
    rates: list[Row] = []
    skipped: dict[str, str] = {}
    began = time.monotonic()
    for name, part in PARTS:
        try:
            rates += part()
        except Exception as exc:  # releases of torch differ in what they raise for a kernel that they do not have
            message = str(exc).strip() or type(exc).__name__
            skipped[name] = message.splitlines()[0][:200]
            print(f"{name:10s} skipped: {skipped[name]}", file=sys.stderr, flush=True)
    return {
        "format": 1,
        "device": torch.cuda.get_device_name() if ON_GPU else "cpu",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "seconds": round(time.monotonic() - began, 1),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if ON_GPU else None,
        "rates": rates,
        "skipped": skipped,
    }


def main() -> int:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print("usage: rates.py FILE", file=sys.stderr)
        return 2
    try:
        # Opened first, so that a path that cannot be written is reported before the measurements.
        with Path(sys.argv[1]).open("w", encoding="utf-8") as file:
            file.write(json.dumps(measured(), indent=1) + "\n")
    except OSError as exc:
        print(f"rates.py: {sys.argv[1]}: cannot be written: {exc.strerror}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
