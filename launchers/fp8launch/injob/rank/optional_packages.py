"""Packages that some of Megatron's settings import and that not every image contains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple


class Need(NamedTuple):
    """A setting, the module that it imports, and how to add that module to an image."""

    module: str
    setting: str
    reason: str
    install: str


EMERGING = ("muon", "dist_muon", "soap", "adaptive_muon", "lion")
_FROM_GIT = "pip install git+https://github.com/NVIDIA-NeMo/Emerging-Optimizers.git"
_DEEP_EP = "build https://github.com/deepseek-ai/DeepEP"
# The source archive on PyPI lacks the CUDA sources.
_HADAMARD = "pip install --no-build-isolation git+https://github.com/Dao-AILab/fast-hadamard-transform.git"
_SSM = "pip install --no-build-isolation mamba-ssm causal-conv1d"


def needs(value: Callable[[str], object]) -> Iterator[Need]:
    """Yield the packages that a run needs. `value` returns an argument by Megatron's attribute name, None if unset.

    Sources, in Megatron-Core 0.17 to 0.19: core/optimizer/emerging_optimizers.py, core/transformer/moe/fused_a2a.py,
    core/ssm/mamba_mixer.py, core/ssm/gated_delta_net and core/transformer/experimental_attention_variant/dsa.py.
    """
    optimizer = value("optimizer")
    if optimizer in EMERGING:
        yield Need("emerging_optimizers", "optimizer", f"optimizer {optimizer}", _FROM_GIT)
    if value("num_experts") and value("moe_token_dispatcher_type") == "flex":
        backend = "moe_flex_dispatcher_backend"
        if value(backend) in (None, "deepep"):
            yield Need("deep_ep", backend, "the deepep dispatcher", _DEEP_EP)
        elif value(backend) == "hybridep":
            yield Need("deep_ep", backend, "the hybridep dispatcher", f"{_DEEP_EP}, branch hybrid-ep")
    for name in ("hybrid_layer_pattern", "hybrid_override_pattern"):
        if "M" in str(value(name) or ""):
            yield Need("mamba_ssm", name, "a Mamba layer", _SSM)
            yield Need("causal_conv1d", name, "a Mamba layer", _SSM)
            break
    variant = "experimental_attention_variant"
    if value(variant) == "gated_delta_net":
        yield Need("fla", variant, "gated_delta_net attention", "pip install flash-linear-attention")
    elif value(variant) == "dsa" and value("dsa_indexer_rotate_activation") is not False:
        yield Need("fast_hadamard_transform", variant, "sparse attention (dsa)", _HADAMARD)
