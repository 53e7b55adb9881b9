"""Runs side by side: rows, ratios over a baseline, scaling, parity, and what else differs between the runs."""

from __future__ import annotations

from collections.abc import Sequence

from fp8launch.problems import error, nearest
from fp8launch.report.comparison import Comparison, Entry, Published
from fp8launch.report.differences import Difference, Verdict, differing, facts_of_axis, kind_of, speed_verdict
from fp8launch.report.measured import NOT_SUBMITTED, Measured, with_unset
from fp8launch.report.parity import TOLERANCE, Parity, parity
from fp8launch.report.rows import Measure, Row, rows_of
from fp8launch.report.run_report import RunReport
from fp8launch.report.scaling import Efficiency, Ratio, efficiencies, ratio
from fp8launch.report.statistics import Statistic

# Beyond this a log's own TFLOP/s are counted by another formula, not rounded differently.
SAME_FORMULA = 0.01


def compare(
    runs: Sequence[Measured],
    baseline: str | None = None,
    *,
    price_per_gpu_hour: float | None = None,
    tolerance: float = TOLERANCE,
    force: bool = False,
) -> Comparison:
    """Everything side by side. Raises UserError for a baseline that no row has."""
    runs = with_unset(runs)
    rows = rows_of(runs)
    axes = _axes(runs)
    bases = _baseline_rows(rows, baseline)
    scaling = efficiencies(rows, force)
    recomputed = _recompute(rows)
    # In weak scaling the batch grows with the GPUs, as it should.
    grown = {"global_batch_size"} if scaling and {e.mode for e in scaling.values()} == {"weak"} else set()
    entries, parities = [], []
    for row in rows:
        base = _counterpart(row, bases) if bases else None
        if base is not None and row not in bases:
            speedup: Ratio | None = ratio(row, base, speed_verdict(row.facts, base.facts, axes), force)
            if row.facts.get("precision") != base.facts.get("precision"):
                parities += _parities(row, base, tolerance)
        else:
            speedup = ratio(row, row, Verdict(), force) if row in bases and row.good and len(rows) > 1 else None
        entries.append(_entry(row, speedup, scaling.get(row.name), recomputed, price_per_gpu_hour, rows))
    return Comparison(
        tuple(entries),
        tuple(_differences(rows, axes | grown)),
        tuple(parities),
        _name_of(bases, baseline),
        tuple(_notes(rows, recomputed)),
        price_per_gpu_hour,
    )


def _axes(runs: Sequence[Measured]) -> set[str]:
    """Facts that the study varies. The number of nodes is none of them: scaling has a measure of its own."""
    keys = {key for run in runs if run.study for key in run.study.point} - {"nodes", "resources.nodes"}
    return {fact for key in keys for fact in facts_of_axis(key)}


def _baseline_rows(rows: Sequence[Row], wanted: str | None) -> list[Row]:
    labels = list(dict.fromkeys(row.label for row in rows))
    if wanted is None:
        if len(labels) < 2:
            return []
        plain = [row for row in rows if row.facts.get("precision") == "bf16"]
        return plain if plain and len(plain) < len(rows) else [row for row in rows if row.label == labels[0]]
    found = [row for row in rows if _is(row, wanted)]
    if not found:
        near = nearest(wanted, labels)
        names = ", ".join(f"'{label}'" for label in labels)
        hint = f"did you mean '{near}'?" if near else "give a variant, a precision, key=value or a run's name"
        raise error("unknown-baseline", f"no row is '{wanted}'; there are {names}", "--baseline", hint)
    return found


def _name_of(bases: Sequence[Row], wanted: str | None) -> str | None:
    """What the baseline rows have in common: their label, else what was asked for, else their precision."""
    labels = {row.label for row in bases}
    return labels.pop() if len(labels) == 1 else wanted or (str(bases[0].facts.get("precision")) if bases else None)


def _is(row: Row, wanted: str) -> bool:
    key, equals, value = wanted.partition("=")
    if equals:
        points = [run.study.point for run in row.runs if run.study]
        return any(str(p.get(key)) == value for p in points) or str(row.facts.get(key)) == value
    precision = str(row.facts.get("precision", ""))
    names = {row.label, row.name, precision, precision.split(" ")[0]}
    return wanted in names or any(run.name == wanted or wanted in run.sources for run in row.runs)


def _counterpart(row: Row, bases: Sequence[Row]) -> Row:
    """The baseline row that differs least from this one: same GPUs, same sequence, same layout where there is one."""

    def distance(base: Row) -> tuple[int, int]:
        verdict = speed_verdict(row.facts, base.facts)
        return len(verdict.unlike), len(verdict.noted)

    return row if row in bases else min(bases, key=distance)


def _parities(row: Row, base: Row, tolerance: float) -> list[Parity]:
    mine, theirs = ([run for run in one.runs if run.report.lines] for one in (row, base))
    return [parity(mine, theirs, tolerance, (row.name, base.name))] if mine and theirs else []


def _recompute(rows: Sequence[Row]) -> bool:
    """Whether TFLOP/s are taken by our own formula: where the logs' own are counted in more than one way."""
    factors = []
    for row in rows:
        for run in row.good:
            logged, ours = run.report.tflops_per_gpu, run.report.tflops_per_gpu_recomputed
            if logged and ours and run.report.tflops_source == "logged":
                factors.append(abs(logged.median / ours.median - 1) <= SAME_FORMULA)
    return not all(factors)


def _entry(
    row: Row,
    speedup: Ratio | None,
    efficiency: Efficiency | None,
    recomputed: bool,
    price: float | None,
    rows: Sequence[Row],
) -> Entry:
    def tflops(report: RunReport) -> Statistic | None:
        return (report.tflops_per_gpu_recomputed if recomputed else None) or report.tflops_per_gpu

    peaks = [run.report.mfu_denominator["peak_tflops"] for run in row.good if run.report.mfu_denominator]
    peak = float(str(peaks[0])) if peaks else None
    speed = row.measure(tflops)
    mfu = None
    if peak and speed:
        scaled = tuple(v / peak for v in speed.runs)
        mfu = Measure(speed.median / peak, scaled, speed.iqr / peak, speed.n, None)
    tokens = row.measure(lambda report: report.tokens_per_s_per_gpu)
    energy = row.measure(lambda report: report.energy_j_per_gpu)
    step = row.measure(lambda report: report.step_time_ms)
    memory = [run.report.peak_memory_mib for run in row.good if run.report.peak_memory_mib]
    # Joules per iteration over tokens per iteration, both of one GPU.
    joules = energy.median / (tokens.median * step.median / 1e3) if energy and tokens and step else None
    return Entry(
        row,
        tokens,
        step,
        speed,
        mfu,
        peak,
        max(memory, default=None),
        tokens.median * row.world if tokens and row.world else None,
        joules,
        price / 3600 / tokens.median * 1e6 if price and tokens else None,
        speedup,
        efficiency,
        _published(row, tokens, rows),
        tuple(_row_notes(row, recomputed)),
    )


def _published(row: Row, tokens: Measure | None, rows: Sequence[Row]) -> Published | None:
    figure = next((run.reference for run in row.runs if run.reference), None)
    if figure is None or not isinstance(figure.get("tokens_per_s_per_gpu"), int | float):
        return None
    gpus = figure.get("gpus")
    notes = [f"the published figure is for {gpus} GPUs"] if gpus and row.world and gpus != row.world else []
    sharing = {other.label for other in rows if any(run.reference == figure for run in other.runs)}
    if len(sharing) > 1:
        notes.append("the recipe has one figure for several variants: it can be of one of them only")
    value = float(figure["tokens_per_s_per_gpu"])
    ours = tokens.median / value if tokens else None
    return Published(value, figure.get("tflops_per_gpu"), gpus, str(figure.get("source", "")), ours, tuple(notes))


def _row_notes(row: Row, recomputed: bool) -> list[str]:
    notes = list(row.notes)
    if recomputed and any(not run.report.tflops_per_gpu_recomputed for run in row.good):
        notes.append("TFLOP/s are the log's own: its arguments do not determine them")
    names = [n for n in differing([run.facts for run in row.runs]) if kind_of(n) != "neutral"]
    if names:
        notes.append(f"its runs differ in {', '.join(names)}")
    notes += dict.fromkeys(note for run in row.good for note in run.report.notes)
    return notes


def _differences(rows: Sequence[Row], axes: set[str]) -> list[Difference]:
    """What differs between the rows, of all facts that may matter to speed; what makes ratios unlike comes first."""
    names = [n for n in differing([row.facts for row in rows]) if kind_of(n) != "neutral"]
    found = [
        Difference(
            name,
            kind_of(name),
            name in axes or name in ("precision", "world_size"),
            {row.name: row.facts[name] for row in rows if name in row.facts},
        )
        for name in names
    ]
    return sorted(found, key=lambda d: (not d.axis, d.kind != "unlike", d.name))


def _notes(rows: Sequence[Row], recomputed: bool) -> list[str]:
    notes = []
    if recomputed:
        notes.append("some logs count FLOPs in another way than Megatron does today: TFLOP/s are recomputed for all")
    absent = [run for row in rows for run in row.runs if run.absent]
    if absent:
        names = [run.name for run in absent]
        runs = ", ".join(names if len(names) <= 8 else [*names[:8], f"and {len(names) - 8} more"])
        again = (
            "; the same `submit` again submits what it left" if any(r.absent == NOT_SUBMITTED for r in absent) else ""
        )
        notes.append(f"{len(absent)} run{'s' * (len(absent) > 1)} of the study missing: {runs}{again}")
    if any(len(row.good) == 1 for row in rows):
        notes.append(
            "a variant with a single run: intervals over its iterations say nothing of run-to-run differences "
            "(--repeat 3 does)"
        )
    peaks = {run.report.mfu_denominator["peak_tflops"] for r in rows for run in r.good if run.report.mfu_denominator}
    if len(peaks) > 1:
        notes.append("MFU divides by the peak of each variant's own data type: compare speeds, not MFUs")
    return notes
