"""Evidence that the job itself prints, as lines of JSON.

probe     FP8 modules, from one rank of each model-parallel position after the first iteration (`injob/rank/probe.py`)
kernels   kernel families, from each profiled rank after its iterations (the plugin `measure`)
profile   other profiles and their files (the plugin `measure`)
tensors   FP8 tensor statistics at regular iterations (the plugin `measure`)
sharding  how much of the weights and optimizer states each rank holds (the plugin `accelerate`)
node      the node, from its first process (`injob/rank/node_info.py`)
nodes     how long the forward pass takes on each node, from rank 0 (`injob/rank/forward_times.py`)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, cast, get_args

from fp8launch.injob.supervisor.log_lines import clean, json_object

MARKER = b"fp8launch-"
EvidenceKind = Literal["probe", "kernels", "node", "profile", "tensors", "sharding", "nodes"]
_BEGINNING = re.compile(f"{MARKER.decode()}({'|'.join(get_args(EvidenceKind))}): (?={{)")


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
    """Return the evidence in a line; None for other lines and for incomplete ones.

    Output of other ranks may surround it: they write to the same file, and Python writes a line and its end separately.
    """
    text = clean(line)
    found = _BEGINNING.search(text)
    if found is None:
        return None
    data = json_object(text, found.end())
    if data is None:
        return None
    return Evidence(cast(EvidenceKind, found[1]), offset, data)
