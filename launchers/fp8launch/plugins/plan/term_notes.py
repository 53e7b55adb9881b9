"""What each term of a predicted step consists of, in a few words."""

from __future__ import annotations

from itertools import chain

from fp8launch.plugins.plan.layer_terms import Seconds
from fp8launch.plugins.plan.layers import imbalance
from fp8launch.plugins.plan.workload import LOSS_PASSES, Workload, linears, loss_kernel, output_layer, scale

_NOTES = {
    "quantization": "of inputs and gradients: passes over memory",
    "elementwise": "norms, residuals, rotary, activations: passes over memory",
    "expert permutation": "tokens sorted by expert and back: passes over memory",
    "expert activation": "unfused, with biases and a clamp",
    "Mamba scan": "convolution, scan and gated norm",
    "recompute": "forward work repeated in the backward pass",
    "offloading": "copies to the host and back, beyond the passes",
    "pipeline bubble": "of the other stages for one micro batch",
    "optimizer": "states of a rank's shard, casts of FP8 parameters",
    "host": "the GPU waits for launches",
    "TP communication": "exposed, around every linear pair",
    "CP communication": "exposed, of keys and values",
    "EP communication": "exposed, of tokens to and from experts",
    "DP communication": "exposed, of gradients and weights",
    "PP communication": "exposed, between stages",
}


def notes_of(run: Workload, terms: Seconds, world: int) -> dict[str, str]:
    """Return a note for each term."""
    found = {name: _NOTES.get(name.partition(" (")[0], "") for name in terms}
    for linear in chain(*(linears(run, kind) for kind in set(run.model.kinds)), [output_layer(run)]):
        several = ""
        if linear.count > 1:
            several = f"{linear.count} x "
        rows = linear.rows / linear.count
        found[f"GEMM {linear.name}"] = f"{run.recipe(linear.quantized)}, {several}{rows:.0f} x {linear.n} x {linear.k}"
    found["GEMM MTP projection"] = run.recipe(True)
    found["attention"] = f"{run.model.seq_length} tokens, causal"
    kernel = loss_kernel(run)
    found["loss"] = f"{kernel}, {LOSS_PASSES[kernel]:g} passes over the logits"
    found["short kernels"] = f"{1e6 * run.speeds.software.kernel:g} microseconds for each kernel"
    share, doublings = scale(run, world)
    found["scale"] = f"{share:.1%} for each of {doublings:.1f} doublings beyond 8 GPUs"
    if run.model.experts:
        found["expert imbalance"] = (
            f"busiest rank {imbalance(run, run.model.experts):.2f} times the mean, router trained"
        )
    return found
