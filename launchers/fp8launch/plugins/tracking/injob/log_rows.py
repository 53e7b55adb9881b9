"""Lines of a growing log as rows for a tracker: numbers by the names that `export` gives them, with their iteration."""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass

from fp8launch.injob.supervisor.health_watch import values_of
from fp8launch.injob.supervisor.log_lines import LONGEST_LINE, without_colours

# Values that a tracker gets as the line states them.
_LOGGED = ("loss", "grad_norm", "learning_rate", "step_time_ms", "tflops_per_gpu", "energy_j_per_gpu")
_TIME = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(\.\d{1,6})?\] {1,2}iteration")
_ARGUMENT = re.compile(r"\b(seq_length|world_size) \.{3,60} (\d{1,9})\s*$")
_VALIDATION = re.compile(r"\bvalidation\S{0,80} loss at (?:iteration )?(\d{1,15})([^|]{0,200})\|(.*)")
_VALIDATION_LOSS = re.compile(r"([^|]{1,100}?) value: ([-+]?\d[\d.]{0,20}(?:E[-+]\d{1,5})?)(?: |$)", re.IGNORECASE)
_MEMORY = re.compile(r"\(after \d{1,15} iterations\) memory \(MB\) \|.{0,400}\| max allocated: (\d{1,9}\.\d{1,4})")
# Megatron-Bridge prints the throughput in a line of its own, before or after the iteration's.
_STEP_TIME = re.compile(r"Step Time : (\d{1,9}\.\d{1,6})s GPU utilization: (\d{1,9}\.\d{1,6})(?:MODEL_)?TFLOP/s/GPU")


@dataclass
class Row:
    """The values of one iteration. `time` is when its line was printed, in seconds since the epoch."""

    step: int
    time: float
    values: dict[str, float]


@dataclass
class LogRows:
    """Rows of a run's logs, which are fed oldest first. Every iteration is one row, in rising order.

    An iteration that a later attempt repeats is left out, also after a rewind: its first row may be delivered already,
    and trackers cannot take values back. A row is complete when the next one begins, because validation and memory are
    printed below their iteration.
    """

    seq_length: float = math.nan
    world_size: float = math.nan
    _row: Row | None = None
    _bridge: tuple[float, float] | None = None

    def feed(self, line: str) -> Iterator[Row]:
        """Read a line. Yields the row before, if this line begins another one."""
        line = without_colours(line[:LONGEST_LINE])
        values = values_of(line)
        if values is not None:
            step = int(values["number"])
            # A line that is cut off has no time.
            if "step_time_ms" in values and (self._row is None or step > self._row.step):
                if self._row is not None:
                    yield self._row
                self._row = Row(step, _time(line), self._measured(values))
                self._take_throughput()
            return
        if (stated := _ARGUMENT.search(line)) is not None:
            setattr(self, stated[1], float(stated[2]))
        elif (speed := _STEP_TIME.search(line)) is not None:
            self._bridge = (float(speed[1]), float(speed[2]))
            self._take_throughput()
        elif self._row is not None:
            self._below(self._row, line)

    def rest(self) -> Iterator[Row]:
        """Yield the last row, if no more lines are expected. It stays the newest one."""
        if self._row is not None:
            yield self._row

    def _measured(self, values: dict[str, float]) -> dict[str, float]:
        found = {name: values[name] for name in _LOGGED if name in values}
        seconds = found["step_time_ms"] / 1e3
        if seconds > 0:
            samples = values.get("global_batch_size", math.nan)
            found["tokens_per_s_per_gpu"] = samples * self.seq_length / (seconds * self.world_size)
        return {name: value for name, value in found.items() if math.isfinite(value)}

    def _take_throughput(self) -> None:
        """Use Bridge's throughput if it is about the newest row: it states the same time."""
        if self._bridge is None or self._row is None:
            return
        seconds, tflops = self._bridge
        if abs(self._row.values["step_time_ms"] / 1e3 - seconds) <= max(0.006, 0.002 * seconds):
            self._row.values.setdefault("tflops_per_gpu", tflops)
            self._bridge = None

    def _below(self, row: Row, line: str) -> None:
        memory = _MEMORY.search(line)
        if memory is not None and float(memory[1]) > 0:
            peak = max(float(memory[1]), row.values.get("peak_memory_mib", 0.0))
            row.values["peak_memory_mib"] = peak
        validation = _VALIDATION.search(line)
        if validation is not None and int(validation[1]) == row.step:
            for label, value in _VALIDATION_LOSS.findall(validation[3]):
                row.values.setdefault(validation_name(label, validation[2]), float(value))


def validation_name(label: str, of: str) -> str:
    """Return a tracker's name for a loss of an evaluation, `of` naming what was evaluated."""
    kind = "test" if "test set" in of else "validation"
    name = "_".join(label.lower().split())
    return f"{kind}_loss" if name == "lm_loss" else f"{kind}_{name}"


def _time(line: str) -> float:
    found = _TIME.search(line)
    if found is not None:
        with contextlib.suppress(ValueError, OverflowError):
            # In the time zone of the node, where this program runs, too.
            return time.mktime(time.strptime(found[1], "%Y-%m-%d %H:%M:%S")) + float(found[2] or 0)
    return time.time()
