"""How fast GPUs and links really are: what the prediction of a step's time multiplies.

Two kinds of numbers. Data sheet values belong to one GPU type: bandwidth of memory, of NVLink and of the network card
of NVIDIA's reference systems, and GPUs per NVLink domain (https://www.nvidia.com/en-us/data-center/: A100, H100, H200,
DGX B200 and B300, GB200 and GB300 NVL72). Achieved fractions belong to an architecture, Hopper or Blackwell, and are
the same for every model and layout. Their sources are stated beside them; `benchmarks/plan` calibrates those that are
not measured by themselves, and measures the error of all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fp8launch.hardware.gpus import Gpu
from fp8launch.hardware.quantization import QUANTIZATION


@dataclass(frozen=True)
class Links:
    """Links of one GPU, GB/s in one direction: NVLink between the `domain` GPUs that it connects, then the network."""

    nvlink: float
    network: float
    domain: int


@dataclass(frozen=True)
class Host:
    """Time that a host takes to launch kernels, relative to the x86 host of our H200 measurements.

    `python` scales everything that Python launches, `experts` the loops over experts that Transformer Engine runs in
    C++. A slow CPU core slows the first down much more than the second.
    """

    python: float = 1.0
    experts: float = 1.0


# The slowest host measured: a virtual machine with two H100 and 32 cores (benchmarks/plan/host_bound.md).
SLOW_X86 = Host(python=2.8, experts=1.0)
GRACE = Host(python=1.4, experts=1.4)


@dataclass(frozen=True)
class Device:
    """A GPU type. `memory` is TB/s; `clock` is the share of the boost clock, which peaks refer to, that long matrix
    products sustain within its power limit, relative to H200; `host` is the host of the published runs, `slow_host` the
    slowest host measured. `host_link` is GB/s in one direction between a GPU and its host's memory."""

    memory: float
    links: Links
    clock: float
    host: Host = Host()
    slow_host: Host = SLOW_X86
    host_link: float = 64.0


@dataclass(frozen=True)
class Fractions:
    """What an architecture achieves.

    `gemm` is the fraction of the dense peak by quantization recipe, in the limit of large matrices: the traffic of
    operands and results is added to it. `attention` and `attention_fp8` are fractions of the peak of that type for the
    core of attention; `memory`, `nvlink` and `network` of the bandwidths. `contention` is the part of communication
    behind computation that lengthens the step even so, for it takes multiprocessors and bandwidth.
    """

    gemm: Mapping[str, float]
    attention: float
    attention_fp8: float
    memory: float
    nvlink: float
    network: float
    contention: float


@dataclass(frozen=True)
class Software:
    """What Megatron-Core 0.19, Transformer Engine 2.20 and mamba-ssm 2.3 add, on every GPU.

    Passes are reads or writes of a whole bf16 tensor: `permutation` of the tokens that are sent to experts, forward or
    backward, `ring` of a rank's queries in a round of ring attention, `biased_activation` of the experts' first product
    where biases and a clamp keep Megatron from fusing the activation. `load_spread` is the spread of one expert's load
    over its mean under a router that is not forced to balance, in the first iterations. `tp_overlapped` is the part of
    tensor parallel communication that `tp_comm_overlap` leaves exposed. `scan` is the time of Mamba's kernels over that
    of their traffic: they are many, small, and wait for one another.

    Times of the host are seconds of a layer's forward and backward pass; `launch_forward` is the forward pass's part of
    them. A dense layer takes `launch`, plus `launch_quantized` in FP8 or FP4, plus `launch_gathered` if parameters are
    gathered in FP8 or FP4: PyTorch dispatches every operation on such a weight in Python. Experts take
    `launch_routing` before the routing and `launch_dispatch` after it, and `launch_expert` for each local expert by its
    precision, because every expert's inputs are quantized by separate kernels. If all experts are local, no host waits
    for another's tokens, and they take `launch_alone` of that time.
    """

    permutation: float = 5.0
    ring: float = 25.0
    biased_activation: float = 66.0
    load_spread: float = 2.5
    tp_overlapped: float = 0.3
    launch: float = 2.0e-3
    launch_quantized: float = 0.8e-3
    # 3B on one and two H100: benchmarks/plan/host_bound.md.
    launch_gathered: float = 0.2e-3
    launch_routing: float = 2.3e-3
    launch_dispatch: float = 4.4e-3
    # Six layers of Qwen3 30B-A3B on one GPU in bf16: benchmarks/h200, `2026-11-23-tuned-one`.
    launch_alone: float = 0.52
    launch_forward: float = 0.45
    # 12 layers of Qwen3 30B-A3B with 64 experts a GPU: benchmarks/h200, `2026-11-23-pairs`. MXFP8: Qwen3 30B-A3B on
    # GB200, NVFP4: Nemotron 3 Super on B300.
    launch_expert: Mapping[str, float] = field(
        default_factory=lambda: {
            "bf16": 0.25e-3,
            "delayed": 0.385e-3,
            "blockwise": 0.415e-3,
            "tensorwise": 0.58e-3,
            "mxfp8": 0.20e-3,
            "nvfp4": 0.25e-3,
        }
    )
    scan: float = 2.7


DEVICES: Mapping[str, Device] = {
    "a100": Device(2.04, Links(300, 25, 8), 1.0, host_link=32),
    # The host: Qwen3 30B-A3B on 16 GPUs.
    "h100": Device(3.35, Links(450, 50, 8), 1.09, host=Host(0.75, 0.75)),
    "h200": Device(4.8, Links(450, 50, 8), 1.0),
    "b200": Device(8.0, Links(900, 50, 8), 1.02),
    "b300": Device(8.0, Links(900, 100, 8), 1.0),
    # Two GPUs share the 450 GB/s in each direction of their Grace's NVLink-C2C.
    "gb200": Device(8.0, Links(900, 50, 72), 1.0, host=GRACE, slow_host=GRACE, host_link=225),
    "gb300": Device(8.0, Links(900, 100, 72), 1.31, host=GRACE, slow_host=GRACE, host_link=225),
}

# Of a link to the host, copies from the GPU: 297 of 450 GB/s on GH200 (375 to the GPU; Schieffer et al., "Harnessing
# Integrated CPU-GPU System Memory for HPC", 2024). Assumed of PCIe too.
COPIES = 0.66
# GB/s that a link to the host has for activations: Grace's NVLink-C2C, over which NVIDIA published such runs.
FAST_HOST_LINK = 100.0

# Clock that the power limit allows, relative to H200 or GB200: watts per peak (700 of H100 and H200, 1000 of B200, 1100
# of B300, 1200 of GB200, 1400 of GB300; NVIDIA data sheets). Calibrated clocks start from it.
POWER_CLOCK: Mapping[str, float] = {
    "a100": 1.0,
    "h100": 1.0,
    "h200": 1.0,
    "b200": 0.91,
    "b300": 1.0,
    "gb200": 1.0,
    "gb300": 1.17,
}

HOPPER = Fractions(
    gemm={
        "bf16": 0.74,
        "tensorwise": 0.71,
        "delayed": 0.73,
        # 2604 ms of kernels where delayed scaling has 2105: benchmarks/h200, `2026-11-21-tune2`.
        "blockwise": 0.58,
    },
    # Alone on H200: cuDNN 0.48, FlashAttention 3 0.57 (benchmarks/h200/tuning.md).
    attention=0.52,
    attention_fp8=0.22,
    # Quantization and norms of Llama-3 8B on H200: 253 and 60 ms for 256 layers.
    memory=0.75,
    nvlink=0.45,
    network=0.65,
    contention=0.25,
)

BLACKWELL = Fractions(
    gemm={
        # Not calibrated: only GPT-OSS was published in bf16.
        "bf16": 0.70,
        "tensorwise": 0.65,
        "delayed": 0.65,
        # Emulated by MXFP8's instructions, not measured.
        "blockwise": 0.50,
        "mxfp8": 0.59,
        "nvfp4": 0.62,
    },
    attention=0.39,
    attention_fp8=0.20,
    memory=0.65,
    nvlink=0.60,
    network=0.47,
    contention=0.25,
)


@dataclass(frozen=True)
class Speeds:
    """Everything that is known of one GPU's speed, as rates: FLOP/s, bytes/s, seconds."""

    gpu: Gpu
    device: Device
    fractions: Fractions
    software: Software = Software()

    def gemm(self, recipe: str) -> float:
        """FLOP/s of large matrix products in a quantization recipe, or in bf16."""
        peak = self.gpu.bf16
        if recipe in QUANTIZATION:
            peak = self.gpu.peak(QUANTIZATION[recipe].operands)
        fraction = self.fractions.gemm.get(recipe, self.fractions.gemm["bf16"])
        return (peak or self.gpu.bf16 or 1.0) * 1e12 * fraction * self.device.clock

    @property
    def attention(self) -> float:
        """FLOP/s of the core of attention in bf16."""
        return (self.gpu.bf16 or 1.0) * 1e12 * self.fractions.attention * self.device.clock

    @property
    def attention_fp8(self) -> float:
        """FLOP/s of the core of attention in FP8."""
        return (self.gpu.fp8 or self.gpu.bf16 or 1.0) * 1e12 * self.fractions.attention_fp8 * self.device.clock

    @property
    def memory(self) -> float:
        """Bytes/s of the GPU's memory."""
        return self.device.memory * 1e12 * self.fractions.memory

    @property
    def nvlink(self) -> float:
        """Bytes/s of one direction of NVLink."""
        return self.device.links.nvlink * 1e9 * self.fractions.nvlink

    @property
    def host_link(self) -> float:
        """Bytes/s of one direction between a GPU and its host's memory."""
        return self.device.host_link * 1e9 * COPIES

    @property
    def network(self) -> float:
        """Bytes/s of one GPU's share of the network."""
        return self.device.links.network * 1e9 * self.fractions.network


def speeds(gpu: Gpu, links: Links | None = None) -> Speeds | None:
    """The speeds of a GPU type; None for a CPU. Without `links`, those of NVIDIA's reference system."""
    device = DEVICES.get(gpu.name)
    if device is None:
        return None
    if links is not None:
        device = replace(device, links=links)
    fractions = HOPPER
    if gpu.capability >= (10, 0):
        fractions = BLACKWELL
    return Speeds(gpu, device, fractions)
