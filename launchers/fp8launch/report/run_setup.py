"""The arguments of a run: those in its logs, else those that it was started with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from fp8launch.hardware.gpus import Dtype
from fp8launch.hardware.gpus import gpu as find_gpu
from fp8launch.logs import LoggedProcesses
from fp8launch.megatron.flops import flops_per_token


@dataclass(frozen=True)
class RunSetup:
    """The arguments of a run, and the versions of its software.

    `dump` is Megatron's own list of its arguments, empty if no log contains one.
    """

    arguments: Mapping[str, object]
    dump: Mapping[str, object]
    world_size: int | None
    seq_length: int | None
    flops_per_token: float | None
    gpu: str | None
    dtype: Dtype
    versions: Mapping[str, str]

    @property
    def peak_tflops(self) -> float | None:
        if self.gpu is None:
            return None
        return find_gpu(self.gpu).peak(self.dtype)

    def mfu_denominator(self) -> dict[str, object] | None:
        peak = self.peak_tflops
        if not peak:
            return None
        return {"gpu": self.gpu, "dtype": self.dtype, "peak_tflops": peak}


def setup_of(
    attempts: LoggedProcesses,
    logged_length: float | None,
    gpu: str | None,
    world_size: int | None,
    stated: Mapping[str, object] | None,
) -> RunSetup:
    """Find the arguments of a run, in its logs and in those that it was started with (`stated`).

    `logged_length` is the sequence length of its last iteration line, for logs that do not hold the arguments.
    """
    dump: Mapping[str, object] = {}
    versions: Mapping[str, str] = {}
    padded = printed = None
    for _, process in attempts:
        head = process.head
        dump = head.arguments or dump
        versions = head.versions or versions
        if head.padded_vocab_size is not None:
            padded = head.padded_vocab_size
        if head.world_size is not None:
            printed = head.world_size
    arguments = {**(stated or {}), **dump}
    counted = dict(arguments)
    if padded:
        counted["padded_vocab_size"] = padded
    seq_length = positive(arguments.get("seq_length"))
    if seq_length is None:
        seq_length = positive(logged_length)
    # fp16 has the same peak on every GPU of the table.
    dtype: Dtype = "bf16"
    if arguments.get("fp4"):
        dtype = "fp4"
    elif arguments.get("fp8") or arguments.get("fp8_format"):
        dtype = "fp8"
    return RunSetup(
        arguments=arguments,
        dump=dump,
        world_size=printed or positive(arguments.get("world_size")) or world_size,
        seq_length=seq_length,
        flops_per_token=flops_per_token(counted),
        gpu=gpu,
        dtype=dtype,
        versions=versions,
    )


def positive(value: object) -> int | None:
    """Return a number above zero as an integer; None for anything else."""
    if isinstance(value, int | float) and math.isfinite(value) and value > 0:
        return int(value)
    return None
