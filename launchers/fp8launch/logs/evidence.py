"""What the job itself says, one line of JSON each: of FP8 (`train/probe.py`) from one rank of each model-parallel place
after the first iteration (`probe`), and from rank 0 after a profiled iteration (`kernels`); of its FP8 tensors
(`train/tensor_stats.py`) every so many iterations (`tensors`); of its nodes (`train/machine.py`) from the first process
of each (`node`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fp8launch.logs.lines import clean, split_prefix

MARKER = b"fp8launch-"
Kind = Literal["probe", "kernels", "node", "tensors"]
_KINDS: Mapping[str, Kind] = {"probe": "probe", "kernels": "kernels", "node": "node", "tensors": "tensors"}


@dataclass(frozen=True)
class Evidence:
    """`data` as printed; `offset` in bytes from the start of the log."""

    kind: Kind
    offset: int
    data: Mapping[str, object]


def parse_evidence(line: str, offset: int = 0) -> Evidence | None:
    """The evidence in a line; None for any other line, and for one that was torn."""
    _, text = split_prefix(clean(line))
    name, colon, rest = text.partition(": ")
    kind = _KINDS.get(name.strip().removeprefix(MARKER.decode())) if name.strip().startswith(MARKER.decode()) else None
    if kind is None or not colon:
        return None
    try:
        # Another rank's words may follow on the line.
        data, _ = json.JSONDecoder().raw_decode(rest.strip())
    except (ValueError, RecursionError):
        return None
    return Evidence(kind, offset, data) if isinstance(data, dict) else None
