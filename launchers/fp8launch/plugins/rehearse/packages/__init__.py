"""Stand-ins for compiled packages in the job's image that Megatron and Transformer Engine import.

They have the interfaces and shapes of the real packages but none of their kernels. `USED` names the ones that a
rehearsal called, so that its result can say what it did not check.
"""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from typing import Any

USED: dict[str, str] = {}
# The versions that stand-ins report to code that reads a package's metadata.
VERSIONS = {"emerging-optimizers": "0.5.0", "flash-attn": "2.8.3"}
MODULES = {
    "causal_conv1d": "causal_conv1d",
    "causal_conv1d.causal_conv1d_varlen": "causal_conv1d",
    "deep_ep": "deep_ep",
    "deep_ep.utils": "deep_ep",
    "emerging_optimizers": "emerging_optimizers",
    "emerging_optimizers.orthogonalized_optimizers": "emerging_optimizers",
    "emerging_optimizers.orthogonalized_optimizers.muon_utils": "emerging_optimizers",
    "emerging_optimizers.scalar_optimizers": "emerging_optimizers",
    "emerging_optimizers.soap": "emerging_optimizers",
    "fast_hadamard_transform": "fast_hadamard_transform",
    "fla": "fla",
    "fla.modules.convolution": "fla",
    "fla.modules.l2norm": "fla",
    "fla.ops.gated_delta_rule": "fla",
    "flash_attn": "flash_attn",
    "flash_attn.flash_attn_interface": "flash_attn",
    "flash_attn_2_cuda": "flash_attn",
    "mamba_ssm": "mamba_ssm",
    "mamba_ssm.ops.triton.layernorm_gated": "mamba_ssm",
    "mamba_ssm.ops.triton.ssd_combined": "mamba_ssm",
}


def install() -> None:
    """Install the stand-ins for packages that are missing."""
    for name, stand_in in MODULES.items():
        root = name.split(".")[0]
        if root in sys.modules or importlib.util.find_spec(root) is None:
            sys.modules[name] = importlib.import_module(f"fp8launch.plugins.rehearse.packages.{stand_in}")
    original = importlib.metadata.version

    def version(distribution_name: str) -> str:
        if distribution_name in VERSIONS:
            return VERSIONS[distribution_name]
        return original(distribution_name)

    importlib.metadata.version = version


def used(package: str, what: str) -> None:
    """Record that a rehearsal called kernels that do not run."""
    USED[package] = what


def stated(*tensors: Any) -> list[Any]:
    """Return the arguments that are not None."""
    return [tensor for tensor in tensors if tensor is not None]


def rows(tensor: Any, number: int) -> Any:
    """Return `number` rows of a tensor, repeated as often as needed."""
    import torch

    if tensor.shape[0] == 0:
        return tensor.new_zeros((number, *tensor.shape[1:]))
    return tensor[torch.arange(number, device=tensor.device) % tensor.shape[0]]
