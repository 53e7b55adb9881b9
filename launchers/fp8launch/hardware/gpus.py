"""GPUs: supported data types, peak rates and memory.

Dense tensor-core peaks in TFLOP/s. H100, B200, B300, GB200, GB300: the table that NVIDIA's dgxc-benchmarking uses as
denominator of its published MFU (GB200's and GB300's bf16 and fp8 are 2 % below the NVL72 data sheet); A100 and H200:
NVIDIA data sheets (H200 has H100's chip). VR200 and R100, both Rubin: NVIDIA's preliminary figures, never measured
(docs/gpus.md). Memory is what the driver reports as the total, in GiB: of the SXM parts, the 80 GB A100 and H100; for
GB300 the value of B300, which has the same 288 GB. Cards with other peaks (PCIe, NVL) have other names in the driver.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from fp8launch.diagnostics import did_you_mean, error

Dtype = Literal["bf16", "fp8", "fp4"]


@dataclass(frozen=True)
class Gpu:
    """`peak` is dense TFLOP/s by data type; a type that is missing is not supported in hardware.

    `model` is a regular expression for the driver's names of the cards that have these peaks, None for no card.
    `per_node` is how many a usual node has. If no run was `measured`, predictions assume another GPU's efficiency.
    """

    name: str
    capability: tuple[int, int]
    memory_gib: float
    model: str | None = None
    bf16: float | None = None
    fp8: float | None = None
    fp4: float | None = None
    per_node: int = 8
    measured: bool = True

    def peak(self, dtype: Dtype) -> float | None:
        """Return the dense peak in TFLOP/s; None if the hardware lacks the type."""
        return {"bf16": self.bf16, "fp8": self.fp8, "fp4": self.fp4}[dtype]


GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100", (8, 0), 80.0, "A100-(?:SXM|PCI)", bf16=312.0),
        Gpu("h100", (9, 0), 79.6, "H100 80GB HBM3|H100 SXM", bf16=989.0, fp8=1979.0),
        Gpu("h200", (9, 0), 140.4, r"\bH200(?! NVL)", bf16=989.0, fp8=1979.0),
        Gpu("b200", (10, 0), 179.1, r"\bB200", bf16=2250.0, fp8=4500.0, fp4=9000.0),
        Gpu("b300", (10, 3), 268.6, r"\bB300", bf16=2250.0, fp8=4500.0, fp4=13500.0),
        Gpu("gb200", (10, 0), 185.0, r"\bGB200", bf16=2450.0, fp8=4900.0, fp4=9800.0, per_node=4),
        Gpu("gb300", (10, 3), 268.6, r"\bGB300", bf16=2450.0, fp8=4900.0, fp4=14700.0, per_node=4),
        Gpu("vr200", (10, 7), 268.2, bf16=4000.0, fp8=17500.0, fp4=35000.0, per_node=4, measured=False),
        Gpu("r100", (10, 7), 268.2, bf16=4000.0, fp8=17500.0, fp4=35000.0, measured=False),
        Gpu("cpu", (0, 0), 0.0),
    )
}


def gpu(name: str) -> Gpu:
    """Return the GPU of that name, in upper or lower case. Raises UserError with the known names."""
    found = GPUS.get(name.lower())
    if found is None:
        hint = did_you_mean(name.lower(), GPUS, "use one of these names")
        raise error("unknown-gpu", f"unknown GPU {name!r}; known: {', '.join(GPUS)}", where="gpu", fix=hint)
    return found


def gpu_of_model(model: str) -> Gpu | None:
    """Return the GPU that the driver calls `model`, such as "NVIDIA H200"; None for an unknown GPU."""
    for candidate in GPUS.values():
        if candidate.model is not None and re.search(candidate.model, model):
            return candidate
    return None
