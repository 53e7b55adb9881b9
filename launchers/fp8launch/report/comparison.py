"""Runs side by side: rows, ratios over a baseline, scaling, parity, other differences, and reasons for invalidity."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from fp8launch.report.columns import row_json
from fp8launch.report.differences import (
    Comparability,
    FactDifference,
    affects_loss,
    affects_speed,
    differing_facts,
    facts_of_axis,
    kind_of,
    settings_change_speed,
    speed_comparability,
)
from fp8launch.report.losses import swept_learning
from fp8launch.report.parity import TOLERANCE, Parity, parity
from fp8launch.report.ratios import (
    baseline_name,
    baseline_rows,
    counterpart,
    efficiencies,
    ratio,
)
from fp8launch.report.read_run import NOT_SUBMITTED, SETTINGS, with_unset
from fp8launch.report.rows import Published, Ratio, Row, about_loss, group_runs, scaling_modes
from fp8launch.report.run_report import RunReport, json_mapping
from fp8launch.report.shared_gpus import sharers
from fp8launch.report.steady_state import RULE
from fp8launch.report.variant_labels import words_of
from fp8launch.wording import and_more, counted

# A longer list of names is cut, with a note.
_MOST_NAMES = 8


def row_notes(row: Row, recomputed: bool) -> list[str]:
    """Return the notes on one row. `recomputed`: TFLOP/s do not come from the logs."""
    notes = list(row.notes)
    if recomputed and any(not run.speed.tflops_per_gpu_recomputed for run in row.good):
        notes.append("TFLOP/s are the log's own: its arguments do not determine them")
    if row.sharing:
        notes.append(row.sharing)
    names = ", ".join(filter(affects_speed, differing_facts(row.runs)))
    if names:
        notes.append(f"its runs differ in {names}")
    for run in row.good:
        notes += [f"{run.name}: {problem.sentence}" for problem in run.health]
    notes += dict.fromkeys(chain.from_iterable(run.notes for run in row.good))
    return notes


def comparison_notes(rows: Sequence[Row], recomputed: bool) -> list[str]:
    """Return the notes on all rows together."""
    notes = []
    if recomputed:
        notes.append("some logs count FLOPs in another way than Megatron does today: TFLOP/s are recomputed for all")
    runs = list(chain.from_iterable(row.runs for row in rows))
    absent = [run for run in runs if run.absent]
    peaks = {run.speed.mfu_denominator["peak_tflops"] for run in runs if run.good and run.speed.mfu_denominator}
    notes += filter(None, map(_merged, rows))
    if absent:
        notes.append(_note_of_absent(absent))
    if any(map(_within_single_runs, rows)):
        notes.append(
            "the interval between two single runs covers their iterations, not the differences between runs: "
            "--repeat 3 measures them"
        )
    if len(peaks) > 1:
        notes.append("MFU divides by the peak of each variant's own data type: compare speeds, not MFUs")
    return notes


def _within_single_runs(row: Row) -> bool:
    ratios = [row.speedup, row.efficiency.ratio if row.efficiency else None]
    return any(ratio.interval.covers == "iterations" for ratio in ratios if ratio and ratio.interval)


def _merged(row: Row) -> str:
    """Name the runs that one row summarizes, with the mean loss of several seeds; empty for a single run."""
    runs = row.runs
    if len(runs) < 2:
        return ""
    what = counted(len(runs), "repeat")
    seeds = {str(run.facts["seed"]) for run in runs if "seed" in run.facts}
    if len(seeds) > 1:
        numbers = sorted(seeds, key=lambda seed: (len(seed), seed))
        what = f"{counted(len(seeds), 'seed')} ({and_more(numbers, _MOST_NAMES)})"
        if len(runs) > len(seeds):
            what += f" in {counted(len(runs), 'run')}"
    loss = row.loss
    if loss and loss.interval:
        what += f", mean loss {loss.end:.4f}, 95 % interval {loss.interval.low:.4f} to {loss.interval.high:.4f}"
    return f"{row.name}: {what}: {and_more([run.name for run in runs], _MOST_NAMES)}"


def _note_of_absent(runs: Sequence[RunReport]) -> str:
    text = f"{counted(len(runs), 'run')} of the study missing: {and_more([run.name for run in runs], _MOST_NAMES)}"
    if any(run.absent == NOT_SUBMITTED for run in runs):
        text += "; repeat the same `submit` to submit the rest"
    return text


def published_speed(row: Row, rows: Sequence[Row]) -> Published | None:
    """Compare a row with the speed that its recipe quotes; None if it quotes none."""
    figure = next((run.reference for run in row.runs if run.reference), {})
    value = figure.get("tokens_per_s_per_gpu")
    if not isinstance(value, int | float) or not value > 0:
        return None
    gpus = figure.get("gpus")
    notes = []
    if gpus and row.world and gpus != row.world:
        notes.append(f"the published figure is for {counted(gpus, 'GPU')}")
    if len({other.label for other in rows for run in other.runs if run.reference == figure}) > 1:
        notes.append("the recipe quotes one figure for several variants: it can be of only one of them")
    ours = row.tokens.median / value if row.tokens else None
    return Published(
        float(value), figure.get("tflops_per_gpu"), gpus, str(figure.get("source", "")), ours, tuple(notes)
    )


# A larger relative difference means that the log counts TFLOP/s by another formula, not that it rounds them.
SAME_FORMULA = 0.01


@dataclass(frozen=True)
class Comparison:
    """Valid unless a ratio between unlike runs was refused, or forced, or no run has a number."""

    rows: tuple[Row, ...]
    differences: tuple[FactDifference, ...]
    parities: tuple[Parity, ...]
    baseline: str | None
    notes: tuple[str, ...]
    price_per_gpu_hour: float | None = None

    @property
    def good(self) -> list[Row]:
        """Return the rows with a number."""
        return [row for row in self.rows if row.good]

    @property
    def problems(self) -> tuple[str, ...]:
        """The reasons why the comparison is not valid."""
        found = []
        if not self.good:
            found.append("no run has a speed or a final loss")
        for name, row, one in self.ratios():
            # A failed run has no ratio.
            if not one.missing and not one.comparability.comparable:
                reasons = "; ".join(one.comparability.unlike)
                found.append(f"{name} of {row.name} over {one.against}: {reasons}")
        return tuple(found)

    @property
    def valid(self) -> bool:
        return not self.problems

    @property
    def about_loss(self) -> bool:
        """Return whether the rows differ in how they learn, so that the loss is the result and the speed is not."""
        return about_loss(self.rows)

    def ratios(self) -> Iterator[tuple[str, Row, Ratio]]:
        """Yield every ratio by its name, `speed-up` or `scaling`, with its row."""
        for row in self.rows:
            if row.speedup:
                yield "speed-up", row, row.speedup
            if row.efficiency:
                yield "scaling", row, row.efficiency.ratio

    def runs(self) -> list[RunReport]:
        return list(chain.from_iterable(row.runs for row in self.rows))

    def commands(self) -> list[str]:
        """The commands that started the runs, each once."""
        return list(dict.fromkeys(run.command for run in self.runs() if run.command))

    def as_json(self) -> dict[str, object]:
        phases = {}
        for run in self.runs():
            if len(run.phases) > 1:
                phases[run.name] = run.phases
        found = {
            "comparable": self.valid,
            "reasons": self.problems,
            "baseline": self.baseline,
            "rows": list(map(row_json, self.rows)),
            "differences": self.differences,
            "parity": self.parities,
            "phases": phases,
            "price_per_gpu_hour": self.price_per_gpu_hour,
            "notes": self.notes,
            "rule": RULE,
        }
        return json_mapping(found)


def compare(
    runs: Sequence[RunReport],
    baseline: str | None = None,
    *,
    price_per_gpu_hour: float | None = None,
    tolerance: float = TOLERANCE,
    force: bool = False,
) -> Comparison:
    """Compare runs side by side. Raises UserError for a baseline that no row has."""
    runs = with_unset(runs)
    grouped = _with_sharers(group_runs(runs), runs)
    axes = _axes(runs)
    bases = baseline_rows(grouped, baseline)
    scaling = efficiencies(grouped, force)
    recomputed = _counts_differ(grouped)
    rows = []
    parities: list[Parity] = []
    for row in grouped:
        speedup = base = None
        if bases:
            base = counterpart(row, bases)
            if row.facts.get("precision") != base.facts.get("precision"):
                parities += _parities(row, base, tolerance)
            if len(grouped) > 1:
                speedup = _speedup(row, base, axes, force)
        rows.append(
            replace(
                row,
                notes=tuple(row_notes(row, recomputed)),
                base=None if base is row else base,
                speedup=speedup,
                efficiency=scaling.get(row.name),
                published=published_speed(row, grouped),
                recomputed_tflops=recomputed,
                price_per_gpu_hour=price_per_gpu_hour,
            )
        )
    if scaling_modes(rows) == ["weak"]:
        # In weak scaling the batch grows with the GPUs, as it should.
        axes.add("global_batch_size")
    return Comparison(
        tuple(rows),
        tuple(_differences(rows, axes)),
        tuple(parities),
        baseline_name(bases, baseline),
        tuple(comparison_notes(rows, recomputed)),
        price_per_gpu_hour,
    )


def _with_sharers(rows: Sequence[Row], runs: Sequence[RunReport]) -> list[Row]:
    """Name for each row the runs that used the same GPU at the same time."""
    shared = sharers([run.gpu_use for run in runs])
    names = {id(run): [runs[i].name for i in found] for run, found in zip(runs, shared, strict=True)}
    return [
        replace(row, shared_with=tuple(dict.fromkeys(chain.from_iterable(names[id(run)] for run in row.runs))))
        for row in rows
    ]


def _axes(runs: Sequence[RunReport]) -> set[str]:
    """Return the facts that the study varies, without the number of nodes: scaling has its own measure."""
    keys: set[str] = set()
    for run in runs:
        if run.study:
            keys.update(run.study.point)
    return set().union(*map(facts_of_axis, keys - {"nodes", "resources.nodes"})) - {"seed"}


def _speedup(row: Row, base: Row, axes: set[str], force: bool) -> Ratio | None:
    if base is not row:
        compared = axes | {name for name in differing_facts([row, base]) if _names_tell(name, row, base)}
        found = ratio(row, base, speed_comparability(row.facts, base.facts, compared), force)
        if swept_learning([row, base]) and not settings_change_speed([row, base]):
            # Rows that differ only in how they learn have the same speed: their ratio is noise.
            found = replace(found, value=None, interval=None)
        return found
    if row.good:
        return ratio(row, row, Comparability(), force)
    return None


def _names_tell(fact: str, row: Row, base: Row) -> bool:
    """Return whether the rows are named by their values of an argument: then they are compared by it."""
    if kind_of(fact) != "noted" or fact == "script" or fact.startswith(SETTINGS):
        return False
    words = []
    for one in (row, base):
        if fact not in one.facts:
            return False
        words.append(words_of(fact, one.facts[fact]))
    named = all(not text or text in one.label.split(", ") for text, one in zip(words, (row, base), strict=True))
    return named and any(words)


def _parities(row: Row, base: Row, tolerance: float) -> list[Parity]:
    mine, theirs = ([run for run in one.runs if run.training.lines] for one in (row, base))
    if not mine or not theirs:
        return []
    return [parity(mine, theirs, tolerance, (row.name, base.name))]


def _counts_differ(rows: Sequence[Row]) -> bool:
    """Return whether the logs count TFLOP/s in more than one way; then they are recomputed for all."""
    for row in rows:
        for run in row.good:
            logged, ours = run.speed.tflops_per_gpu, run.speed.tflops_per_gpu_recomputed
            if logged and ours and run.speed.tflops_source == "logged":
                off = abs(logged.median / ours.median - 1)
                if off > SAME_FORMULA:
                    return True
    return False


def _differences(rows: Sequence[Row], axes: set[str]) -> list[FactDifference]:
    """Return the differences that matter to speed or loss; differences that forbid ratios come first."""
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
