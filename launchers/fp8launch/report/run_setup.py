"""The arguments of a run: what its logs say of them, else what it was started with."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from fp8launch.hardware.gpus import Dtype
from fp8launch.hardware.gpus import gpu as find_gpu
from fp8launch.logs import ParsedLog, Process
from fp8launch.megatron.flops import flops_per_token

T = TypeVar("T")
V = TypeVar("V")
Attempts = Sequence[tuple[ParsedLog, Process]]


@dataclass(frozen=True)
class RunSetup:
    """The arguments of a run. `dump` is Megatron's own list of them, empty if no log contains one."""

    arguments: Mapping[str, object]
    dump: Mapping[str, object]
    world_size: int | None
    seq_length: int | None
    flops_per_token: float | None
    gpu: str | None
    dtype: Dtype

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
    attempts: Attempts,
    logged_length: float | None,
    gpu: str | None,
    world_size: int | None,
    stated: Mapping[str, object] | None,
) -> RunSetup:
    """Find the arguments of a run, from its logs and from what it was started with (`stated`).

    `logged_length` is the sequence length of its last iteration line, for logs that do not hold the arguments.
    """
    dump = last_stated(process.head.arguments for _, process in attempts)
    arguments = {**(stated or {}), **dump}
    padded = _last(process.head.padded_vocab_size for _, process in attempts)
    counted = dict(arguments)
    if padded:
        counted["padded_vocab_size"] = padded
    seq_length = positive(arguments.get("seq_length"))
    if seq_length is None:
        seq_length = positive(logged_length)
    printed = _last(process.head.world_size for _, process in attempts)
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
    )


def _last(items: Iterable[T | None]) -> T | None:
    last = None
    for item in items:
        if item is not None:
            last = item
    return last


def last_stated(found: Iterable[Mapping[str, V]]) -> Mapping[str, V]:
    """The last mapping that holds anything; an empty one where none does."""
    stated: Mapping[str, V] = {}
    for mapping in found:
        stated = mapping or stated
    return stated


def positive(value: object) -> int | None:
    """Return a number above zero as an integer; None for anything else."""
    if isinstance(value, int | float) and math.isfinite(value) and value > 0:
        return int(value)
    return None
