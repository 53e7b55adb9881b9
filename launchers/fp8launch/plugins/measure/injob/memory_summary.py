"""Where GPU memory peaks: from PyTorch's history of its allocator (`torch.cuda.memory._snapshot`).

The history has a bounded number of events, the oldest of which may be missing. So totals are counted backward from the
memory allocated at its end. Sizes are allocator blocks, which are multiples of 512 bytes.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

MOST_GROUPS = 20
_BLOCK = 512
_PACKAGES = re.compile(r"(?:^|/)((?:megatron|transformer_engine|fp8launch)/.+)")
# The outermost frame of the main thread. PyTorch runs the backward pass in threads of its own.
_MAIN = "<module>"
_NOT_KNOWN = "allocated before the recording"
_NO_FRAME = "PyTorch's backward pass (no Python code)"


class Mark(NamedTuple):
    """From this time on (microseconds since 1970), an iteration or the forward pass of a layer runs."""

    time_us: int
    iteration: int
    layer: int | None


@dataclass(frozen=True)
class Peak:
    """The largest allocation, after the event at `position` of the history; -1 is the beginning of the history."""

    position: int
    allocated: int
    reserved: int


def find_peak(events: Sequence[Mapping[str, Any]], allocated: int, reserved: int) -> Peak:
    """Return the peak of a history that ends with these allocated and reserved bytes."""
    best, best_at, most_reserved = allocated, len(events) - 1, reserved
    for position in range(len(events) - 1, -1, -1):
        action, size = events[position]["action"], events[position]["size"]
        if action == "alloc":
            allocated -= rounded(size)
        elif action == "free_requested":
            allocated += rounded(size)
        elif action in ("segment_alloc", "segment_map"):
            reserved -= size
        elif action in ("segment_free", "segment_unmap"):
            reserved += size
        most_reserved = max(most_reserved, reserved)
        # The first event with the highest total decides.
        if allocated >= best:
            best, best_at = allocated, position - 1
    return Peak(best_at, best, most_reserved)


def rounded(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK


def live_at(
    events: Sequence[Mapping[str, Any]], blocks: Iterable[Mapping[str, Any]], position: int
) -> list[tuple[int, Sequence[Mapping[str, Any]] | None]]:
    """Return size and frames of every block that is allocated after the event at `position`.

    `blocks` are allocated at the end of the history. Frames are None for a block from before the recording.
    """
    live: dict[int, tuple[int, Any]] = {}
    for event in events[: position + 1]:
        if event["action"] == "alloc":
            live[event["addr"]] = rounded(event["size"]), event.get("frames") or ()
        elif event["action"] == "free_requested":
            live.pop(event["addr"], None)
    later = set()
    for event in events[position + 1 :]:
        if event["action"] == "alloc":
            later.add(event["addr"])
        elif event["action"] == "free_requested" and event["addr"] not in later:
            live.setdefault(event["addr"], (rounded(event["size"]), None))
            later.add(event["addr"])
    for block in blocks:
        if block["address"] not in later:
            live.setdefault(block["address"], (block["size"], block.get("frames") or None))
    return list(live.values())


def owner(frames: Sequence[Mapping[str, Any]] | None) -> str:
    """Name the line that made an allocation, `FILE:LINE FUNCTION`: the innermost of Megatron or Transformer Engine."""
    if frames is None:
        return _NOT_KNOWN
    named = ""
    for frame in frames:  # the innermost comes first
        text = f"{frame['line']} {frame['name']}"
        if found := _PACKAGES.search(frame["filename"]):
            return f"{found[1]}:{text}"
        if not named and frame["filename"].endswith(".py"):
            folders = frame["filename"].rpartition("site-packages/")[2].split("/")
            named = f"{'/'.join(folders[-3:])}:{text}"
    return named or _NO_FRAME


def groups(live: Iterable[tuple[int, Sequence[Mapping[str, Any]] | None]]) -> list[dict[str, Any]]:
    """Add up blocks by the line that made them, largest first."""
    found: dict[str, list[int]] = {}
    for size, frames in live:
        found.setdefault(owner(frames), []).append(size)
    ordered = sorted(found, key=lambda name: -sum(found[name]))
    return [{"where": name, "bytes": sum(found[name]), "blocks": len(found[name])} for name in ordered]


def moment(event: Mapping[str, Any] | None, marks: Sequence[Mark]) -> dict[str, Any]:
    """Return iteration, part, layer and line of code of an allocation. Only the forward pass has a layer."""
    if event is None:
        return {"peak_iteration": None, "part": "before the recorded history", "layer": None, "where": None}
    frames = event.get("frames") or ()
    names = {frame["name"] for frame in frames}
    position = bisect_right(marks, event["time_us"], key=lambda mark: mark.time_us)
    mark = marks[position - 1] if position else Mark(0, 0, None)
    part, layer = "other", None
    if any("optimizer" in frame["filename"] for frame in frames):
        part = "optimizer"
    elif _MAIN not in names:
        part = "backward"
    elif not names.isdisjoint(("forward", "forward_step")):
        part, layer = "forward", mark.layer
    return {"peak_iteration": mark.iteration or None, "part": part, "layer": layer, "where": owner(frames)}


def summary(snapshot: Mapping[str, Any], device: int, marks: Sequence[Mark], most_events: int) -> dict[str, Any]:
    """Return the peak of a device's memory: bytes, moment, and the largest groups of live allocations."""
    events = snapshot["device_traces"][device]
    segments = [segment for segment in snapshot["segments"] if segment["device"] == device]
    blocks = []
    for segment in segments:
        blocks += [block for block in segment["blocks"] if block["state"] == "active_allocated"]
    allocated = sum(block["size"] for block in blocks)
    peak = find_peak(events, allocated, sum(segment["total_size"] for segment in segments))
    live = groups(live_at(events, blocks, peak.position))
    return {
        "peak_allocated": peak.allocated,
        "peak_reserved": peak.reserved,
        "allocated_at_end": allocated,
        **moment(events[peak.position] if peak.position >= 0 else None, marks),
        "live": live[:MOST_GROUPS],
        "other_bytes": sum(group["bytes"] for group in live[MOST_GROUPS:]),
        "events": len(events),
        "complete": len(events) < most_events,
    }
