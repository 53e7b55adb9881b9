"""Find the node that slows a training down, from how long the model's forward pass takes on each node.

In synchronous training, all ranks have the same step time because they wait for the slowest one. The forward pass
includes little or no waiting, so it reveals which rank is late. The ranks print it (`rank/forward_times.py`):
`fp8launch-nodes: {"v":1,"first":11,"last":20,"forward_ms":{"node1":12.31,"node2":30.87}}`.

Nodes may hold different pipeline stages, so each node is first compared with itself before the slowdown, and then with
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

from fp8launch.injob.supervisor.log_lines import json_object

NODE_TIMES = "fp8launch-nodes: "
# Starts the log line with which the supervisor asks the training to leave a slow node.
LEAVE = "fp8launch: slow-node: "
# The minimum and maximum number of measurements used before and after the slowdown. The nearest ones are used.
_FEWEST, _MOST = 6, 100
# The node must account for this share of the increase in step time, and no other node may have slowed by this share of
# it. Otherwise, the nodes have a common cause.
_OWN_SHARE = 0.5
# The medians before and after must differ by this many standard errors, and in this share of all pairs, the later
# measurement must be larger, because a few measurements on a shared machine prove nothing.
_ERRORS, _ABOVE = 5.0, 0.8
_LONGEST_MS = 1e12
# The name becomes an argument of Slurm commands, so it must not look like an option.
_NODE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,254}\Z")
# The job gives up a node only after slow steps for this many measurements or seconds.
_LASTING, _LASTING_S = 30, 300.0


@dataclass(frozen=True)
class NodeTimes:
    """The mean forward time per micro batch in iterations `first` to `last`, in ms, on each node's slowest rank."""

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
    """Return the measurement in a log line, or None if there is none."""
    _, found, text = line.partition(NODE_TIMES)
    data = json_object(text) if found else None
    return None if data is None else NodeTimes.of_json(data)


class SlowNode(NamedTuple):
    """A node that slows the training from iteration `first` to `last`.

    Steps take `step_ms`, which is `step_factor` times as long as before. The forward pass takes `factor` times as long
    on this node, and `others_factor` times as long on the `others` other nodes (median). `measurements` has the numbers
    of measurements before and after.
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
        """Return the record of a slow node, or None for anything else, because others may write to the log."""
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
    """Return the node that causes an increase of the step time, or None if it is not a single node.

    Steps take `after_ms` from iteration `begin` on, and `before_ms` before. A forward pass that became slower by less
    than the fraction `least`, relative to the other nodes, is normal.
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
    # Compare with the node's own earlier times as well, because the other nodes may all have become faster.
    if min(excess, growth[slowest] - 1) < max(least, _OWN_SHARE * (step_factor - 1)):
        return None
    if max(others) / usual - 1 > _OWN_SHARE * excess:
        return None
    if not _separate(_relative(before, slowest, nodes), _relative(after, slowest, nodes)):
        return None
    counts = (len(before), len(after))
    return SlowNode(slowest, after_ms, step_factor, growth[slowest], len(others), usual, begin, after[-1].last, counts)


def _relative(times: Sequence[NodeTimes], node: str, nodes: set[str]) -> list[float]:
    """Return a node's time relative to the others' median in each measurement, which cancels common slowdowns."""
    return [
        one.forward_ms[node] / statistics.median([one.forward_ms[other] for other in nodes if other != node])
        for one in times
    ]


def _separate(before: Sequence[float], after: Sequence[float]) -> bool:
    """Return whether `after` exceeds `before` by more than their spread."""
    rise = statistics.median(after) - statistics.median(before)
    if rise < _ERRORS * math.hypot(_error(before), _error(after)):
        return False
    above = sum(later > earlier for earlier in before for later in after)
    return above >= _ABOVE * len(before) * len(after)


def _error(values: Sequence[float]) -> float:
    """Return a median's standard error, 1.25 times a mean's. It uses the median deviation, which ignores outliers."""
    middle = statistics.median(values)
    sigma = 1.4826 * statistics.median([abs(value - middle) for value in values])
    return 1.25 * sigma / math.sqrt(len(values))


def lasts(slow: SlowNode) -> bool:
    """Return whether a node has been slow long enough to give it up, because a restart costs minutes."""
    return slow.measurements[1] >= _LASTING or (slow.last - slow.first + 1) * slow.step_ms >= 1000 * _LASTING_S


def record_of(slow: SlowNode) -> str:
    """Return the log line from which `recorded_in` can read the slow node."""
    return LEAVE + json.dumps(slow.as_json())


def recorded_in(log: str) -> SlowNode | None:
    """Return the slow node that the supervisor asked the training to leave, or None if it did not."""
    found = None
    for line in log.splitlines():
        if line.startswith(LEAVE):
            found = SlowNode.of_json(json_object(line, len(LEAVE))) or found
    return found
