"""A comparison: its rows with their numbers, what differs between them, and why it is not valid."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fp8launch.report.columns import Entry
from fp8launch.report.differences import FactDifference
from fp8launch.report.parity import Parity
from fp8launch.report.run_data import RunData
from fp8launch.report.scaling import Ratio
from fp8launch.report.steady_state import RULE


@dataclass(frozen=True)
class Comparison:
    """Valid unless a ratio between unlike runs was refused, or forced, or no run has a number."""

    entries: tuple[Entry, ...]
    differences: tuple[FactDifference, ...]
    parities: tuple[Parity, ...]
    baseline: str | None
    notes: tuple[str, ...]
    price_per_gpu_hour: float | None = None
    rule: str = RULE

    @property
    def problems(self) -> tuple[str, ...]:
        """Why the comparison is not valid."""
        found = [] if any(entry.row.good for entry in self.entries) else ["no run has a number to compare"]
        for name, entry, ratio in self.ratios():
            # A failed run has no ratio that could mislead.
            if not ratio.missing and not ratio.comparability.comparable:
                reasons = "; ".join(ratio.comparability.unlike)
                found.append(f"{name} of {entry.row.name} over {ratio.against}: {reasons}")
        return tuple(found)

    @property
    def valid(self) -> bool:
        return not self.problems

    def ratios(self) -> Iterator[tuple[str, Entry, Ratio]]:
        """Yield every ratio by its name, `speed-up` or `scaling`, with its entry."""
        for entry in self.entries:
            if entry.speedup:
                yield "speed-up", entry, entry.speedup
            if entry.efficiency:
                yield "scaling", entry, entry.efficiency.ratio

    def runs(self) -> list[RunData]:
        return [run for entry in self.entries for run in entry.row.runs]

    def commands(self) -> list[str]:
        """The commands that started the runs, each once."""
        return list(dict.fromkeys(run.command for run in self.runs() if run.command))

    def as_json(self) -> dict[str, object]:
        phases = {}
        for run in self.runs():
            if len(run.report.phases) > 1:
                phases[run.name] = [phase.as_json() for phase in run.report.phases]
        return {
            "comparable": self.valid,
            "reasons": list(self.problems),
            "baseline": self.baseline,
            "rows": [entry.as_json() for entry in self.entries],
            "differences": [difference.as_json() for difference in self.differences],
            "parity": [parity.as_json() for parity in self.parities],
            "phases": phases,
            "price_per_gpu_hour": self.price_per_gpu_hour,
            "notes": list(self.notes),
            "rule": self.rule,
        }
