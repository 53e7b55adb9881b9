"""A run as the models of memory and speed see it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from fp8launch.megatron.architecture import Architecture, Division
from fp8launch.megatron.model_arithmetic import Arguments, whole
from fp8launch.plugins.estimate.dtype_sizes import LayerKind, PrecisionSizes, decoder_kinds, mtp_kinds


@dataclass(frozen=True)
class DividedRun:
    """A run's arguments and model, its division over GPUs, and its precision."""

    args: Arguments
    model: Architecture
    split: Division
    precision: PrecisionSizes

    def on(self, name: str) -> bool:
        return bool(self.args.get(name))

    # A search reads these hundreds of thousands of times.
    @cached_property
    def micro_batch(self) -> int:
        return whole(self.args, "micro_batch_size") or 1

    @cached_property
    def tokens(self) -> float:
        """Tokens of a micro batch on a context-parallel rank."""
        return self.micro_batch * self.model.seq_length / self.split.cp

    @property
    def own_tokens(self) -> float:
        """Tokens of a tensor-parallel rank between linear layers."""
        return self.split.own_tokens(self.tokens)

    @cached_property
    def kinds(self) -> tuple[LayerKind, ...]:
        return decoder_kinds(self.model, self.precision)

    @cached_property
    def mtp_kinds(self) -> tuple[LayerKind, ...]:
        return mtp_kinds(self.model, self.precision)
