"""Evidence that the job itself prints, as lines of JSON.

probe     FP8 modules, from one rank of each model-parallel position after the first iteration (`injob/rank/probe.py`)
kernels   kernel families, from rank 0 after a profiled iteration
tensors   FP8 tensor statistics at regular iterations (the plugin `measure`)
sharding  how much of the weights and optimizer states each rank holds (the plugin `accelerate`)
node      the node, from its first process (`injob/rank/node_info.py`)
nodes     how long the forward pass takes on each node, from rank 0 (`injob/rank/forward_times.py`)
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from fp8launch.injob.supervisor.log_lines import bounded_int, clean, split_prefix

MARKER = b"fp8launch-"
EvidenceKind = Literal["probe", "kernels", "node", "tensors", "sharding", "nodes"]
_KINDS: Mapping[str, EvidenceKind] = {
    "fp8launch-probe": "probe",
    "fp8launch-kernels": "kernels",
    "fp8launch-node": "node",
    "fp8launch-nodes": "nodes",
    "fp8launch-tensors": "tensors",
    "fp8launch-sharding": "sharding",
}


@dataclass(frozen=True)
class Evidence:
    """`data` as printed; `offset` in bytes from the start of the log."""

    kind: EvidenceKind
    offset: int
    data: Mapping[str, object]


def of_kind(kind: EvidenceKind, evidence: Iterable[Evidence]) -> list[Evidence]:
    """Return the evidence of one kind."""
    return [one for one in evidence if one.kind == kind]


def parse_evidence(line: str, offset: int = 0) -> Evidence | None:
    """Return the evidence in a line; None for other lines and for incomplete ones."""
    _, text = split_prefix(clean(line))
    name, colon, rest = text.partition(": ")
    kind = _KINDS.get(name.strip())
    if kind is None or not colon:
        return None
    try:
        # Output of another rank may follow on the line.
        data, _ = json.JSONDecoder(parse_int=bounded_int).raw_decode(rest.strip())
    except (ValueError, RecursionError):
        return None
    if not isinstance(data, dict):
        return None
    return Evidence(kind, offset, data)
