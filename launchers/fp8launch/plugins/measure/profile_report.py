"""Profiles in a run's log, for `parse`: the top kernels, how busy the GPU was, and where memory peaks.

A GPU that is idle waits for its host. A GPU that only communicates waits for other ranks, or for the network. In a
profile of several ranks, the slowest one has the longest kernels of its own; the other ranks wait for it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fp8launch.diagnostics import printable
from fp8launch.logs import ParsedLog
from fp8launch.report.run_report import ReportField
from fp8launch.report.steady_state import select_steady_state
from fp8launch.untyped import as_int, as_mapping, as_number

# Beyond this idle share of a usual step, a GPU is called host-bound.
HOST_BOUND = 0.2
_SHOWN = 10
_WIDTH = 80
_GIB = 2**30

# By tool and rank.
_Profiles = dict[tuple[str, int], dict[str, Any]]


def profile(logs: Sequence[ParsedLog]) -> ReportField | None:
    """Return the newest profile of each tool and rank: a list, ordered by tool and rank, and the slowest rank."""
    newest: _Profiles = {}
    said = [each for log in logs for each in log.evidence if each.kind in ("kernels", "profile")]
    if not said:
        return None
    kept = select_steady_state([(log, process) for log in logs for process in log.processes]).kept
    steps = [ms for ms in kept.column("step_time_ms") if ms > 0]
    step_ms = statistics.median(steps) if steps else None
    for evidence in said:
        if found := _profile(evidence.kind, evidence.data, step_ms):
            # nsys reports its kernels and its file in two lines.
            known = newest.get((found["tool"], found["rank"]), {})
            if known.get("iterations") == found["iterations"]:
                found = {**known, **{name: value for name, value in found.items() if value is not None}}
            newest[found["tool"], found["rank"]] = found
    if not newest:
        return None
    profiles = [newest[key] for key in sorted(newest)]
    slowest = _slowest(profiles)
    lines = list(_lines(profiles, slowest))
    return ReportField({"profiles": profiles, "slowest_rank": slowest}, tuple(lines))


def _profile(kind: str, data: Mapping[str, Any], step_ms: float | None) -> dict[str, Any] | None:
    """Return a line of the log as a profile, None if it is malformed.

    `step_ms` is the time of a step that was not profiled.
    """
    rank, first = as_int(data.get("rank")), as_int(data.get("iteration"))
    if rank is None or first is None:
        return None
    last = as_int(data.get("last_iteration"))
    found: dict[str, Any] = {
        "tool": _text(data.get("tool")) or "torch",
        "rank": rank,
        "iterations": [first, first if last is None else last],
        "file": _text(data.get("trace") or data.get("file")),
    }
    if "peak_allocated" in data:
        return found | _memory(data)
    wall, busy, waiting = (as_number(data.get(name)) for name in ("wall_ms", "busy_ms", "waiting_ms"))
    families = {
        str(name): as_number(as_mapping(of).get("ms")) or 0.0 for name, of in as_mapping(data.get("families")).items()
    }
    total = sum(families.values()) or as_number(data.get("total_ms")) or 0.0
    found |= {"wall_ms": wall, "gpu_ms": total if kind == "kernels" else None}
    if kind == "kernels" or "top" in data:
        found["families"] = {name: {"ms": ms, "share": _share(ms, total)} for name, ms in families.items()}
        found["top"] = list(_top(data.get("top"), total))
    if wall and busy is not None:
        idle = max(0.0, wall - busy) / wall
        # A profiler slows the host, but not the kernels.
        usual = wall if step_ms is None else min(wall, step_ms * (found["iterations"][1] - first + 1))
        usual_idle = max(0.0, usual - busy) / usual
        found |= {
            "busy_share": 1 - idle,
            "idle_share": idle,
            "idle_share_of_usual_step": usual_idle,
            "waiting_share": _share(waiting or 0.0, wall),
            "host_bound": usual_idle > HOST_BOUND,
        }
    return found


def _memory(data: Mapping[str, Any]) -> dict[str, Any]:
    live = []
    for group in _list(data.get("live")):
        where, size, blocks = _text(group.get("where")), as_number(group.get("bytes")), as_int(group.get("blocks"))
        if where is not None and size is not None:
            live.append({"where": where, "bytes": size, "blocks": blocks})
    return {
        "peak_allocated_bytes": as_number(data.get("peak_allocated")),
        "peak_reserved_bytes": as_number(data.get("peak_reserved")),
        "peak_iteration": as_int(data.get("peak_iteration")),
        "peak_part": _text(data.get("part")),
        "peak_layer": as_int(data.get("layer")),
        "peak_where": _text(data.get("where")),
        "live": live,
        "other_bytes": as_number(data.get("other_bytes")),
        "complete": bool(data.get("complete", True)),
    }


def _top(rows: object, total: float) -> Iterator[dict[str, Any]]:
    for row in _list(rows):
        ms, name = as_number(row.get("ms")), _text(row.get("name"))
        if ms is not None and name is not None:
            family, calls = _text(row.get("family")), as_int(row.get("count"))
            yield {"name": name, "family": family, "calls": calls, "ms": ms, "share": _share(ms, total)}


def _slowest(profiles: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the rank with the longest kernels of its own, if several ranks were profiled."""
    own = {}
    for each in profiles:
        if each.get("gpu_ms") is not None:
            communication = each["families"].get("communication", {"ms": 0.0})
            own[each["rank"]] = each["gpu_ms"] - communication["ms"]
    return max(own, key=lambda rank: own[rank]) if len(own) > 1 else None


def _lines(profiles: Sequence[Mapping[str, Any]], slowest: int | None) -> Iterator[str]:
    shown = slowest
    for each in profiles:
        first, last = each["iterations"]
        iterations = f"iterations {first}-{last}" if last > first else f"iteration {first}"
        yield f"profile of rank {each['rank']}, {iterations}, by {each['tool']}: {each['file'] or 'without a file'}"
        yield f"  {_state(each)}"
        if "live" in each:
            yield from _live(each)
        elif each.get("top") and shown in (None, each["rank"]):
            shown = each["rank"]
            yield from _table(each)
    if slowest is not None:
        yield f"slowest rank: {slowest}, by the time of its kernels without communication"


def _state(one: Mapping[str, Any]) -> str:
    if "peak_part" in one:
        return _peak(one)
    if "idle_share" in one:
        verdict = "host-bound" if one["host_bound"] else "not host-bound"
        idle, usual = f"{one['idle_share']:.0%}", f"{one['idle_share_of_usual_step']:.0%}"
        slowed = f" ({usual} of a usual step)" if usual != idle else ""
        text = f"GPU idle {idle}{slowed}, {verdict}"
        return text + (f"; only communicating {one['waiting_share']:.0%}" if one["waiting_share"] else "")
    if one.get("gpu_ms"):
        return f"{one['gpu_ms']:,.0f} ms of kernels in {one['wall_ms'] or 0:,.0f} ms"
    return f"{one['wall_ms'] or 0:,.0f} ms"


def _peak(one: Mapping[str, Any]) -> str:
    part = {"forward": "the forward pass", "backward": "the backward pass"}.get(one["peak_part"], one["peak_part"])
    if one["peak_layer"] is not None:
        part = f"{part} of layer {one['peak_layer']}"
    return f"peak {_gib(one['peak_allocated_bytes'])} allocated, {_gib(one['peak_reserved_bytes'])} reserved; in {part}"


def _gib(size: float | None) -> str:
    return "unknown" if size is None else f"{size / _GIB:.2f} GiB"


def _live(one: Mapping[str, Any]) -> Iterator[str]:
    if one["peak_where"]:
        yield _fitted("  reached in ", one["peak_where"])
    yield "        size  blocks  allocated at the peak by"
    for group in one["live"][:_SHOWN]:
        yield _fitted(f"  {_gib(group['bytes']):>10}  {group['blocks'] or 0:6}  ", group["where"])
    rest = sum(group["bytes"] for group in one["live"][_SHOWN:]) + (one["other_bytes"] or 0)
    if rest:
        yield f"  {_gib(rest):>10}          other code"
    if not one["complete"]:
        yield "  the history is full: earlier events are missing; profile fewer iterations"


def _table(one: Mapping[str, Any]) -> Iterator[str]:
    has_families = any(row["family"] for row in one["top"])
    title = "family         kernel" if has_families else "operator"
    yield f"   share        ms   calls  {title}"
    for row in one["top"][:_SHOWN]:
        family = f"{row['family'] or '':<13}  " if has_families else ""
        yield _fitted(
            f"  {row['share']:6.1%} {row['ms']:9,.1f} {row['calls'] or 0:7}  {family}",
            row["name"].removeprefix("void "),
        )


def _fitted(start: str, text: str) -> str:
    """Shorten a text in the middle, so that the line has at most 80 characters."""
    room = _WIDTH - len(start)
    if len(text) > room:
        end = room // 3
        text = f"{text[: room - end - 1]}…{text[-end:]}"
    return start + text


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def _text(value: object) -> str | None:
    return printable(" ".join(value.split())) if isinstance(value, str) and value.strip() else None


def _list(value: object) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []
