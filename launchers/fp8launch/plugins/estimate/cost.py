"""The cost of a run: floating-point operations, tokens, and GPU-hours at a known or predicted throughput."""

from __future__ import annotations

from dataclasses import dataclass

from fp8launch.megatron.flops import flops_per_token
from fp8launch.megatron.model_arithmetic import Arguments, steps_of_run, whole


@dataclass(frozen=True)
class Throughput:
    """A throughput in tokens/s/GPU and its basis. `known` is false for a prediction."""

    tokens_per_s_per_gpu: float
    basis: str
    known: bool


@dataclass(frozen=True)
class Cost:
    """The cost of a run on `gpus` GPUs. Values that need an unknown throughput or length are None."""

    gpus: int
    flops_per_token: float | None
    tokens_per_step: int
    steps: int | None
    throughput: Throughput | None

    @property
    def tokens(self) -> int | None:
        if self.steps is None:
            return None
        return self.steps * self.tokens_per_step

    @property
    def step_time_s(self) -> float | None:
        """Seconds of one step at the throughput."""
        if self.throughput is None:
            return None
        return self.tokens_per_step / (self.throughput.tokens_per_s_per_gpu * self.gpus)

    @property
    def gpu_hours(self) -> float | None:
        """GPU-hours of all steps, without start-up, validation and checkpoints."""
        if self.tokens is None or self.throughput is None:
            return None
        return self.tokens / self.throughput.tokens_per_s_per_gpu / 3600


def cost(args: Arguments, gpus: int, global_batch: int, throughput: Throughput | None = None) -> Cost:
    """Return the cost of a run with `args` (by Megatron's attribute name) at a throughput."""
    sequence = whole(args, "seq_length") or 0
    return Cost(gpus, flops_per_token(args), global_batch * sequence, steps_of_run(args, global_batch), throughput)
