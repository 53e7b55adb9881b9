"""What Megatron's CUDA graphs capture of a layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# One setting, renamed twice: 0.17 has the second; from 0.18 on that spelling sets the third.
_NAMES = ("cuda_graph_modules", "cuda_graph_scope", "cuda_graph_scope_deprecated")
_WHOLE_LAYER = "full"


def graph_modules(attributes: Mapping[str, Any]) -> frozenset[str]:
    """Return the captured modules, such as "attn" and "moe_router"; none stands for whole layers.

    `attributes` are arguments by Megatron's attribute name.
    """
    stated = next((attributes[name] for name in _NAMES if attributes.get(name)), ())
    if isinstance(stated, str):
        stated = [stated]
    elif not isinstance(stated, (list, tuple)):
        stated = []
    return frozenset(str(getattr(module, "name", module)) for module in stated) - {_WHOLE_LAYER}
