"""Which node slows a training down, from how long the model's forward pass takes on each node.

In synchronous training every rank has the same step time, because all wait for the slowest one. The forward pass
includes little or no waiting, so it shows which rank is late. The ranks print it (`rank/forward_times.py`):
`fp8launch-nodes: {"v":1,"first":11,"last":20,"forward_ms":{"node1":12.31,"node2":30.87}}`.

Nodes may hold different stages of a pipeline, so each node is compared with itself before the slowdown, and then with
the other nodes.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

NODE_TIMES = "fp8launch-nodes: "
# The line of the log with which the supervisor asks a training to leave a slow node.
LEAVE = "fp8launch: slow-node: "
# Measurements that are needed, and the most that are used, on either side of the slowdown: the nearest.
_FEWEST, _MOST = 6, 100
# The node must account for this share of the increase in step time, and no other node may have slowed by this share of
# it: otherwise the cause is a shared one.
_OWN_SHARE = 0.5
# The medians before and after must differ by this many standard errors, and in this share of all pairs the later
# measurement must be larger: on a shared machine a few measurements prove nothing.
_ERRORS, _ABOVE = 5.0, 0.8
_LONGEST_MS = 1e12
# Becomes an argument of Slurm's commands.
_NODE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,254}\Z")
# The job gives up a node only after this many measurements, or seconds, of slow steps.
_LASTING, _LASTING_S = 30, 300.0


@dataclass(frozen=True)
class NodeTimes:
    """The mean forward pass of a micro batch in iterations `first` to `last`, in ms, on the slowest rank of each
    node."""

    first: int
    last: int
    forward_ms: Mapping[str, float]

    @classmethod
    def of_json(cls, data: Mapping[str, Any]) -> NodeTimes | None:
        """Return a measurement as printed in a log; None for anything else."""
        first, last, stated = data.get("first"), data.get("last"), data.get("forward_ms")
        if not isinstance(first, int) or not isinstance(last, int) or not isinstance(stated, dict):
            return None
        times = {}
        for node, ms in stated.items():
            is_number = isinstance(ms, (int, float)) and not isinstance(ms, bool)
            if is_number and 0 < ms < _LONGEST_MS and _NODE.match(node):
                times[node] = float(ms)
        return cls(first, last, times)


def node_times_in(line: str) -> NodeTimes | None:
    """Return the measurement in a line of the log; None if there is none."""
    _, found, text = line.partition(NODE_TIMES)
    if not found:
        return None
    try:
        data, _ = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return None
    return NodeTimes.of_json(data) if isinstance(data, dict) else None


class SlowNode(NamedTuple):
    """A node that slows the training from iteration `first` to `last`.

    Steps take `step_ms`, `step_factor` times as long as before. The forward pass takes `factor` times as long on this
    node, and on `others` other nodes `others_factor` times (the median). `measurements` counts those before and after.
    """

    node: str
    step_ms: float
    step_factor: float
    factor: float
    others: int
    others_factor: float
    first: int
    last: int
    measurements: tuple[int, int]

    @property
    def sentence(self) -> str:
        others = "the other node" if self.others == 1 else f"the {self.others} other nodes"
        return (
            f"{self.node} slows the run from iteration {self.first} on: steps take {self.step_factor:.2f} times as "
            f"long as before, and the forward pass {self.factor:.2f} times on {self.node}, "
            f"{self.others_factor:.2f} times on {others}"
        )

    def as_json(self) -> dict[str, Any]:
        record = self._asdict()
        for name in ("step_factor", "factor", "others_factor"):
            record[name] = round(record[name], 3)
        return {**record, "step_ms": round(self.step_ms, 1), "measurements": list(self.measurements)}

    @classmethod
    def of_json(cls, data: Any) -> SlowNode | None:
        """Return the record of a slow node, None for anything else: others may write to a log."""
        kinds = (str, float, float, float, int, float, int, int)
        try:
            before, after = data["measurements"]
            values = [kind(data[name]) for kind, name in zip(kinds, cls._fields)]  # noqa: B905 (Python 3.7)
            found = cls._make([*values, (int(before), int(after))])
        except (KeyError, TypeError, ValueError, OverflowError):
            return None
        numbers = (found.step_ms, found.step_factor, found.factor, found.others_factor)
        return found if _NODE.match(found.node) and all(map(math.isfinite, numbers)) else None


def find_slow_node(
    times: Sequence[NodeTimes], begin: int, before_ms: float, after_ms: float, least: float
) -> SlowNode | None:
    """Return the node to which an increase of the step time is due; None if it is no single node.

    Steps take `after_ms` from iteration `begin` on, and `before_ms` before it. A forward pass that became slower by
    less than the fraction `least`, relative to the other nodes, is within the usual.
    """
    before = [one for one in times if one.last < begin][-_MOST:]
    after = [one for one in times if one.first >= begin][-_MOST:]
    if len(before) < _FEWEST or len(after) < _FEWEST:
        return None
    nodes = set.intersection(*(set(one.forward_ms) for one in before + after))
    if len(nodes) < 2:
        return None
    growth = {}
    for node in nodes:
        now = statistics.median([one.forward_ms[node] for one in after])
        growth[node] = now / statistics.median([one.forward_ms[node] for one in before])
    slowest = max(sorted(nodes), key=growth.__getitem__)
    others = [growth[node] for node in nodes if node != slowest]
    usual = statistics.median(others)
    excess = growth[slowest] / usual - 1
    step_factor = after_ms / before_ms
    # Compared with the other nodes, which may all be faster now, and with the node itself before.
    if min(excess, growth[slowest] - 1) < max(least, _OWN_SHARE * (step_factor - 1)):
        return None
    if max(others) / usual - 1 > _OWN_SHARE * excess:
        return None
    if not _separate(_relative(before, slowest, nodes), _relative(after, slowest, nodes)):
        return None
    counts = (len(before), len(after))
    return SlowNode(slowest, after_ms, step_factor, growth[slowest], len(others), usual, begin, after[-1].last, counts)


def _relative(times: Sequence[NodeTimes], node: str, nodes: set[str]) -> list[float]:
    """Return a node's time relative to the others' median in each measurement, so that common slowdowns cancel out."""
    return [
        one.forward_ms[node] / statistics.median([one.forward_ms[other] for other in nodes if other != node])
        for one in times
    ]


def _separate(before: Sequence[float], after: Sequence[float]) -> bool:
    """Return whether `after` is above `before` beyond their spread."""
    rise = statistics.median(after) - statistics.median(before)
    if rise < _ERRORS * math.hypot(_error(before), _error(after)):
        return False
    above = sum(later > earlier for earlier in before for later in after)
    return above >= _ABOVE * len(before) * len(after)


def _error(values: Sequence[float]) -> float:
    """Return the standard error of a median: 1.25 times a mean's, by the median deviation, so outliers do not count."""
    middle = statistics.median(values)
    sigma = 1.4826 * statistics.median([abs(value - middle) for value in values])
    return 1.25 * sigma / math.sqrt(len(values))


def lasts(slow: SlowNode) -> bool:
    """Return whether a node has been slow for long enough to give it up: another start costs minutes."""
    return slow.measurements[1] >= _LASTING or (slow.last - slow.first + 1) * slow.step_ms >= 1000 * _LASTING_S


def record_of(slow: SlowNode) -> str:
    """Return the line of the log from which `recorded_in` reads the slow node again."""
    return LEAVE + json.dumps(slow.as_json())


def recorded_in(log: str) -> SlowNode | None:
    """Return the slow node because of which the supervisor asked a training to leave; None if it did not."""
    found = None
    for line in log.splitlines():
        if line.startswith(LEAVE):
            try:
                found = SlowNode.of_json(json.loads(line[len(LEAVE) :])) or found
            except ValueError:
                continue
    return found
