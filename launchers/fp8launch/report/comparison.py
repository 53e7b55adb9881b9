"""What a comparison is: its rows with their numbers, what differs, and what stands against it."""

from __future__ import annotations

from dataclasses import dataclass

from fp8launch.report.differences import Difference
from fp8launch.report.parity import Parity
from fp8launch.report.rows import Measure, Row
from fp8launch.report.scaling import Efficiency, Ratio
from fp8launch.report.selection import RULE


@dataclass(frozen=True)
class Published:
    """NVIDIA's, or another's, figure from the recipe; `ratio` is ours over it, in tokens/s/GPU."""

    tokens_per_s_per_gpu: float
    tflops_per_gpu: float | None
    gpus: int | None
    source: str
    ratio: float | None
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, object]:
        return {**{n: getattr(self, n) for n in self.__dataclass_fields__}, "notes": list(self.notes)}


@dataclass(frozen=True)
class Entry:
    """A row with its numbers. Units: tokens/s/GPU, ms, dense model TFLOP/s/GPU, MiB, J/token, currency/million."""

    row: Row
    tokens: Measure | None
    step_time: Measure | None
    tflops: Measure | None
    mfu: Measure | None
    peak_tflops: float | None
    peak_memory_mib: float | None
    tokens_total: float | None
    energy_per_token: float | None
    cost_per_million_tokens: float | None
    speedup: Ratio | None
    efficiency: Efficiency | None
    published: Published | None
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, object]:
        row = self.row
        return {
            "variant": row.label,
            "nodes": row.nodes,
            "gpus": row.world,
            "status": _status(row),
            "status_text": row.status,
            "runs": [
                {"name": r.name, "status": "missing" if r.absent else r.report.status, "command": r.command}
                for r in row.runs
            ],
            "tokens_per_s_per_gpu": self.tokens.as_json() if self.tokens else None,
            "step_time_ms": self.step_time.as_json() if self.step_time else None,
            "tflops_per_gpu": self.tflops.as_json() if self.tflops else None,
            "mfu": self.mfu.as_json() if self.mfu else None,
            "mfu_denominator_tflops": self.peak_tflops,
            "peak_memory_mib": self.peak_memory_mib,
            "tokens_per_s": self.tokens_total,
            "energy_j_per_token": self.energy_per_token,
            "cost_per_million_tokens": self.cost_per_million_tokens,
            "speedup": self.speedup.as_json() if self.speedup else None,
            "scaling_efficiency": self.efficiency.as_json() if self.efficiency else None,
            "published": self.published.as_json() if self.published else None,
            "notes": list(self.notes),
        }


def _status(row: Row) -> str:
    if row.status == "ok":
        return "ok"
    return "partial" if row.good else "missing" if all(r.absent for r in row.runs) else row.runs[0].report.status


@dataclass(frozen=True)
class Comparison:
    """`valid` unless a ratio was refused, or given by force, between unlike runs, or no run has a number."""

    entries: tuple[Entry, ...]
    differences: tuple[Difference, ...]
    parities: tuple[Parity, ...]
    baseline: str | None
    notes: tuple[str, ...]
    price_per_gpu_hour: float | None = None
    rule: str = RULE

    @property
    def problems(self) -> tuple[str, ...]:
        """Why the comparison is not valid."""
        found = [] if any(e.row.good for e in self.entries) else ["no run has a number to compare"]
        for entry in self.entries:
            for what, one in (
                ("speed-up", entry.speedup),
                ("scaling", entry.efficiency.ratio if entry.efficiency else None),
            ):
                # Where a run has failed there is no ratio that could mislead.
                if one and not one.missing and not one.verdict.comparable:
                    found.append(f"{what} of {entry.row.name} over {one.against}: {'; '.join(one.verdict.unlike)}")
        return tuple(found)

    @property
    def valid(self) -> bool:
        return not self.problems

    def as_json(self) -> dict[str, object]:
        return {
            "comparable": self.valid,
            "reasons": list(self.problems),
            "baseline": self.baseline,
            "rows": [entry.as_json() for entry in self.entries],
            "differences": [d.as_json() for d in self.differences],
            "parity": [p.as_json() for p in self.parities],
            "phases": {
                run.name: [phase.as_json() for phase in run.report.phases]
                for entry in self.entries
                for run in entry.row.runs
                if len(run.report.phases) > 1
            },
            "price_per_gpu_hour": self.price_per_gpu_hour,
            "notes": list(self.notes),
            "rule": self.rule,
        }
