"""What a run takes: floating-point operations, tokens, and GPU-hours for a throughput that is known or assumed."""

from __future__ import annotations

from dataclasses import dataclass

from fp8launch.hardware.gpus import Dtype, Gpu
from fp8launch.megatron.architecture import architecture
from fp8launch.megatron.flops import flops_per_token
from fp8launch.megatron.model_arithmetic import Arguments, whole


@dataclass(frozen=True)
class Efficiency:
    """A published fraction of the dense peak of `dtype`, in model FLOPs, and where it was seen."""

    dtype: Dtype
    fraction: float
    seen: str


# Megatron-Bridge's performance summaries and dgxc-benchmarking, in Megatron's FLOPs over the peaks of hardware/gpus.
DENSE = {
    "bf16": Efficiency("bf16", 0.556, "Llama-3 8B on 8 H100, dgxc-benchmarking v25.04.02"),
    "fp8": Efficiency("fp8", 0.376, "Llama-3 8B on 8 H100, Megatron-Bridge 25.11"),
    "fp4": Efficiency("fp4", 0.300, "Llama-3.1 405B on 256 GB200, Megatron-Bridge 26.06"),
}
# Experts wait for tokens to travel and multiply small matrices: 10 % (Qwen3 30B, H100) to 26 % (DeepSeek-V3, GB200).
MOE = {
    "bf16": Efficiency("bf16", 0.25, "twice the FP8 fraction assumed of the same models"),
    "fp8": Efficiency("fp8", 0.15, "10 % (Qwen3 30B-A3B, H100) to 26 % (DeepSeek-V3, GB200), Megatron-Bridge 26.06"),
    "fp4": Efficiency("fp4", 0.10, "half of the dense fraction's share"),
}


@dataclass(frozen=True)
class Throughput:
    """Tokens per second and GPU, and on what that rests. `known` is false for an assumption."""

    tokens_per_s_per_gpu: float
    basis: str
    known: bool


@dataclass(frozen=True)
class Cost:
    """Of a run on `gpus` GPUs; what rests on an unknown throughput or length is None."""

    gpus: int
    flops_per_token: float | None
    tokens_per_step: int
    steps: int | None
    throughput: Throughput | None

    @property
    def tokens(self) -> int | None:
        return None if self.steps is None else self.steps * self.tokens_per_step

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


def cost(args: Arguments, gpus: int, global_batch: int, gpu: Gpu, known: Throughput | None = None) -> Cost:
    """The cost of a run with `args` (by Megatron's attribute name); without a known throughput one is assumed."""
    sequence = whole(args, "seq_length") or 0
    per_token = flops_per_token(args)
    steps = whole(args, "train_iters")
    if steps is None and (samples := whole(args, "train_samples")):
        steps = -(-samples // global_batch)
    return Cost(gpus, per_token, global_batch * sequence, steps, known or _assumed(args, gpu, per_token))


def _assumed(args: Arguments, gpu: Gpu, per_token: float | None) -> Throughput | None:
    """What published runs of the like reach on this GPU's peak; None for a CPU or FLOPs that are not counted."""
    kind = "bf16"
    if args.get("fp4"):
        kind = "fp4"
    elif args.get("fp8"):
        kind = "fp8"
    model = architecture(args)
    found = (MOE if model and model.experts else DENSE)[kind]
    peak = gpu.peak(found.dtype)
    if not per_token or not peak:
        return None
    basis = (
        f"assumed: {found.fraction:.0%} of {gpu.name}'s {kind} peak of {peak:g} TFLOP/s, as published for {found.seen}"
    )
    return Throughput(peak * 1e12 * found.fraction / per_token, basis, known=False)
