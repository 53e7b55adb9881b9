"""Watch the health of a training while it runs, and end it if the recipe's `health.actions` say so.

Events are written to the log, where the supervisor reads them after the end:
`fp8launch: unhealthy: nan: good until 12, suspect until 14: the loss ...`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fp8launch.injob.supervisor.health_rules import (
    ACTION_CODES,
    IS_INFINITE,
    IS_NAN,
    SLOW_NODE,
    Event,
    HealthLimits,
    Series,
    event_in,
    slow_node_of,
)
from fp8launch.injob.supervisor.log_lines import LONGEST_LINE
from fp8launch.injob.supervisor.slow_node import NodeTimes, SlowNode, node_times_in

UNHEALTHY = "fp8launch: unhealthy: "
CAUSE = "unhealthy-training"
# With more lines than this in memory, the older half is dropped.
_MOST_LINES = 20_000
_BLOCK = 1 << 24
# The longest lines have the times of all nodes.
_LONGEST_PENDING = 1 << 20
_ITERATION = re.compile(r"iteration\s{1,20}(\d{1,15})/\s{0,20}\d{1,15} \|")
_RECORD = re.compile(r"([a-z-]{1,40}): good until (\d{1,15}|unknown), suspect until (\d{1,15}): (.{1,400})")
# Megatron's own check names its iteration.
_MEGATRON_STOPPED = re.compile(r"iteration #?(\d{1,15})\b")
_FIELDS = {
    "grad norm": "grad_norm",
    "number of skipped iterations": "skipped",
    "number of nan iterations": "nan",
    "elapsed time per iteration (ms)": "step_time_ms",
    "learning rate": "learning_rate",
    "global batch size": "global_batch_size",
    "throughput per gpu (tflop/s/gpu)": "tflops_per_gpu",
    "energy per gpu (j/iter/gpu)": "energy_j_per_gpu",
}


@dataclass(frozen=True)
class Actions:
    """What the plan says about health: an action by code, `stop` or the number of checkpoints to go back.

    `log_interval` is the number of iterations per log line. The run goes back at most `max_rewinds` times.
    `slow_node` is the action on a slow node: `exclude`, `exclude-later` or None.
    """

    by_code: Mapping[str, Any]
    limits: HealthLimits
    max_rewinds: int = 0
    log_interval: int = 1
    skip_flag: str | None = None
    skipped: tuple[int, ...] = ()
    slow_node: str | None = None

    @classmethod
    def of_plan(cls, plan: Mapping[str, Any]) -> Actions:
        """Return the actions of a plan; a plan of an earlier version has none."""
        stated = plan.get("health") or {}
        by_code = {code: stated["actions"][code] for code in ACTION_CODES if code in stated.get("actions", {})}
        return cls(
            by_code,
            HealthLimits.of_recipe(stated.get("limits", {})),
            stated.get("max_rewinds", 0),
            stated.get("log_interval", 1),
            stated.get("skip_flag"),
            tuple(stated.get("skipped", ())),
            stated.get("actions", {}).get(SLOW_NODE),
        )

    @property
    def watch(self) -> bool:
        """Return whether the log has to be read while the training runs."""
        return bool(self.by_code) or self.slow_node == "exclude"

    def checkpoints_back(self, code: str) -> int:
        """Return by how many checkpoints a run goes back for a code; 0 for an action that is not `rewind`."""
        action = self.by_code.get(code)
        return int(action["rewind"]) if isinstance(action, dict) else 0


@dataclass
class HealthWatch:
    """The iteration lines of a growing log, and how long the forward pass took on each node."""

    actions: Actions
    offset: int = 0
    pending: bytes = b""
    rows: list[dict[str, float]] = field(default_factory=list)
    node_times: list[NodeTimes] = field(default_factory=list)
    node_times_seen: int = 0

    def look(self, log: Path) -> Event | None:
        """Read what was added to the log. Return an event that calls for an action."""
        if not self.actions.watch:
            return None
        try:
            with log.open("rb") as file:
                file.seek(self.offset)
                block = file.read(_BLOCK)
        except OSError:  # srun has not made it yet
            return None
        self.offset += len(block)
        *lines, pending = (self.pending + block).split(b"\n")
        self.pending = pending[-_LONGEST_PENDING:]
        before = len(self.rows)
        for line in lines:
            self.feed(line.decode("utf-8", "replace"))
        if len(self.rows) == before:
            return None
        for values in (self.rows, self.node_times):
            if len(values) > _MOST_LINES:
                del values[: _MOST_LINES // 2]
        return event_in(series_of(self.rows), self.actions.limits, self.actions.by_code)

    def feed(self, line: str) -> None:
        """Keep the values of a line. Iterations that are printed twice count once."""
        row = values_of(line[:LONGEST_LINE])
        if row is not None:
            if not self.rows or row["number"] > self.rows[-1]["number"]:
                self.rows.append(row)
            return
        times = node_times_in(line)
        if times is not None:
            self.node_times.append(times)

    def news_of_nodes(self) -> SlowNode | None:
        """Return the node that slows the training now; None if there is none, or nothing new about it."""
        if len(self.node_times) == self.node_times_seen:
            return None
        self.node_times_seen = len(self.node_times)
        return self.slow_node()

    def slow_node(self) -> SlowNode | None:
        """Return the node that slows the training at the end of the lines."""
        if SLOW_NODE in self.actions.limits.ignore or not self.node_times:
            return None
        # As in `parse`, the first two lines include the start-up.
        return slow_node_of(series_of(self.rows[2:]), {0: self.node_times}, self.actions.limits)


def slow_node_of_log(log: str, actions: Actions) -> SlowNode | None:
    """Return the node that slowed an attempt at its end, from its log."""
    watch = HealthWatch(actions)
    for line in log.splitlines():
        watch.feed(line)
    return watch.slow_node()


def values_of(line: str) -> dict[str, float] | None:
    """Return the values of an iteration line that the rules and trackers read; None for any other line."""
    found = _ITERATION.search(line)
    if found is None:
        return None
    values = {"number": float(found.group(1))}
    losses: dict[str, float] = {}
    for part in line[found.end() :].split("|"):
        label, colon, text = part.rpartition(":")
        name = " ".join(label.lower().replace("_", " ").split())
        try:
            value = float(text)
        except ValueError:
            continue
        if colon and name in _FIELDS:
            values[_FIELDS[name]] = value
        elif colon and name.endswith("loss"):
            losses[name] = value
    if losses:
        values["loss"] = losses.get("lm loss", next(iter(losses.values())))
    broken = [value for value in [*losses.values(), values.get("grad_norm", 0.0)] if not math.isfinite(value)]
    if broken:
        values["not_finite"] = IS_NAN if any(map(math.isnan, broken)) else IS_INFINITE
    return values


def series_of(rows: list[dict[str, float]]) -> Series:
    """Return the columns of one attempt's lines. The second one may be a mean that includes the first."""

    def column(name: str) -> list[float]:
        return [row.get(name, math.nan) for row in rows]

    return Series(
        number=[int(row["number"]) for row in rows],
        attempt=[0] * len(rows),
        step_time_ms=column("step_time_ms"),
        loss=column("loss"),
        mixed=[i == 1 for i in range(len(rows))],
        grad_norm=column("grad_norm"),
        has_grad_norm=any(map(math.isfinite, column("grad_norm"))),
        not_finite=column("not_finite"),
        skipped=column("skipped"),
        nan=column("nan"),
    )


def record_of(event: Event) -> str:
    """Return the line of the log from which `event_of` reads the event again."""
    good = "unknown" if event.good is None else event.good
    return f"{UNHEALTHY}{event.code}: good until {good}, suspect until {event.until}: {event.message}"


def event_of(cause: str, line: str | None, log: str, actions: Actions) -> Event | None:
    """Return the event that ended an attempt, by its cause, the line that reported it, and the log.

    Megatron itself ends a training whose loss is NaN, unless that check is disabled.
    """
    if cause == CAUSE and line:
        found = _RECORD.search(line)
        if found:
            code, good, until, message = found.groups()
            return Event(code, message, int(good) if good.isdigit() else None, int(until))
    if cause == "nan" and "nan" in actions.by_code:
        numbers = [int(number) for number in _ITERATION.findall(log)]
        good = numbers[-1] if numbers else None
        stated = _MEGATRON_STOPPED.search(line or "")
        until = int(stated.group(1)) if stated else (good or 0) + actions.log_interval
        return Event("nan", "Megatron stopped at a loss or gradient that is NaN", good, until)
    return None
