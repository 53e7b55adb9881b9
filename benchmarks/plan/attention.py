"""Measure the core of attention over sequence lengths: causal, heads of 128, bf16. Needs a GPU and torch.

    python benchmarks/plan/attention.py

Prints TFLOP/s of the forward and of both passes for cuDNN's and FlashAttention's kernels in PyTorch, with the FLOPs
under the causal mask and 2.5 times as many backward: attention.md.
"""

from __future__ import annotations

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

HEADS, WIDTH, TOKENS = 16, 128, 32768
LENGTHS = [2**power for power in range(10, 18)]


def seconds(backend: SDPBackend, length: int, backward: bool) -> float:
    """Return the median seconds of a pass, or of both passes."""
    shape = (max(TOKENS // length, 1), HEADS, length, WIDTH)
    query, key, value = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    gradient = torch.randn_like(query)
    times = []
    with sdpa_kernel(backend):
        for _ in range(12):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            output = scaled_dot_product_attention(query, key, value, is_causal=True)
            if backward:
                output.backward(gradient)
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) / 1000)
    return sorted(times[2:])[5]


def main() -> None:
    print(torch.cuda.get_device_name(), torch.__version__, torch.backends.cudnn.version())
    for length in LENGTHS:
        flops = 2 * max(TOKENS, length) * HEADS * WIDTH * length
        rates = []
        for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
            rates += [flops / seconds(backend, length, False), 3.5 * flops / seconds(backend, length, True)]
        print(f"{length:7d}", *(f"{rate / 1e12:6.0f}" for rate in rates), flush=True)


if __name__ == "__main__":
    main()
