"""Families of GPU kernels, by patterns of their names.

From CUDA 12.8 on, cuBLASLt's kernels have their operand types as letters after `nvjet_` (and `sm90_`, `sm100_`):
q e4m3, r e5m2, o e2m1, t bf16, h fp16, s fp32. Older kernels, CUTLASS's and DeepGEMM's have the types in full. Seen on
H200 with Transformer Engine 2.20: `nvjet_sm90_qq...`, `nvjet_sm90_qr...`, blockwise with `Ablk128`/`Avec128`; from
published profiles of Blackwell: `nvjet_sm100_qqtst...`, `nvjet_ootst..._Avec16UE4M3_Bvec16UE4M3`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

COMMUNICATION, FP8_GEMM, FP4_GEMM, GEMM = "communication", "fp8_gemm", "fp4_gemm", "gemm"

# The first matching pattern decides, so the special comes before the general.
FAMILIES: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (family, re.compile(text))
    for family, text in (
        (COMMUNICATION, r"(?i)nccl|nvshmem|deep_?ep|hybrid_?ep|userbuffers|symm_mem"),
        ("memory", r"^Mem(?:cpy|set)"),
        ("attention", r"(?i)sdpa|flash_?(?:fwd|bwd|attn)|fmha|attention|masked_softmax|flashattn|compute_dot_do_o"),
        # Before the GEMMs: names of quantization kernels contain the FP8 types, too.
        (
            "quantisation",
            r"(?i)quantize|cast_transpose|transpose_cast|block_?scaled?_(?:1d|2d|cast)|cast_(?:mxfp8|fp8|master|transpose)"
            r"|amax|hadamard|swizzle_(?:row|col|scal)|scale_inv|delayed_scaling|compute_scale"
            r"|transformer_engine::.*transpose|multi_tensor_compute_scale|mxfp8_(?:scal|cast)|nvfp4_(?:scal|cast)",
        ),
        (FP4_GEMM, r"nvjet_(?:sm\d+_)?o[oqrt]|(?i:gemm.*e2m1|e2m1.*gemm|cutlass.*(?:float_e2m1|nv_float4))"),
        (
            FP8_GEMM,
            r"nvjet_(?:sm\d+_)?[qr][qr]|(?i:gemm.*e[45]m[32]|e[45]m[32].*gemm|cutlass.*float_e[45]m[32]|fp8_gemm)",
        ),
        (GEMM, r"(?i)nvjet|gemm|splitk|cutlass|gemv|wgmma"),
        ("optimizer", r"(?i)multi_tensor|adam|l2norm"),
        ("norm", r"(?i)rms_?norm|layer_?norm|\bln_(?:fwd|bwd)|norm_(?:fwd|bwd)"),
    )
)
OTHER = "other"
LONGEST_NAME = 160


class Kernel(NamedTuple):
    """One kernel, with its start and duration in nanoseconds."""

    name: str
    start: int
    ns: int


@dataclass
class Total:
    count: int = 0
    ns: int = 0

    def add(self, count: int, ns: int) -> None:
        self.count += count
        self.ns += ns

    def as_json(self) -> dict[str, float]:
        return {"count": self.count, "ms": _ms(self.ns)}


@functools.cache
def family(name: str) -> str:
    """Return the family of a kernel; `other` for elementwise kernels and unknown names."""
    for family, pattern in FAMILIES:
        if pattern.search(name):
            return family
    return OTHER


def by_name(totals: Mapping[str, Total], top: int = 40) -> dict[str, object]:
    """Return count and time of the `top` names by time, and of all."""
    listed = [{"name": name[:LONGEST_NAME], **totals[name].as_json()} for name in _longest_first(totals)[:top]]
    return {"top": listed, "distinct": len(totals), "total_ms": _ms(sum(total.ns for total in totals.values()))}


def by_family(kernels: Mapping[str, Total], top: int = 40) -> dict[str, object]:
    """Return count and time by family, the `top` kernels by time, and further GEMMs: enough to judge again later."""
    families: dict[str, Total] = {}
    of = {name: family(name) for name in kernels}
    for name, total in kernels.items():
        families.setdefault(of[name], Total()).add(total.count, total.ns)
    ranked = _longest_first(kernels)
    listed = []
    for name in ranked[:top]:
        listed.append({"name": name[:LONGEST_NAME], "family": of[name], **kernels[name].as_json()})
    gemms = [name for name in ranked[top:] if of[name].endswith("gemm")]
    return {
        "families": {name: families[name].as_json() for name in _longest_first(families)},
        "top": listed,
        "more_gemms": [f"{kernels[name].count} {name[:60]}" for name in gemms[:10]],
        "distinct": len(kernels),
    }


def summary(kernels: Sequence[Kernel]) -> dict[str, object]:
    """Return the kernels by family, and how long the GPU was busy.

    `busy_ms` is the time during which at least one kernel ran. In `waiting_ms` of it, all running kernels communicated.
    """
    own = [kernel for kernel in kernels if family(kernel.name) != COMMUNICATION]
    busy = covered(kernels)
    return {"busy_ms": _ms(busy), "waiting_ms": _ms(busy - covered(own)), **by_family(totals(kernels))}


def covered(kernels: Iterable[Kernel]) -> int:
    """Return the nanoseconds during which at least one of the kernels ran."""
    total = end = 0
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        stop = kernel.start + kernel.ns
        total += max(0, stop - max(kernel.start, end))
        end = max(end, stop)
    return total


def totals(kernels: Iterable[Kernel]) -> dict[str, Total]:
    """Add up kernels by name."""
    found: dict[str, Total] = {}
    for kernel in kernels:
        found.setdefault(kernel.name, Total()).add(1, kernel.ns)
    return found


def _longest_first(totals: Mapping[str, Total]) -> list[str]:
    return sorted(totals, key=lambda name: -totals[name].ns)


def _ms(ns: int) -> float:
    return round(ns / 1e6, 3)
