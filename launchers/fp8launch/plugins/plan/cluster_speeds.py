"""The speeds of a cluster: the links that its profile states, and the rates measured on its own GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from fp8launch.cluster.profile import Cluster
from fp8launch.hardware.gpus import Gpu
from fp8launch.plugins.plan.calibration import Calibration, Correction, cluster_name, corrections, stored_rates
from fp8launch.plugins.plan.speeds import DEVICES, Links, Speeds, speeds


def corrected(known: Speeds, found: Iterable[Correction]) -> Speeds:
    """Return speeds with these corrections."""
    factors = {one.group: one.factor for one in found if one.factor is not None}
    fractions = known.fractions
    gemm = {}
    for recipe, fraction in fractions.gemm.items():
        group = "gemm bf16" if recipe == "bf16" else "gemm fp8"
        if recipe != "nvfp4":  # its products were not measured
            fraction *= factors.get(group, 1.0)
        gemm[recipe] = fraction
    attention = factors.get("attention", 1.0)
    fractions = replace(
        fractions,
        gemm=gemm,
        attention=fractions.attention * attention,
        attention_fp8=fractions.attention_fp8 * attention,
        memory=fractions.memory * factors.get("memory", 1.0),
    )
    device = known.device
    if "host" in factors:
        own = device.host.slower(1 / factors["host"])
        device = replace(device, host=own, slow_host=own)  # this host is known
    return replace(known, fractions=fractions, device=device)


def cluster_speeds(
    gpu: Gpu, gpus: int, cluster: Cluster | None, say: Callable[[str], None] | None = None
) -> Speeds | None:
    """Return the speeds of a number of GPUs of a cluster, None for a CPU.

    Without a cluster, return the speeds of NVIDIA's reference system. `say` receives a note if the network is assumed.
    """
    reference = DEVICES.get(gpu.name)
    if cluster is None or reference is None:
        return speeds(gpu)
    known = speeds(gpu, _links(reference.links, gpus, cluster, say))
    assert known is not None  # it has a reference
    if rates := stored_rates(cluster, gpu):
        found = Calibration(cluster_name(cluster), rates, tuple(corrections(rates, gpu)))
        known = replace(corrected(known, found.corrections), calibration=found)
    return known


def _links(reference: Links, gpus: int, cluster: Cluster, say: Callable[[str], None] | None) -> Links:
    """Return the cluster's links. What its profile does not state comes from NVIDIA's reference system."""
    if cluster.network is None:
        if gpus > reference.domain and say is not None:
            say(
                f"the cluster profile has no `network`: assuming {reference.network * 8:g} Gbit/s per GPU and NVLink "
                f"domains of {reference.domain} GPUs, as in NVIDIA's reference system"
            )
        return reference
    stated = cluster.network
    network = (stated.gbit_per_gpu or 0) / 8 or reference.network
    return Links(reference.nvlink, network, stated.nvlink_domain or reference.domain)
