"""Real speeds of GPUs, links and hosts: the parameters of the speed model.

Two kinds of numbers. Data sheet values belong to one GPU type: bandwidth of memory, of NVLink and of the network card
of NVIDIA's reference systems, and GPUs per NVLink domain (https://www.nvidia.com/en-us/data-center/: A100, H100, H200,
DGX B200 and B300, GB200, GB300 and Vera Rubin NVL72). Achieved fractions belong to an architecture, Hopper or
Blackwell, and are the same for every model and layout. Comments name the sources of values that were measured directly;
`benchmarks/plan` calibrates all others and measures the errors of predictions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from fp8launch.hardware.gpus import Gpu
from fp8launch.hardware.quantization import quantization_recipes

if TYPE_CHECKING:
    from fp8launch.plugins.plan.calibration import Calibration


@dataclass(frozen=True)
class Links:
    """Links of one GPU in GB/s per direction: NVLink within a domain of `domain` GPUs, and the network beyond it."""

    nvlink: float
    network: float
    domain: int


@dataclass(frozen=True)
class Host:
    """Time that a host takes to launch kernels, relative to the x86 host of the H200 measurements.

    `python` scales everything that Python launches, `experts` the loops over experts that Transformer Engine runs in
    C++. A slow CPU core affects Python much more.
    """

    python: float = 1.0
    experts: float = 1.0

    def slower(self, factor: float) -> Host:
        """Return a host whose Python takes `factor` times as long.

        The loops over experts take the square root of it as long: over five hosts the exponent is 0.48
        (benchmarks/plan/host_bound.md).
        """
        return Host(self.python * factor, self.experts * math.sqrt(factor))


# The slowest host measured: a virtual machine with two H100 and 32 cores (benchmarks/plan/host_bound.md).
SLOW_X86 = Host(python=3.0, experts=1.1)
GRACE = Host(python=1.3, experts=1.0)
# Hosts of published results on H100, B200 and B300: Python from Qwen3 30B-A3B on 16 H100, experts from all layouts with
# experts that wait for the host and were not held out (benchmarks/plan/accuracy.md).
DGX = Host(python=0.85, experts=0.75)


@dataclass(frozen=True)
class Device:
    """A GPU type.

    `memory` is in TB/s. `clock` is the share of the boost clock that long matrix products sustain within the power
    limit, relative to H200. `host` is the host of the published runs, `slow_host` the slowest host measured.
    `host_link` is in GB/s per direction between a GPU and its host's memory.
    """

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
    core of attention in the limit of long sequences; at `attention_half` tokens under a causal mask half of it is left.
    `memory` and `nvlink` are fractions of the bandwidths. `contention` is the share of overlapped
    communication that lengthens the step anyway, because it uses multiprocessors and bandwidth.
    """

    gemm: Mapping[str, float]
    attention: float
    attention_fp8: float
    attention_half: float
    memory: float
    nvlink: float
    contention: float


@dataclass(frozen=True)
class Software:
    """Overheads of Megatron-Core 0.19, Transformer Engine 2.20 and mamba-ssm 2.3, the same on every GPU.

    `permutation` is the time of a pass that orders tokens by expert, relative to a copy. Other passes are reads or
    writes of a whole bf16 tensor: `ring` of a rank's queries in a round of ring attention, `biased_activation` of the
    experts' first product where biases and a clamp keep Megatron from fusing the activation. `independent_tokens` is
    how many tokens choose their experts independently in a micro batch of a trained router without forced balance: the
    loads of experts vary as much as if there were no others. `independent_at_first` is the same for a router in its
    first iterations. `tp_overlapped` is the share of tensor parallel communication that `tp_comm_overlap` leaves
    exposed, `tp_overlapped_pair` the same for two ranks, `experts_overlapped` what the overlap of expert communication
    leaves of it over the network: its kernels keep multiprocessors while they wait. `scan` is the time of Mamba's
    kernels relative to the time of their traffic: they are many, small, and wait for one another. `scale` is the share
    by which a step slows down for each doubling of its GPUs beyond a node, `scale_delayed` what delayed scaling adds:
    it reduces the largest values over all ranks. `network` is the fraction of a network card's bandwidth that
    collectives reach, `pair` what a transfer between two GPUs reaches: a pipeline's next stage or a ring's next rank.
    `kernel` is the seconds that any kernel takes in addition to its FLOPs and traffic. `fuses_latent` is whether
    Blackwell trains with fused latent attention.

    Times of the host are seconds for a layer's forward and backward pass; `launch_forward` is the forward pass's share
    of them. A dense layer takes `launch`, plus `launch_quantized` by its precision, plus `launch_gathered` if
    parameters are gathered in FP8 or FP4: PyTorch dispatches every operation on such a weight in Python. Experts take
    `launch_routing` before the routing and `launch_dispatch` after it, and `launch_expert` for each local expert by its
    precision, because every expert's inputs are quantized by separate kernels. If all experts are local, no host waits
    for another's tokens, and they take `launch_alone` of that time. `launch_overlapped` is the time of all launches
    relative to these if expert communication is overlapped: Python launches a layer in parts, which wait for events of
    two streams and run their own backward passes.
    """

    permutation: float = 1.25
    ring: float = 25.0
    biased_activation: float = 66.0
    # Free routing of Mixtral 8x22B is 4 % slower than balanced routing.
    independent_tokens: float = 800.0
    # Four layers with 8 experts, 2 for a token, in their first iterations on two and four H200: nearly all tokens
    # choose the same experts.
    independent_at_first: float = 0.5
    # Median of series of the same layout from 8 to 2304 H100 (benchmarks/plan/accuracy.md).
    scale: float = 0.004
    scale_delayed: float = 0.004
    tp_overlapped: float = 0.3
    # Measured on two H100 (benchmarks/h200/layouts.md). With it, the median error of 34 published layouts with TP 2
    # falls from 5.3 to 4.0 %.
    tp_overlapped_pair: float = 0.83
    # Qwen3 30B-A3B in bf16 on 16 H100 gains 18 % by the overlap (docs/training/moe-optimization.md of Megatron-Bridge),
    # Qwen3 235B-A22B on 256 H100 11 %.
    experts_overlapped: float = 0.55
    # H100, B200 and GB200 have ConnectX-7 cards of 400 Gbit/s, B300 and GB300 ConnectX-8 of 800 Gbit/s.
    network: Mapping[str, float] = field(default_factory=lambda: {"connectx7": 0.65, "connectx8": 0.47})
    # NCCL sends to one rank over few channels in small chunks. NVIDIA enlarges the chunks of some pipelines with
    # NCCL_P2P_NET_CHUNKSIZE (scripts/performance/perf_plugins.py of Megatron-Bridge).
    pair: float = 0.47
    kernel: float = 2.0e-6
    # Since Transformer Engine 2.5 and cuDNN 9.11 (fused_attn.cpp). FlashAttention 2 takes other wide heads, but none
    # whose values are narrower than their keys.
    fuses_latent: bool = True
    launch: float = 2.0e-3
    # 3B on one and two H100: benchmarks/plan/host_bound.md. MXFP8 and NVFP4 were not measured.
    launch_quantized: Mapping[str, float] = field(
        default_factory=lambda: {
            "delayed": 0.15e-3,
            "blockwise": 0.6e-3,
            "tensorwise": 0.6e-3,
            "mxfp8": 0.8e-3,
            "nvfp4": 0.8e-3,
        }
    )
    launch_gathered: float = 0.25e-3
    launch_routing: float = 2.3e-3
    launch_dispatch: float = 3.0e-3
    # Between Qwen3 30B-A3B in bf16 on 16 H100 (1.1; docs/training/moe-optimization.md of Megatron-Bridge) and Qwen3
    # 235B-A22B on 256 B300 in NeMo 26.02, which also delays weight gradients (1.5).
    launch_overlapped: float = 1.3
    # Six layers of Qwen3 30B-A3B on one GPU in bf16: benchmarks/h200, `2026-11-23-tuned-one`.
    launch_alone: float = 0.52
    launch_forward: float = 0.45
    # 12 layers of Qwen3 30B-A3B with 64 experts a GPU: benchmarks/h200, `2026-11-23-pairs`. MXFP8 and NVFP4 were not
    # measured: as in blockwise scaling, one kernel quantizes a tensor for all three products.
    launch_expert: Mapping[str, float] = field(
        default_factory=lambda: {
            "bf16": 0.27e-3,
            "delayed": 0.405e-3,
            "blockwise": 0.435e-3,
            "tensorwise": 0.60e-3,
            "mxfp8": 0.435e-3,
            "nvfp4": 0.435e-3,
        }
    )
    scan: float = 3.1


DEVICES: Mapping[str, Device] = {
    "a100": Device(2.04, Links(300, 25, 8), 1.0, host_link=32),
    "h100": Device(3.35, Links(450, 50, 8), 1.09, host=DGX),
    "h200": Device(4.8, Links(450, 50, 8), 1.0),
    "b200": Device(8.0, Links(900, 50, 8), 1.02, host=DGX),
    "b300": Device(8.0, Links(900, 100, 8), 1.025, host=DGX),
    # Two GPUs share the 450 GB/s in each direction of their Grace's NVLink-C2C.
    "gb200": Device(8.0, Links(900, 50, 72), 1.0, host=GRACE, slow_host=GRACE, host_link=225),
    "gb300": Device(8.0, Links(900, 100, 72), 1.34, host=GRACE, slow_host=GRACE, host_link=225),
    # Never measured. Memory, NVLink and Vera Rubin's links are NVIDIA's preliminary figures: two network cards of
    # 800 Gb/s a GPU, and 1.8 TB/s of NVLink-C2C in both directions together, which the two GPUs of a Vera share.
    # Assumed, no public source found: Grace's times for Vera, and Vera Rubin's network for HGX Rubin NVL8.
    "vr200": Device(22.0, Links(1800, 200, 72), 1.0, host=GRACE, slow_host=GRACE, host_link=450),
    "r100": Device(22.0, Links(1800, 200, 8), 1.0),
}

# Fraction of the bandwidth of a link to the host that copies from the GPU achieve: 297 of 450 GB/s on GH200 (375 to the
# GPU; Schieffer et al., "Harnessing Integrated CPU-GPU System Memory for HPC", 2024). Assumed for PCIe as well.
COPIES = 0.66
# Least GB/s of a link over which `plan` offloads activations. NVIDIA published such runs for Grace's NVLink-C2C only.
FAST_HOST_LINK = 100.0

# GB/s of a network card of 400 Gbit/s.
CONNECTX7 = 50.0

# Sustained clock that the power limit allows, relative to H200 or GB200: watts per peak (700 of H100 and H200, 1000 of
# B200, 1100 of B300, 1200 of GB200, 1400 of GB300; NVIDIA data sheets). Calibrated clocks start from it.
POWER_CLOCK: Mapping[str, float] = {
    "a100": 1.0,
    "h100": 1.0,
    "h200": 1.0,
    "b200": 0.91,
    "b300": 1.0,
    "gb200": 1.0,
    "gb300": 1.17,
    "vr200": 1.0,
    "r100": 1.0,
}

HOPPER = Fractions(
    gemm={
        "bf16": 0.76,
        "tensorwise": 0.71,
        "delayed": 0.73,
        # 2604 ms of kernels where delayed scaling has 2105: benchmarks/h200, `2026-11-21-tune2`.
        "blockwise": 0.58,
    },
    # Measured separately: cuDNN at 8192 tokens 0.48 on H200, FlashAttention 3 0.57 (benchmarks/h200/tuning.md); cuDNN
    # from 1024 to 131072 tokens on H100 (benchmarks/plan/attention.md).
    attention=0.60,
    attention_fp8=0.25,
    attention_half=1100,
    # Quantization and norms of Llama-3 8B on H200: 253 and 60 ms for 256 layers.
    memory=0.75,
    nvlink=0.45,
    contention=0.25,
)

BLACKWELL = Fractions(
    gemm={
        "bf16": 0.63,
        "tensorwise": 0.65,
        "delayed": 0.65,
        # Not measured; Blackwell emulates it with MXFP8 instructions.
        "blockwise": 0.50,
        "mxfp8": 0.59,
        "nvfp4": 0.62,
    },
    # FlashAttention 4 reaches 0.71 of the peak in the forward pass at most, 1.3 times cuDNN 9.13 (arXiv 2603.05451).
    attention=0.57,
    attention_fp8=0.29,
    attention_half=2300,
    memory=0.70,
    nvlink=0.60,
    contention=0.25,
)


@dataclass(frozen=True)
class Speeds:
    """The speed of one GPU as rates in FLOP/s and bytes/s.

    `calibration` is what the rates owe to measurements on a cluster's own GPUs.
    """

    gpu: Gpu
    device: Device
    fractions: Fractions
    software: Software = Software()
    calibration: Calibration | None = None

    # A search reads rates hundreds of thousands of times.
    @cached_property
    def _gemm(self) -> dict[str, float]:
        return {}

    def gemm(self, recipe: str) -> float:
        """Return the FLOP/s of large matrix products in a quantization recipe or bf16."""
        if recipe not in self._gemm:
            self._gemm[recipe] = self._gemm_rate(recipe)
        return self._gemm[recipe]

    def _gemm_rate(self, recipe: str) -> float:
        peak = self.gpu.bf16
        if recipe in quantization_recipes():
            peak = self.gpu.peak(quantization_recipes()[recipe].operands)
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

    @cached_property
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

    @cached_property
    def network(self) -> float:
        """Bytes/s of one GPU's share of the network."""
        card = "connectx7" if self.device.links.network <= CONNECTX7 else "connectx8"
        return self.device.links.network * 1e9 * self.software.network[card]

    @cached_property
    def pair(self) -> float:
        """Bytes/s between two GPUs over the network."""
        return self.device.links.network * 1e9 * self.software.pair


def speeds(gpu: Gpu, links: Links | None = None) -> Speeds | None:
    """Return the speeds of a GPU type, None for a CPU. `links` default to NVIDIA's reference system."""
    device = DEVICES.get(gpu.name)
    if device is None:
        return None
    if links is not None:
        device = replace(device, links=links)
    fractions = HOPPER
    if gpu.capability >= (10, 0):
        fractions = BLACKWELL
    return Speeds(gpu, device, fractions)
