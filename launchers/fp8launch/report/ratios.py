"""Choose a baseline for each row, and compute speed-ups over it and scaling efficiencies.

Weak scaling keeps the work per GPU constant, so the global batch grows with the number of GPUs. Strong scaling keeps
the global batch constant. In both cases, efficiency is the speed per GPU divided by the speed per GPU on the fewest
GPUs. For strong scaling, this equals the usual definition: total speed-up divided by the growth in GPUs.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from itertools import permutations, product, starmap

from fp8launch.diagnostics import did_you_mean, error
from fp8launch.hardware.quantization import UNQUANTIZED
from fp8launch.report.differences import Comparability, arguments_unknown, parity_differences, speed_comparability
from fp8launch.report.intervals import ratio_interval
from fp8launch.report.rows import Ratio, Row, ScalingEfficiency, ScalingMode, labels_of
from fp8launch.report.run_report import UNITS, Unit

# Shown in place of a speed-up if runs of the row, or of the baseline, shared a GPU.
SHARED = "runs used the same GPU at the same time"


def baseline_rows(rows: Sequence[Row], wanted: str | None) -> list[Row]:
    """Return the rows that `wanted` names; see `_default_baseline` for the default. One variant has no baseline.

    Raises UserError if it names no row.
    """
    labels = labels_of(rows)
    if wanted is None:
        if len(labels) < 2:
            return []
        return _default_baseline(rows)
    found = [row for row in rows if _is_meant(row, wanted)]
    if not found:
        names = "', '".join(labels)
        hint = did_you_mean(wanted, labels, "pass a variant, a precision, key=value or a run's name")
        raise error("unknown-baseline", f"'{wanted}' is not a row; rows: '{names}'", "--baseline", hint)
    return found


def _default_baseline(rows: Sequence[Row]) -> list[Row]:
    """Return the unquantized rows if other rows did the same work, else the variant comparable with most other rows.

    A row that did different work from the rest never becomes the baseline, whatever its precision.
    """
    partners = _partners(rows)
    for name in UNQUANTIZED:
        plain: list[Row] = []
        others: list[Row] = []
        for row in rows:
            if row.facts.get("precision") == name:
                plain.append(row)
            else:
                others.append(row)
        if plain and others and (not partners or any(starmap(_alike, product(others, plain)))):
            return plain
    first = max(rows, key=lambda row: partners.get(row.name, 0))
    return [row for row in rows if row.label == first.label]


def _alike(a: Row, b: Row) -> bool:
    found = speed_comparability(a.facts, b.facts)
    return found.comparable and not arguments_unknown(found)


def _partners(rows: Sequence[Row]) -> dict[str, int]:
    """Count how many other rows each row can be compared with. Rows with a count of 0 are left out."""
    found: Counter[str] = Counter()
    for row, other in permutations(rows, 2):
        if row.label != other.label and _alike(row, other):
            found[row.name] += 1
    return found


def _is_meant(row: Row, wanted: str) -> bool:
    key, equals, value = wanted.partition("=")
    if equals:
        return value in _stated(row, key)
    precision = str(row.facts.get("precision", ""))
    names = {row.label, row.name, precision}
    if " then " not in precision:
        names.add(precision.split(" ")[0])
    for run in row.runs:
        names.update((run.name, *run.sources))
    return wanted in names


def _stated(row: Row, key: str) -> set[str]:
    """Return a row's values of a key, from its facts and from the axes of its study."""
    found = {str(row.facts.get(key))}
    for run in row.runs:
        if run.study:
            found.add(str(run.study.point.get(key)))
    return found


def baseline_name(bases: Sequence[Row], wanted: str | None) -> str | None:
    """Return the name that the baseline rows share: their label, else `wanted`, else their precision."""
    labels = labels_of(bases)
    if len(labels) == 1:
        return labels[0]
    if wanted or not bases:
        return wanted
    return str(bases[0].facts.get("precision"))


def counterpart(row: Row, bases: Sequence[Row]) -> Row:
    """Return the most similar baseline row, if possible with the same GPUs, sequence, layout and learning rate."""
    if row in bases:
        return row

    def distance(base: Row) -> tuple[int, int, int]:
        found = speed_comparability(row.facts, base.facts)
        return len(found.unlike), len(found.noted), len(parity_differences(row.facts, base.facts))

    return min(bases, key=distance)


def ratio(row: Row, base: Row, comparability: Comparability, force: bool = False) -> Ratio:
    """Divide the speed of a row by the speed of `base`. Rows that did different work need `force`."""
    for one in (row, base):
        if not one.good:
            whose = "" if one is row else f"{one.name}: "
            return Ratio(None, None, base.name, comparability, f"{whose}{one.status}")
        if one.shared_with and not force:
            return Ratio(None, None, base.name, comparability, SHARED)
    unit = _common_unit(row, base)
    if unit is None:
        return Ratio(None, None, base.name, comparability, "the logs do not contain speeds in a common unit")
    if not (comparability.comparable or force):
        return Ratio(None, None, base.name, comparability, unit=unit)
    mine, theirs = row.speeds(unit), base.speeds(unit)
    interval, noise = None, 0.0
    if row is not base:
        interval = ratio_interval(mine, theirs)
        if len(mine) == len(theirs) == 1:
            noise = _relative_iqr(mine[0]) + _relative_iqr(theirs[0])
    value = _median_of_medians(mine) / _median_of_medians(theirs)
    return Ratio(value, interval, base.name, comparability, unit=unit, noise=noise)


def _relative_iqr(speeds: Sequence[float]) -> float:
    if len(speeds) < 2:
        return 0.0
    low, median, high = statistics.quantiles(speeds, n=4, method="inclusive")
    return (high - low) / median


def _common_unit(row: Row, base: Row) -> Unit | None:
    """Return the first unit in which all runs of both rows have a speed, or None."""
    runs = (*row.good, *base.good)
    for unit in UNITS:
        if all(run.speeds(unit) for run in runs):
            return unit
    return None


def _median_of_medians(speeds: Sequence[Sequence[float]]) -> float:
    return statistics.median(map(statistics.median, speeds))


def efficiencies(rows: Sequence[Row], force: bool = False) -> dict[str, ScalingEfficiency]:
    """Return the scaling efficiency by row name, for variants that ran on several numbers of GPUs."""
    found: dict[str, ScalingEfficiency] = {}
    for label in labels_of(rows):
        sized = [row for row in rows if row.label == label and row.world]
        sized.sort(key=lambda row: row.world or 0)
        good = [row for row in sized if row.good]
        if not good or len(sized) < 2:
            continue
        mode = _mode(good)
        for row in sized:
            comparability = _comparability(row, good[0], mode)
            found[row.name] = ScalingEfficiency(mode, ratio(row, good[0], comparability, force))
    return found


def _mode(rows: Sequence[Row]) -> ScalingMode:
    totals, per_gpu = set(), set()
    for row in rows:
        batch = row.facts.get("global_batch_size")
        totals.add(batch)
        if isinstance(batch, int | float) and row.world:
            per_gpu.add(batch / row.world)
    if len(per_gpu) == 1:
        return "weak"
    if len(totals) == 1 and None not in totals:
        return "strong"
    return "neither"


def _comparability(row: Row, base: Row, mode: ScalingMode) -> Comparability:
    found = speed_comparability(row.facts, base.facts, axes={"world_size", "global_batch_size"})
    # Scaling runs differ in these on purpose, so noting them would not help the reader.
    noted = tuple(n for n in found.noted if not n.startswith(("number of GPUs", "global batch ", "node set ")))
    if mode != "neither" or row is base:
        return Comparability(found.unlike, noted)
    batches = f"{row.facts.get('global_batch_size')} against {base.facts.get('global_batch_size')}"
    return Comparability((*found.unlike, f"global batch {batches}: neither weak nor strong scaling"), noted)
