"""What each label of an iteration line means: one table for Megatron 0.11 to 0.20 and its forks.

A dialect is a row here, never another expression. Labels are compared in lower case with single blanks. Sources:
`training_log` of megatron-core 0.12 to 0.20; swiss-ai and oellm forks (tokens per second); AMD Primus (`a/b` is
"this window/average", the first is read); Megatron-DeepSpeed (`TFLOPs`); Megatron-Bridge (throughput before its
label).
"""

from __future__ import annotations

FIELDS: dict[str, str] = {
    "elapsed time per iteration (ms)": "step_time_ms",
    "throughput per gpu (tflop/s/gpu)": "tflops_per_gpu",
    "compute per gpu (tflop/s/gpu)": "tflops_per_gpu",
    "model_tflop/s/gpu": "tflops_per_gpu",
    "tflop/s/gpu": "tflops_per_gpu",
    "tflops": "tflops_per_gpu",
    "tokens/sec/gpu": "tokens_per_s_per_gpu",
    "tokens/s/gpu": "tokens_per_s_per_gpu",
    "tokens per gpu (tokens/s/gpu)": "tokens_per_s_per_gpu",
    "tokens/s/gpu inst/harmonic mean": "tokens_per_s_per_gpu",
    "tokens per second per gpu (tok/s/gpu)": "tokens_per_s_per_gpu",
    "energy per gpu (j/iter/gpu)": "energy_j_per_gpu",
    "power per gpu (w/gpu)": "power_w_per_gpu",
    "global batch size": "global_batch_size",
    "batch size": "global_batch_size",
    "grad norm": "grad_norm",
    "number of skipped iterations": "skipped_iterations",
    "number of nan iterations": "nan_iterations",
    "hip mem usage/free/total/usage_ratio": "memory_used_gib",
}

# Read by nobody here, and each number costs time when there are a million lines.
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
    }
)

LOSS_PREFIX = "loss:"


def field_of(label: str) -> str | None:
    """Our name for a label, None for one that we do not keep; a loss keeps its own name: `loss:lm loss`."""
    key = " ".join(label.lower().split())
    if key in IGNORED:
        return None
    if key in FIELDS:
        return FIELDS[key]
    return LOSS_PREFIX + key if key.endswith("loss") else None
