"""Runs side by side: rows, ratios over a baseline, scaling, parity, other differences, and why it is not valid."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from fp8launch.report.baseline import baseline_name, baseline_rows, counterpart
from fp8launch.report.columns import entry_json
from fp8launch.report.comparison_notes import comparison_notes, row_notes
from fp8launch.report.differences import (
    Comparability,
    FactDifference,
    affects_loss,
    differing_facts,
    facts_of_axis,
    kind_of,
    settings_change_speed,
    speed_comparability,
)
from fp8launch.report.entry import Entry, about_loss, scaling_modes
from fp8launch.report.goodput import goodput_of_runs
from fp8launch.report.grouping import ComparisonRow, Measure, group_runs
from fp8launch.report.json_values import json_list
from fp8launch.report.loss_summary import loss_summary, swept_learning
from fp8launch.report.parity import TOLERANCE, Parity, parity
from fp8launch.report.published import published_speed
from fp8launch.report.run_data import RunData, with_unset
from fp8launch.report.run_facts import SETTINGS
from fp8launch.report.run_report import RunReport, Statistic
from fp8launch.report.scaling import Ratio, ScalingEfficiency, efficiencies, ratio
from fp8launch.report.steady_state import RULE
from fp8launch.report.variant_labels import words_of

# A larger relative difference means that the log counts TFLOP/s by another formula, not that it rounds them.
SAME_FORMULA = 0.01


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
    def rows(self) -> list[ComparisonRow]:
        return [entry.row for entry in self.entries]

    @property
    def good(self) -> list[Entry]:
        """The rows with a number."""
        return [entry for entry in self.entries if entry.row.good]

    @property
    def problems(self) -> tuple[str, ...]:
        """Why the comparison is not valid."""
        found = []
        if not self.good:
            found.append("no run has a number to compare")
        for name, entry, one in self.ratios():
            # A failed run has no ratio.
            if not one.missing and not one.comparability.comparable:
                reasons = "; ".join(one.comparability.unlike)
                found.append(f"{name} of {entry.row.name} over {one.against}: {reasons}")
        return tuple(found)

    @property
    def valid(self) -> bool:
        return not self.problems

    @property
    def about_loss(self) -> bool:
        """Whether the rows differ in how they learn, so that the loss is the result and the speed is not."""
        return about_loss(self.entries)

    def ratios(self) -> Iterator[tuple[str, Entry, Ratio]]:
        """Yield every ratio by its name, `speed-up` or `scaling`, with its entry."""
        for entry in self.entries:
            if entry.speedup:
                yield "speed-up", entry, entry.speedup
            if entry.efficiency:
                yield "scaling", entry, entry.efficiency.ratio

    def runs(self) -> list[RunData]:
        return list(chain.from_iterable(row.runs for row in self.rows))

    def commands(self) -> list[str]:
        """The commands that started the runs, each once."""
        return list(dict.fromkeys(run.command for run in self.runs() if run.command))

    def as_json(self) -> dict[str, object]:
        phases = {}
        for run in self.runs():
            if len(run.report.phases) > 1:
                phases[run.name] = json_list(run.report.phases)
        return {
            "comparable": self.valid,
            "reasons": list(self.problems),
            "baseline": self.baseline,
            "rows": list(map(entry_json, self.entries)),
            "differences": json_list(self.differences),
            "parity": json_list(self.parities),
            "phases": phases,
            "price_per_gpu_hour": self.price_per_gpu_hour,
            "notes": list(self.notes),
            "rule": self.rule,
        }


def compare(
    runs: Sequence[RunData],
    baseline: str | None = None,
    *,
    price_per_gpu_hour: float | None = None,
    tolerance: float = TOLERANCE,
    force: bool = False,
) -> Comparison:
    """Compare runs side by side. Raises UserError for a baseline that no row has."""
    runs = with_unset(runs)
    rows = group_runs(runs)
    axes = _axes(runs)
    bases = baseline_rows(rows, baseline)
    scaling = efficiencies(rows, force)
    recomputed = _counts_differ(rows)
    entries = []
    parities: list[Parity] = []
    for row in rows:
        speedup = None
        if bases:
            base = counterpart(row, bases)
            if row.facts.get("precision") != base.facts.get("precision"):
                parities += _parities(row, base, tolerance)
            if len(rows) > 1:
                speedup = _speedup(row, base, axes, force)
        entries.append(_entry(row, speedup, scaling.get(row.name), recomputed, price_per_gpu_hour, rows))
    if scaling_modes(entries) == ["weak"]:
        # In weak scaling the batch grows with the GPUs, as it should.
        axes.add("global_batch_size")
    return Comparison(
        tuple(entries),
        tuple(_differences(rows, axes)),
        tuple(parities),
        baseline_name(bases, baseline),
        tuple(comparison_notes(entries, recomputed)),
        price_per_gpu_hour,
    )


def _axes(runs: Sequence[RunData]) -> set[str]:
    """Facts that the study varies. The number of nodes is not one of them: scaling has a measure of its own."""
    keys: set[str] = set()
    for run in runs:
        if run.study:
            keys.update(run.study.point)
    return set().union(*map(facts_of_axis, keys - {"nodes", "resources.nodes"})) - {"seed"}


def _speedup(row: ComparisonRow, base: ComparisonRow, axes: set[str], force: bool) -> Ratio | None:
    if base is not row:
        compared = axes | {name for name in differing_facts([row, base]) if _names_tell(name, row, base)}
        found = ratio(row, base, speed_comparability(row.facts, base.facts, compared), force)
        if swept_learning([row, base]) and not settings_change_speed([row, base]):
            # Rows that only learn differently have the same speed: their ratio is noise.
            found = replace(found, value=None, interval=None)
        return found
    if row.good:
        return ratio(row, row, Comparability(), force)
    return None


def _names_tell(fact: str, row: ComparisonRow, base: ComparisonRow) -> bool:
    """Whether the rows are named by their values of an argument, which then is what is compared."""
    if kind_of(fact) != "noted" or fact == "script" or fact.startswith(SETTINGS):
        return False
    words = []
    for one in (row, base):
        if fact not in one.facts:
            return False
        words.append(words_of(fact, one.facts[fact]))
    told = all(not text or text in one.label.split(", ") for text, one in zip(words, (row, base), strict=True))
    return told and any(words)


def _parities(row: ComparisonRow, base: ComparisonRow, tolerance: float) -> list[Parity]:
    mine, theirs = _with_lines(row), _with_lines(base)
    if not mine or not theirs:
        return []
    return [parity(mine, theirs, tolerance, (row.name, base.name))]


def _with_lines(row: ComparisonRow) -> list[RunData]:
    return [run for run in row.runs if run.report.lines]


def _counts_differ(rows: Sequence[ComparisonRow]) -> bool:
    """Whether the logs count TFLOP/s in more than one way; then they are recomputed for all."""
    for row in rows:
        for run in row.good:
            logged, ours = run.report.tflops_per_gpu, run.report.tflops_per_gpu_recomputed
            if logged and ours and run.report.tflops_source == "logged":
                off = abs(logged.median / ours.median - 1)
                if off > SAME_FORMULA:
                    return True
    return False


def _entry(
    row: ComparisonRow,
    speedup: Ratio | None,
    efficiency: ScalingEfficiency | None,
    recomputed: bool,
    price: float | None,
    rows: Sequence[ComparisonRow],
) -> Entry:
    tokens = row.measure(lambda report: report.tokens_per_s_per_gpu)
    step_time = row.measure(lambda report: report.step_time_ms)
    tflops = row.measure(lambda report: _tflops(report, recomputed))
    peak = _peak_tflops(row)
    memory = row.known(lambda report: report.peak_memory_mib)
    tokens_total, cost = None, None
    if tokens and row.world:
        tokens_total = tokens.median * row.world
    if tokens and price:
        cost = price / 3600 / tokens.median * 1e6
    return Entry(
        row=row,
        tokens=tokens,
        step_time=step_time,
        tflops=tflops,
        mfu=_mfu(tflops, peak),
        peak_tflops=peak,
        peak_memory_mib=max(memory, default=None),
        tokens_total=tokens_total,
        energy_per_token=_energy_per_token(row, tokens, step_time),
        cost_per_million_tokens=cost,
        speedup=speedup,
        efficiency=efficiency,
        published=published_speed(row, tokens, rows),
        notes=tuple(row_notes(row, recomputed)),
        loss=loss_summary(row.good),
        goodput=goodput_of_runs([run.report.goodput for run in row.runs]),
    )


def _tflops(report: RunReport, recomputed: bool) -> Statistic | None:
    if recomputed and report.tflops_per_gpu_recomputed:
        return report.tflops_per_gpu_recomputed
    return report.tflops_per_gpu


def _peak_tflops(row: ComparisonRow) -> float | None:
    for run in row.good:
        if run.report.mfu_denominator:
            return float(str(run.report.mfu_denominator["peak_tflops"]))
    return None


def _mfu(tflops: Measure | None, peak: float | None) -> Measure | None:
    if tflops is None or not peak:
        return None
    return tflops.over(peak)


def _energy_per_token(row: ComparisonRow, tokens: Measure | None, step_time: Measure | None) -> float | None:
    """Joules per iteration over tokens per iteration, both of one GPU."""
    energy = row.measure(lambda report: report.energy_j_per_gpu)
    if energy is None or tokens is None or step_time is None:
        return None
    return energy.median / (tokens.median * step_time.median / 1e3)


def _differences(rows: Sequence[ComparisonRow], axes: set[str]) -> list[FactDifference]:
    """Differences between the rows that matter to speed or loss; those that forbid ratios come first."""
    found = []
    for name in differing_facts(rows):
        kind = kind_of(name)
        if kind == "neutral" and not affects_loss(name):
            continue
        compared = name in axes or name in ("precision", "world_size")
        values = {}
        for row in rows:
            if name in row.facts:
                values[row.name] = row.facts[name]
        found.append(FactDifference(name, kind, compared, values))
    order = ("unlike", "noted", "neutral")
    return sorted(found, key=lambda one: (not one.axis, order.index(one.kind), one.name))
