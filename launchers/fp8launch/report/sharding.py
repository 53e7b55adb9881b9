"""Are weights and optimizer states divided among the ranks, as asked? From the elements that each rank holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

NOT_PARTITIONED = "not-partitioned"
TITLES = {
    "ddp": "DDP",
    "fsdp2": "FSDP2",
    "zero1": "ZeRO 1",
    "zero2": "ZeRO 2",
    "zero3": "ZeRO 3",
}
# States that each of them divides among the ranks: name in the evidence, name for people.
_DIVIDES: Mapping[str, Mapping[str, str]] = {
    "ddp": {},
    "zero1": {"optimizer_elements": "optimizer states"},
    "zero2": {"optimizer_elements": "optimizer states"},
    "zero3": {"optimizer_elements": "optimizer states", "weight_elements": "weights"},
    "fsdp2": {"optimizer_elements": "optimizer states", "weight_elements": "weights"},
}


@dataclass(frozen=True)
class Sharding:
    """A summary of the evidence, and whether it contradicts the request."""

    text: str
    refuted: bool


def judge_sharding(data: Mapping[str, object]) -> Sharding | None:
    """Judge one line of evidence; None if it is incomplete, as that of another program may be."""
    asked, in_effect, total = str(data.get("asked")), str(data.get("in_effect")), data.get("parameters")
    if asked not in _DIVIDES or not isinstance(total, int) or total < 1:
        return None
    effective = TITLES.get(in_effect, "no sharding")
    for name, what in _DIVIDES[asked].items():
        held = _counts(data.get(name))
        if not held:
            return None
        if not _is_divided(held, total):
            whole = f"{what} are not partitioned: each rank holds {max(held)} of {total} elements"
            return Sharding(f"asked for {TITLES[asked]}, {whole}; {effective} is in effect", True)
    if in_effect != asked:
        return Sharding(f"asked for {TITLES[asked]}, but {effective} is in effect", True)
    held = _counts(data.get("optimizer_elements"))
    if not held:
        return None
    on_one = " (one rank: there is nothing to divide)" if len(held) == 1 and _DIVIDES[asked] else ""
    return Sharding(
        f"{effective} is in effect: each rank holds {max(held)} of {total} elements of the optimizer states{on_one}",
        False,
    )


def _is_divided(held: Sequence[int], total: int) -> bool:
    """Whether the ranks hold parts. Parts are padded: a part may be up to half-way to the whole."""
    return len(held) == 1 or max(held) < (total + total / len(held)) / 2


def _counts(value: object) -> list[int]:
    """A list of counts; empty for anything else."""
    if not isinstance(value, list) or not all(isinstance(each, int) and each >= 0 for each in value):
        return []
    return value if any(value) else []
