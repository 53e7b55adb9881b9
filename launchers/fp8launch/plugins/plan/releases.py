"""The software that a prediction is for, and how much slower older releases are.

Factors are medians over layouts that NVIDIA published for both releases, rounded to a percent
(benchmarks/plan/accuracy.md). They hold for layouts without graphs of the whole step, which older releases lack.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from fp8launch.hardware.gpus import gpu
from fp8launch.plugins.plan.known_runs import Kind

# The NeMo container whose published results the model was calibrated with last.
RELEASE = "26.06"


@dataclass(frozen=True)
class OlderRelease:
    """A release of the NeMo container, with its speed relative to `RELEASE`.

    `attention` is the relative speed of its attention. `fuses_latent` is whether it has fused kernels for latent
    attention.
    """

    name: str
    speed: float
    source: str
    attention: float = 1.0
    fuses_latent: bool = True


_H100 = "dgxc-benchmarking 24.11 to 25.04, 8B, 15B, 70B, 175B and 405B on H100"
_BRIDGE = "performance summary of Megatron-Bridge, 25.09 to 26.06"
_HOPPER = (
    # FlashAttention 2 instead of cuDNN: benchmarks/plan/attention.md.
    OlderRelease("24.03", 0.94, "as 24.09, with FlashAttention 2", attention=0.58),
    OlderRelease("24.09", 0.94, _H100),
    OlderRelease("24.12", 0.97, _H100),
    OlderRelease("25.02", 0.99, _H100),
    OlderRelease("25.04", 0.99, _H100),
    OlderRelease("25.11", 0.99, _BRIDGE),
    OlderRelease("26.02", 0.99, _BRIDGE),
)
_BLACKWELL = (
    OlderRelease("25.02", 0.91, "405B on 128 B200 in 25.02 and 25.09, and " + _BRIDGE, fuses_latent=False),
    OlderRelease(
        "25.04",
        0.92,
        "405B on 128 GB200 in dgxc-benchmarking 25.05 and later, and " + _BRIDGE,
        fuses_latent=False,
    ),
    OlderRelease("25.07", 0.95, "between 25.04 and 25.09"),
    OlderRelease("25.09", 0.96, _BRIDGE),
    OlderRelease("25.11", 0.96, _BRIDGE),
    OlderRelease("26.02", 0.97, _BRIDGE),
)
_EXPERTS = (
    OlderRelease("25.11", 0.93, _BRIDGE),
    OlderRelease("26.02", 0.95, _BRIDGE),
    OlderRelease("26.04", 0.98, _BRIDGE),
)


def older_releases(gpu_name: str, kind: Kind) -> tuple[OlderRelease, ...]:
    """Return the older releases with a known factor for a GPU type and a kind of model, oldest first.

    Releases of models with experts before 25.11 have the factors of dense models, or 25.11's if that is smaller.
    """
    dense: tuple[OlderRelease, ...] = _HOPPER
    if gpu(gpu_name).capability >= (10, 0):
        dense = _BLACKWELL
    if kind == "dense":
        return dense
    first = _EXPERTS[0]
    earlier = [replace(one, speed=min(one.speed, first.speed)) for one in dense if one.name < first.name]
    return (*earlier, *_EXPERTS)


def slower(terms: Mapping[str, float], release: OlderRelease, unfused_ms: float | None = None) -> float:
    """Return the milliseconds of a step with these terms in an older release.

    `unfused_ms` is the step without fused latent attention, None if it has no such attention.
    """
    if unfused_ms is not None and not release.fuses_latent:
        return unfused_ms / release.speed
    attention = terms.get("attention", 0.0)
    rest = sum(terms.values()) - attention
    return (rest + attention / release.attention) / release.speed
