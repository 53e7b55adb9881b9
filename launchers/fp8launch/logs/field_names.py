"""The meaning of each label of an iteration line: one table for Megatron 0.11 to 0.20 and its forks.

Labels are compared in lower case, with `_` and `-` as blanks. Sources:
`training_log` of megatron-core 0.12 to 0.20; swiss-ai and oellm forks (tokens per second); AMD Primus (`a/b` is
"this window/average", the first is read); Megatron-DeepSpeed and BigScience (`TFLOPs`, seconds instead of
milliseconds), their Ascend and DCU ports (`tgs`, a misspelt batch size); GPT-NeoX (`approx flops per GPU`);
Megatron-Bridge (throughput before its label); NeMo 2 (`train_step_timing in s`, bytes).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

LOSS_PREFIX = "loss:"
# IS_NAN in a line whose loss or gradient norm is NaN, IS_INFINITE if one is infinite. NaN itself means "no value" here.
NOT_FINITE = "not_finite"
# Megatron's timers within an iteration, by its own names, in ms of the slowest rank.
TIMER_PREFIX = "timer:"

FIELDS: dict[str, str] = {
    "lm loss": LOSS_PREFIX + "lm loss",
    "elapsed time per iteration (ms)": "step_time_ms",
    "elapsed time per iteration (s)": "step_time_s",
    "train step timing in s": "step_time_s",
    "throughput per gpu (tflop/s/gpu)": "tflops_per_gpu",
    "compute per gpu (tflop/s/gpu)": "tflops_per_gpu",
    "flop throughput (tflop/sec/gpu)": "tflops_per_gpu",
    "model tflop/s/gpu": "tflops_per_gpu",
    "tflop/s/gpu": "tflops_per_gpu",
    "tflops": "tflops_per_gpu",
    "tflops (model)": "tflops_per_gpu",
    "tflops per gpu": "tflops_per_gpu",
    "approx flops per gpu": "tflops_per_gpu",
    "tokens/sec/gpu": "tokens_per_s_per_gpu",
    "tokens/s/gpu": "tokens_per_s_per_gpu",
    "tokens per gpu (tokens/s/gpu)": "tokens_per_s_per_gpu",
    "tokens/s/gpu inst/harmonic mean": "tokens_per_s_per_gpu",
    "tokens per second per gpu (tok/s/gpu)": "tokens_per_s_per_gpu",
    "tokens per second per gpu": "tokens_per_s_per_gpu",
    "tokens per sec per gpu": "tokens_per_s_per_gpu",
    "tokens per gpu per second (tgs)": "tokens_per_s_per_gpu",
    "throughput (token/sec/gpu)": "tokens_per_s_per_gpu",
    "energy per gpu (j/iter/gpu)": "energy_j_per_gpu",
    "power per gpu (w/gpu)": "power_w_per_gpu",
    "global batch size": "global_batch_size",
    "gloabl batch size": "global_batch_size",
    "batch size": "global_batch_size",
    "actual seqlen": "seq_length",
    "actual seq length": "seq_length",
    "grad norm": "grad_norm",
    "total grad norm": "grad_norm",
    "number of skipped iterations": "skipped_iterations",
    "number of nan iterations": "nan_iterations",
    "hip mem usage/free/total/usage ratio": "memory_used_gib",
    "peak memory usage": "memory_used_bytes",
}
# Fields in other units than ours.
UNITS: Mapping[str, tuple[str, float]] = {
    "step_time_s": ("step_time_ms", 1e3),
    "memory_used_bytes": ("memory_used_gib", 2.0**-30),
}

# Not used, and each number takes time in a log of a million lines.
IGNORED = frozenset(
    {
        "consumed samples",
        "skipped samples",
        "consumed tokens",
        "learning rate",
        "loss scale",
        "num zeros",
        "params norm",
        "eta",
        "val loss",
    }
)

_BLANKS = re.compile(r"[\s_-]+")


def is_health_sign(name: str) -> bool:
    """Return whether this field must be finite in every line."""
    return name == "grad_norm" or name.startswith(LOSS_PREFIX)


def field_of(label: str) -> str | None:
    """Return our name for a label, None for an ignored one. A loss keeps its own name: `loss:lm loss`."""
    key = _BLANKS.sub(" ", label.lower()).strip()
    if "(" in key:
        key = re.sub(r" ?\(", " (", key)
    if key in IGNORED:
        return None
    if key in FIELDS:
        return FIELDS[key]
    if key.endswith("loss"):
        return LOSS_PREFIX + " ".join(label.lower().split())
    return None
