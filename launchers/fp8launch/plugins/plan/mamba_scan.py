"""Time of a Mamba-2 layer between its projections: convolution, scan and gated norm.

The model counts the bytes that each kernel of mamba-ssm 2.3 reads and writes (state-spaces/mamba, `ssd_combined.py`,
`mamba_split_conv1d_scan_combined`), and the small products inside the scan at the rate of attention. The backward pass
repeats the convolution and the states of every chunk. The factor `Software.scan` says how much longer the kernels take
than their traffic alone.
"""

from __future__ import annotations

from collections.abc import MutableMapping

from fp8launch.megatron.model_arithmetic import Mamba
from fp8launch.plugins.plan.workload import BF16, Workload

FP32 = 4
TERM = "Mamba scan"
# FLOPs of the scan's backward pass relative to forward: two products for each one, and the states again.
SCAN_BACKWARD = 2.5


def add_scan(
    run: Workload, forward: MutableMapping[str, float], backward: MutableMapping[str, float], mamba: Mamba
) -> None:
    """Add the seconds of one layer and micro batch to both passes."""
    tokens = run.tokens / run.split.tp
    products = tokens * _products(mamba) / run.speeds.attention
    read, read_back = _traffic(mamba)
    if run.micro_batch > 1:
        # The scan takes one sequence after the other, so its inputs and results are transposed.
        read += 2 * (mamba.projected + mamba.inner) * BF16
        read_back += 2 * (mamba.projected + mamba.inner) * BF16
    byte = run.speeds.software.scan / run.speeds.memory
    forward[TERM] += products + tokens * read * byte
    backward[TERM] += SCAN_BACKWARD * products + tokens * read_back * byte


def _products(mamba: Mamba) -> float:
    """Return the FLOPs of the scan per token.

    The products are the states of a chunk, C with B, and both with the chunk's x, half of which is masked.
    """
    within = mamba.groups * mamba.state * mamba.chunk / 2
    return 2 * (mamba.inner * mamba.state + within + mamba.inner * (mamba.state + mamba.chunk / 2))


def _traffic(mamba: Mamba) -> tuple[float, float]:
    """Return the bytes per token that the kernels of the forward and the backward pass read and write."""
    inner, group = mamba.inner * BF16, mamba.groups * mamba.state * BF16
    convolved = mamba.convolved * BF16
    # A state for every chunk and channel, and the products of C and B within a chunk.
    states = mamba.inner * mamba.state / mamba.chunk * FP32
    pairs = mamba.groups * mamba.chunk * FP32
    convolution = 2 * convolved
    state = (inner + group + states) + 2 * states
    pair = 2 * group + pairs
    scan = pairs + 2 * inner + group + states
    gated_norm = 3 * inner
    forward = convolution + state + pair + scan + gated_norm
    # Gradients of states, of x with dt, of B, of C, of the pairs, and of the decay.
    gradients = (
        (inner + group + states)
        + 3 * states
        + (3 * inner + group + pairs + states)
        + 2 * (inner + group + states)
        + (2 * inner + pairs)
        + 2 * (pairs + 2 * group)
        + (3 * inner + pairs + states)
    )
    backward = 2 * gated_norm + convolution + state + pair + gradients + 3 * convolved
    return forward, backward
